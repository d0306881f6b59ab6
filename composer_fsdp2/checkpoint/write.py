"""Writing the checkpoint of a live run: all ranks together, complete or not at all.

See [Note: visible at once] in `staging`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.load import reason_of
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.progress import CountedPlanner, bytes_of
from composer_fsdp2.checkpoint.source import CHECKSUMS, digest_of
from composer_fsdp2.checkpoint.staging import (
    INCOMPLETE,
    Publications,
    hidden,
    keep_beside,
    locked,
    make_own_folder,
    new_token,
    remove_leftovers,
    sync,
    unwritten,
    write_failure,
)
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.progress import counting_bytes
from composer_fsdp2.ranks import raise_on_all_ranks

__all__ = [
    "REPLACED",
    "Savers",
    "Staging",
    "point_to",
    "together",
    "write_checksums",
    "write_sharded",
]


_SAID = ("could not be written", "was written by another run")
"""errors that say all there is to say"""
REPLACED = ".replaced."
"""Beginning of the name of a folder while another one takes its place."""


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
def _signals_after() -> Generator[None]:
    """Puts SIGTERM and SIGINT off to the end of a block; in the main thread, nothing elsewhere.

    What their handlers raise would come out of torch's writers as a file that could not be written.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # `signal.signal` returns None for a handler of C code, and does not take None back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


@_signals_after()
def write_sharded(
    state_dict: dict[str, Any],
    folder: Path,
    savers: Savers,
    planner: SavePlanner | None = None,
    publish: Callable[[], None] | None = None,
    own: Publications | None = None,
) -> None:
    """Writes a state dict of shards as one folder.

    Collective: yes, over `savers.everyone`.

    Args:
        state_dict: nested; DTensors are written as the shards they are.
        folder: where it appears when it is complete. What is there is replaced.
        savers: who takes part.
        planner: what decides who writes which piece.
        publish: called on every rank when the checkpoint is complete and visible.
        own: what the run has written; what another one has is not replaced.

    Raises:
        CheckpointError: on every rank, when any rank could not write. Nothing appears then.
    """
    group = savers.everyone
    token = raise_on_all_ranks({"~token": new_token()}, group=group)[0]["~token"]
    temporary, held = hidden(folder, token), contextlib.ExitStack()

    def clear() -> None:
        if savers.first_on_node:
            remove_leftovers(folder)
            held.enter_context(make_own_folder(temporary))

    def appear() -> None:
        _appear(temporary, folder, token, own)

    try:
        together(group, clear, folder)
        together(group, lambda: _write_shards(state_dict, temporary, savers, planner), folder)
        together(
            group, lambda: write_checksums(temporary) if savers.first_on_node else None, folder
        )
        # On a shared disk the first to come renames it for all; the others see that it is gone.
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        together(group, lambda: appear() if rank == 0 else None, folder)
        late = savers.first_on_node and rank != 0
        together(group, lambda: appear() if late else None, folder)
    finally:
        held.close()
        if savers.first_on_node:
            shutil.rmtree(temporary, ignore_errors=True)
    if publish is not None:
        together(group, publish, folder)


@_signals_after()
def together(group: dist.ProcessGroup | None, act: Callable[[], object], path: Path) -> None:
    """Acts, and raises on every rank of the group when any could not write.

    Collective: yes.

    Raises:
        CheckpointError: saying that nothing is at `path`, and why.
    """
    error: Exception | None = None
    try:
        act()
    except CheckpointError as failed:
        error = failed
    except CheckpointException as failed:
        error = CheckpointError(reason_of(failed))
    except Exception as failed:  # whatever it is, the other ranks must hear of it
        refused = write_failure(failed)
        error = CheckpointError(f"{type(failed).__name__}: {failed}")
        if refused is not None:
            error = unwritten(path, refused)
    try:
        raise_on_all_ranks({}, error, group)
    except CheckpointError as agreed:
        if any(said in str(agreed) for said in _SAID):
            raise
        raise CheckpointError(
            f"The checkpoint '{path}' could not be written: {agreed}. Nothing is left of it, and "
            "earlier ones are as they were. Make room there, or give another place."
        ) from error


class _Writer(FileSystemWriter):
    """torch's own, which hides what the system said, and loses it on the way to other ranks.

    Source: an error travels pickled, without its cause,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/utils.py#L193
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes this rank's file. Collective: no."""
        size_bytes = bytes_of(plan.items)
        with (
            _told_plainly(Path(self.path)),
            counting_bytes("Saving checkpoint", size_bytes) as advance,
        ):
            counted: Any = CountedPlanner(planner, plan, advance)
            return super().write_data(plan, counted)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Writes `.metadata`. Collective: no."""
        with _told_plainly(Path(self.path)):
            super().finish(*args, **kwargs)


@contextlib.contextmanager
def _told_plainly(temporary: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:
        refused = write_failure(error)
        if refused is None:
            raise
        shown = temporary.name.removeprefix(INCOMPLETE).partition(".")[2]
        raise unwritten(temporary.with_name(shown), refused) from error


def _write_shards(
    state_dict: dict[str, Any], temporary: Path, savers: Savers, planner: SavePlanner | None
) -> None:
    if not savers.writes:
        return
    save(
        state_dict,
        # FileSystemWriter forces each file to the disk before it returns (`sync_files`).
        storage_writer=_Writer(temporary),
        # Composer's choice. By default torch spreads values that all ranks hold over the ranks.
        planner=planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        process_group=savers.writers,
    )


def write_checksums(folder: Path) -> None:
    """Records what is in a folder; the values in it carry their own checksums."""
    files = [item for item in folder.iterdir() if item.is_file()]
    # Another node of a shared disk may be writing its own, which will be the same.
    sizes = {item.name: item.stat().st_size for item in files if item.name != CHECKSUMS}
    found: dict[str, Any] = {"files": dict(sorted(sizes.items()))}
    if (folder / METADATA).is_file():
        found["metadata_sha256"] = digest_of(folder / METADATA)
    with (folder / CHECKSUMS).open("w") as file:
        json.dump(found, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def _appear(temporary: Path, folder: Path, token: str, own: Publications | None) -> None:
    """Gives the folder its name; what has the name steps aside first and goes afterwards."""
    if not temporary.is_dir():
        return
    replaced = folder.with_name(f"{REPLACED}{folder.name}")
    with locked(folder.parent):
        if own is not None and own.is_anothers(folder):
            raise keep_beside(temporary, folder, token)
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            # rename(2) refuses to replace a folder that holds something.
            folder.rename(replaced)
        temporary.rename(folder)
        if own is not None:
            own.note(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(link: Path, target: Path) -> None:
    """Makes a symbolic link point somewhere else, with no moment in between without a link."""
    temporary = hidden(link, new_token())
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)


class Staging:
    """Copies of a state dict in CPU memory, which stay as they are while training goes on.

    The memory is kept for the next copy: touching new memory costs more than the copy itself. On
    the CPU 256 MB take 0.12 s into new memory and 0.044 s into memory that is kept.

    [Note: not BlockingAsyncStager] torch's own stager keeps memory with `cache_staged_state_dict`
    only, and that pins it, which fails without a GPU (torch 2.7 and 2.15, `RuntimeError`). On any
    device it then raises `CompanionMismatch` when a key comes or goes and `RuntimeError` when a
    tensor has another shape: state that an optimizer makes later, a metric, an unfrozen layer.
    Without that option every save pays for new memory while training waits.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str | int, ...], torch.Tensor] = {}

    def copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies every tensor, and everything else with it.

        Collective: no. DTensors keep their mesh; their shards are on the CPU.
        """
        copied = self._copy(state_dict, ())
        # Copies with `non_blocking` may return before the bytes are in CPU memory. In a process
        # that does not use CUDA, `synchronize` would initialise it.
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
