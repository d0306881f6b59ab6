"""Writes a checkpoint so that it is there whole or not at all.

[Note: visible at once] Everything is written beside its place under a hidden name, forced to the
disk, and renamed. Whoever is killed at any moment leaves the hidden name behind, which nobody takes
for a checkpoint and the next attempt removes; what had the name before stays until the new one is
whole.

[Note: two runs in one folder] The hidden name is a run's own, and the run keeps a lock on it while
it writes: a hidden name without a lock was left behind. A checkpoint that another run has put in
the place since this one began is not replaced; see `Publications`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "REPLACED",
    "Publications",
    "check_destination",
    "hidden",
    "locked",
    "publish",
    "reason_at",
    "remove_leftovers",
    "staged",
    "sync",
    "unwritten",
    "write_failure",
]

_INCOMPLETE = ".incomplete."
"""Beginning of the name of something that is not complete."""
REPLACED = ".replaced."
"""Beginning of the name of a folder while another one takes its place."""
_TOKEN = "[0-9a-f]{12}"
_OLD_SECONDS = 86_400.0
"""Where locks do not work, what is older than this was left behind."""
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_REFUSED_BYTES = ("inline_container.cc", "PytorchStreamWriter", "No space left")
"""parts of errors in which torch hides that the system took no more bytes"""


def hidden(path: Path, token: str) -> Path:
    """Returns where something is written before it is complete; the suffix of the name stays.

    Args:
        path: the name after `publish`.
        token: twelve hexadecimal digits that no other save has.
    """
    return path.with_name(f"{_INCOMPLETE}{token}.{path.name}")


class Publications:
    """Paths that this run has put into place, to tell them from those of another run."""

    def __init__(self) -> None:
        self._began = time.time()
        self._own: dict[Path, tuple[int, ...] | None] = {}

    def note(self, path: Path) -> None:
        """Remembers that this run has written what is there now."""
        self._own[path] = _identity(path)

    def is_anothers(self, path: Path) -> bool:
        """Returns whether somebody else has written it since this run began."""
        identity = _identity(path)
        return (
            identity is not None
            and identity != self._own.get(path)
            and identity[0] > self._began * 1e9
        )


def _identity(path: Path) -> tuple[int, ...] | None:
    with suppress(OSError):
        # A folder's own time changes with each name in it; `.metadata` is written once.
        identity = (path / ".metadata" if path.is_dir() else path).stat()
        return identity.st_mtime_ns, identity.st_ino, identity.st_dev
    return None


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Generator[None]:
    """Holds a lock on a file or folder, where the file system has locks.

    The lock is on the folder and not on its name: it stays when the folder is renamed.

    Args:
        path: a file or folder that exists.
        shared: by the nodes of one save, against those who want the lock alone.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a forked process has the handle too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Removes what saves to this place left behind when they were killed."""
    pattern = re.compile(f"{re.escape(_INCOMPLETE)}(?:{_TOKEN}\\.)?{re.escape(path.name)}")
    with suppress(OSError):  # why nothing can be written there is told when something is
        for item in list(path.parent.iterdir()):
            if pattern.fullmatch(item.name) and (item.is_symlink() or _is_left(item)):
                _remove(item)


def _is_left(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # NFS is one, too: there an exclusive lock needs a file that is open for writing.
    except OSError:  # a file system without locks
        return time.time() - os.fstat(handle).st_mtime > _OLD_SECONDS
    finally:
        os.close(handle)
    return True


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # passes over files and links
    # Nothing may be there, or not even the folder; why it failed is what counts.
    with suppress(OSError):
        path.unlink()


def check_destination(path: Path, *, folder: bool) -> None:
    """Refuses to write over something.

    Args:
        path: the file or folder to be written.
        folder: whether it will be a folder; then it may be an empty one already.

    Raises:
        CheckpointError: something is there.
    """
    # Where nothing can be looked up, the write that follows tells why.
    is_there = os.path.lexists(path)
    is_folder = is_there and folder and path.is_dir() and not path.is_symlink()
    if is_there and not (is_folder and not any(path.iterdir())):
        raise CheckpointError(
            f"'{path}' exists already. Nothing is written over, because it may be the only copy of "
            "something. Give a path where nothing is yet."
        )


@contextmanager
def staged(
    destination: Path,
    *,
    folder: bool,
    replace: bool = False,
    publications: Publications | None = None,
) -> Generator[Path]:
    """Yields a path beside `destination` that becomes it once everything is on the disk.

    Whatever goes wrong, Ctrl-C included, nothing stays behind. See [Note: visible at once].

    Args:
        destination: the file or folder to be written.
        folder: whether it will be a folder, or a file; it is there and empty.
        replace: whether a file that is there may be replaced, and folders above be made; else see
            `check_destination`.
        publications: what the run has written; what another one has is not replaced.

    Raises:
        CheckpointError: something is there already, or the system refuses to write.
    """
    if not replace:
        check_destination(destination, folder=folder)
    temporary = hidden(destination, secrets.token_hex(6))
    try:
        if replace:
            destination.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(destination)
        if folder:
            temporary.mkdir()
        else:
            temporary.touch()
        with locked(temporary):
            yield temporary
            # The rename could reach the disk before data that is not forced there first.
            for item in [*temporary.iterdir(), temporary] if folder else [temporary]:
                sync(item)
            publish(temporary, destination, publications, replace=replace)
    except BaseException as error:
        _remove(temporary)
        cause = _cause(error)
        failure = write_failure(error)
        if failure is not None:
            raise unwritten(destination, failure) from error
        if cause is not error:
            raise cause from None
        raise


def publish(
    temporary: Path,
    destination: Path,
    publications: Publications | None = None,
    *,
    replace: bool = True,
) -> None:
    """Gives what is complete its name; a folder of that name steps aside and goes afterwards.

    Args:
        temporary: a name of `hidden`.
        destination: the final name, on the same file system.
        publications: what the run has written; what another one has is not replaced.
        replace: whether something that is there may be replaced; else see `check_destination`.

    Raises:
        CheckpointError: something is there. If another run has written it, what is complete keeps
            a name beside it.
    """
    aside = destination.with_name(f"{REPLACED}{destination.name}")
    with locked(destination.parent):
        if publications is not None and publications.is_anothers(destination):
            token = temporary.name.removeprefix(_INCOMPLETE).partition(".")[0]
            second = destination.with_name(f"{destination.stem}.second-{token}{destination.suffix}")
            temporary.rename(second)
            raise CheckpointError(
                f"'{destination}' was written by another run since this one began. Two runs save "
                "to one folder. Replacing it would lose what the other run has saved, so it stays "
                f"as it is, and this run's checkpoint is '{second}'. Give every run a "
                "save_folder of its own."
            )
        if not replace:
            check_destination(destination, folder=temporary.is_dir())
        elif temporary.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            if destination.exists():
                # rename(2) refuses to replace a folder that holds something.
                destination.rename(aside)
        # It replaces a file, or an empty folder, in one step.
        temporary.replace(destination)
        if publications is not None:
            publications.note(destination)
    sync(destination.parent)
    if replace:
        shutil.rmtree(aside, ignore_errors=True)


_NOT_FOR_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk.

    Raises:
        OSError: as the file system raises it; not where it cannot force a folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Network and FUSE mounts that know no such call for a folder give names by themselves.
        if not (path.is_dir() and error.errno in _NOT_FOR_FOLDERS):
            raise
    finally:
        os.close(handle)


# --- Errors. ---


def unwritten(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a checkpoint the system refuses to write."""
    cure = "Make room there, or give another place."
    if error.errno in _READ_ONLY:
        cure = "Give another place, or the right to write there."
    return CheckpointError(
        f"The checkpoint '{path}' could not be written: {reason_at(path, error)}. Nothing is left "
        f"of it, because half a checkpoint is none, and earlier ones are as they were. {cure}"
    )


def reason_at(path: Path, error: OSError) -> str:
    """Returns why the system refused to write there, and how much room there is if it says so."""
    room = ""
    with suppress(OSError, StopIteration):
        parent = next(parent for parent in path.absolute().parents if parent.is_dir())
        use = shutil.disk_usage(parent)
        room = f" ({use.free / 1e9:.1f} of {use.total / 1e9:.1f} GB are free in '{parent}')"
    return f"{error.strerror or error}{room}"


def write_failure(error: BaseException) -> OSError | None:
    """Returns what the system refused, also where a library has hidden it in an error of its own.

    Collective: no.
    """
    cause, said = _cause(error), str(error)
    if isinstance(cause, OSError):
        return cause
    if isinstance(cause, KeyboardInterrupt | CheckpointError):
        return None
    number = re.search(r"os error (\d+)", said)  # safetensors' way to say it
    if number is not None:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    if any(part in said for part in _REFUSED_BYTES):
        return OSError(errno.ENOSPC, "the system did not take all of its bytes")
    return None


def _cause(error: BaseException) -> BaseException:
    """Returns the error inside torch's writer, which hides it behind an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | KeyboardInterrupt):
            return cause
        # Any other kind of error speaks for itself, whatever it was raised while handling.
        hides = isinstance(cause, RuntimeError) and not isinstance(cause, CheckpointError)
        cause = cause.__cause__ or cause.__context__ if hides else None
    return error
