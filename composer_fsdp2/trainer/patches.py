"""What of Composer is replaced while the plugin is installed: one table, the only such place."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.errors import PatchError

__all__ = ["PATCHES", "PatchPoint", "describe_patches", "install", "installed", "uninstall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPoint:
    """One attribute of another package that is replaced."""

    target: str
    """`package.module:attribute` or `package.module:Class.attribute`"""
    replacement: Callable[..., Any]
    why: str
    fingerprints: frozenset[str]
    """of the sources it was read and tested for"""
    versions: str
    """of the package, for the message when none fits"""


def _parse_parallelism_config(_self: Any, parallelism_config: Any) -> Any:
    from composer_fsdp2.trainer.config import parse_parallelism_config

    return parse_parallelism_config(parallelism_config)


def _parallelize_composer_model(
    composer_model: Any, optimizer: Any, config: Any, precision: Any = None
) -> None:
    from composer_fsdp2.trainer.prepare import prepare_fully_shard

    prepare_fully_shard(composer_model, optimizer, config, precision)


PATCHES: tuple[PatchPoint, ...] = (
    PatchPoint(
        target="composer.trainer.trainer:Trainer._parse_parallelism_config",
        replacement=_parse_parallelism_config,
        why="reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
        fingerprints=frozenset({"7042fa346599943f"}),
        versions="mosaicml 0.32.1",
    ),
    PatchPoint(
        target="composer.distributed.prepare_distributed:parallelize_composer_model",
        replacement=_parallelize_composer_model,
        why="wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
        fingerprints=frozenset({"dc721528ec14d5a0"}),
        versions="mosaicml 0.32.1",
    ),
)

_originals: dict[str, Any] = {}


def install() -> None:
    """Replaces every target of the table, or none. Calling it again does nothing.

    Collective: no.

    Raises:
        PatchError: when a target's source is not one the replacement was written for.
    """
    if _originals:
        return
    found = [(point, *_locate(point.target)) for point in PATCHES]
    for point, owner, name in found:
        _check(point, inspect.getattr_static(owner, name))
    for point, owner, name in found:
        _originals[point.target] = inspect.getattr_static(owner, name)
        setattr(owner, name, point.replacement)


def uninstall() -> None:
    """Puts every original back. Without `install()` before it, it does nothing."""
    for point in PATCHES:
        if point.target in _originals:
            owner, name = _locate(point.target)
            setattr(owner, name, _originals.pop(point.target))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Installs for the duration of a block, and leaves things as they were."""
    before = bool(_originals)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def describe_patches() -> str:
    """The table with the state of every row."""
    lines: list[str] = []
    for point in PATCHES:
        lines += [f"{point.target}", f"  {_state(point)}", f"  because it {point.why}"]
    return "\n".join(lines)


def _state(point: PatchPoint) -> str:
    if point.target in _originals:
        return "installed"
    try:
        owner, name = _locate(point.target)
        _check(point, inspect.getattr_static(owner, name))
    except (ImportError, PatchError) as error:
        return f"cannot be installed: {error}"
    return "fits, not installed"


def _locate(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        raise PatchError(f"'{target}' does not exist in this version. {_advice()}")
    return owner, name


def _check(point: PatchPoint, original: Any) -> None:
    fingerprint = hashlib.sha256(inspect.getsource(original).encode()).hexdigest()[:16]
    if fingerprint not in point.fingerprints:
        raise PatchError(
            f"The source of '{point.target}' (fingerprint {fingerprint}) is not one the "
            f"replacement was written for ({point.versions}: {', '.join(point.fingerprints)}). "
            f"Replacing it could change the run in ways nobody tested. {_advice()}"
        )


def _advice() -> str:
    version = importlib.metadata.version("mosaicml")
    return f"Installed is mosaicml {version}; install a version this package was tested with."
