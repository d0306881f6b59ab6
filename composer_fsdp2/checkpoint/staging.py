"""Writing so that a checkpoint is there whole or not at all.

[Note: visible at once] Everything is written beside its place under a hidden name, forced to the
disk, and renamed. Whoever is killed at any moment leaves the hidden name behind, which nobody takes
for a checkpoint and the next attempt removes; what had the name before stays until the new one is
whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_fsdp2.errors import CheckpointError

__all__ = ["INCOMPLETE", "check_destination", "hidden", "staged", "sync", "unwritten"]

INCOMPLETE = ".incomplete."
"""What the name of something begins with until it is complete."""


def hidden(path: Path) -> Path:
    """Where something is written before it is complete; the suffix of the name stays."""
    return path.with_name(f"{INCOMPLETE}{path.name}")


def check_destination(path: Path, *, folder: bool) -> None:
    """Refuses to write over something.

    Args:
        path: what is to be written.
        folder: whether it will be a folder; then it may be an empty one already.

    Raises:
        CheckpointError: something is there.
    """
    if not os.path.lexists(path):
        return
    if folder and path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        return
    raise CheckpointError(
        f"'{path}' exists already. Nothing is written over, because it may be the only copy of "
        "something. Give a path where nothing is yet."
    )


@contextmanager
def staged(destination: Path, *, folder: bool, replace: bool = False) -> Generator[Path]:
    """Yields a path beside `destination` that becomes it once everything is on the disk.

    Whatever goes wrong, Ctrl-C included, nothing stays behind. See [Note: visible at once].

    Args:
        destination: what is to be written.
        folder: whether it will be a folder, which is created, or a file, which is not.
        replace: whether a file that is there may be replaced, and folders above be made; else see
            `check_destination`.

    Raises:
        CheckpointError: something is there already, or the system refuses to write.
    """
    if not replace:
        check_destination(destination, folder=folder)
    temporary = hidden(destination)
    try:
        _remove(temporary)  # of an attempt that was killed
        if replace:
            destination.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            temporary.mkdir()
        yield temporary
        for item in [*temporary.iterdir(), temporary] if folder else [temporary]:
            sync(item)
        temporary.replace(destination)
    except BaseException as error:
        _remove(temporary)
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise unwritten(destination, cause) from error
        if cause is not error:
            raise cause from None
        raise
    sync(destination.parent)


def unwritten(path: Path, error: OSError) -> CheckpointError:
    """The error for a checkpoint the system refuses to write."""
    return CheckpointError(
        f"The checkpoint '{path}' could not be written: {error.strerror or error}. Nothing is left "
        "of it, because half a checkpoint is none, and earlier ones are as they were. Make room "
        "there, or give another place."
    )


def _cause(error: BaseException) -> BaseException:
    """What happened inside torch's writer, which hides it behind an error of its own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError | KeyboardInterrupt):
            return found
        # Any other kind of error speaks for itself, whatever it was raised while handling.
        found = found.__context__ if isinstance(found, RuntimeError) else None
    return error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # It may not be there, or not even the folder; why it failed is what counts.
        with suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
