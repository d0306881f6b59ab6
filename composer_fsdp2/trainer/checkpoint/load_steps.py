"""Fetches checkpoints, and shares steps between the ways of loading them."""

from __future__ import annotations

import contextlib
import copy
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
from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint, KeyPath, flatten
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
    "restore_keys",
    "set_rates_by_schedules",
    "shape_as_saved",
    "warn_on_rank_0",
]

Ignore = Sequence[str] | Callable[[dict[str, Any]], None] | None


StateDict = dict[str, Any]

_OF_FILES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".gz", ".tgz")
"""endings of files with all values; other objects of a store are folders of shards"""


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
        copied = copy.copy(value)  # of the same class, such as a Counter
        for key, item in value.items():
            copied[key] = _copied_containers(item)
        return copied
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
    if not rest or _is_bare(holder[first]):
        del holder[first]


def _is_bare(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_bare, value.values()))


def shape_as_saved(callbacks: Any, saved: Checkpoint) -> None:
    """Gives the state of callbacks a place for each value that was saved, in place.

    A load fills the places that exist. A new callback may lack some, such as the numbers of a
    progress bar that is not shown yet. Collective: no.

    Args:
        callbacks: name -> state of the run's, `None` without.
        saved: an open checkpoint.
    """
    for name, value in (callbacks or {}).items():
        places = {path: key for key, path in saved.under("state", "callbacks", name).items()}
        # A callback may have given the very dictionary that it goes on with.
        copied = _copied_containers(value)
        callbacks[name] = _shaped(copied, places, saved) if places else copied


def _shaped(value: Any, places: Mapping[KeyPath, str], saved: Checkpoint) -> Any:
    """Returns a value with the places whose key paths, from it on, lead to keys."""
    if () in places and (len(places) == 1 or value is None):
        tensor = saved.tensors.get(places[()])
        if tensor is not None and not isinstance(value, torch.Tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return None if isinstance(value, Mapping) and value else value
    inner: dict[Any, dict[KeyPath, str]] = {}
    for path, key in places.items():
        if path:
            inner.setdefault(path[0], {})[tuple(path[1:])] = key
    if all(isinstance(part, int) for part in inner):
        items, size = list(value) if isinstance(value, list) else [], max(inner) + 1
        # Nothing is saved of an empty dictionary in a list.
        items += [{} for _ in range(size - len(items))]
        return [
            _shaped(item, inner[number], saved) if number in inner else item
            for number, item in enumerate(items[:size])
        ]
    values = value if isinstance(value, dict) else {}
    own_keys = {str(key): key for key in values}
    are_numbers = bool(own_keys) and all(type(key) is int for key in values)
    for part, below in inner.items():
        # torch has made text of it.
        new_key = int(part) if are_numbers and str(part).isdecimal() else part
        key = own_keys.get(str(part), new_key)
        values[key] = _shaped(values.get(key), below, saved)
    return values


def restore_keys(values: Any) -> None:
    """Moves loaded values from texts to the run's own keys, such as numbers, in place.

    torch makes text of each key. Collective: no.
    """
    for key in list(values) if isinstance(values, dict) else []:
        if not isinstance(key, str) and str(key) in values:
            values[key] = values.pop(str(key))
        restore_keys(values.get(key))


def notes_of(saved: Checkpoint, flat: Mapping[str, Any], left_out: Iterable[str]) -> Iterator[str]:
    """Yields sentences about tensors that the run keeps in a lower precision, and left out values.

    Left out is what the run and the checkpoint do not both have.
    """
    keys = [
        key
        for key, value in flat.items()
        if isinstance(value, torch.Tensor) and key in saved.tensors
        if _loses_precision(saved.tensors[key].dtype, value.dtype)
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


def _loses_precision(stored: torch.dtype, run: torch.dtype) -> bool:
    try:
        return torch.promote_types(stored, run) != run
    except RuntimeError:  # torch promotes no float8 and few unsigned integers
        return stored.itemsize > run.itemsize


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
            path = path if object_store is None else path.rstrip("/")
            is_file = is_tar(path) or is_compressed_pt(path) or Path(path).suffix in _OF_FILES
            if object_store is None or is_file:
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
