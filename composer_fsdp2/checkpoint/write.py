"""Writing a checkpoint so that it is complete or not there at all.

[Note: visible at once] Everything is written beside its place under a hidden name, forced to the
disk, and renamed. Whoever is killed at any moment leaves the hidden name behind, which nobody takes
for a checkpoint and the next save removes; what had the name before stays until the new one is
whole.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.load import reason_of
from composer_fsdp2.checkpoint.source import CHECKSUMS, METADATA, digest_of
from composer_fsdp2.core.collectives import agree
from composer_fsdp2.errors import CheckpointError

__all__ = [
    "INCOMPLETE",
    "Savers",
    "Staging",
    "point_to",
    "sync_folder",
    "together",
    "whole_file",
    "write_checksums",
    "write_sharded",
]


INCOMPLETE = ".incomplete."
"""What the name of something begins with until it is complete."""


@dataclass(frozen=True, slots=True)
class Savers:
    """Who takes part in a sharded save.

    Attributes:
        everyone: all ranks; `None` is the default group.
        writers: those that hold one copy of the parameters; `None` is everyone.
        writes: whether this rank is one of them.
        first_on_node: whether this rank sees to the folder on this machine's disk.
    """

    everyone: dist.ProcessGroup | None
    writers: dist.ProcessGroup | None
    writes: bool
    first_on_node: bool


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a hidden name to write to, and makes the file appear at its place at the end.

    Raises:
        CheckpointError: the file could not be written; what was at its place is as it was.
    """
    hidden = path.with_name(
        f"{INCOMPLETE}{path.name}"
    )  # keeps the suffix, which may say how to pack
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
        with hidden.open("rb+") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        hidden.unlink(missing_ok=True)


def write_sharded(
    state_dict: dict[str, Any],
    folder: Path,
    savers: Savers,
    planner: SavePlanner | None = None,
    publish: Callable[[], None] | None = None,
) -> None:
    """Writes a state dict of shards as one folder.

    Collective: yes, over `savers.everyone`.

    Args:
        state_dict: nested; DTensors are written as the shards they are.
        folder: where it appears when it is complete. What is there is replaced.
        savers: who takes part.
        planner: what decides who writes which piece.
        publish: called on every rank when the checkpoint is complete and visible.

    Raises:
        CheckpointError: on every rank, when any rank could not write. Nothing appears then.
    """
    hidden = folder.with_name(f"{INCOMPLETE}{folder.name}")
    group = savers.everyone
    try:
        together(group, lambda: _clear(hidden) if savers.first_on_node else None, folder)
        together(group, lambda: _write_shards(state_dict, hidden, savers, planner), folder)
        together(group, lambda: write_checksums(hidden) if savers.first_on_node else None, folder)
        # On a shared disk the first to come renames it for all; the others see that it is gone.
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        together(group, lambda: _appear(hidden, folder) if rank == 0 else None, folder)
        late = savers.first_on_node and rank != 0
        together(group, lambda: _appear(hidden, folder) if late else None, folder)
    finally:
        if savers.first_on_node:
            shutil.rmtree(hidden, ignore_errors=True)
    if publish is not None:
        publish()


def together(group: dist.ProcessGroup | None, act: Callable[[], object], path: Path) -> None:
    """Acts, and raises on every rank of the group when any could not write.

    Collective: yes.

    Raises:
        CheckpointError: saying that nothing is at `path`, and why.
    """
    error: Exception | None = None
    try:
        act()
    except CheckpointException as failed:
        error = CheckpointError(reason_of(failed))
    except CheckpointError as failed:
        error = failed
    except OSError as failed:
        error = _unwritten(path, failed)
    except Exception as failed:  # whatever it is, the other ranks must hear of it
        error = CheckpointError(f"{type(failed).__name__}: {failed}")
    try:
        agree({}, error, group)
    except CheckpointError as agreed:
        if "could not be written" in str(agreed):
            raise
        raise CheckpointError(
            f"The checkpoint '{path}' could not be written: {agreed}. It does not exist now; "
            "earlier ones are as they were. Make room or correct the path, and resume from the "
            "latest one."
        ) from error


def _clear(hidden: Path) -> None:
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)


def _write_shards(
    state_dict: dict[str, Any], hidden: Path, savers: Savers, planner: SavePlanner | None
) -> None:
    if not savers.writes:
        return
    save(
        state_dict,
        storage_writer=FileSystemWriter(hidden),
        planner=planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        process_group=savers.writers,
    )


def write_checksums(folder: Path) -> None:
    """Records what is in a folder; the values in it carry their own checksums."""
    sizes = {item.name: item.stat().st_size for item in folder.iterdir() if item.is_file()}
    found: dict[str, Any] = {"files": dict(sorted(sizes.items()))}
    if (folder / METADATA).is_file():
        found["metadata_sha256"] = digest_of(folder / METADATA)
    with (folder / CHECKSUMS).open("w") as file:
        json.dump(found, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _appear(hidden: Path, folder: Path) -> None:
    """Gives the folder its name; what has the name steps aside first and goes afterwards."""
    if not hidden.is_dir():
        return
    replaced = folder.with_name(f".replaced.{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    hidden.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Forces names in a folder to the disk; without it a rename may not survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_to(link: Path, target: Path) -> None:
    """Makes a symbolic link point somewhere else, with no moment in between without a link."""
    hidden = link.with_name(f"{INCOMPLETE}{link.name}")
    hidden.unlink(missing_ok=True)
    hidden.symlink_to(os.path.relpath(target, link.parent))
    hidden.replace(link)


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or str(error)
    return CheckpointError(
        f"The checkpoint '{path}' could not be written: {reason}. It does not exist now; earlier "
        "ones are as they were. Make room or correct the path, and resume from the latest one."
    )


class Staging:
    """Copies of a state dict in CPU memory, which stay as they are while training goes on.

    The memory is kept for the next copy: touching new memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str | int, ...], torch.Tensor] = {}

    def copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies every tensor, and everything else with it.

        Collective: no. DTensors keep their mesh; their shards are on the CPU.
        """
        copied = self._copy(state_dict, ())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copy(self, value: Any, way: tuple[str | int, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach(), way)
        if isinstance(value, dict):
            return {key: self._copy(item, (*way, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*way, i)) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def _copy_tensor(self, value: torch.Tensor, way: tuple[str | int, ...]) -> torch.Tensor:
        kept = self._tensors.get(way)
        if kept is None or not _alike(kept, value):
            kept = self._tensors[way] = torch.empty_like(value, device="cpu")
        _local(kept).copy_(_local(value), non_blocking=True)
        return kept


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _alike(kept: torch.Tensor, value: torch.Tensor) -> bool:
    placed = [t.placements if isinstance(t, DTensor) else None for t in (kept, value)]
    a, b = _local(kept), _local(value)
    return placed[0] == placed[1] and a.shape == b.shape and a.dtype == b.dtype
