"""State dicts of a model and its optimizer, as FSDP2 alone would shard the experts.

[Note: view of experts] A rank holds shards of its own experts. Everybody else is shown shards of
all experts over all ranks, which is how they lie without expert parallelism: checkpoints of one
kind are those of the other, and torch's functions for state dicts need to know nothing. Rows travel
from one layout to the other in an all-to-all, so no rank has more of a state dict than its shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer_fsdp2.parallel.expert.held import Held, held_by
from composer_fsdp2.parallel.expert.mesh import ExpertMesh
from composer_fsdp2.parallel.row_order import part_of

__all__ = ["seen_by_all", "show_all_experts", "show_all_states", "taken_from_all"]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """This rank's part of a tensor of one expert; empty where it has none."""

    held: Held
    shape: torch.Size
    local: torch.Tensor


def _rows(count: int, ranks: int, rank: int) -> range:
    """The rows that FSDP2 gives a rank.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L372
    """
    step = -(-count // ranks)
    return range(min(rank * step, count), min((rank + 1) * step, count))


def _shared(one: range, other: range) -> range:
    return range(
        max(one.start, other.start), max(one.start, other.start, min(one.stop, other.stop))
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

    def own_rows(part: _Part, rank: int) -> range:
        """Of a rank among those of its expert; ranks of one group are next to each other."""
        shard, place = divmod(rank, mesh.degree)
        rows = _rows(part.shape[0], len(ranks) // mesh.degree, shard)
        return rows if place == part.held.place else range(0)

    def all_rows(part: _Part, rank: int) -> range:
        return _rows(part.shape[0], len(ranks), rank)

    before, after = (own_rows, all_rows) if to_all else (all_rows, own_rows)

    def width(part: _Part) -> int:
        return part.shape.numel() // max(1, part.shape[0])

    pieces: list[torch.Tensor] = []
    sent = [0] * len(ranks)
    for rank in ranks:
        for part in parts:
            mine = before(part, here)
            rows = _shared(mine, after(part, rank))
            if rows:
                piece = part.local[rows.start - mine.start : rows.stop - mine.start]
                pieces.append(piece.reshape(-1))
                sent[rank] += piece.numel()
    plan = [
        (rank, number, len(_shared(before(part, rank), after(part, here))) * width(part))
        for rank in ranks
        for number, part in enumerate(parts)
    ]
    received = [sum(size for source, _, size in plan if source == rank) for rank in ranks]
    empty = parts[0].local.new_empty(0)
    arrived = empty.new_empty(sum(received))
    dist.all_to_all_single(arrived, torch.cat([empty, *pieces]), received, sent, group=group)
    found: list[list[torch.Tensor]] = [[] for _ in parts]
    for (_, number, _), piece in zip(plan, arrived.split([size for *_, size in plan]), strict=True):
        found[number].append(piece)
    return [
        torch.cat(rows).view(len(after(part, here)), *part.shape[1:])
        for part, rows in zip(parts, found, strict=True)
    ]


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


def seen_by_all(held: Held, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of an expert as FSDP2 alone would shard it.

    Collective: yes, over the ranks of one copy of the model.

    Args:
        held: of its parameter.
        value: as a rank holds it, divided as the parameter is.
    """
    (local,) = _moved([_Part(held, value.shape, _local(value, value))], to_all=True)
    return _to_all(held, value.shape, local)


def taken_from_all(held: Held, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of an expert as this rank holds it: the reverse of `seen_by_all`.

    Collective: yes, over the ranks of one copy of the model, for a DTensor.

    Args:
        held: of its parameter.
        value: sharded over all ranks, or whole.
        like: divided as the parameter is.
    """
    if isinstance(value, DTensor):
        (local,) = _moved([_Part(held, like.shape, _local(value, like))], to_all=False)
        return _own(local, like)
    if held.place != held.mesh.place:
        return like
    assert isinstance(like, DTensor)
    return part_of(value, like.device_mesh, like.placements)


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
        _Part(held, param.shape, _local(state[name], param))
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
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            continue  # torch says what is wrong
        if isinstance(value, DTensor):
            if not _is_own(value, param):
                spread[name] = param, held
        elif held.place != held.mesh.place:
            state[name] = param.detach()
        else:
            assert isinstance(param, DTensor)
            state[name] = part_of(value, param.device_mesh, param.placements)
    parts = [_Part(h, p.shape, _local(state[name], p)) for name, (p, h) in spread.items()]
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
                parts[number, key] = _Part(owner, param.shape, local)
    moved = dict(zip(parts, _moved(list(parts.values()), to_all=True), strict=True))
    changed = {number: entry for number, entry in state["state"].items() if number not in params}
    for number, (param, owner) in params.items():
        entry = {
            key: value if dtype is None else _to_all(owner, param.shape, moved[number, key])
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
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            if isinstance(value, DTensor) and not _is_own(value, param):
                parts[number, key] = _Part(owner, param.shape, _local(value, param))
            elif own and not isinstance(value, DTensor):
                assert isinstance(param, DTensor)
                changed[number][key] = part_of(value, param.device_mesh, param.placements)
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
    kept: Mapping[int, Mapping[Any, tuple[torch.dtype | None, Any]]], mesh: ExpertMesh
) -> dict[int, dict[Any, tuple[torch.dtype | None, Any]]]:
    """Returns what ranks hold of the state of their experts. Collective: yes, over their group."""
    everyone: list[Any] = [None] * mesh.degree
    dist.all_gather_object(everyone, kept, group=mesh.group)
    return {number: entry for one in everyone for number, entry in one.items()}
