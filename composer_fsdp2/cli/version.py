"""`composer-fsdp2 --version`: what is installed, read without importing it."""

from __future__ import annotations

from importlib import metadata

import typer

from composer_fsdp2 import __version__

__all__ = ["installed", "show_versions", "versions"]

_BESIDE = ("torch", "mosaicml", "llm-foundry")
"""Distributions that decide what this package can do."""


def versions() -> dict[str, str]:
    """Returns the version of this package, and of those beside it that are installed."""
    beside = {name: installed(name) for name in _BESIDE}
    return {"composer-fsdp2": __version__} | {name: v for name, v in beside.items() if v}


def installed(name: str) -> str | None:
    """Returns the version of a distribution; `None` where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def show_versions(wanted: bool) -> None:
    """Prints one line a package and ends the command, if `wanted`."""
    if wanted:
        for name, version in versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit
