"""Hooks that a unit of FSDP2 has from its sharding on: around its forward, and after a reduction.

Everything else that happens in a step is a listener of a run (`step.run`). These are there without
a run too, in a model that only `apply_plan` has sharded: without them backward would be missed, or
inputs and gradients would be other numbers.

[Note: casting inputs] torch casts the inputs of a unit through its registry of containers, which
builds new ones. A key-value cache is such a container: the block would write into a copy, and
generation go wrong without a word. So tensors are cast here, in plain containers only.
Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L223
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.ranks import is_fake
from composer_fsdp2.shard.device_mesh import note_copies
from composer_fsdp2.torch_private.tensors import (
    is_view,
    root_mesh,
    tree_leaves,
    tree_map,
    unsafe_view,
)
from composer_fsdp2.torch_private.units import gather_again, hear_backward, is_root, lazy_init

__all__ = [
    "AverageOverReplicas",
    "Division",
    "InputCast",
    "MakeHook",
    "force_backward_through",
    "hook_after_sharding",
    "hook_before_sharding",
    "leave_division_to_torch",
    "probe_reduction",
]


def hook_before_sharding(module: nn.Module) -> None:
    """Hooks a module that is about to be a unit. Collective: no."""
    # Hooks after a forward run in the order of registration, and FSDP2's own puts its gradient
    # hooks on the tensors that this one returns.
    module.register_forward_hook(_after_forward)


def hook_after_sharding(module: nn.Module, cast: InputCast, full: str | None, frozen: bool) -> None:
    """Hooks a new unit. Collective: no.

    Args:
        module: the unit.
        cast: of its inputs.
        full: type of the device on which autocast must not lower its dtype, if anywhere.
        frozen: whether it trains nothing, and torch was told not to gather it in backward.
    """
    # Before FSDP2's own, which is prepended too.
    module.register_forward_pre_hook(_before_forward, prepend=True)
    if full is not None:
        # No hook: a context that a pre-hook enters would not be left after every error.
        module.forward = torch.autocast(full, enabled=False)(module.forward)
    if cast.dtype is not None or cast.device is not None:
        # Runs after FSDP2's own, which is prepended and moves inputs to the device. Also when a
        # forward is run again in backward, where FSDP2 of torch 2.7 returns before its cast.
        module.register_forward_pre_hook(cast.before_forward, with_kwargs=True)
    if frozen:
        module.register_forward_hook(_gather_once_backward_needs_it)


def _before_forward(module: Any, _args: object) -> None:
    if not torch.compiler.is_compiling() and is_root(module) is None:
        # The first forward may make shards anew, which the optimizer steps.
        with torch.inference_mode(False):
            lazy_init(module)
    gather_again(module)


def _after_forward(module: Any, _args: object, output: object) -> object:
    if torch.is_grad_enabled() and not isinstance(output, torch.Tensor):
        # Older torch does not look for tensors in dataclasses.
        leaves = (leaf for leaf in tree_leaves(output) if not isinstance(leaf, torch.Tensor))
        if hidden := [tensor for leaf in leaves for tensor in _in_fields(leaf)]:
            hear_backward(module, hidden)
    if isinstance(module, nn.Linear) and isinstance(output, torch.Tensor) and is_view(output):
        # Some models scale their logits in place. Nothing else holds the tensor behind the view.
        return unsafe_view(output)
    return _guarded_output(output)


def _guarded_output(output: Any) -> Any:
    """Has torch refuse a change in place of a view that the unit returns.

    Such a change drops the hook by which FSDP2 learns that backward has come:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L318
    What is no plain container stays whole, as inputs do.
    """
    if isinstance(output, torch.Tensor):
        view = torch.is_grad_enabled() and output.requires_grad and is_view(output)
        return _Returned.apply(output) if view else output
    if type(output) is tuple or type(output) is list:
        return type(output)(map(_guarded_output, output))
    if type(output) is dict:
        return {key: _guarded_output(value) for key, value in output.items()}
    return output


def _in_fields(leaf: Any) -> Iterator[torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        yield leaf
    elif dataclasses.is_dataclass(leaf):
        for field in dataclasses.fields(leaf):
            for inside in tree_leaves(getattr(leaf, field.name)):
                yield from _in_fields(inside)


class _Returned(torch.autograd.Function):
    """Returns the same tensor, which torch lets nobody change in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        # Autograd lets nobody change a view in place that was made inside a custom Function.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return grad


def _gather_once_backward_needs_it(module: Any, _args: object, output: object) -> None:
    """Turns the gather in backward on, for good: the module may run again before a backward."""
    if torch.is_grad_enabled() and any(map(_may_need_gradient, tree_leaves(output))):
        module.set_unshard_in_backward(True)


def _may_need_gradient(leaf: object) -> bool:
    """Whether a gradient can come back through it; an unknown object may hold such a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    return not isinstance(leaf, type(None) | bool | int | float | complex | str | bytes)


# --- Inputs. ---


@dataclasses.dataclass(frozen=True, slots=True)
class InputCast:
    """Casts floating point inputs, and moves inputs, if at all; see [Note: casting inputs]."""

    dtype: torch.dtype | None
    device: str | None = None
    """Type of the device that inputs are moved to where shards are in CPU memory: a model that asks
    for the device of its weights (`hidden.to(head.weight.device)`) has moved them there."""

    def __call__(self, value: Any) -> Any:
        """Treats the tensors in a value; other containers than tuple, list and dict stay whole."""
        if self.dtype is None and self.device is None:
            return value
        # Nearly every unit gets these; the tree of torch costs 5 % of a small step.
        if type(value) is dict:
            return {key: self(item) for key, item in value.items()}
        if type(value) is tuple or type(value) is list:
            return type(value)(map(self, value))
        if _is_no_container(value):
            return self._cast(value)
        return tree_map(self._cast, value, is_leaf=_is_no_container)

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # As FSDP2's own cast does: integers and complex numbers stay.
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Casts, as a forward pre-hook with keyword arguments."""
        return self(args), self(kwargs)

    def before_method(self, module: nn.Module, name: str) -> None:
        """Does the same for another method of the module."""
        method = getattr(module, name)

        @functools.wraps(method)
        def casting(*args: Any, **kwargs: Any) -> Any:
            return method(*self(args), **self(kwargs))

        setattr(module, name, casting)


def _is_no_container(value: object) -> bool:
    return not isinstance(value, tuple | list | dict)


# --- Units beside a tower. ---


def force_backward_through(units: Iterable[FSDPModule]) -> None:
    """Makes backward go through units although nothing before them is trained on this rank.

    Where a tower runs on another rank, backward goes through them there to reach it: their weights
    are gathered again, and their gradients are reduced as soon as it has passed.

    Collective: no. Costs the gradient of one input more on a rank without the tower.
    """
    for unit in units:
        assert isinstance(unit, nn.Module)
        # Before torch's own hook, which looks for inputs that need a gradient.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
        unit.register_forward_pre_hook(_need_gradient, prepend=True, with_kwargs=True)


@torch.compiler.disable
def _need_gradient(
    _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    inputs: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    floating = [key for key, value in inputs.items() if _is_floating(value)]
    leaves = tree_leaves(inputs) if floating and torch.is_grad_enabled() else []
    if not leaves or any(_is_floating(leaf) and leaf.requires_grad for leaf in leaves):
        return None
    anchor = torch.zeros((), requires_grad=True)
    inputs[floating[0]] = _Anchored.apply(inputs[floating[0]], anchor)
    return tuple(inputs[place] for place in range(len(args))), {key: inputs[key] for key in kwargs}


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


class _Anchored(torch.autograd.Function):
    """Makes a copy that needs a gradient, and drops the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        # Of a view, or of the input as it is, autograd would refuse changes in place later.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # pyright: ignore
        return None, None


# --- Reductions. ---


class Division:
    """Makes a sum over the shards an average, in place.

    Args:
        size: ranks over which the backend takes a sum where FSDP2 asks for an average.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is.
    """

    def __init__(self, size: int, sources: int = 1) -> None:
        self.size, self._sources = size, sources

    def __call__(self, reduced: torch.Tensor) -> None:
        """Divides. Collective: no."""
        _use_in_this_stream(reduced)
        if self._sources > 1:
            # Not torch's own factor, which divides twice where one rank has all of a gradient:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
            reduced.div_(self._sources)
        # FSDP2 asks for an average of these two only; others it sums and divides itself.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L554
        if self.size > 1 and reduced.dtype in (torch.float32, torch.bfloat16):
            reduced.div_(self.size)


def _use_in_this_stream(reduced: torch.Tensor) -> None:
    """Keeps a reduced gradient until the stream of its hook is done with it.

    The memory is of the stream that reduces. Torch adds it to gradients of earlier microbatches on
    this stream, and frees it; the next reduction could write there before the sum has read it.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.get_device_module(reduced.device).current_stream())


def leave_division_to_torch(hook: object) -> None:
    """Has a unit's hook divide no more, because FSDP2 sums and divides itself. Collective: no.

    Args:
        hook: what `set_all_reduce_hook` was given, perhaps nothing. Averages over copies of the
            model go on: FSDP2 knows the shards of one copy alone there.
    """
    before = hook.before if isinstance(hook, AverageOverReplicas) else hook
    if isinstance(before, Division):
        before.size = 1


class AverageOverReplicas:
    """Averages the reduced gradients of one unit over the copies of the model, in place.

    Args:
        group: one rank of every copy.
        before: done first, to what the shards' reduction gave.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: Callable[[torch.Tensor], None] | None
    ) -> None:
        self._group = group
        self.before = before
        self.due = True
        """false keeps gradients on this rank until a call with true, as torch's own HSDP does"""
        self.waiting: torch.Tensor | None = None

    def __call__(self, reduced: torch.Tensor) -> None:
        """Collective: yes, when it is due."""
        _use_in_this_stream(reduced)
        if self.before is not None:
            self.before(reduced)
        if self.waiting is not None:
            reduced += self.waiting
        if not self.due:
            self.waiting = reduced.clone()
            # FSDP adds the result of this hook to the gradients of the shards.
            # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L449
            reduced.zero_()
            return
        self.waiting = None
        # A sum, which every backend has: some of those that come here refuse an average.
        dist.all_reduce(reduced, group=self._group)
        reduced.div_(self._group.size())


# --- Finds out how gradients are averaged where a backend does not do it. ---
#
# [Note: averaging] FSDP2 asks the backend for the average of gradients. Some backends return the
# sum without a word, others refuse. Both are found by doing one small reduction; what is wrong is
# put right in `set_all_reduce_hook`, which sees every reduced gradient. NCCL averages.


MakeHook = Callable[[], Callable[[torch.Tensor], None] | None]
"""makes what a unit gives to `set_all_reduce_hook`; `None` where the backend needs no help"""


def probe_reduction(mesh: DeviceMesh, sources: int = 1) -> tuple[DeviceMesh, MakeHook]:
    """Finds out how gradients can be averaged on a 1-D or (replicate, shard) mesh.

    Collective: yes, over every group of the mesh.

    A 2-D mesh whose backend cannot run torch's own HSDP is sharded on its shard axis, and the hook
    averages over the replicate axis: the same arithmetic, with parameters that are DTensors on the
    shard axis alone.

    Args:
        mesh: of the ranks between which gradients are reduced.
        sources: ranks whose tokens a gradient on one rank is of, as that of an expert is. It is an
            average over them too.

    Returns:
        The mesh to give to `fully_shard`, and what makes a hook for each unit.
    """
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    sums = not _averages_reduce_scatter(shard_group, mesh.device_type)
    size = shard_group.size() if sums else 1
    divide = Division(size, sources) if sums or sources > 1 else None
    if replicate_group is None or _runs_hsdp(replicate_group, mesh.device_type):
        return mesh, lambda: divide
    # Torch 2.7 cuts axes out of a whole mesh alone.
    shard_mesh = root_mesh(mesh)[mesh.mesh_dim_names[1]]  # pyright: ignore[reportOptionalSubscript]
    note_copies(shard_mesh, mesh)
    return shard_mesh, lambda: AverageOverReplicas(replicate_group, divide)


def _averages_reduce_scatter(group: dist.ProcessGroup, device_type: str) -> bool:
    if is_fake(group) or group.size() == 1:
        return True
    # On the mesh's device: in a group with several backends the tensor's device chooses one.
    output = torch.zeros(1, device=device_type)
    values = torch.full((group.size(),), float(group.rank()), device=device_type)
    # Newer torch renamed it and warns about the old name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, values, op=dist.ReduceOp.AVG, group=group)
    return _is_average(output.item(), group.size())


def _is_average(found: float, ranks: int) -> bool:
    """Whether ranks that sent their numbers got the average; their sum is at least twice as much.

    Each rank answers for itself, and many ranks round in another order on each of them.
    """
    return math.isclose(found, (ranks - 1) / 2, rel_tol=0.1)


def _runs_hsdp(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether torch's own HSDP works: it wants an average, and an event from the stream.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L461
    """
    # CPU streams of older torch give no event, over which its backward stops with an assertion.
    if device_type == "cpu" and torch.cpu.current_stream().record_event() is None:
        return False
    if is_fake(group):
        return True
    value = torch.full((1,), float(group.rank()), device=device_type)
    try:
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):
        return False  # the arguments are refused on every rank, before anything is sent
    return _is_average(value.item(), group.size())
