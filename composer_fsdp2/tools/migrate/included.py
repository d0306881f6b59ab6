"""Files of settings that a configuration names: JSON or YAML, read and never executed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.document import Document, json_mapping

__all__ = ["read_settings"]

_MOST_BYTES = 10_000_000


def read_settings(value: str, folder: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Reads the settings in a file, looked for beside the configuration and in the current folder.

    Args:
        value: a path, or the settings themselves as JSON.
        folder: of the configuration; without one no file is read.

    Returns:
        The settings and where they are, or `None` and what is wrong with the file.
    """
    written = json_mapping(value)
    if written is not None:
        return written, "the value itself"
    if folder is None:
        return None, f"{value!r} is named, and its settings are not known here"
    try:
        place = next((p for p in _places(value, folder) if p.is_file()), None)
        if place is None:
            return None, f"{value!r} is neither in {str(folder)!r} nor in the current folder"
        if place.stat().st_size > _MOST_BYTES:
            return None, f"{str(place)!r} is larger than {_MOST_BYTES:,} bytes"
        text = place.read_text(encoding="utf-8-sig")
        document = Document(text, str(place))
    except (OSError, ValueError, ConfigError) as error:
        return None, f"{value!r} cannot be read: {error}"
    if document.duplicates():
        twice = ".".join(next(iter(document.duplicates())))
        return None, f"{str(place)!r} says {twice!r} more than once"
    return document.data, str(place)


def _places(value: str, folder: Path) -> Iterator[Path]:
    path = Path(os.path.expanduser(value))
    yield folder / path
    yield Path.cwd() / path
