"""Writing so that a checkpoint is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_fsdp2.errors import CheckpointError

__all__ = ["check_destination", "staged"]


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
def staged(destination: Path, *, folder: bool) -> Iterator[Path]:
    """Yields a path beside `destination` that becomes it once everything is on the disk.

    Whatever goes wrong, Ctrl-C included, nothing stays behind.

    Args:
        destination: what is to be written; see `check_destination`.
        folder: whether it will be a folder, which is created, or a file, which is not.

    Raises:
        CheckpointError: something is there already, or the system refuses to write.
    """
    check_destination(destination, folder=folder)
    temporary = destination.parent / f".{destination.name}.{os.getpid()}.tmp"
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        for item in [*temporary.iterdir(), temporary] if folder else [temporary]:
            _sync(item)
        temporary.replace(destination)
    except BaseException as error:
        _remove(temporary)
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise CheckpointError(
                f"'{destination}' cannot be written: {cause.strerror or cause}. Nothing is left of "
                "it, because half a checkpoint is none. Free space there, or give another place."
            ) from error
        if cause is not error:
            raise cause from None
        raise
    _sync(destination.parent)


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
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # It may not be there, or not even the folder; why it failed is what counts.
        with suppress(OSError):
            path.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
