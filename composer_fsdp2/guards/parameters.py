"""Refuses changes of gathered parameters, which FSDP2 forgets, and steps of parameters added later.

[Note: gathered parameters] Modules compute with a whole copy of a parameter. It is made anew for
every use, and its memory is freed after it. So a write to it is lost, and a tensor put in its place
is pushed aside. Versions and places are compared at every gather, which costs less than a
microsecond a parameter; contents only in the first step of training and the first forward of
evaluation, because a write through `.data` leaves no other trace. Whoever keeps a gathered
parameter beyond its forward is not looked for: torch's own error is explained where it says so.

Source: torch frees the memory and puts shards into the modules,
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L549
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L601
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import form_of, group_dividing
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.shard.summon import is_shown
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.text import child_name, listed, plain_name
from composer_fsdp2.torch_private.tensors import storage_id, tree_leaves
from composer_fsdp2.torch_private.units import (
    backward_number,
    frees_after_forward,
    gathered_memory,
    gathered_param,
    has_run,
    in_function_transform,
    is_exported,
    params_of,
    places_of,
    sharded_param,
    stands_in,
)

__all__ = ["AddedParameters", "GatheredParameters"]


class _Param:
    """Holds version, address and bits of one parameter since it was gathered."""

    def __init__(self, record: Any, names: Mapping[int, str], unit: str) -> None:
        self.record, self.unit = record, unit
        self.places = places_of(record)
        self.name = f"{names.get(id(self.places[0][0]), '?')}.{self.places[0][1]}".lstrip(".")
        self.plain: bool | None = None
        self.seen: tuple[int, int] | None = None
        self.contents: torch.Tensor | None = None
        self.dtype = sharded_param(record).dtype
        """of the shard when the model was prepared"""

    def is_cast(self) -> bool:
        """Whether the shard has another dtype than the memory into which torch gathers it."""
        if sharded_param(self.record).dtype == self.dtype or not has_run(self.record):
            return False
        # With mixed precision torch casts what it sends.
        return gathered_param(self.record).dtype == self.dtype

    def is_exchanged(self) -> bool:
        """Whether a module has another parameter registered than FSDP2 put there."""
        # A module may get another dictionary, as the monitor gives it while it counts.
        registered = [module._parameters.get(key) for module, key in self.places]
        return any(
            not stands_in(self.record, param) and not is_shown(param) for param in registered
        )

    def note(self, contents: bool) -> None:
        if self.plain is None:
            self.plain = gathered_memory(self.record) is not None
        unsharded = gathered_param(self.record)
        self.seen = _seen(unsharded) if self.plain else None
        self.contents = _digest(self.record) if contents and self.plain else None

    def is_changed(self) -> bool:
        unsharded = gathered_param(self.record)
        if self.seen is not None and self.seen != _seen(unsharded):
            return True
        return self.contents is not None and not torch.equal(self.contents, _digest(self.record))


def _seen(unsharded: torch.Tensor) -> tuple[int, int]:
    """Returns version and place; a tensor made under inference_mode has no version."""
    return 0 if unsharded.is_inference() else unsharded._version, unsharded.data_ptr()


_LATE = {"tensor": "fused weights in another order", "expert": "the experts of one rank alone"}
"""what checkpoints of an optimizer that came too late would hold, by the parallelism"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _digest(record: Any) -> torch.Tensor:
    """Returns sums of a parameter's bits over rows and columns, weighted so that order counts."""
    memory = gathered_memory(record)
    assert memory is not None
    memory = torch.view_as_real(memory) if memory.is_complex() else memory
    bits = memory.contiguous().view(_BITS[memory.element_size()])
    bits = bits.flatten(1) if bits.ndim > 1 else bits.reshape(1, -1)
    sums = [bits.sum(axis, dtype=torch.int64) for axis in (0, 1)]
    return torch.stack(
        [(axis_sum * torch.arange(1, len(axis_sum) + 1).to(axis_sum)).sum() for axis_sum in sums]
    )


class GatheredParameters(StepListener):
    """Refuses changes of gathered parameters; see [Note: gathered parameters].

    The end of the first forward of training and of evaluation, and the beginning of the second
    forward of training, are collectives over the default group, and raise PlanError on every rank.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether there are parameters."""
        return bool(run.groups)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        names = {key: run.tree.paths[index].path for key, index in run.tree.first_path.items()}
        self._groups = {
            group: [_Param(param, names, unit) for param in params_of(group)]
            for unit, groups in run.groups.items()
            for group in groups
        }
        self._found: list[str] = []
        self._forwards = {True: 0, False: 0}
        """of training, and of evaluation, that came to their end"""

    def begin_forward(self) -> None:
        """Raises errors that a backward has shown. Collective: yes, the second time in training."""
        trains = torch.is_grad_enabled()
        if trains and self._forwards[True] == 1:
            self._agree("the beginning of the second forward")
        else:
            self._raise_here()

    def end_forward(self) -> None:
        """Raises errors that a forward has shown. Collective: yes, the first time."""
        trains = torch.is_grad_enabled()
        self._forwards[trains] += 1
        if self._forwards[trains] == 1:
            self._agree("the end of the first forward")
        else:
            self._raise_here()

    def aborted(self) -> None:
        """Starts anew: ranks have ended different numbers of forwards. Collective: no."""
        self._forwards = {True: 0, False: 0}

    @torch.compiler.disable
    def before_forward(self, unit: str, group: Any) -> None:
        """Refuses transformations of torch.func, which run no hooks of autograd. Collective: no."""
        if in_function_transform():
            raise PlanError(
                f"'{unit or 'the model'}' was called inside a transformation of torch.func (vmap, "
                "grad, jvp or their like). FSDP2 gathers and reduces in hooks of autograd, which "
                "such a transformation does not run: gradients would be lost. Call the model with "
                "a batch and take gradients with torch.autograd.grad (create_graph=True for second "
                "ones), or transform a function inside the unit's own forward."
            )

    def before_gather(self, unit: str, group: Any) -> None:
        """Refuses parameters that were cast after the first gather. Collective: no."""
        for param in self._groups[group]:
            if param.is_cast():
                raise PlanError(
                    f"'{param.name}' was {param.dtype} in the first forward and is "
                    f"{sharded_param(param.record).dtype} now, as after model.bfloat16(), "
                    "model.double() or model.to(dtype). FSDP2 gathers it into memory of the first "
                    "dtype. Convert the model before it is prepared; or keep it and have units "
                    "compute in another dtype: mixed_precision, with param_dtype."
                )

    def before_unsharded(self, unit: str, group: Any) -> None:
        """Looks for tensors in the places of the shards. Collective: no."""
        self._found += [_exchanged(p) for p in self._groups[group] if p.is_exchanged()]

    def after_unsharded(self, unit: str, group: Any) -> None:
        """Notes versions, and contents in the first step. Collective: no."""
        trains = torch.is_grad_enabled()
        # A backward has no grad mode either, and is no evaluation.
        in_backward = backward_number() != -1
        is_first = self._forwards[True] <= 1 if in_backward else self._forwards[trains] == 0
        for param in self._groups[group]:
            param.note(is_first)

    def may_free(self, unit: str, group: Any) -> bool:
        """Looks for changes; keeps memory that was given to numpy. Collective: no."""
        for param in self._groups[group]:
            if param.is_exchanged():
                self._found.append(_exchanged(param))
            elif param.is_changed():
                self._found.append(
                    f"'{param.name}' was changed in place while {_unit_text(param.unit)} had it "
                    "gathered, by a forward, a submodule or a hook. That is a copy which FSDP2 "
                    "frees: the change is lost, and training would silently go another way than "
                    "without FSDP2. Keep what forward counts or adapts in a buffer "
                    "(register_buffer); compute with a changed copy (F.linear(x, "
                    "self.weight.clamp(-1, 1))); or change the weight between steps, in a "
                    "callback, with composer_fsdp2.summon_full_params."
                )
            param.contents = None
        exported = [param for param in self._groups[group] if is_exported(param.record)]
        self._found += [
            f"`numpy()`, or something like it, was called on '{param.name}' while "
            f"{_unit_text(param.unit)} had it gathered. The array shares memory that FSDP2 frees "
            "when it is no longer needed, and torch cannot free what it has given away. Take a "
            "copy: weight.detach().clone().numpy()."
            for param in exported
        ]
        return not exported  # torch would stop on this rank alone

    def after_forward(self, unit: str, output: Any) -> None:
        """Refuses a unit that returns its parameter, whose memory is about to be freed.

        Collective: no.
        """
        if any(self._forwards.values()):
            return
        for group in self.run.groups.get(unit, ()):
            if frees_after_forward(group) in (None, False):
                continue
            memory = [(gathered_memory(param.record), param) for param in self._groups[group]]
            by_storage = {
                storage_id(tensor): param for tensor, param in memory if tensor is not None
            }
            for leaf in tree_leaves(output):
                if type(leaf) in (torch.Tensor, nn.Parameter) and storage_id(leaf) in by_storage:
                    name = by_storage[storage_id(leaf)].name
                    raise PlanError(
                        f"{_unit_text(unit)} returns its parameter '{name}', "
                        "or a view of it. FSDP2 frees the memory when its forward is over, so "
                        "whoever uses it reads freed memory. Return a copy (weight.clone()), use "
                        "the weight inside the unit, or choose the unit around both with "
                        "wrap_policy."
                    )

    def _agree(self, subject: str) -> None:
        """Raises on every rank the changes that were found on any. Collective: yes."""
        self.run.tell("before_agreement", subject)
        error = self._error()
        # Almost always there is none, and one number says that.
        if agreement_of(self.run.device).any_rank(error is not None):
            raise_on_all_ranks({}, error)

    def _raise_here(self) -> None:
        if (error := self._error()) is not None:
            raise error

    def _error(self) -> PlanError | None:
        problems, self._found = list(dict.fromkeys(self._found)), []
        if not problems:
            return None
        more = f"\n... and {len(problems) - 3} more" if len(problems) > 3 else ""
        return PlanError("\n".join(problems[:3]) + more)


class AddedParameters(StepListener):
    """Refuses to train parameters whose gradients nobody averages.

    They are parameters that a model got after it was prepared, and those that were frozen then and
    are full on every rank.

    Every parameter that is added to the optimizer of the run is checked. Of other optimizers only
    parameters of the model are: they may step another model, whose gradients somebody else
    averages.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether there are ranks to average over."""
        return dist.get_world_size() > 1

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        stepped = [param for optimizer in run.optimizers for param in _params_of(optimizer)]
        self._whole = {
            id(param) for param in [*run.model.parameters(), *stepped] if _is_plain(param)
        }
        # Not by the model's method `parameters`, which a class may have made its own.
        self._frozen = {
            plain_name(child_name(path, name)): param
            for path, module in run.model.named_modules()
            for name, param in module._parameters.items()
            if param is not None and _is_plain(param) and not param.requires_grad
        }
        self._seen = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]]()

    def begin_forward(self) -> None:
        """Refuses a forward that would give a replicated parameter a gradient. Collective: no."""
        if torch.is_grad_enabled():
            self._check_frozen()

    def _check_frozen(self) -> None:
        names = [name for name, param in self._frozen.items() if param.requires_grad]
        if names:
            raise PlanError(
                f"{listed(names)} was frozen when the model was prepared and is to be trained now "
                "(requires_grad). Each rank has all of it, and no rank averages its gradient with "
                "others, so each would train another value. Freeze it again, or let it require a "
                "gradient before the model is prepared; to unfreeze parameters during training, "
                "take `frozen: replicate` or the name in `ignored_params` out."
            )

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer whose parameters have changed. Collective: no.

        Raises:
            PlanError: for a parameter that was frozen, and one that was not there before; for an
                optimizer that was built later, where ranks divide a layer or its experts.
        """
        self._check_frozen()
        params = _params_of(optimizer)
        param_ids = [id(param) for param in params]
        if self._seen.get(optimizer) == param_ids:
            return
        names = {id(param): f"'{name}'" for name, param in self.run.model.named_parameters()}
        model_params = [param for param in params if id(param) in names]
        is_given = any(optimizer is other for other in self.run.optimizers)
        is_divided = any(group_dividing(param) is not None for param in model_params)
        kinds = (
            {"tensor"}
            if is_divided
            else {form_of(param).parallelism for param in model_params} - {""}
        )
        if not is_given and kinds:
            (kind,) = kinds
            raise PlanError(
                f"{type(optimizer).__name__} was built after the model was prepared with {kind} "
                f"parallelism. Its checkpoints would hold {_LATE[kind]}. Give it to "
                "prepare_fully_shard, or to the Trainer."
            )
        checked = params if is_given else model_params
        added = [
            p for p in checked if _is_plain(p) and p.requires_grad and id(p) not in self._whole
        ]
        if added:
            name = names.get(id(added[0]), f"A parameter of shape {tuple(added[0].shape)}")
            raise PlanError(
                f"{name} was given to "
                f"{type(optimizer).__name__} after the model was prepared. No rank averages its "
                "gradient with others, so each would train another value. Add it to the model and "
                "to the optimizer before prepare_fully_shard, or before the Trainer is made."
            )
        self._seen[optimizer] = param_ids


def _params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_plain(param: object) -> bool:
    return not isinstance(param, DTensor)


# --- Texts of errors. ---


def _unit_text(name: str) -> str:
    return f"unit '{name}'" if name else "the root unit"


def _exchanged(param: _Param) -> str:
    return (
        f"Another tensor was put in the place of '{param.name}' while {_unit_text(param.unit)} "
        "ran, by torch.func.functional_call or an assignment to the module. FSDP2 computes with "
        "the parameters it gathers, so the tensor would be ignored or dropped. Give forward the "
        "tensor as an argument; call the module's function with it (F.linear(x, weight)); or write "
        "it into the parameter between steps with composer_fsdp2.summon_full_params."
    )
