"""Divides layers between the ranks of a tensor group, in place.

[Note: sums over a group] The ranks of a group read the same batch. A layer divided by columns gets
the full input and gives a part of the output. A layer divided by rows gets that part and gives a
term of the full output, which the ranks add up. DTensors do the same to gradients. Every rank of
the group computes all other modules alike, from equal inputs: their gradients are equal but for
rounding of kernels that add up in any order, and are averaged over the group so that weights stay
the same.

[Note: two streams] Between layers divided by columns and the layer divided by rows that follows
them, a rank has its own heads or its own part of an MLP, and dropout must draw its own numbers for
them. Everywhere else the ranks compute the same; see [Note: one stream]. So the generator is given
a seed of the rank there, made of its state, and goes back to where it was. Activation checkpointing
restores the state from before a block, and with it the seed.
"""

from __future__ import annotations

import copy
import functools
import numbers
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composer_fsdp2.parallel.form import ExpertForm, FusedRowsForm, form_of, part_of, set_form
from composer_fsdp2.parallel.state_dicts import show_model_order
from composer_fsdp2.parallel.tensor.known import Cut, block_with, is_conv1d
from composer_fsdp2.parallel.tensor.layers import LayerPlan
from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef
from composer_fsdp2.ranks import broadcast_from_rank0, is_fake, of_rank0
from composer_fsdp2.torch_private.tensors import copy_hooks

__all__ = ["divide_layers", "draws"]


def divide_layers(tree: ModuleTree, plan: LayerPlan, mesh: DeviceMesh) -> None:
    """Divides the layers of a plan, with rank 0's weights; see [Note: sums over a group].

    Collective: yes, over the default group. Ties stay: a tied parameter is divided once. A
    parameter that is on meta on rank 0 stays there, as a part; see [Note: initial weights].

    Args:
        tree: the model. Its references are to the new parameters afterwards.
        plan: layers and their cuts, from `plan_layers`.
        mesh: the tensor axis of the run's mesh.
    """
    modules = dict(tree.modules())
    weight_ids = tree.weight_of
    refs_of: dict[int, list[ParamRef]] = {}
    for ref in tree.params:
        refs_of.setdefault(weight_ids[id(ref.param)], []).append(ref)
    # Parameters of rank 0 on meta get values when they are sharded.
    on_meta = of_rank0([ref.name for ref in tree.params if ref.param.is_meta])
    done: set[int] = set()
    blocks: dict[str, _DividedBlock] = {}
    for name, cut in plan.cuts.items():
        module, padding = modules[name], plan.padding.get(name, 0)
        for attribute, param in list(module._parameters.items()):
            if param is None or id(param) in done:
                continue
            refs = refs_of[weight_ids[id(param)]]
            dim, stays = cut.dim_of(attribute, module), refs[0].name in on_meta
            new = _divided(param, dim, cut.blocks, padding, mesh, keep_on_meta=stays)
            for ref in refs:
                owner = tree.paths[ref.path_index].module
                owner._parameters[ref.name.rpartition(".")[2]] = ref.param = new
            done.add(id(new))
        show_model_order(module)  # of every module that has a tied parameter
        parent, is_adapter = block_with(name, modules)
        block = None
        if cut.kind in ("columns", "rows") and not is_adapter:
            block = blocks[parent] = blocks.get(parent) or _DividedBlock(modules[parent], mesh)
            block.draw_apart(module, cut)
        _install(module, cut, mesh, padding, block)
    for name, counts in plan.counts.items():
        _divide_counts(modules[name], counts, plan.degree)
    average = functools.partial(_average, mesh.get_group())
    for first, *_ in refs_of.values():
        is_expert = isinstance(form_of(first.param), ExpertForm)
        same_on_all = id(first.param) not in done and not is_expert
        if same_on_all and first.param.requires_grad:
            first.param.register_post_accumulate_grad_hook(average)


@torch.no_grad()
def _divided(
    param: nn.Parameter,
    dim: int | None,
    blocks: tuple[int, ...],
    padding: int,
    mesh: DeviceMesh,
    *,
    keep_on_meta: bool,
) -> nn.Parameter:
    """Returns this rank's part of a parameter, with rank 0's values. Collective: yes."""
    device = torch.empty(0, device=mesh.device_type).device  # with its index
    no_values = is_fake()
    where = torch.device("meta") if keep_on_meta else param.device if no_values else device
    full = torch.empty_like(param, device=where) if param.is_meta else param.detach().to(where)
    if not no_values and not keep_on_meta:
        # Each rank cuts its part out of rank 0's full weight, one weight at a time.
        broadcast_from_rank0(full, device)
    form = None
    # Parts that follow each other in the model do so on the ranks.
    if dim is not None and (len(blocks) > 1 or padding):
        form = FusedRowsForm(blocks or (full.shape[dim],), mesh.size(), dim, padding)
        full = form.to_ranks(full)
    part = part_of(full, mesh, [Replicate() if dim is None else Shard(dim)])
    new = nn.Parameter(part, requires_grad=param.requires_grad)
    # Users mark parameters (`_no_weight_decay`) and hang hooks on them before they are divided.
    vars(new).update(vars(param))
    copy_hooks(param, new)
    if form is not None:
        set_form(new, form)
    return new


def _divide_counts(module: Any, counts: Mapping[str, int], degree: int) -> None:
    """Changes numbers that a forward splits by, those of a shared configuration in a copy."""
    for path, count in counts.items():
        holder, _, name = path.rpartition(".")
        changed = copy.copy(getattr(module, holder)) if holder else module
        setattr(changed, name, count // degree)
        if holder:
            setattr(module, holder, changed)


def _average(group: dist.ProcessGroup, param: torch.Tensor) -> None:
    """Averages a gradient over a group, after FSDP2 has reduced it. Collective: yes."""
    # FSDP2 sets gradients by itself and calls such hooks then, in the same order on all ranks:
    # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L499
    if param.grad is None:
        return
    grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
    if grad.numel():
        dist.all_reduce(grad, group=group)
        grad.div_(group.size())


# --- Inside of an attention or MLP ---


class _DividedBlock:
    """An attention or MLP with divided layers: its input, and its random numbers.

    The input is one tensor for all layers that are divided by columns: each rank adds up the
    gradients of queries, keys and values before the ranks add up their sums, so that they send one
    tensor and not three.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module, self._mesh, self._draws = module, mesh, draws(module)
        self._local: torch.Tensor | None = None
        self._replicated: DTensor | None = None
        self._before: torch.Tensor | None = None
        # After an error too: recomputation ends with one once it has all that it needs.
        module.register_forward_hook(self._leave, always_call=True)

    def replicated(self, local: torch.Tensor) -> DTensor:
        """Returns an input as a DTensor: the same object until the module's forward ends."""
        if self._replicated is None or self._local is not local:
            self._local = local
            self._replicated = DTensor.from_local(local, self._mesh, [Replicate()], run_check=False)
        return self._replicated

    def draw_apart(self, layer: nn.Module, cut: Cut) -> None:
        """Has a rank draw its own numbers from one layer to the next; see [Note: two streams]."""
        if self._draws and cut.kind == "rows":
            layer.register_forward_pre_hook(self._end)
        elif self._draws and not cut.gathers:
            layer.register_forward_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        """Seeds the generator with a number that all ranks draw alike, plus the rank's."""
        if self._before is not None or not self._module.training:
            return
        generator = self._generator()
        if self._mesh.device_type == "cpu":
            seed = int(torch.randint(2**62, (), generator=generator))
        else:
            # A number from the device would have to be waited for. An offset is a multiple of 4.
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            seed = generator.initial_seed() + offset * _ODD
        self._before = generator.get_state()
        generator.manual_seed((seed + (self._mesh.get_local_rank() + 1) * _ODD) % 2**63)

    def _end(self, *_: Any) -> None:
        """Goes back to where the generator was."""
        if self._before is not None:
            self._generator().set_state(self._before)
            self._before = None

    def _leave(self, *_: Any) -> None:
        self._local = self._replicated = None  # they would be in memory until the next forward
        self._end()

    def _generator(self) -> torch.Generator:
        if self._mesh.device_type == "cpu":
            return torch.default_generator
        module: Any = torch.get_device_module(self._mesh.device_type)
        return module.default_generators[module.current_device()]


_ODD = 0x9E3779B97F4A7C15
"""spreads seeds that lie next to each other"""


def draws(module: nn.Module) -> bool:
    """Says whether a module has dropout, as a module or as a number."""
    for part in module.modules():
        values = {"dropout": part.p} if isinstance(part, nn.Dropout) else vars(part)
        for name, value in values.items():
            if "drop" in name and isinstance(value, numbers.Real) and 0 < float(value) <= 1:
                return True
    return False


# --- Inputs and outputs ---


def _install(
    module: nn.Module, cut: Cut, mesh: DeviceMesh, padding: int, block: _DividedBlock | None
) -> None:
    """Has a layer take and give plain tensors, with DTensors inside."""
    by_columns, by_rows, norm = (cut.kind == kind for kind in ("columns", "rows", "norm"))
    gives_full = cut.gathers or by_rows or cut.kind == "embedding"

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = args
        if not isinstance(first, torch.Tensor) or isinstance(first, DTensor):
            return args
        # A graph would take the state of `block` for a constant, or break at it.
        if by_columns and block is not None and not torch.compiler.is_compiling():
            return (block.replicated(first), *others)
        if padding and by_rows:
            first = nn.functional.pad(first, (0, padding))
        # Which dimension does not matter to a norm: it treats all but the last one alike.
        placement = Replicate() if by_columns else Shard(0 if norm else first.ndim - 1)
        return (DTensor.from_local(first, mesh, [placement], run_check=False), *others)

    def leave(_: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return output
        placement = Replicate() if gives_full else Shard(0 if norm else output.ndim - 1)
        # Adds up or exchanges, in forward and the other way round in backward.
        if output.placements != (placement,):
            output = output.redistribute(placements=[placement])
        return output.to_local()

    if cut.kind == "embedding":
        _look_up_own_rows(module, mesh, padding)
    else:
        module.register_forward_pre_hook(enter)
    if padding and by_columns:
        _cut_off_padding(module, mesh, padding)
    module.register_forward_hook(leave)


def _cut_off_padding(module: nn.Module, mesh: DeviceMesh, padding: int) -> None:
    """Has a layer return its output without the rows of padding, also from `forward` itself."""
    original = module.forward
    if is_conv1d(module):
        # Its forward shapes the output by this number:
        # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/pytorch_utils.py#L117
        module.nf = module.nf + padding * mesh.size()  # pyright: ignore[reportArgumentType, reportOperatorIssue]

    def forward(*args: Any) -> Any:
        output = original(*args)
        if not isinstance(output, DTensor):
            return output
        part = output.to_local()[..., :-padding].contiguous()
        return DTensor.from_local(part, mesh, [Shard(part.ndim - 1)], run_check=False)

    module.forward = forward


def _look_up_own_rows(module: nn.Module, mesh: DeviceMesh, padding: int) -> None:
    """Has an embedding look up the words of this rank, which are zero on the other ranks.

    Torch's own lookup for a DTensor takes a number that is no word for a word of another rank, and
    uses the number of words of the first model of a process for all models.

    Source: `embedding_dense_backward` is cached without it,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/tensor/_ops/_embedding_ops.py#L237
    """
    original = module.forward

    def forward(words: torch.Tensor) -> Any:
        weight = module._parameters["weight"]
        if not isinstance(weight, DTensor):
            return original(words)
        rows_of_rank = weight.to_local()
        rows = len(rows_of_rank) - padding
        local = words - mesh.get_local_rank() * rows
        wrong = (words < 0) | (words >= rows * mesh.size())
        is_remote = ((local < 0) | (local >= rows)) & ~wrong
        # No row of any rank, so that all of them raise.
        local = local.masked_fill(is_remote, 0).masked_fill(wrong, len(rows_of_rank))
        embedded = nn.functional.embedding(local, rows_of_rank)
        embedded = embedded.masked_fill(is_remote.unsqueeze(-1), 0)
        return DTensor.from_local(embedded, mesh, [Partial()], run_check=False)

    module.forward = forward
