"""Fetches checkpoints, and shares steps between the ways of loading them."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import ObjectStore, dist
from composer.utils import checkpoint as composers
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import extract_path_from_symlink, is_tar
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint, flatten
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import on_all_ranks
from composer_fsdp2.text import listed

__all__ = [
    "Ignore",
    "StateDict",
    "as_checkpoint_error",
    "check_objects",
    "drop_keys",
    "fetched",
    "notes_of",
    "remove_keys",
    "set_rates_by_schedules",
    "warn_on_rank_0",
]

Ignore = Sequence[str] | Callable[[dict[str, Any]], None] | None


StateDict = dict[str, Any]


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    """Returns an error of a load as a `CheckpointError`. Collective: no."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")


def drop_keys(values: StateDict, ignore: Ignore) -> StateDict:
    """Returns the state dict without the keys a user ignores.

    Containers are copied: they may be the very lists that a scheduler goes on with.
    """
    if not ignore:
        return values
    values = _copied_containers(values)
    (ignore if callable(ignore) else composers.glob_filter(list(ignore)))(values)
    values.setdefault("state", {})
    return values


def _copied_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied_containers(item) for key, item in value.items()}
    return [_copied_containers(item) for item in value] if type(value) is list else value


def remove_keys(values: StateDict, keys: Sequence[str]) -> None:
    """Takes keys out of a nested state dict, so that nobody asks the checkpoint for them.

    What has none left goes too: it is for its owner to keep what it has, not to load nothing.
    """
    _, key_paths = flatten(values)
    for key in keys:
        if key in key_paths:
            _remove(values, key_paths[key])


def _remove(holder: Any, keys: Sequence[str | int]) -> None:
    first, *rest = keys
    if rest:
        _remove(holder[first], rest)
    if not rest or holder[first] == {}:
        del holder[first]


def notes_of(saved: Checkpoint, flat: Mapping[str, Any], left_out: Iterable[str]) -> Iterator[str]:
    """Yields sentences about tensors that the run keeps in a lower precision, and left out values.

    Left out is what the run and the checkpoint do not both have.
    """
    keys = [
        key
        for key, value in flat.items()
        if isinstance(value, torch.Tensor) and key in saved.tensors
        if torch.promote_types(saved.tensors[key].dtype, value.dtype) != value.dtype
    ]
    if keys:
        stored, run_dtype = saved.tensors[keys[0]].dtype, flat[keys[0]].dtype
        yield (
            f"{len(keys)} tensors of '{saved.path}' lose precision: '{keys[0]}' is stored in "
            f"{stored} and the run keeps it in {run_dtype}."
        )
    described = ("state.metadata.", "state.integrations.")  # nobody reads them back
    told = [key for key in left_out if not key.startswith(described)]
    if told:
        yield (
            f"'{saved.path}' and the run do not both have {listed(told, 20, '')}. What the "
            "run has of it stays as it is."
        )


def warn_on_rank_0(notes: Iterable[str]) -> None:
    """Warns of each note, on one rank. Collective: no."""
    if dist.get_global_rank() == 0:
        for note in notes:
            warnings.warn(note, stacklevel=2)


def set_rates_by_schedules(schedules: Iterable[LRScheduler]) -> None:
    """Sets the learning rate of each group to its schedule's value.

    Collective: no. Composer's schedules are functions of the timestamp, each a `LambdaLR`. When a
    run goes on at a later time without the groups of a checkpoint, they hold the rate of batch 0,
    often 0, until the schedule is asked again, which is after the next step. Other kinds of
    schedules count their own steps, and are left alone.
    """
    for schedule in schedules:
        if not isinstance(schedule, LambdaLR):
            continue
        rules = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        rates = [base * rule(schedule.last_epoch) for base, rule in rules]
        schedule.get_last_lr()[:] = rates
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


# --- Where a checkpoint is on this machine. ---


@contextlib.contextmanager
def fetched(
    path: str, object_store: Any, state: State, progress_bar: bool
) -> Generator[tuple[Path, Any]]:
    """Yields the local path of a checkpoint, and for a remote folder its reader."""
    path = composers._format_path_with_rank_zero(path) if "{" in path else path
    if object_store is None and not is_tar(path) and not is_compressed_pt(path):
        yield Path(path), None
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = composers._get_local_rank_zero_path(temporary)
        try:
            if object_store is not None and path.endswith(".symlink"):
                path = extract_path_from_symlink(path, object_store=object_store)
            if object_store is None or Path(path).suffix in (".pt", ".tar", ".gz", ".tgz"):
                download = composers.download_checkpoint
                file, _, _ = on_all_ranks(
                    lambda: download(path, folder, object_store, progress_bar), as_checkpoint_error
                )
                yield Path(file), None
                return
            fetch, target = composers.download_object_or_file, Path(folder) / METADATA
            first = dist.get_local_rank() == 0
            # The reader fetches it too, but on one rank alone, and the others would wait for its
            # failure.
            on_all_ranks(
                lambda: fetch(f"{path}/{METADATA}", target, object_store) if first else None,
                as_checkpoint_error,
            )
            reader: Any = composers.DistCPObjectStoreReader(
                source_path=path,
                destination_path=str(Path(folder) / "checkpoint"),
                object_store=object_store,
                device_mesh=state.device_mesh,
            )
            yield Path(reader.path), reader
        finally:
            dist.barrier()  # the folder is shared by the ranks of a node


def check_objects(saved: FolderCheckpoint, reader: Any) -> None:
    """Looks whether all files of a checkpoint are in the store, before any is fetched.

    Collective: no. Ranks divide the work.

    Raises:
        CheckpointError: naming a file that is missing or too short.
    """
    store, folder = reader.object_store, reader.source_path
    if not isinstance(store, ObjectStore):
        return  # a logger fetches files, and cannot be asked about them
    first, step = dist.get_global_rank(), dist.get_world_size()
    for name, least in sorted(saved.files.items())[first::step]:
        try:
            size = store.get_object_size(f"{folder}/{name}")
        except FileNotFoundError:
            size = 0
        if size < least:
            raise CheckpointError(
                f"The checkpoint '{store.get_uri(folder)}' is incomplete: '{name}' has {size} of "
                f"{least} bytes there. Some weights are not there. Upload it again, or take "
                "another checkpoint."
            )
