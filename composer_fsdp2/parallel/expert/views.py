"""Has state dicts of a model and its optimizer show experts as FSDP2 alone would shard them.

[Note: view of experts] A rank has shards of its own experts. State dicts show shards of all experts
over all ranks, as they are without expert parallelism: checkpoints of both kinds of run are the
same, and torch's functions for state dicts need to know nothing. Rows travel from one layout to the
other in an all-to-all, so no rank has more of a state dict than its shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer_fsdp2.parallel.form import ExpertForm, form_of, rows_of
from composer_fsdp2.parallel.state_dicts import (
    States,
    change_optimizer_state_dicts,
    change_state_dicts,
)
from composer_fsdp2.torch_private.tensors import sharded_like

__all__ = ["show_all_experts", "show_all_states"]

_Block = tuple[range, ...]
"""a range for each dimension of a tensor"""


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertPart:
    """This rank's part of a tensor of one expert or of all experts; empty for a remote expert."""

    form: ExpertForm
    shape: torch.Size
    """of the full tensor"""
    local: torch.Tensor

    def shard_block(self, ranks: int, rank: int) -> _Block:
        """Returns the block of a rank's shard; ranks of an expert group follow each other."""
        degree = self.form.mesh.degree
        shard, group_rank = divmod(rank, degree)
        block, dim = list(map(range, self.shape)), self.form.dim or 0
        if self.form.dim is not None:
            block[0] = rows_of(self.shape[0], degree, group_rank)
        elif group_rank != self.form.owner:
            block[0] = range(0)
        rows = rows_of(len(block[dim]), ranks // degree, shard)
        block[dim] = block[dim][rows.start : rows.stop]
        return tuple(block)

    def checkpoint_block(self, ranks: int, rank: int) -> _Block:
        """Returns the block of a rank where FSDP2 divides the tensor over all ranks."""
        return (rows_of(self.shape[0], ranks, rank), *map(range, self.shape[1:]))


def _part(form: ExpertForm, param: DTensor, value: torch.Tensor) -> _ExpertPart:
    """Returns this rank's part of a parameter, or of state that is divided as the parameter is."""
    local = value.to_local() if isinstance(value, DTensor) else value
    # The backend of the mesh sends from its own devices.
    return _ExpertPart(form, form.model_shape(param.shape), local.to(param.device_mesh.device_type))


def _shared(block: _Block, other: _Block) -> _Block:
    return tuple(
        range(first := max(a.start, b.start), max(first, min(a.stop, b.stop)))
        for a, b in zip(block, other, strict=True)
    )


def _size(block: _Block) -> int:
    return math.prod(map(len, block))


def _within(inside: _Block, outside: _Block) -> tuple[slice, ...]:
    return tuple(
        slice(inner.start - outer.start, inner.stop - outer.start)
        for inner, outer in zip(inside, outside, strict=True)
    )


def _moved(parts: Mapping[Any, _ExpertPart], *, to_all: bool) -> dict[Any, torch.Tensor]:
    """Moves rows from the shards of each expert's own ranks to those of all ranks, or back.

    Collective: yes, over the ranks that share one replica of the model. They give the same parts in
    the same order.

    Returns:
        This rank's rows of each tensor in the other layout.
    """
    moved: dict[Any, torch.Tensor] = {}
    for dtype in dict.fromkeys(part.local.dtype for part in parts.values()):
        alike = {key: part for key, part in parts.items() if part.local.dtype == dtype}
        moved.update(zip(alike, _moved_alike(list(alike.values()), to_all), strict=True))
    return moved


def _moved_alike(parts: Sequence[_ExpertPart], to_all: bool) -> list[torch.Tensor]:
    data_parallel = parts[0].form.mesh.data_parallel
    group = data_parallel.get_group(data_parallel.ndim - 1)
    this_rank, count = group.rank(), group.size()
    before, after = _ExpertPart.shard_block, _ExpertPart.checkpoint_block
    if not to_all:
        before, after = after, before
    blocks_before = [before(part, count, this_rank) for part in parts]
    blocks_after = [after(part, count, this_rank) for part in parts]
    # For each rank the blocks of each tensor that it gets from this rank, and that it sends.
    outgoing = [
        [
            _shared(block, after(p, count, rank))
            for p, block in zip(parts, blocks_before, strict=True)
        ]
        for rank in range(count)
    ]
    incoming = [
        [
            _shared(before(p, count, rank), block)
            for p, block in zip(parts, blocks_after, strict=True)
        ]
        for rank in range(count)
    ]
    sent, received = ([sum(map(_size, blocks)) for blocks in side] for side in (outgoing, incoming))
    empty = parts[0].local.new_empty(0)
    pieces = [
        part.local[_within(block, outer)].reshape(-1)
        for blocks in outgoing
        for part, outer, block in zip(parts, blocks_before, blocks, strict=True)
        if _size(block)
    ]
    arrived = empty.new_empty(sum(received))
    dist.all_to_all_single(arrived, torch.cat([empty, *pieces]), received, sent, group=group)
    tensors = [empty.new_empty([len(side) for side in block]) for block in blocks_after]
    rest = iter(arrived.split([_size(block) for blocks in incoming for block in blocks]))
    for blocks in incoming:
        for tensor, outer, block in zip(tensors, blocks_after, blocks, strict=True):
            tensor[_within(block, outer)] = next(rest).view([len(side) for side in block])
    return tensors


def _to_all(parts: Mapping[Any, _ExpertPart]) -> dict[Any, DTensor]:
    """Returns DTensors over all ranks. Collective: yes, as `_moved`."""
    tensors: dict[Any, DTensor] = {}
    for key, local in _moved(parts, to_all=True).items():
        data_parallel, shape = parts[key].form.mesh.data_parallel, parts[key].shape
        tensors[key] = DTensor.from_local(
            local,
            data_parallel,
            [*[Replicate()] * (data_parallel.ndim - 1), Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
    return tensors


def _to_own(values: Mapping[Any, tuple[Any, DTensor, ExpertForm]]) -> dict[Any, Any]:
    """Returns the values that this rank loads from a state dict.

    Collective: yes, as `_moved`.
    """
    loaded: dict[Any, Any] = {}
    spread: dict[Any, _ExpertPart] = {}
    for key, (value, param, form) in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != form.model_shape(param.shape):
            continue  # torch refuses the value
        # A value on the parameter's mesh was taken from the parameters, and not from a state dict,
        # or torch has divided a full tensor of a file as it divides this rank's slice.
        is_own = isinstance(value, DTensor) and value.device_mesh == param.device_mesh
        if not isinstance(value, DTensor) or (is_own and form.dim is not None):
            loaded[key] = form.from_checkpoint(value, param.detach())
        elif not is_own:
            spread[key] = _part(form, param, value)
    moved = _moved(spread, to_all=False).items()
    return loaded | {key: sharded_like(local, values[key][1]) for key, local in moved}


# --- Models ---


def show_all_experts(experts: nn.Module) -> None:
    """Has state dicts of a module show its experts as FSDP2 alone would shard them.

    Collective: no, but each state dict is from then on, over the ranks of one replica.
    """
    change_state_dicts(experts, _after_saving, _before_loading)


@torch.no_grad()
def _after_saving(experts: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    params = _params(experts, state, prefix)
    # Not with `keep_vars`, for which the parameters themselves are asked for.
    if not any(isinstance(state[name], nn.Parameter) for name in params):
        parts = {name: _part(form, param, state[name]) for name, (param, form) in params.items()}
        state.update(_to_all(parts))


@torch.no_grad()
def _before_loading(
    experts: nn.Module, state: dict[str, Any], prefix: str, *_args: Any, **_kwargs: Any
) -> None:
    params = _params(experts, state, prefix)
    state.update(
        _to_own({name: (state[name], *param_and_form) for name, param_and_form in params.items()})
    )


def _params(
    experts: nn.Module, state: Mapping[str, Any], prefix: str
) -> dict[str, tuple[DTensor, ExpertForm]]:
    """Returns parameters of experts, and their forms, by their names in a state dict."""
    return {
        prefix + name: (param, form)
        for name, param in experts.named_parameters()
        # Not a DTensor: full parameters are summoned, on this rank or on all.
        if isinstance(param, DTensor) and prefix + name in state
        if isinstance(form := form_of(param), ExpertForm)
    }


# --- Optimizers ---


def show_all_states(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show state of experts as FSDP2 alone would shard it.

    Collective: no, but each state dict is from then on, over the ranks of one replica.
    """
    change_optimizer_state_dicts(optimizer, ExpertForm, _shown_states, _loaded_states)


@torch.no_grad()
def _shown_states(forms: Mapping[int, tuple[Any, ExpertForm]], states: States) -> States:
    # Ranks tell each other the dtype of tensors that are divided as their parameter is, and the
    # value of others.
    local_states: dict[int, dict[Any, tuple[torch.dtype | None, Any]]] = {}
    for number, (param, form) in forms.items():
        if not form.is_remote:
            local_states[number] = {
                key: (value.dtype, None)
                if isinstance(value, torch.Tensor) and value.shape == param.shape
                else (None, value)
                for key, value in states.get(number, {}).items()
            }
    mesh = next(form.mesh for _, form in forms.values())
    everyone: list[Any] = [None] * mesh.degree
    dist.all_gather_object(everyone, local_states, group=mesh.group)
    all_states = {number: state for of_rank in everyone for number, state in of_rank.items()}
    parts: dict[tuple[int, Any], _ExpertPart] = {}
    for number, (param, form) in forms.items():
        for key, (dtype, _) in all_states[number].items():
            if dtype is not None:
                value = states.get(number, {}).get(key)
                if value is None or form.is_remote:
                    value = torch.empty(0, dtype=dtype)
                parts[number, key] = _part(form, param, value)
    shown = _to_all(parts)
    changed = {number: state for number, state in states.items() if number not in forms}
    for number in forms:
        if all_states[number]:
            changed[number] = {
                key: shown.get((number, key), value)
                for key, (_, value) in all_states[number].items()
            }
    return changed


@torch.no_grad()
def _loaded_states(forms: Mapping[int, tuple[Any, ExpertForm]], states: States) -> States:
    loaded = _to_own(
        {
            (number, key): (value, param, form)
            for number, (param, form) in forms.items()
            for key, value in states.get(number, {}).items()
        }
    )
    remote = {number for number, (_, form) in forms.items() if form.is_remote}
    changed = {number: state for number, state in states.items() if number not in remote}
    for (number, key), value in loaded.items():
        if number in changed:
            changed[number] = {**changed[number], key: value}
    return changed
