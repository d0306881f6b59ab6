"""State dicts of a model and its optimizer, as FSDP2 alone would shard the experts.

[Note: view of experts] A rank holds shards of its own experts. Everybody else is shown shards of
all experts over all ranks, which is how they lie without expert parallelism: checkpoints of one
kind are those of the other, and torch's functions for state dicts need to know nothing. Rows travel
from one layout to the other in an all-to-all, so no rank has more of a state dict than its shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer_fsdp2.parallel.held import Held, Holders, held_by
from composer_fsdp2.parallel.row_order import part_of

__all__ = ["show_all_experts", "show_all_states"]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """This rank's part of a tensor of an expert, or of all of them; empty where it has none."""

    held: Held
    shape: torch.Size
    """of the whole tensor"""
    local: torch.Tensor


def _rows(count: int, ranks: int, rank: int) -> range:
    """The rows that FSDP2 gives a rank.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L372
    """
    step = -(-count // ranks)
    return range(min(rank * step, count), min((rank + 1) * step, count))


_Block = tuple[range, ...]
"""of each dimension of a tensor"""


def _own_block(part: _Part, shards: int, shard: int, place: int) -> _Block:
    """Returns what FSDP2 gives a rank of those that hold the experts of a place."""
    block, dim = list(map(range, part.shape)), part.held.dim or 0
    if part.held.dim is not None:
        share = part.shape[0] // part.held.mesh.degree
        block[0] = range(place * share, (place + 1) * share)
    elif place != part.held.place:
        block[0] = range(0)
    rows = _rows(len(block[dim]), shards, shard)
    block[dim] = block[dim][rows.start : rows.stop]
    return tuple(block)


def _shared(one: _Block, other: _Block) -> _Block:
    return tuple(
        range(first := max(a.start, b.start), max(first, min(a.stop, b.stop)))
        for a, b in zip(one, other, strict=True)
    )


def _size(block: _Block) -> int:
    return math.prod(map(len, block))


def _within(block: _Block, around: _Block) -> tuple[slice, ...]:
    return tuple(
        slice(own.start - whole.start, own.stop - whole.start)
        for own, whole in zip(block, around, strict=True)
    )


def _moved(parts: Sequence[_Part], *, to_all: bool) -> list[torch.Tensor]:
    """Moves rows from the shards of each expert's own ranks to those of all ranks, or back.

    Collective: yes, over the ranks that share one copy of the model. They give the same parts in
    the same order.

    Returns:
        This rank's rows of each tensor in the other layout.
    """
    found: dict[int, torch.Tensor] = {}
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        by_kind[part.local.dtype].append(number)
    for numbers in by_kind.values():
        moved = _moved_alike([parts[number] for number in numbers], to_all)
        found.update(zip(numbers, moved, strict=True))
    return [found[number] for number in range(len(parts))]


def _moved_alike(parts: Sequence[_Part], to_all: bool) -> list[torch.Tensor]:
    mesh = parts[0].held.mesh
    group = mesh.usual.get_group(mesh.usual.ndim - 1)
    here, ranks = group.rank(), range(group.size())

    def own_block(part: _Part, rank: int) -> _Block:
        """Of a rank among those of its expert; ranks of one group are next to each other."""
        shard, place = divmod(rank, mesh.degree)
        return _own_block(part, len(ranks) // mesh.degree, shard, place)

    def usual_block(part: _Part, rank: int) -> _Block:
        return (_rows(part.shape[0], len(ranks), rank), *map(range, part.shape[1:]))

    before, after = (own_block, usual_block) if to_all else (usual_block, own_block)
    pieces: list[torch.Tensor] = []
    sent = [0] * len(ranks)
    for rank in ranks:
        for part in parts:
            mine = before(part, here)
            if size := _size(common := _shared(mine, after(part, rank))):
                pieces.append(part.local[_within(common, mine)].reshape(-1))
                sent[rank] += size
    plan = [
        (rank, number, _shared(before(part, rank), after(part, here)))
        for rank in ranks
        for number, part in enumerate(parts)
    ]
    sizes = [_size(common) for *_, common in plan]
    received = [0] * len(ranks)
    for (rank, *_), size in zip(plan, sizes, strict=True):
        received[rank] += size
    empty = parts[0].local.new_empty(0)
    arrived = empty.new_empty(sum(received))
    dist.all_to_all_single(arrived, torch.cat([empty, *pieces]), received, sent, group=group)
    found = [empty.new_empty([len(side) for side in after(part, here)]) for part in parts]
    for (_, number, common), piece in zip(plan, arrived.split(sizes), strict=True):
        if len(piece):
            shape = [len(side) for side in common]
            found[number][_within(common, after(parts[number], here))] = piece.view(shape)
    return found


def _to_all(held: Held, shape: torch.Size, local: torch.Tensor) -> DTensor:
    """The DTensor over all ranks."""
    usual = held.mesh.usual
    return DTensor.from_local(
        local,
        usual,
        [*[Replicate()] * (usual.ndim - 1), Shard(0)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _local(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's rows, where the backend of the mesh sends them."""
    local = value.to_local() if isinstance(value, DTensor) else value
    assert isinstance(param, DTensor)
    return local.to(param.device_mesh.device_type)


# --- Models ---


def show_all_experts(experts: nn.Module) -> None:
    """Has state dicts of a module show its experts as FSDP2 alone would shard them.

    Collective: no, but each state dict is from then on, over the ranks of one copy of the model.
    """
    experts.register_state_dict_post_hook(_after_saving)
    experts.register_load_state_dict_pre_hook(_before_loading)


@torch.no_grad()
def _after_saving(experts: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    params = _params(experts, state, prefix)
    if any(isinstance(state[name], nn.Parameter) for name in params):
        return  # `keep_vars`: the parameters themselves are asked for
    parts = [
        _Part(held, held.whole_shape(param.shape), _local(state[name], param))
        for name, (param, held) in params.items()
    ]
    for name, part, local in zip(params, parts, _moved(parts, to_all=True), strict=True):
        state[name] = _to_all(part.held, part.shape, local)


@torch.no_grad()
def _before_loading(
    experts: nn.Module, state: dict[str, Any], prefix: str, *_args: Any, **_kwargs: Any
) -> None:
    spread: dict[str, tuple[torch.Tensor, Held]] = {}
    for name, (param, held) in _params(experts, state, prefix).items():
        value = state[name]
        shape = held.whole_shape(param.shape)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            continue  # torch says what is wrong
        if held.dim is not None and isinstance(value, DTensor) and _is_own(value, param):
            # Torch has divided a whole tensor of a file as it divides this rank's slice.
            value = value.full_tensor()
        if isinstance(value, DTensor):
            if not _is_own(value, param):
                spread[name] = param, held
        elif held.place != held.mesh.place:
            state[name] = param.detach()
        else:
            assert isinstance(param, DTensor)
            state[name] = part_of(held.own(value), param.device_mesh, param.placements)
    parts = [
        _Part(held, held.whole_shape(param.shape), _local(state[name], param))
        for name, (param, held) in spread.items()
    ]
    for (name, (param, _)), local in zip(spread.items(), _moved(parts, to_all=False), strict=True):
        state[name] = _own(local, param)


def _is_own(value: DTensor, param: torch.Tensor) -> bool:
    """Whether somebody has taken it from the parameters, and not from a state dict."""
    return isinstance(param, DTensor) and value.device_mesh == param.device_mesh


def _own(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The DTensor that a parameter is on this rank."""
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _params(
    experts: nn.Module, state: Mapping[str, Any], prefix: str
) -> dict[str, tuple[torch.Tensor, Held]]:
    """Parameters of experts that a state dict has, by their names in it."""
    found: dict[str, tuple[torch.Tensor, Held]] = {}
    for name, param in experts.named_parameters():
        held = held_by(param)
        # Not a DTensor: somebody is shown whole parameters, on this rank or on all.
        if held is not None and isinstance(param, DTensor) and prefix + name in state:
            found[prefix + name] = param, held
    return found


# --- Optimizers ---


def show_all_states(optimizer: torch.optim.Optimizer) -> None:
    """Has state dicts of an optimizer show state of experts as FSDP2 alone would shard it.

    Collective: no, but each state dict is from then on, over the ranks of one copy of the model.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(held_by(param) for param in params):
        optimizer.register_state_dict_post_hook(_after_saving_state)
        optimizer.register_load_state_dict_pre_hook(_before_loading_state)


@torch.no_grad()
def _after_saving_state(held: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    params = _numbered(held, state)
    if not params:
        return state
    entries = {number: state["state"].get(number, {}) for number in params}
    kept = {
        number: {key: _described(value, params[number][0]) for key, value in entry.items()}
        for number, entry in entries.items()
        if params[number][1].place == params[number][1].mesh.place
    }
    known = _told(kept, next(iter(params.values()))[1].mesh)
    parts: dict[tuple[int, Any], _Part] = {}
    for number, (param, owner) in params.items():
        for key, (dtype, _) in known[number].items():
            if dtype is not None:
                value = entries[number].get(key)
                empty = torch.empty(0, dtype=dtype, device=owner.mesh.usual.device_type)
                own = owner.place == owner.mesh.place
                local = _local(value, param) if own and value is not None else empty
                parts[number, key] = _Part(owner, owner.whole_shape(param.shape), local)
    moved = dict(zip(parts, _moved(list(parts.values()), to_all=True), strict=True))
    changed = {number: entry for number, entry in state["state"].items() if number not in params}
    for number, (_, owner) in params.items():
        entry = {
            key: value
            if dtype is None
            else _to_all(owner, parts[number, key].shape, moved[number, key])
            for key, (dtype, value) in known[number].items()
        }
        if entry:
            changed[number] = entry
    return {**state, "state": changed}


@torch.no_grad()
def _before_loading_state(held: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    changed = dict(state["state"])
    parts: dict[tuple[int, Any], _Part] = {}
    params = _numbered(held, state)
    for number, (param, owner) in params.items():
        entry = changed.pop(number, {})
        own = owner.place == owner.mesh.place
        if own and entry:
            changed[number] = dict(entry)
        shape = owner.whole_shape(param.shape)
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                continue
            if isinstance(value, DTensor) and not _is_own(value, param):
                parts[number, key] = _Part(owner, shape, _local(value, param))
            elif own and not isinstance(value, DTensor):
                assert isinstance(param, DTensor)
                whole = owner.own(value)
                changed[number][key] = part_of(whole, param.device_mesh, param.placements)
    moved = _moved(list(parts.values()), to_all=False)
    for (number, key), local in zip(parts, moved, strict=True):
        if number in changed:
            changed[number][key] = _own(local, params[number][0])
    return {**state, "state": changed}


def _numbered(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[int, tuple[torch.Tensor, Held]]:
    """Parameters of experts by their numbers in a state dict."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return {
        number: (param, held)
        for number, param in zip(numbers, params, strict=True)
        if (held := held_by(param)) is not None
    }


def _described(value: Any, param: torch.Tensor) -> tuple[torch.dtype | None, Any]:
    """The dtype of a tensor that is divided as the parameter is, or else the value."""
    if isinstance(value, torch.Tensor) and value.shape == param.shape:
        return value.dtype, None
    return None, value


def _told(
    kept: Mapping[int, Mapping[Any, tuple[torch.dtype | None, Any]]], mesh: Holders
) -> dict[int, dict[Any, tuple[torch.dtype | None, Any]]]:
    """Returns what ranks hold of the state of their experts. Collective: yes, over their group."""
    everyone: list[Any] = [None] * mesh.degree
    dist.all_gather_object(everyone, kept, group=mesh.group)
    return {number: entry for one in everyone for number, entry in one.items()}
