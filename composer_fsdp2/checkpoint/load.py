"""Loads a checkpoint into the state that a run already has: only if it fits, and exactly.

torch fills a state dict key by key and asks only for the keys the run has. Whatever the file has
beside them is dropped without a word, and hyperparameters go by the number of their group. So names
and shapes are compared here first.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.progress import counting_bytes
from composer_fsdp2.text import listed

__all__ = [
    "STATE_SETTINGS",
    "check_fit",
    "check_groups",
    "load_sharded",
    "read_items",
    "reason_of",
]


_MODEL = "state.model."
_OPTIMIZERS = "state.optimizers."
_PARTS = ("state.callbacks", "state.algorithms", "state.schedulers")
_OPTIONAL = (
    # Descriptions of the run that wrote it; nothing reads them back.
    "state.metadata.*",
    # Newer versions of torch save more than older ones did; what is there when nothing is loaded
    # is what the older version meant.
    "state.schedulers.*._is_initial",
    "state.optimizers.*.param_groups.*.decoupled_weight_decay",
    "state.optimizers.*.param_groups.*.fused",
    # Schedulers note it when they are made; a run without any has none.
    "state.optimizers.*.param_groups.*.initial_lr",
    # A run that was on another kind of device.
    "rng.*.cuda",
)
"""Keys a checkpoint may lack. Never a tensor of the model or of the optimizer."""


def check_fit(
    saved: Checkpoint,
    target: Mapping[str, Any],
    *,
    strict: bool = True,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Compares the keys and shapes of a checkpoint with those of a run.

    Collective: no. No tensor is read.

    Args:
        saved: an open checkpoint.
        target: key -> value of the run, flattened, without the keys that are not to be loaded.
        strict: whether the model's names must be the same. If not, differences of its names are
            returned; differences of shape never are.
        ignored: globs over key paths joined by `/`, of values to leave out.

    Returns:
        Keys that keep the value of the run, because nothing is lost by that.

    Raises:
        CheckpointError: it does not fit; lists at most 20 names of each kind.
    """
    left_out: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    shapes: list[str] = []
    for key, value in target.items():
        parts = key.split(".")
        # Before torch 2.4, an object could contain the value.
        holders = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if key in saved.tensors and isinstance(value, torch.Tensor):
            have, run = saved.tensors[key].shape, tuple(value.shape)
            if key.startswith((_MODEL, _OPTIMIZERS)) and have != run:
                shapes.append(f"{key} (checkpoint {have}, run {run})")
        elif key not in saved.tensors and not any(holder in saved.objects for holder in holders):
            learned = isinstance(value, torch.Tensor) and not key.startswith("rng.")
            # Of a callback, algorithm or scheduler that the saved run had not.
            part = ".".join(parts[:3])
            is_new = part.startswith(_PARTS) and not any(
                f"{path}.".startswith(f"{part}.") for path in saved.paths
            )
            optional = (
                is_new
                or (not learned and any(fnmatch.fnmatchcase(key, glob) for glob in _OPTIONAL))
                or (not strict and key.startswith(_MODEL))
            )
            (left_out if optional else missing).append(key)
    present = {key.split(".")[1] for key in target if key.startswith(("state.model", "state.opt"))}
    for key in saved.tensors:
        learned = key.startswith(_MODEL) or (key.startswith(_OPTIMIZERS) and ".state." in key)
        if not learned or key in target or key.split(".")[1] not in present:
            continue
        path = saved.paths[key]
        starts = ["/".join(map(str, path[:n])) for n in range(1, len(path) + 1)]
        if not any(fnmatch.fnmatchcase(start, glob) for start in starts for glob in ignored):
            loose = not strict and key.startswith(_MODEL)
            (left_out if loose else unexpected).append(key)
    problems = {
        "not in the checkpoint": missing,
        "not in the run": unexpected,
        "of another shape": shapes,
    }
    differences = [f"{kind}: {listed(names, 20, '')}" for kind, names in problems.items() if names]
    if differences:
        raise CheckpointError(
            f"The checkpoint '{saved.path}' does not fit this run; {'; '.join(differences)}. "
            "Whatever is left out would train from other values than those that were saved. Use "
            "the model and optimizer it was saved with, or name in `load_ignore_keys` what should "
            "not be loaded."
        )
    return left_out


STATE_SETTINGS = ("amsgrad", "centered", "momentum")
"""settings of a parameter group that decide what state its parameters have"""


def check_groups(
    saved: Sequence[Mapping[str, Any]], run: Sequence[Mapping[str, Any]], where: str
) -> None:
    """Compares parameter groups by the names in them; the order of names does not matter.

    Collective: no.

    Args:
        saved: groups in the checkpoint, with the names of their parameters.
        run: those of the run's optimizer, with names too.
        where: path of the checkpoint; in error messages.

    Raises:
        CheckpointError: the number of groups or the members of one differ, or the run would keep
            state of which the checkpoint has none.
    """
    theirs, ours = ([set(group["params"]) for group in groups] for groups in (saved, run))
    problems: list[str] = []
    if len(theirs) != len(ours):
        problems.append(f"the checkpoint has {len(theirs)} and the run {len(ours)}")
    for number, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        sides = {"checkpoint": sorted(a - b), "run": sorted(b - a)}
        problems += [
            f"group {number} has only in the {side}: {listed(only, 20, '')}"
            for side, only in sides.items()
            if only
        ]
    if problems:
        raise CheckpointError(
            f"The parameter groups of '{where}' are not those of this run: {'; '.join(problems)}. "
            "Learning rates and weight decay go by the number of the group and would reach the "
            "wrong parameters. Build the optimizer with the same groups, or start its state anew "
            "with load_ignore_keys: [state/optimizers/*]."
        )
    problems = [
        f"{key} of group {number} is {a[key]} in the checkpoint and {b[key]} in the run"
        for number, (a, b) in enumerate(zip(saved, run, strict=True))
        for key in STATE_SETTINGS
        if b.get(key) and not a.get(key, True)
    ]
    if problems:
        raise CheckpointError(
            f"The optimizer of '{where}' kept less state than this run's: {'; '.join(problems)}. "
            "Settings of groups go on as they were saved, so the run's would have no effect. Build "
            "the optimizer as it was saved, or start its state anew with load_ignore_keys: "
            "[state/optimizers/*]."
        )


def read_items(saved: FolderCheckpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Carries out this rank's part of a load, nothing executed.

    Collective: no. Of a tensor's piece the ranges that are wanted are read; `load_sharded` compares
    their checksums.

    Raises:
        CheckpointError: a piece is damaged, could execute code, or has not the promised shape.
    """
    items_of: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items:
        items_of.setdefault(item.storage_index, []).append(item)
    storage = saved.metadata.storage_data
    # Pieces that lie behind each other are read one after the other.
    order = sorted(
        items_of, key=lambda index: (storage[index].relative_path, storage[index].offset)
    )
    total = sum(storage[index].length for index in items_of)
    with counting_bytes(f"Loading {saved.path.name}", total) as advance:
        for index in order:
            if index.fqn in saved.tensors:
                items = items_of[index]
                views = [functools.partial(_narrowed, item) for item in items]
                piece = saved.piece(index, views=views)
                for item in items:
                    _copy_part(saved, item, piece, planner)
            else:
                file = saved.checked(index)
                saved.piece(index, file)
                for item in items_of[index]:
                    # The bytes execute nothing, so the planner may load them its own way.
                    file.seek(0)
                    planner.load_bytes(item, file)
            advance(storage[index].length)


def _narrowed(item: ReadItem, piece: torch.Tensor) -> torch.Tensor:
    """Returns what is wanted of a stored piece, from which these offsets count."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        piece = piece.narrow(dim, start, length)
    return piece


def _copy_part(
    saved: FolderCheckpoint, item: ReadItem, piece: torch.Tensor, planner: LoadPlanner
) -> None:
    try:
        piece = _narrowed(item, piece)
        # `resolve_tensor` has narrowed the target.
        # Detached, because a leaf that requires a gradient refuses `copy_`.
        target = planner.resolve_tensor(item).detach()
        if target.shape != piece.shape:
            raise ValueError("another shape")
    except (RuntimeError, ValueError, IndexError):
        raise CheckpointError(
            f"{saved.where(item.storage_index)} has not the shape its metadata promises. The file "
            "belongs to another checkpoint. Restore the right file, or take another checkpoint."
        ) from None
    target.copy_(piece)
    planner.commit_tensor(item, target)


class _OwnPlanLoader(DefaultLoadPlanner):
    """Keeps the plan of each rank there: torch gathers all of them on rank 0, and changes none.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/default_planner.py#L479
    """

    def create_local_plan(self) -> LoadPlan:
        """Returns an empty plan. Collective: no."""
        self._plan = super().create_local_plan()
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Returns the plan of this rank. Collective: no."""
        del new_plan
        return self._plan


def load_sharded(
    target: dict[str, Any], reader: StorageReader, planner: LoadPlanner | None = None
) -> None:
    """Fills a nested state dict, tensors in place, from a sharded checkpoint.

    Collective: yes, over the default group.

    Raises:
        CheckpointError: on every rank, when any rank failed. torch raises a `BaseException`, which
            `except Exception` does not see.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/checkpoint/api.py#L22
    """
    try:
        with torch.no_grad():
            load(target, storage_reader=reader, planner=planner or _OwnPlanLoader())
    except CheckpointException as error:
        raise CheckpointError(reason_of(error)) from error
    saved: FolderCheckpoint | None = getattr(reader, "checkpoint", None)
    if saved is not None:
        saved.compare_ranges()


def reason_of(error: CheckpointException) -> str:
    """Returns the first rank's reason; the others usually say the same."""
    rank, (cause, _) = min(error.failures.items())
    text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return text if len(error.failures) > 1 else f"On rank {rank}: {text}"
