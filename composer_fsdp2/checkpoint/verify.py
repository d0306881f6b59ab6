"""Whether every byte of a checkpoint is the one that was written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.checkpoint.descriptions import vet_algorithms_of
from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint, open_checkpoint
from composer_fsdp2.errors import CheckpointError

__all__ = ["Verdict", "verify_checkpoint"]

_FILE_SHARES = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings of `verify_checkpoint`."""

    path: str
    kind: str | None
    size_bytes: int
    parts: int
    """tensors and objects"""
    problems: tuple[str, ...]


def verify_checkpoint(path: Path, advance: Callable[[int, int], object]) -> Verdict:
    """Reads all of a checkpoint and compares it with its checksums, in spite of damage.

    Collective: no.

    Args:
        path: a folder or a file.
        advance: told the bytes read so far, and in all.

    Raises:
        CheckpointError: there is nothing.
    """
    try:
        source = open_checkpoint(path, incomplete=True)
    except CheckpointError as error:
        if not path.exists():
            raise
        return Verdict(str(path), None, 0, 0, (str(error),))
    problems = list(source.problems.values())
    checks = _folder(source) if isinstance(source, FolderCheckpoint) else _file(source)
    done, total = 0, source.size_bytes
    for check in checks:
        with _told(problems):
            done += check()
        advance(min(done, total), total)
    if not problems:  # what cannot be read has been told
        with _told(problems):
            vet_algorithms_of(source)
    advance(total, total)
    return Verdict(str(path), source.kind, total, len(source.paths), tuple(problems))


@contextmanager
def _told(problems: list[str]) -> Generator[None]:
    try:
        yield
    except CheckpointError as error:
        problems.append(str(error))


def _folder(source: FolderCheckpoint) -> Iterator[Callable[[], int]]:
    for index, info in source.metadata.storage_data.items():
        # What is missing or cut off is known already, and one problem, not one for each piece.
        if info.relative_path not in source.problems and index.fqn not in source.problems:
            yield lambda index=index: source.check_piece(index)


def _file(source: Checkpoint) -> Iterator[Callable[[], int]]:
    for i in range(_FILE_SHARES):
        yield lambda i=i: sum(source.check((i, _FILE_SHARES))) // _FILE_SHARES
