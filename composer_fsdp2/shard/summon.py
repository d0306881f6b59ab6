"""Gathers a parameter as one process has it, or all of them for the length of a block.

[Note: summoning] The unsharded parameters FSDP2 computes with are in the compute dtype, and are
gone when their unit reshards. So the shards are gathered as they are, and the full tensors take
their slots in the modules. A forward inside the block belongs to FSDP2: while it runs, the shards
are back in their slots, with the values of the full tensors, and are gathered as always.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.parallel.form import as_in_model, form_of
from composer_fsdp2.plan.module_tree import own_parameters
from composer_fsdp2.shard.layout import Slot
from composer_fsdp2.shard.units import is_sharded
from composer_fsdp2.text import listed
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.tensors import local_part, without_fsdp_hooks_after_load
from composer_fsdp2.torch_private.units import (
    CHANGES_PARAMETERS,
    is_busy,
    is_inside_unit,
    is_root,
)

__all__ = ["full_tensor", "holds_shards", "is_shown", "is_summoned", "summon_full_params"]


@torch.no_grad()
def full_tensor(model: nn.Module, name: str, *, gradient: bool = False) -> torch.Tensor | None:
    """Returns a parameter as one process has it: all rows, in the order of the model.

    A DTensor's own `full_tensor()` has rows in the order of the ranks, and rows of padding, where
    tensor parallelism divides a layer. Collective: yes, over the ranks that share the parameter;
    between steps, on every rank.

    Args:
        model: prepared with `prepare_fully_shard`, or not.
        name: FQN of the parameter in the model before preparing.
        gradient: returns the parameter's gradient instead; `None` where it has none.

    Returns:
        A tensor of the shape that the parameter had before it was sharded. It may share memory
        with the parameter where nothing is sharded.

    Raises:
        PlanError: for a name that is no parameter.

    Example:
        >>> import torch
        >>> from composer_fsdp2 import full_tensor, prepare_fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
        >>> _ = prepare_fully_shard(model, None, {}, device="cpu")
        >>> full_tensor(model, "0.weight").shape
        torch.Size([8, 4])
    """
    owner = model
    try:
        for part in ("", *name.split(".")[:-1]):
            owner = owner.get_submodule(part)
            # A unit that stayed gathered shows a copy in the compute dtype, from before the step.
            if isinstance(owner, FSDPModule):
                owner.reshard()
        param = model.get_parameter(name)
    except AttributeError as error:
        names = [other for other, _ in model.named_parameters(remove_duplicate=False)]
        raise PlanError(
            f"'{name}' is no parameter of the model. Ranks would wait for each other without a "
            f"tensor to gather.{nearest(name, names)} Write a name of model.named_parameters()."
        ) from error
    return form_of(param).full(param.grad if gradient else param.detach())


def holds_shards(module: nn.Module) -> bool:
    """Says whether FSDP2 or another DTensor holds parameters of the module. Collective: no."""
    return is_sharded(module) or any(isinstance(param, DTensor) for param in module.parameters())


def is_shown(param: object) -> bool:
    """Says whether a block around this call shows the parameter, or the full tensor of a shard."""
    return _block_of(param) is not None


def _block_of(param: object) -> _Summoned | None:
    return next((block for block in _BLOCKS if id(param) in block.ids), None)


def is_summoned(module: nn.Module) -> bool:
    """Says whether blocks around this call show all sharded parameters. Collective: no."""
    params = [param for param in module.parameters() if _sharded_or_summoned(param)]
    return bool(params) and all(map(is_shown, params))


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Generator[None, None, None]:
    """Replaces shards by full parameters while a block runs, as FSDP1's method does.

    Collective: yes, all ranks enter and leave together. Any time but inside a forward or backward;
    a module without FSDP2 is left as it is. The values are those the optimizer steps, in their own
    dtype, and stand under every name of a tied parameter. Parameters FSDP2 was told to ignore are
    full anyway.

    With tensor parallelism full parameters are those of one process, in the order of the model. The
    model and its units can be called then as well, but not a divided layer by itself.

    Writes, the same on every rank, are kept when the block ends. They are lost when it ends with an
    exception. Forward works inside, without backward: it computes with the written values (under
    `rank0_only` with those of the shards), and every rank has to call it. A block inside another
    shows the same tensors; without `writeback` its own writes are undone.

    Args:
        module: the model, a unit, or a module around units.
        recurse: shows parameters of units inside the module's own as well.
        writeback: false discards what was written.
        rank0_only: the other ranks keep their shards, and hold one full parameter at a time.
        offload_to_cpu: puts full parameters on the CPU.
        with_grads: shows full gradients too, in `param.grad`; they are written back as well.

    Raises:
        ConfigError: for `rank0_only` with `writeback`, `offload_to_cpu` with `with_grads`, and a
            block that asks for more than the one around it shows.
        PlanError: inside a forward or backward; for a module inside a unit; and at the end, when a
            full parameter was replaced in its module, or the shards stepped, inside the block.

    Yields:
        Nothing: the parameters of the module are full, in the shapes of the unsharded model.

    Source: signature and meaning are those of `FullyShardedDataParallel.summon_full_params`,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/fully_sharded_data_parallel.py

    Example:
        >>> import torch
        >>> from composer_fsdp2 import prepare_fully_shard, summon_full_params
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = prepare_fully_shard(model, None, {}, device="cpu")
        >>> with summon_full_params(model):
        ...     _ = model.weight.data.fill_(1.0)
        >>> model.weight.full_tensor().sum().item()
        8.0
    """
    check_private_members(["summon_full_params"])
    if rank0_only and writeback:
        raise ConfigError(
            "rank0_only and writeback were both asked for. The other ranks hold shards only, and "
            "would not see what rank 0 writes. Add writeback=False to read on rank 0, or leave "
            "rank0_only out to write on every rank."
        )
    if offload_to_cpu and with_grads:
        raise ConfigError(
            "offload_to_cpu and with_grads were both asked for. A gradient has to be where its "
            "parameter is. Leave one of them out."
        )
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu without rank0_only puts a full copy of the model into CPU memory for "
            "every rank of a node. Add rank0_only=True, writeback=False if rank 0 is enough.",
            stacklevel=3,
        )
    inside = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    units: list[FSDPModule] = [unit for _, unit in inside]
    if busy := [name for name, unit in inside if is_busy(unit)]:
        raise PlanError(
            f"'{busy[0]}' is inside a forward or backward, or one was aborted. Its parameters are "
            "on their way between shards and whole. Summon full parameters between steps."
        )
    for unit in units:
        # A unit that does not reshard after forward still has unsharded parameters in its modules.
        unit.reshard()
    _check_owners(module, units)
    if not recurse:
        units = [module] if isinstance(module, FSDPModule) else []
    summoned = _Summoned(units, rank0_only, with_grads)
    summoned.gather(_sharded_parameters(module, recurse), offload_to_cpu)
    keep = False
    try:
        summoned.enter()
        yield
        keep = writeback
    finally:
        summoned.leave(keep)


def _check_owners(module: nn.Module, units: list[FSDPModule]) -> None:
    """Refuses parameters of units outside the module, which may be gathered at the moment."""
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        return
    suspects = [] if isinstance(module, FSDPModule) else [*_region(module)]
    roots = [is_root(unit) for unit in units]
    if False in roots and True not in roots:
        # A weight shared by several units belongs to one around them.
        suspects += [
            (name, inner)
            for name, inner in module.named_modules()
            if not all(map(_sharded_or_summoned, own_parameters(inner)))
        ]
    for name, inner in suspects:
        if is_inside_unit(inner) and not all(map(is_shown, own_parameters(inner))):
            raise PlanError(
                f"Parameters of '{name}', a {type(inner).__name__}, belong to a unit around the "
                "module that was given. Only that unit knows where they are now. Give the whole "
                "model, or the unit."
            )


def _region(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module and modules inside it that are in no nested unit."""
    waiting, seen = [("", module)], {id(module)}
    while waiting:
        prefix, inner = waiting.pop()
        yield prefix, inner
        for name, child in inner.named_children():
            if id(child) not in seen and not isinstance(child, FSDPModule):
                seen.add(id(child))
                waiting.append((f"{prefix}.{name}".lstrip("."), child))


def _sharded_parameters(module: nn.Module, recurse: bool) -> list[_FullParameter]:
    """Returns the sharded parameters to summon, each with all its slots."""
    region = module.named_modules() if recurse else _region(module)
    module_ids = {id(inner) for _, inner in region}
    parameters: dict[int, _FullParameter] = {}
    for prefix, inner in module.named_modules():
        for name, param in inner._parameters.items():
            if param is not None and _sharded_or_summoned(param):
                fqn = f"{prefix}.{name}".lstrip(".")
                parameter = parameters.setdefault(id(param), _FullParameter(fqn, param))
                parameter.slots.append((inner, name))
    return [p for p in parameters.values() if any(id(owner) in module_ids for owner, _ in p.slots)]


def _sharded_or_summoned(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) or is_shown(param)


@dataclass(slots=True, eq=False)
class _FullParameter:
    """Holds a sharded parameter, and its full tensor on the ranks that see it."""

    name: str
    shard: nn.Parameter
    slots: list[Slot] = field(default_factory=list[Slot])
    full: nn.Parameter | None = None
    version: int = 0
    """of the shard, by which a step of the optimizer inside the block is seen"""
    before_forward: torch.Tensor | None = None
    """values of the shard, once a forward inside the block has needed the written ones"""

    def show(self) -> None:
        for module, name in self.slots:
            # After a forward that failed, FSDP2 may have left another parameter there.
            if self.full is not None and module._parameters[name] is self.shard:
                module._parameters[name] = self.full

    def hide(self, *, everything: bool = False) -> None:
        for module, name in self.slots:
            if everything or module._parameters[name] is self.full:
                module._parameters[name] = self.shard

    def is_ours(self) -> bool:
        """Says whether nothing but the full tensor was written to."""
        full = self.full
        return (
            full is not None
            and full.shape == form_of(self.shard).model_shape(self.shard.shape)
            and all(module._parameters[name] is full for module, name in self.slots)
            and self.shard._version == self.version
        )

    @torch.no_grad()
    def lend(self) -> None:
        """Gives the shard the values of the full tensor while a forward runs."""
        # In place: FSDP2 gathers padded memory of its own, of which the local tensor is a view.
        local, part = local_part(self.shard), local_part(self._sharded(self.full))
        if not torch.equal(local, part):
            self.before_forward = (
                local.clone() if self.before_forward is None else self.before_forward
            )
            local.copy_(part)

    @torch.no_grad()
    def restore(self) -> None:
        if self.before_forward is not None:
            local_part(self.shard).copy_(self.before_forward)

    @torch.no_grad()
    def write(self, with_grads: bool) -> None:
        """Copies this rank's part of the full tensor to the shard. Collective: no."""
        assert self.full is not None
        local_part(self.shard).copy_(local_part(self._sharded(self.full)))
        if with_grads and not form_of(self.shard).is_remote:
            grad = self.full.grad
            self.shard.grad = None if grad is None else self._sharded(grad)

    def _sharded(self, full: torch.Tensor | None) -> torch.Tensor:
        assert full is not None
        return form_of(self.shard).shard(full, self.shard)


@dataclass(slots=True, eq=False)
class _Summoned:
    """Shows the full parameters of one block, which make way for FSDP2 meanwhile."""

    units: list[FSDPModule]
    rank0_only: bool
    with_grads: bool
    parameters: list[_FullParameter] = field(default_factory=list[_FullParameter])
    borrowed: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=list[Any]
    )
    """tensors that a block around this one shows, with values and gradients from its start"""
    ids: set[int] = field(default_factory=set[int])
    """of the shards and of the full tensors in their slots"""
    forwards: int = 0
    """forwards that are running, each inside another"""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @torch.no_grad()
    def gather(self, parameters: list[_FullParameter], offload_to_cpu: bool) -> None:
        """Gathers the parameters that no block around this one shows. Collective: yes."""
        for parameter in parameters:
            if (outer := _block_of(parameter.shard)) is None:
                continue
            wider = {
                "rank0_only=False": outer.rank0_only and not self.rank0_only,
                "with_grads=True": self.with_grads and not outer.with_grads,
            }
            if more := [option for option, asks in wider.items() if asks]:
                raise ConfigError(
                    f"'{parameter.name}' is summoned already, and this block asks for "
                    f"{' and '.join(more)}, which the one around it does not show. Both would show "
                    "the same tensor. Ask for it in the block around this one."
                )
        shows = not self.rank0_only or dist.get_rank() == 0
        for parameter in parameters:
            param = parameter.shard
            if _block_of(param) is None:
                values = _gathered(param, param, offload_to_cpu)
                assert values is not None
                full = nn.Parameter(values, requires_grad=param.requires_grad)
                vars(full).update(as_in_model(vars(param)))
                if self.with_grads:
                    full.grad = _gathered(param.grad, param, offload_to_cpu)
                parameter.full, parameter.version = full if shows else None, param._version
                self.parameters.append(parameter)
            elif not isinstance(param, DTensor):
                grad = param.grad.clone() if self.with_grads and param.grad is not None else None
                self.borrowed.append((param, param.detach().clone(), grad))

    def enter(self) -> None:
        _BLOCKS.append(self)
        self.undo.callback(_BLOCKS.remove, self)
        for parameter in self.parameters:
            # The full tensors of a block live as long as it does, and so do their addresses.
            self.ids |= {id(parameter.shard), id(parameter.full)} - {id(None)}
            parameter.show()
        # Puts shards into their slots for a forward, and for methods registered like a forward.
        for unit in self.units if self.parameters else []:
            assert isinstance(unit, nn.Module)
            # Prepended later than FSDP2's own, so it runs before that one gathers. Torch calls no
            # hooks after a forward that raised, except those with `always_call`.
            before = unit.register_forward_pre_hook(self._before_forward, prepend=True)
            after = unit.register_forward_hook(self._after_forward, always_call=True)
            for hook in (before, after):
                self.undo.callback(hook.remove)
            for name, value in list(vars(unit).items()):
                # `register_fsdp_forward_method` puts a bound method into the instance.
                if isinstance(value, types.MethodType) and value.__self__ is unit:
                    self._set(unit, name, self._forward()(value))
            for name in CHANGES_PARAMETERS:
                self._set(unit, name, _refuse)
        for owner in dict.fromkeys(m for parameter in self.parameters for m, _ in parameter.slots):
            # After `load_state_dict` FSDP2 takes the parameters of a module for shards, and would
            # fail over a full tensor.
            self.undo.enter_context(without_fsdp_hooks_after_load(owner))

    def _set(self, unit: FSDPModule, name: str, value: Callable[..., Any]) -> None:
        attributes = vars(unit)
        restore = functools.partial(attributes.__setitem__, name, attributes.get(name))
        self.undo.callback(
            restore if name in attributes else functools.partial(attributes.pop, name)
        )
        attributes[name] = value

    @contextlib.contextmanager
    def _forward(self) -> Generator[None]:
        self._before_forward()
        try:
            yield
        finally:
            self._after_forward()

    def _before_forward(self, *_: Any) -> None:
        if self.forwards == 0:
            for parameter in self.parameters:
                if not self.rank0_only:
                    parameter.lend()
                parameter.hide()
        self.forwards += 1

    def _after_forward(self, *_: Any) -> None:
        self.forwards -= 1
        if self.forwards == 0:
            for unit in self.units:
                unit.reshard()
            for parameter in self.parameters:
                parameter.show()

    def leave(self, keep: bool) -> None:
        changed = [
            parameter.name for parameter in self.parameters if keep and not parameter.is_ours()
        ]
        keep = keep and not changed
        # A forward that failed leaves units gathered, and FSDP2 believing so: only the hook after
        # forward frees them. https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L237
        idle = not any(map(is_busy, self.units))
        with self.undo:
            for unit in self.units:
                unit.reshard()
            for parameter in self.parameters:
                parameter.hide(everything=idle)
                if keep:
                    parameter.write(self.with_grads)
                else:
                    parameter.restore()
            for full, values, grad in [] if keep else self.borrowed:
                full.data = values
                full.grad = grad if self.with_grads else full.grad
        if changed:
            raise PlanError(
                f"{listed(changed)}: the full parameter was not in its place when the block "
                "ended, had another shape, or its shards had changed. It is not clear which values "
                "are meant, so none were written. Write into the full parameters (`param.copy_`, "
                "`param.data = ...`), and keep backward, the optimizer's step and assignments to "
                "modules out of the block."
            )


_BLOCKS: list[_Summoned] = []
"""blocks that are running, inner ones last"""


def _gathered(tensor: torch.Tensor | None, shard: Any, on_cpu: bool) -> torch.Tensor | None:
    """Returns the full tensor of a shard or its gradient, in memory of its own.

    Collective: yes.
    """
    full = form_of(shard).full(None if tensor is None else tensor.detach())
    if full is None:
        return None
    storage = local_part(shard if tensor is None else tensor).untyped_storage()
    if full.untyped_storage().data_ptr() == storage.data_ptr():
        full = full.clone()  # with one shard there is nothing to gather
    return full.to("cpu" if on_cpu else shard.device_mesh.device_type)


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise PlanError(
        "The module was to be converted, moved (`half`, `to`) or gathered (`unshard`) while its "
        "full parameters are summoned. FSDP2 would take them for its shards. Convert copies "
        "(`{name: value.half() for name, value in model.state_dict().items()}`), or do it before "
        "the block."
    )
