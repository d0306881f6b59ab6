"""Dividing layers between the ranks of a tensor group, in place.

[Note: what adds up] The ranks of a group read the same batch. A layer divided by columns gets the
whole input and gives a part of the output, one divided by rows gets that part and gives a term of
the whole output, which the ranks add up. DTensors do the same to gradients. All else is computed by
every rank of the group alike, from equal inputs: its gradients are equal but for rounding of
kernels that add up in any order, and are averaged over the group so that weights stay the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2.parallel.adapters import home_of
from composer_fsdp2.parallel.cuts import Cut, is_conv1d
from composer_fsdp2.parallel.layers import LayerPlan
from composer_fsdp2.parallel.random_numbers import draw_apart, draws
from composer_fsdp2.parallel.row_order import RowOrder, order_of, part_of, show_usual_order
from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef, canonical_param_ids
from composer_fsdp2.ranks import broadcast_from_rank0, is_fake
from composer_fsdp2.shard.torch_private.tensors import copy_hooks

__all__ = ["divide_layers"]


def divide_layers(tree: ModuleTree, plan: LayerPlan, mesh: DeviceMesh) -> None:
    """Divides the layers of a plan, with rank 0's weights; see [Note: what adds up].

    Collective: yes, over the default group. Ties stay: a tied parameter is divided once. One that
    is on meta on rank 0 stays there, as a part; see [Note: initial weights].

    Args:
        tree: the model. Its references to parameters are those of after.
        plan: of this model.
        mesh: the tensor axis of the run's mesh.
    """
    modules = dict(tree.modules())
    same = canonical_param_ids(tree.params)
    places: dict[int, list[ParamRef]] = {}
    for ref in tree.params:
        places.setdefault(same[id(ref.param)], []).append(ref)
    unknown = _unknown_values(tree)
    done: set[int] = set()
    inputs: dict[str, _WholeInput] = {}
    for name, cut in plan.cuts.items():
        module = modules[name]
        padding = plan.padding.get(name, 0)
        for attribute, param in list(module._parameters.items()):
            if param is None or id(param) in done:
                continue
            placement = _placement(cut, attribute, module)
            order = _order(cut, placement, param, plan.degree, padding)
            refs = places[same[id(param)]]
            on_meta = refs[0].name in unknown
            new = _divided(param, placement, mesh, order, keep_on_meta=on_meta)
            _exchange(tree, refs, new)
            done.add(id(new))
        parent, is_adapter = home_of(name, modules)
        if cut.kind == "columns" and not is_adapter and parent not in inputs:
            inputs[parent] = _WholeInput(modules[parent], mesh)
        _install(module, cut, mesh, padding, None if is_adapter else inputs.get(parent))
    _show_usual_orders(modules, plan)
    _draw_apart(modules, plan, mesh)
    for name, counts in plan.counts.items():
        _divide_counts(modules[name], counts, plan.degree)
    for group in places.values():
        if id(group[0].param) not in done and group[0].param.requires_grad:
            group[0].param.register_post_accumulate_grad_hook(_averaging(mesh.get_group()))


def _show_usual_orders(modules: Mapping[str, nn.Module], plan: LayerPlan) -> None:
    """In every place of a tied parameter."""
    for name in plan.cuts:
        params = modules[name]._parameters.items()
        orders = {key: order for key, param in params if (order := order_of(param)) is not None}
        if orders:
            show_usual_order(modules[name], orders)


def _draw_apart(modules: Mapping[str, nn.Module], plan: LayerPlan, mesh: DeviceMesh) -> None:
    between: dict[str, dict[str, list[nn.Module]]] = {}
    for name, cut in plan.cuts.items():
        if cut.kind in ("columns", "rows") and not cut.gathers:
            home, _ = home_of(name, modules)
            kinds = between.setdefault(home, {"columns": [], "rows": []})
            kinds[cut.kind].append(modules[name])
    for parent, kinds in between.items():
        if draws(modules[parent]):
            draw_apart(modules[parent], kinds["columns"], kinds["rows"], mesh)


def _placement(cut: Cut, attribute: str, module: nn.Module) -> Placement:
    if cut.kind == "norm" or (cut.kind == "rows" and attribute == "bias"):
        return Replicate()
    if cut.kind == "embedding" or attribute == "bias":
        return Shard(0)
    output, inside = (1, 0) if is_conv1d(module) else (0, 1)
    return Shard(output if cut.kind == "columns" else inside)


def _order(
    cut: Cut, placement: Placement, param: nn.Parameter, degree: int, padding: int
) -> RowOrder | None:
    if (len(cut.blocks) < 2 and not padding) or not isinstance(placement, Shard):
        return None
    return RowOrder(cut.blocks or (param.shape[placement.dim],), degree, placement.dim, padding)


def _unknown_values(tree: ModuleTree) -> frozenset[str]:
    """Names of parameters that rank 0 has on meta: they get their values when they are sharded.

    Collective: yes.
    """
    names = [ref.name for ref in tree.params if ref.param.is_meta]
    if not is_fake() and dist.get_world_size() > 1:
        holder = [names]
        dist.broadcast_object_list(holder, src=0)
        (names,) = holder
    return frozenset(names)


@torch.no_grad()
def _divided(
    param: nn.Parameter,
    placement: Placement,
    mesh: DeviceMesh,
    order: RowOrder | None,
    *,
    keep_on_meta: bool,
) -> nn.Parameter:
    """This rank's part of a parameter as rank 0 has it."""
    device = torch.device(mesh.device_type)
    if mesh.device_type != "cpu":
        device = torch.device(
            mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
        )
    pretends = is_fake()
    where = torch.device("meta") if keep_on_meta else param.device if pretends else device
    whole = torch.empty_like(param, device=where) if param.is_meta else param.detach().to(where)
    if not pretends and not keep_on_meta:
        broadcast_from_rank0(whole, device)
    whole = whole if order is None else order.to_ranks(whole)
    part = part_of(whole, mesh, [placement])
    new = nn.Parameter(part, requires_grad=param.requires_grad)
    vars(new).update(vars(param))
    copy_hooks(param, new)
    if order is not None:
        order.note(new)
    return new


def _exchange(tree: ModuleTree, refs: list[ParamRef], new: nn.Parameter) -> None:
    for ref in refs:
        module = tree.paths[ref.path_index].module
        module._parameters[ref.name.rpartition(".")[2]] = new
        ref.param = new


def _divide_counts(module: Any, counts: Mapping[str, int], degree: int) -> None:
    """Changes what a forward splits by. A configuration is shared, so the module gets its own."""
    for path, count in counts.items():
        holder, _, name = path.rpartition(".")
        if holder:
            setattr(module, holder, copy.copy(getattr(module, holder)))
            setattr(getattr(module, holder), name, count // degree)
        else:
            setattr(module, name, count // degree)


# --- What goes in and comes out ---


class _WholeInput:
    """The input of one module's layers that are divided by columns, as one tensor for all of them.

    Its gradients of queries, keys and values are added up on each rank before the ranks add up
    theirs, so that they send one and not three.
    """

    def __init__(self, parent: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._local: torch.Tensor | None = None
        self._whole: DTensor | None = None
        parent.register_forward_hook(self._forget, always_call=True)

    def of(self, local: torch.Tensor) -> DTensor:
        """Returns the same for the same tensor, until the module's forward ends."""
        if self._whole is None or self._local is not local:
            self._local, self._whole = local, _whole(local, self._mesh)
        return self._whole

    def _forget(self, *_: Any) -> None:
        self._local = self._whole = None


def _whole(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def _install(
    module: nn.Module, cut: Cut, mesh: DeviceMesh, padding: int, inputs: _WholeInput | None
) -> None:
    if cut.kind == "embedding":
        _look_up_own_rows(module, mesh, padding)
    enters = {
        "columns": Replicate(),
        "rows": Shard(-1),
        "embedding": None,
        # Which dimension does not matter: a norm treats all but the last one alike.
        "norm": Shard(0),
    }[cut.kind]
    whole = cut.gathers or cut.kind in ("rows", "embedding")
    leaves = Replicate() if whole else Shard(0) if cut.kind == "norm" else Shard(-1)

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if enters is None or not isinstance(args[0], torch.Tensor) or isinstance(args[0], DTensor):
            return args
        first = args[0]
        if cut.kind == "columns" and inputs is not None and not torch.compiler.is_compiling():
            return (inputs.of(first), *args[1:])
        if padding and cut.kind == "rows":
            first = nn.functional.pad(first, (0, padding))
        placement = Shard(first.ndim - 1) if enters == Shard(-1) else enters
        return (DTensor.from_local(first, mesh, [placement], run_check=False), *args[1:])

    def leave(_: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return output
        placement = Shard(output.ndim - 1) if leaves == Shard(-1) else leaves
        if output.placements != (placement,):
            output = output.redistribute(placements=[placement])
        return output.to_local()

    if padding and cut.kind == "columns":
        _cut_off_padding(module, mesh, padding)
    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _cut_off_padding(module: nn.Module, mesh: DeviceMesh, padding: int) -> None:
    """Has a layer return what it would without rows of padding, to whoever calls its forward."""
    usual = module.forward
    if is_conv1d(module):
        module.nf = module.nf + padding * mesh.size()  # pyright: ignore[reportArgumentType, reportOperatorIssue]

    def forward(*args: Any) -> Any:
        output = usual(*args)
        if not isinstance(output, DTensor):
            return output
        part = output.to_local()[..., :-padding].contiguous()
        return DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False)

    module.forward = forward


def _look_up_own_rows(module: nn.Module, mesh: DeviceMesh, padding: int) -> None:
    """Has an embedding look up the words of this rank, which are zero on the other ranks.

    Torch's own for a DTensor takes what is no word for one of another rank, and remembers the
    number of words of the first model of a process, whatever another one has.

    Source: `embedding_dense_backward` is cached without it,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/tensor/_ops/_embedding_ops.py#L237
    """
    usual = module.forward

    def forward(words: torch.Tensor) -> Any:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return usual(words)
        own = weight.to_local()
        rows = len(own) - padding
        local = words - mesh.get_local_rank() * rows
        wrong = (words < 0) | (words >= rows * mesh.size())
        elsewhere = ((local < 0) | (local >= rows)) & ~wrong
        # No row of any rank, so that all of them raise.
        local = local.masked_fill(elsewhere, 0).masked_fill(wrong, len(own))
        found = nn.functional.embedding(local, own)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return DTensor.from_local(found, mesh, [Partial()], run_check=False)

    module.forward = forward


def _averaging(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """A hook that averages a gradient over a group, after FSDP2 has reduced it."""

    def average(param: torch.Tensor) -> None:
        if param.grad is None:
            return
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if grad.numel():
            dist.all_reduce(grad, group=group)
            grad.div_(group.size())

    return average
