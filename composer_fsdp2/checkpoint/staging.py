"""Writing so that a checkpoint is there whole or not at all.

[Note: visible at once] Everything is written beside its place under a hidden name, forced to the
disk, and renamed. Whoever is killed at any moment leaves the hidden name behind, which nobody takes
for a checkpoint and the next attempt removes; what had the name before stays until the new one is
whole.

[Note: two runs in one folder] The hidden name is a run's own, and the run keeps a lock on it while
it writes: what has no lock was left by somebody who is gone. What another run has put in the place
since this one began is not replaced; see `Publications`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_fsdp2.errors import CheckpointError

__all__ = [
    "INCOMPLETE",
    "Publications",
    "check_destination",
    "hidden",
    "keep_beside",
    "locked",
    "make_own_folder",
    "new_token",
    "reason_at",
    "remove_leftovers",
    "staged",
    "sync",
    "unwritten",
    "write_failure",
]

INCOMPLETE = ".incomplete."
"""Beginning of the name of something that is not complete."""
_TOKEN = "[0-9a-f]{12}"
_OLD_SECONDS = 86_400.0
"""Where locks do not work, what is older than this was left behind."""
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_REFUSED_BYTES = ("inline_container.cc", "PytorchStreamWriter", "No space left", "os error")
"""parts of errors in which libraries hide that the system took no more bytes"""


def new_token() -> str:
    """Returns a part of a name that no other save has."""
    given = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
    return hashlib.sha256(given.encode()).hexdigest()[:12]


def hidden(path: Path, token: str) -> Path:
    """Where something is written before it is complete; the suffix of the name stays."""
    return path.with_name(f"{INCOMPLETE}{token}.{path.name}")


class Publications:
    """Paths that this run has put into place, to tell them from those of another run."""

    def __init__(self) -> None:
        self._began = time.time()
        self._own: dict[Path, tuple[int, ...]] = {}

    def note(self, path: Path) -> None:
        """Remembers that this run has written what is there now."""
        found = _identity(path)
        if found is not None:
            self._own[path] = found

    def is_anothers(self, path: Path) -> bool:
        """Whether somebody else has written it since this run began."""
        found = _identity(path)
        return found is not None and found != self._own.get(path) and found[0] > self._began * 1e9


def _identity(path: Path) -> tuple[int, ...] | None:
    with suppress(OSError):
        # A folder's own time changes with each name in it; `.metadata` is written once.
        found = (path / ".metadata" if path.is_dir() else path).stat()
        return found.st_mtime_ns, found.st_ino, found.st_dev
    return None


def keep_beside(temporary: Path, path: Path, token: str) -> CheckpointError:
    """Gives what is complete a name of its own, and returns the error that says so."""
    kept = path.with_name(f"{path.stem}.second-{token}{path.suffix}")
    temporary.rename(kept)
    return CheckpointError(
        f"'{path}' was written by another run since this one began. Two runs save to one folder. "
        "Replacing it would lose what the other run has saved, so it stays as it is, and this "
        f"run's checkpoint is '{kept}'. Give every run a save_folder of its own."
    )


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds a lock on a file or folder, where the file system has locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a forked process has the handle too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


@contextmanager
def make_own_folder(path: Path) -> Generator[None]:
    """Makes a folder, and holds it against those who remove what was left behind.

    Another node of a shared disk may have made it, and holds it.
    """
    while True:
        # `exist_ok` looks a second time, and raises when another has removed it by then.
        with suppress(FileExistsError):
            path.mkdir(parents=True)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            if path.is_symlink():  # to nowhere: no folder can be made there
                raise
            continue  # somebody took it for a leftover before it was opened
        with suppress(OSError):
            # The lock is on the folder and not on its name: it stays when the folder is renamed.
            # The nodes of a save share it. Who removes the folder holds it alone, until it is gone.
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_at(path, handle):
            break
        os.close(handle)  # or before it was held
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Whether the folder that is open is still the one of this name."""
    try:
        return path.is_dir() and os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def remove_leftovers(path: Path) -> None:
    """Removes what saves to this place left behind when they were killed."""
    pattern = re.compile(f"{re.escape(INCOMPLETE)}(?:{_TOKEN}\\.)?{re.escape(path.name)}")
    with suppress(OSError):  # why nothing can be written there is told when something is
        for item in list(path.parent.iterdir()):
            if pattern.fullmatch(item.name):
                _remove_if_left(item)


def _remove_if_left(path: Path) -> None:
    if path.is_symlink():
        _remove(path)
        return
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    # NFS is one, too: there an exclusive lock needs a file that is open for writing.
    except OSError:  # a file system without locks
        if time.time() - os.fstat(handle).st_mtime > _OLD_SECONDS:
            _remove(path)
    else:
        _remove(path)
    finally:
        os.close(handle)


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
def staged(
    destination: Path, *, folder: bool, replace: bool = False, own: Publications | None = None
) -> Generator[Path]:
    """Yields a path beside `destination` that becomes it once everything is on the disk.

    Whatever goes wrong, Ctrl-C included, nothing stays behind. See [Note: visible at once].

    Args:
        destination: what is to be written.
        folder: whether it will be a folder, or a file; it is there and empty.
        replace: whether a file that is there may be replaced, and folders above be made; else see
            `check_destination`.
        own: what the run has written; what another one has is not replaced.

    Raises:
        CheckpointError: something is there already, or the system refuses to write.
    """
    if not replace:
        check_destination(destination, folder=folder)
    token = new_token()
    temporary = hidden(destination, token)
    try:
        if replace:
            destination.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(destination)
        with contextlib.ExitStack() as stack:
            if folder:
                stack.enter_context(make_own_folder(_beside(temporary)))
            else:
                temporary.touch()
                stack.enter_context(locked(temporary))
            yield temporary
            # The rename could reach the disk before data that is not forced there first.
            for item in [*temporary.iterdir(), temporary] if folder else [temporary]:
                sync(item)
            _publish(temporary, destination, token, own, folder=folder, replace=replace)
    except BaseException as error:
        _remove(temporary)
        failure = write_failure(error)
        if failure is not None:
            raise unwritten(destination, failure) from error
        cause = _cause(error)
        if cause is not error:
            raise cause from None
        raise
    sync(destination.parent)


def _publish(
    temporary: Path,
    destination: Path,
    token: str,
    own: Publications | None,
    *,
    folder: bool,
    replace: bool,
) -> None:
    with locked(destination.parent):
        if own is not None and own.is_anothers(destination):
            raise keep_beside(temporary, destination, token)
        if not replace:
            check_destination(destination, folder=folder)
        # rename(2) replaces a file, or an empty folder, in one step.
        temporary.replace(destination)
        if own is not None:
            own.note(destination)


def _beside(temporary: Path) -> Path:
    """Refuses to make the folders above."""
    if not temporary.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(temporary.parent))
    return temporary


def unwritten(path: Path, error: OSError) -> CheckpointError:
    """The error for a checkpoint the system refuses to write."""
    cure = "Make room there, or give another place."
    if error.errno in _READ_ONLY:
        cure = "Give another place, or the right to write there."
    return CheckpointError(
        f"The checkpoint '{path}' could not be written: {reason_at(path, error)}. Nothing is left "
        f"of it, because half a checkpoint is none, and earlier ones are as they were. {cure}"
    )


def reason_at(path: Path, error: OSError) -> str:
    """Returns why the system refused to write there, and how much room there is."""
    return f"{error.strerror or error}{_room_at(path)}"


def _room_at(path: Path) -> str:
    """How much is free there, in words; nothing where the system does not say."""
    place = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    if place is None:
        return ""
    with suppress(OSError):
        room = shutil.disk_usage(place)
        return f" ({room.free / 1e9:.1f} of {room.total / 1e9:.1f} GB are free in '{place}')"
    return ""


def write_failure(error: BaseException) -> OSError | None:
    """Returns what the system refused, also where a library has hidden it in an error of its own.

    Collective: no.
    """
    found = _cause(error)
    if isinstance(found, OSError):
        return found
    if isinstance(found, KeyboardInterrupt):
        return None
    said = any(part in str(error) for part in _REFUSED_BYTES)
    if said and not isinstance(error, CheckpointError):
        return OSError(errno.ENOSPC, "the system did not take all of its bytes")
    return None


def _cause(error: BaseException) -> BaseException:
    """Returns the error inside torch's writer, which hides it behind an error of its own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError | KeyboardInterrupt):
            return found
        # Any other kind of error speaks for itself, whatever it was raised while handling.
        hides = isinstance(found, RuntimeError) and not isinstance(found, CheckpointError)
        found = found.__cause__ or found.__context__ if hides else None
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
