"""Refuses what a model does to gathered parameters and FSDP2 would forget.

[Note: gathered parameters] Modules compute with a whole copy of a parameter. It is made anew for
every use, and its memory is freed after it. So a write to it is lost, a tensor put in its place is
pushed aside, and whoever keeps it reads freed memory later. Versions and places are compared at
every gather, which costs less than a microsecond a parameter; contents only in the first step of
training and the first forward of evaluation, because a write through `.data` leaves no other trace.

Source: torch frees the memory and puts shards into the modules,
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L549
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L601
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.runtime.agreement import agreement_of
from composer_fsdp2.runtime.events import Event, UnitEvents
from composer_fsdp2.runtime.explain import Refusal
from composer_fsdp2.runtime.second_backward import SecondBackward
from composer_fsdp2.shard.summon import is_shown
from composer_fsdp2.shard.torch_private.gathered import (
    gathered_memory,
    gathered_param,
    in_function_transform,
    is_exported,
    is_gathered,
    memory_id,
    number_of_holders,
    places_of,
    stands_in,
    wrap_transitions,
)
from composer_fsdp2.shard.torch_private.tensors import storage_id, tree_leaves
from composer_fsdp2.shard.torch_private.units import (
    backward_number,
    device_of,
    frees_after_forward,
    has_run,
    param_groups,
    params_of,
    sharded_param,
)

__all__ = ["watch_gathered"]


def watch_gathered(
    tree: ModuleTree,
    units: Mapping[str, FSDPModule],
    groups: Mapping[str, Sequence[Any]],
    events: UnitEvents,
    second: SecondBackward,
) -> None:
    """Refuses writes to gathered parameters, and those who keep them.

    Collective: no; the end of the first forward of training and of evaluation, and the beginning of
    the second forward of training are, over the default group, and raise PlanError on every rank.

    Args:
        tree: of the model, whose forward is one microbatch.
        units: by name, those that have parameters.
        groups: torch's, of each of these units.
        events: of these units; ranks have compared their order before this is told.
        second: decides when memory may be freed.
    """
    watch = _Watch(tree, units, groups, events, second)
    events.listeners += (watch.hear,)


class _Param:
    """One parameter, and what is known of it since it was gathered."""

    def __init__(self, record: Any, names: Mapping[int, str], unit: str) -> None:
        self.record, self.unit = record, unit
        self.places = places_of(record)
        self.modules = [module for module, _ in self.places]
        self.name = f"{names.get(id(self.modules[0]), '?')}.{self.places[0][1]}".lstrip(".")
        self.plain: bool | None = None
        self.seen: tuple[int, int] | None = None
        self.contents: torch.Tensor | None = None
        self.holders: tuple[int, int] | None = None
        self.shard: tuple[torch.Tensor, int] | None = None

    def note_shard(self) -> None:
        shard = sharded_param(self.record)
        self.shard = shard, storage_id(shard)

    def forget_shard(self) -> bool:
        """Whether `.data` of the shard was assigned: a gather would go on reading the old one.

        FSDP2 itself takes another parameter before its first gather, if `to_empty` or `to` has put
        one into the module.
        """
        noted, self.shard = self.shard, None
        shard = sharded_param(self.record)
        return noted is not None and noted[0] is shard and noted[1] != storage_id(shard)

    def is_exchanged(self) -> bool:
        """Whether something stands in a module that FSDP2 did not put there."""
        # A module may get another dictionary, as the monitor gives it while it counts.
        found = [module._parameters.get(key) for module, key in self.places]
        return any(not stands_in(self.record, one) and not is_shown(one) for one in found)

    def note(self, contents: bool) -> None:
        if self.plain is None:
            self.plain = gathered_memory(self.record) is not None
            # Autograd keeps views of a DTensor as Python objects, which look like a user's.
            if not isinstance(gathered_param(self.record), DTensor):
                refs, tensors = number_of_holders(self.record)
                self.holders = refs - len(self.places), tensors
        whole = gathered_param(self.record)
        self.seen = _seen(whole) if self.plain else None
        self.contents = _digest(self.record) if contents and self.plain else None

    def is_changed(self) -> bool:
        whole = gathered_param(self.record)
        if self.seen is not None and self.seen != _seen(whole):
            return True
        return self.contents is not None and not torch.equal(self.contents, _digest(self.record))

    def has_new_holders(self) -> bool:
        if self.holders is None:
            return False
        now = number_of_holders(self.record)
        more = now[0] > self.holders[0] or now[1] > self.holders[1]
        self.holders = max(now[0], self.holders[0]), max(now[1], self.holders[1])
        return more


def _seen(whole: torch.Tensor) -> tuple[int, int]:
    """Version and place; what was made under inference_mode has no version."""
    return 0 if whole.is_inference() else whole._version, whole.data_ptr()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _digest(record: Any) -> torch.Tensor:
    """Sums of a parameter's bits over rows and columns, weighted so that order counts."""
    whole = gathered_memory(record)
    assert whole is not None
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    if whole.numel() == 0:
        return torch.zeros(2, dtype=torch.int64)
    bits = whole.contiguous().view(_BITS[whole.element_size()])
    bits = bits.reshape(len(bits), -1) if bits.ndim > 1 else bits.reshape(1, -1)
    sums = [bits.sum(axis, dtype=torch.int64) for axis in (0, 1)]
    return torch.stack([(one * torch.arange(1, len(one) + 1).to(one)).sum() for one in sums])


class _Watch:
    def __init__(
        self,
        tree: ModuleTree,
        units: Mapping[str, FSDPModule],
        groups: Mapping[str, Sequence[Any]],
        events: UnitEvents,
        second: SecondBackward,
    ) -> None:
        model = tree.root
        self._model, self._events, self._second = model, events, second
        self._groups: dict[Any, list[_Param]] = {}
        self._found: list[str] = []
        self._forwards = {True: 0, False: 0}
        """of training, and of evaluation, that came to their end"""
        self._in_first: list[Any] = []
        names = {key: tree.paths[index].path for key, index in tree.first_path.items()}
        self._refusals: dict[Any, list[tuple[dict[str, Any], Refusal]]] = {}
        for unit_name, unit in units.items():
            for group in groups[unit_name]:
                self._add(group, unit_name, unit, names)
            assert isinstance(unit, nn.Module)
            # Prepended later than torch's own, which gathers, so that it runs first.
            unit.register_forward_pre_hook(partial(_check_transform, unit_name), prepend=True)
            hook = partial(self._check_output, unit_name, unit)
            # Prepended, because torch's own frees the memory.
            self._in_first.append(unit.register_forward_hook(hook, prepend=True))
        for group in list(self._groups)[:1]:
            group.agree_on_writes = self._agree
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def _add(self, group: Any, name: str, unit: FSDPModule, names: Mapping[int, str]) -> None:
        self._groups[group] = [_Param(p, names, name) for p in params_of(group)]
        wrap_transitions(
            group,
            before=partial(self._before_gather, group),
            after=partial(self._after_gather, group),
            frees=partial(self._before_free, group),
        )
        # Units gather themselves, and who replaced a forward keeps it.
        holders: dict[nn.Module, _Param] = {}
        for param in self._groups[group]:
            for module in param.modules:
                holders.setdefault(module, param)
        self._refusals[group] = [
            (vars(module), Refusal(module, names.get(id(module), "?"), p.name, unit, name))
            for module, p in holders.items()
            if not isinstance(module, FSDPModule) and "forward" not in vars(module)
        ]
        self._refuse_calls(group)

    def _refuse_calls(self, group: Any) -> None:
        for attributes, refusal in self._refusals[group]:
            # `nn.Module` calls `self.forward`, and finds the instance's before that of its class.
            attributes.setdefault("forward", refusal)  # somebody may have put in another one

    def _before_gather(self, group: Any) -> None:
        self._found += [_exchanged(p) for p in self._groups[group] if p.is_exchanged()]

    def _after_gather(self, group: Any) -> None:
        for attributes, refusal in self._refusals[group]:
            if attributes.get("forward") is refusal:
                del attributes["forward"]
        trains = torch.is_grad_enabled()
        # A backward has no grad mode either, and is no evaluation.
        in_backward = backward_number() != -1
        is_first = self._forwards[True] <= 1 if in_backward else self._forwards[trains] == 0
        for param in self._groups[group]:
            param.note(is_first)

    def _before_free(self, group: Any) -> bool:
        if not self._second.frees(group):
            return False
        for param in self._groups[group]:
            if param.is_exchanged():
                self._found.append(_exchanged(param))
            elif param.is_changed():
                self._found.append(_changed(param))
            param.contents = None
        exported = [param for param in self._groups[group] if is_exported(param.record)]
        self._found += map(_is_exported, exported)
        if exported:
            return False  # torch would stop on this rank alone
        self._refuse_calls(group)
        return True

    def _begin(self, _module: nn.Module, _args: object) -> None:
        self._second.begin()
        self._found += self._kept()
        if not torch.is_grad_enabled() or self._forwards[True] != 1:
            self._raise_here()
        if self._forwards[torch.is_grad_enabled()] == 0:
            for param in self._params():
                param.note_shard()

    def _params(self) -> Iterator[_Param]:
        for params in self._groups.values():
            yield from params

    def hear(self, event: Event, _name: str) -> None:
        """Agrees on what the first step has shown. Collective: yes, at its end."""
        if event == "aborted":  # each rank has come to the end of another number of forwards
            self._forwards = {True: 0, False: 0}
        if event == "begin" and self._forwards[True] == 1 and self._groups:
            next(iter(self._groups)).agree_on_writes()

    def _end(self, _module: nn.Module, _args: object, _output: object) -> None:
        trains = torch.is_grad_enabled()
        self._forwards[trains] += 1
        if self._forwards[trains] > 1 or not self._groups:
            self._raise_here()
            return
        while self._in_first:
            self._in_first.pop().remove()
        self._found += [_assigned(param) for param in self._params() if param.forget_shard()]
        self._events.tell("end", "")  # a rank that does not come is missed there
        next(iter(self._groups)).agree_on_writes()

    def _agree(self) -> None:
        """Raises on every rank what was found on any. Collective: yes."""
        error = self._error()
        # Almost always there is none, and one number says that.
        agreement = agreement_of(device_of(next(iter(self._groups))))
        if agreement.any_rank(error is not None):
            raise_on_all_ranks({}, error)

    def _raise_here(self) -> None:
        if (error := self._error()) is not None:
            raise error

    def _error(self) -> PlanError | None:
        found, self._found = list(dict.fromkeys(self._found)), []
        if not found:
            return None
        more = f"\n... and {len(found) - 3} more" if len(found) > 3 else ""
        return PlanError("\n".join(found[:3]) + more)

    def _check_output(self, name: str, unit: FSDPModule, *call: Any) -> None:
        """Refuses a unit that returns its own parameter, whose memory is about to be freed."""
        for group in param_groups(unit):
            if frees_after_forward(group) in (None, False):
                continue
            own = {memory_id(p.record): p for p in self._groups[group] if p.plain}
            for leaf in tree_leaves(call[-1]):
                if type(leaf) in (torch.Tensor, nn.Parameter) and storage_id(leaf) in own:
                    raise PlanError(_returned(own[storage_id(leaf)], name))

    # --- Those who keep a parameter. ---

    def _kept(self) -> list[str]:
        suspects = [
            param
            for group, params in self._groups.items()
            if not is_gathered(group)
            for param in params
            if has_run(param.record) and param.plain and param.has_new_holders()
        ]
        if not suspects:
            return []
        places: dict[_Param, set[str | None]] = {}
        for param, holder in _holders_of(suspects):
            places.setdefault(param, set()).add(_place_in(self._model, holder))
        return [_is_kept(param, found) for param, found in places.items()]


@torch.compiler.disable
def _check_transform(name: str, _unit: nn.Module, _args: object) -> None:
    if in_function_transform():
        raise PlanError(
            f"'{name or 'the model'}' was called inside a transformation of torch.func (vmap, "
            "grad, jvp or their like). FSDP2 gathers and reduces in hooks of autograd, which such "
            "a transformation does not run: gradients would be lost. Call the model with a batch "
            "and take gradients with torch.autograd.grad (create_graph=True for second ones), or "
            "transform a function inside the unit's own forward."
        )


def _holders_of(suspects: list[_Param]) -> Iterator[tuple[_Param, Any]]:
    """Pairs of a parameter and an object that holds it, or shares its memory."""
    by_memory: dict[int | None, _Param] = {memory_id(param.record): param for param in suspects}
    ours = {id(gathered_param(p.record)) for p in suspects}
    ours |= _noted_by_torch()
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor) and id(obj) not in ours:
            param = by_memory.get(_storage_of(obj))
            if param is not None and not _is_torchs(obj, param.record):
                yield param, obj
    for param in suspects:
        whole = gathered_param(param.record)
        own = (param.record, vars(param.record))
        for holder in gc.get_referrers(whole):
            if isinstance(holder, types.FrameType) or any(holder is one for one in own):
                continue
            yield param, whole
            break


def _noted_by_torch() -> set[int]:
    """Ids of what CommDebugMode notes of each module for its tables, which nobody computes with."""
    modes = (mode for mode in gc.get_objects() if type(mode) is CommDebugMode)
    notes = (params for mode in modes for params in mode.get_parameter_info().values())
    return {id(param) for params in notes for param in params.values()}


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # of a class without memory of its own
        return None


def _is_torchs(tensor: torch.Tensor, record: Any) -> bool:
    lists = (value for value in vars(record).values() if isinstance(value, list | tuple))
    return any(tensor is one for items in lists for one in items)


def _place_in(model: nn.Module, wanted: object) -> str | None:
    """Which attribute in a model leads to an object; `None` for none."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inside = value if key not in ("_parameters", "_modules") else None
            if _reaches(inside, wanted, depth=3):
                return f"'{f'{name}.{key}'.lstrip('.')}'"
    return None


def _reaches(value: object, wanted: object, depth: int) -> bool:
    if value is wanted:
        return True
    if depth == 0 or isinstance(value, nn.Module | torch.Tensor | str | type):
        return False
    inside: Iterable[object] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    elif isinstance(value, types.FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
    return any(_reaches(one, wanted, depth - 1) for one in inside)


# --- What is said. ---


def _unit_text(name: str) -> str:
    return f"unit '{name}'" if name else "the root unit"


def _changed(param: _Param) -> str:
    return (
        f"'{param.name}' was changed in place while {_unit_text(param.unit)} had it gathered, by a "
        "forward, a submodule or a hook. That is a copy which FSDP2 frees: the change is lost, and "
        "training would silently go another way than without FSDP2. Keep what forward counts or "
        "adapts in a buffer (register_buffer); compute with a changed copy (F.linear(x, "
        "self.weight.clamp(-1, 1))); or change the weight between steps, in a callback, with "
        "composer_fsdp2.summon_full_params."
    )


def _exchanged(param: _Param) -> str:
    return (
        f"Another tensor was put in the place of '{param.name}' while {_unit_text(param.unit)} "
        "ran, by torch.func.functional_call or an assignment to the module. FSDP2 computes with "
        "the parameters it gathers, so the tensor would be ignored or dropped. Give forward the "
        "tensor as an argument; call the module's function with it (F.linear(x, weight)); or write "
        "it into the parameter between steps with composer_fsdp2.summon_full_params."
    )


def _assigned(param: _Param) -> str:
    return (
        f"'{param.name}.data' was assigned in place, while {_unit_text(param.unit)} had not "
        "gathered it. FSDP2 gathers the memory it made for the shard, so the assignment would be "
        "ignored. Compute with a changed copy (F.linear(x, self.weight * 0.9)) in the unit; or "
        "change the weight between steps, in a callback, with composer_fsdp2.summon_full_params."
    )


def _returned(param: _Param, unit: str) -> str:
    return (
        f"{_unit_text(unit)} returns its parameter '{param.name}', or a view of it. FSDP2 frees "
        "the memory when its forward is over, so whoever uses it reads freed memory. Return a copy "
        "(weight.clone()), use the weight inside the unit, or choose the unit around both with "
        "wrap_policy."
    )


def _is_exported(param: _Param) -> str:
    return (
        f"`numpy()`, or something like it, was called on '{param.name}' while "
        f"{_unit_text(param.unit)} had it gathered. The array shares memory that FSDP2 frees when "
        "it is no longer needed, and torch cannot free what it has given away. Take a copy: "
        "weight.detach().clone().numpy()."
    )


def _is_kept(param: _Param, places: set[str | None]) -> str:
    inside = sorted(place for place in places if place is not None)
    holder = inside[0] if inside else "Something outside the model (a list, a closure, a hook)"
    return (
        f"{holder} keeps the gathered parameter '{param.name}', or a view of it, after its "
        "forward. FSDP2 has freed that memory: to use it later computes with freed memory or old "
        "weights, and can end the process. Read the parameter from its module in every forward, or "
        "keep a copy (weight.detach().clone())."
    )
