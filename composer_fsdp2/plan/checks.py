"""Refuses what cannot be trained in shards: it would be silently wrong, or torch's own error.

[Note: left whole] A frozen parameter that cannot be sharded (a scalar, one without elements, of
integers) needs none of what sharding does for it: it has no gradient and never changes. It is left
alone, whole on every rank. A trained one is refused.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.held_tensors import held_tensors
from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef, is_packed, memory_of
from composer_fsdp2.plan.shard_dims import gathers_itself
from composer_fsdp2.plan.unit_size import FROZEN_MAY_DIFFER
from composer_fsdp2.plan.wrap_plan import ShardUnit
from composer_fsdp2.text import child_name, listed, quoted
from composer_fsdp2.torch_private.units import gathers_integers

__all__ = ["check_model", "left_whole", "refuse_gradients", "refuse_unreadable"]

_GATHERED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes that every backend sends and autograd takes for weights"""

_LARGE_BYTES = 2**24
"""so much whole on every rank is worth a warning"""

_SHOWN = 5
"""at most so many parameters that are held elsewhere are named"""


def refuse_unreadable(tree: ModuleTree) -> None:
    """Refuses a model that nothing can be decided about. Collective: no.

    Raises:
        PlanError: for parameters without a shape, and for modules that are sharded already.
    """
    lazy = [ref.name for ref in tree.params if is_lazy(ref.param)]
    if lazy:
        raise PlanError(
            f"{listed(lazy)} has no shape yet: a lazy module gets it in its first call. There is "
            "nothing to shard until then. Call the model once with a batch before it is prepared, "
            "or give the sizes (`nn.Linear` instead of `nn.LazyLinear`)."
        )
    unpacked = [
        ref.name
        for ref in tree.params
        if type(ref.param).__name__ == "Params4bit" and not is_packed(ref.param)
    ]
    if unpacked:
        raise PlanError(
            f"{listed(unpacked)} is to be packed in 4 bits by bitsandbytes, and is not yet: that "
            "happens when a weight with values is moved to a device, and a shard cannot be packed. "
            "Load the base with its values on every rank (not with `init_device: mixed` or "
            "`meta`), on the device of the run."
        )
    for path, module in tree.modules():
        if isinstance(module, FSDPModule):
            raise PlanError(
                f"{quoted(path, 'The model')} is sharded by FSDP2 already, by an earlier Trainer "
                "or prepare_fully_shard of this process, or by your own fully_shard. Sharding "
                "twice would mix shards of shards. Build the model anew for every Trainer, and "
                "load its weights from a checkpoint (load_path) or from a state dict that was "
                "taken inside `with composer_fsdp2.summon_full_params(model):`, before adapters "
                "are put on it; or go on with the first Trainer (fit, eval). Take your own "
                "fully_shard calls out."
            )


def refuse_gradients(tree: ModuleTree) -> None:
    """Refuses a model with gradients from a backward before it is prepared. Collective: no.

    Raises:
        PlanError: for gradients that are not zero; shards begin without any.
    """
    grads = ((ref.name, ref.param.grad) for ref in tree.params)
    names = [name for name, grad in grads if grad is not None and not grad.is_meta and grad.any()]
    if names:
        raise PlanError(
            f"{listed(names)} has a gradient already. It is of the whole parameter, and the first "
            "step would go without it, because shards begin with no gradient. Prepare the model "
            "before the first backward, or clear the gradients: `model.zero_grad()`."
        )


def left_whole(refs: Collection[ParamRef], weight_of: Mapping[int, int]) -> set[int]:
    """Finds frozen weights that FSDP2 cannot shard and need not; see [Note: left whole].

    Args:
        refs: every name of every parameter.
        weight_of: id(parameter) -> that of the first one over the same memory.
    """
    trained = {weight_of[id(ref.param)] for ref in refs if ref.param.requires_grad}
    first_refs: dict[int, ParamRef] = {}
    for ref in refs:
        param, weight = ref.param, weight_of[id(ref.param)]
        is_plain = not (isinstance(param, DTensor) or _is_foreign(param) or param.is_quantized)
        cannot = param.ndim == 0 or not param.numel() or param.dtype not in _GATHERED
        if is_plain and cannot and weight not in trained:
            first_refs.setdefault(weight, ref)
    size = sum(ref.param.nbytes for ref in first_refs.values())
    if size >= _LARGE_BYTES:
        names = listed((ref.name for ref in first_refs.values()), 3)
        warnings.warn(
            f"{len(first_refs)} frozen parameters ({names}) are of a dtype that FSDP2 does not "
            f"shard, so every rank keeps all {size:,} bytes of them. Keep them in bf16 or fp32 to "
            "have them sharded.",
            stacklevel=3,
        )
    return set(first_refs)


def check_model(
    tree: ModuleTree,
    units: Iterable[ShardUnit],
    refs: Sequence[ParamRef],
    ties: Iterable[Sequence[ParamRef]],
) -> list[str]:
    """Returns sentences about a plan that would train wrongly or fail at once. Collective: no.

    Linear in the number of modules.

    Args:
        tree: the model before sharding.
        units: all units of the plan.
        refs: the parameters that are to be sharded.
        ties: those of them that are one weight.
    """
    params = {ref.name: ref.param for ref in refs}
    problems: list[str] = []
    for unit in units:
        problems += filter(None, [_layout_problem(tree, unit.module)])
        dtypes: dict[str, str] = {}
        for name in unit.params:
            param = params[name]
            if (problem := _problem_of(name, param)) is not None:
                problems.append(problem)
            elif param.requires_grad or not FROZEN_MAY_DIFFER:
                dtypes.setdefault(_dtype_name(param), name)
        if len(dtypes) > 1:
            shown = " and ".join(f"{dtype} ('{name}')" for dtype, name in dtypes.items())
            where = f"The unit '{unit.module}'" if unit.module else "The root unit"
            problems.append(
                f"{where} holds parameters of different dtypes: {shown}. One "
                "collective gathers one dtype, and torch would stop at the first forward. Modules "
                "of one dtype are made units of their own, but these share a module: cast them to "
                "one dtype, or list frozen ones in ignored_params."
            )
    for group in ties:
        trained = [ref.name for ref in group if ref.param.requires_grad]
        frozen = [ref.name for ref in group if not ref.param.requires_grad]
        if trained and frozen:
            problems.append(
                f"'{trained[0]}' is trained and '{frozen[0]}' is frozen, and both are the same "
                "memory. Sharding makes one parameter of them, and the use of the frozen one "
                "would then get a gradient. Hold one parameter, and use its `.detach()` where no "
                "gradient is wanted."
            )
    return [*problems, *_problems_of_modules(tree, refs), *_aliases(tree, refs)]


def _layout_problem(tree: ModuleTree, name: str) -> str | None:
    """Returns why torch cannot make an FSDP class of a unit's class, which begins with a mixin.

    torch derives a class from FSDPModule and the module's own, and Python allows that where the
    attributes of both are kept by a class that derives from `object` itself. Source:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py#L238
    """
    kind = keeper = type(tree.root.get_submodule(name))
    while keeper.__base__ is not None and keeper.__base__.__dictoffset__:
        keeper = keeper.__base__
    if keeper.__base__ in (object, None):
        return None
    first = next((base for base in kind.__mro__ if nn.Module in base.__bases__[1:]), kind)
    bases = ", ".join(base.__name__ for base in first.__bases__)
    return (
        f"{quoted(name, 'The model')} is of the class {kind.__name__}, and "
        f"{first.__name__}({bases}) derives from a class without attributes of its own "
        f"({keeper.__base__.__name__}) before nn.Module. FSDP2 gives each unit a class of its own, "
        "and Python cannot exchange classes of such a layout. Name nn.Module, or the class that "
        "derives from it, first."
    )


def _dtype_name(param: nn.Parameter) -> str:
    return str(param.dtype).removeprefix("torch.")


def _is_foreign(param: nn.Parameter) -> bool:
    """Whether sharding would drop a tensor's class; some classes define their own gather."""
    of_torch = type(param).__module__.partition(".")[0] == "torch"
    return not of_torch and not gathers_itself(param)


def _problem_of(name: str, param: nn.Parameter) -> str | None:
    if param.is_quantized:
        return (
            f"'{name}' is quantised ({_dtype_name(param)}), and neither shards nor gradients of "
            "such tensors exist. Register the integers (`.int_repr()`) as a buffer and compute "
            "`scale * integers` in forward, or train `.dequantize()`."
        )
    if is_packed(param) and param.requires_grad:
        return (
            f"'{name}' is packed in 4 bits by bitsandbytes, and is to be trained. The gradient is "
            "that of its bytes. Freeze it, and train adapters."
        )
    if is_packed(param):
        return (
            None
            if gathers_integers()
            else f"'{name}' is packed in 4 bits by bitsandbytes, and this torch has no gather that "
            "leaves its bytes alone: they would be cast to the dtype of the run. Write `frozen: "
            "replicate`, which keeps it on every rank, or install torch 2.14 or newer."
        )
    if _is_foreign(param):
        return (
            f"'{name}' is of the class {type(param).__name__}, which FSDP2 would exchange for a "
            "plain parameter: what the class does would be lost. Use `nn.Parameter`; attributes "
            "you set on it are kept. A frozen one can be left whole on every rank with "
            "ignored_params, and a class with `fsdp_pre_all_gather` and `fsdp_post_all_gather` is "
            "gathered as it says."
        )
    if param.ndim == 0:
        return (
            f"'{name}' is a scalar parameter. FSDP2 shards the first dimension, and a scalar has "
            "none. Give it shape (1,), or freeze it: it then stays whole on every rank."
        )
    if not param.numel():
        return (
            f"'{name}' has no elements (shape {tuple(param.shape)}). FSDP2 has no rows to cut, and "
            "torch would stop with an error of its own. Leave the layer out where its size is 0 "
            "(`nn.Identity()`), or freeze the parameter: there is nothing to train in it."
        )
    if param.is_complex():
        return (
            f"'{name}' is complex ({_dtype_name(param)}). The gathered copy would be cast to real "
            "numbers, or not be sent at all. Store a real parameter whose last dimension is 2, and "
            "call `torch.view_as_complex` in forward."
        )
    if param.dtype not in _GATHERED:
        return (
            f"'{name}' has the dtype {_dtype_name(param)}, which cannot be reduced between ranks. "
            "Train it in fp32 or bf16 (see `mixed_precision` and `fp8`), or freeze it: it then "
            "stays whole on every rank."
        )
    if not param.is_contiguous():
        return (
            f"'{name}' is not contiguous (shape {tuple(param.shape)}, stride {param.stride()}). "
            "FSDP2 cuts the memory into rows, so it needs rows that follow each other. Store it as "
            "`nn.Parameter(weight.contiguous())`."
        )
    return None


def _problems_of_modules(tree: ModuleTree, refs: Sequence[ParamRef]) -> Iterator[str]:
    sharded = {id(ref.param) for ref in refs}
    for path, module in tree.modules():
        where = f"'{path}' ({type(module).__name__})"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in sharded:
            if module.max_norm is not None:
                yield (
                    f"{where} has max_norm={module.max_norm}: its forward rescales rows of the "
                    "weight in place. FSDP2 computes with a gathered copy that is dropped "
                    "afterwards, and the change with it. Take max_norm out, and rescale the rows "
                    "that were looked up in forward, or the weight in a callback after the step."
                )
            if module.sparse and module.weight.requires_grad:
                yield (
                    f"{where} has sparse=True. FSDP2 reduces dense gradients, and torch would "
                    "stop in the first backward. Write sparse=False; an optimizer for sparse "
                    "gradients (SparseAdam) is then replaced by one for dense ones."
                )
        # The parameters of a scripted module live in C++, where FSDP2 cannot exchange them.
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted and (names := [name for name, _ in module.named_parameters(recurse=False)]):
            yield (
                f"'{path}' was made by torch.jit (script or trace) and holds {listed(names)}. Its "
                "parameters cannot be exchanged by shards. Take the module itself instead of its "
                "scripted form, and set `compile: true` if it has to be fast."
            )


def _aliases(tree: ModuleTree, refs: Sequence[ParamRef]) -> Iterator[str]:
    """Finds buffers and other tensors that are, or share memory with, a sharded parameter."""
    by_storage: dict[int, list[tuple[int, int, ParamRef]]] = defaultdict(list)
    for ref in refs:
        if (memory := memory_of(ref.param)) is not None:
            by_storage[memory[0]].append((memory[1], memory[2], ref))

    def sharing(tensor: torch.Tensor) -> ParamRef | None:
        storage, start, end = memory_of(tensor) or (0, 0, 0)
        extents = by_storage.get(storage, ())
        return next((ref for first, past, ref in extents if start < past and first < end), None)

    for path, module in tree.modules():
        for name, buffer in module._buffers.items():
            ref = None if buffer is None else sharing(buffer)
            if ref is not None:
                yield (
                    f"The buffer '{child_name(path, name)}' shares memory with the parameter "
                    f"'{ref.name}'. Sharding gives the parameter memory of its own, and the buffer "
                    "would keep the first values. Read the parameter in forward, or register a "
                    "copy (`.clone()`) if the values are to stay."
                )
    sharded = {id(ref.param): ref for ref in refs}
    told: set[int] = set()
    for tensor, module, attribute in held_tensors(tree):
        ref = sharded.get(id(tensor))
        if ref is None and not isinstance(tensor, DTensor):
            ref = sharing(tensor)
        if ref is None or id(ref.param) in told or len(told) == _SHOWN:
            continue
        told.add(id(ref.param))
        owner = f"'{attribute}' of {quoted(module)}"
        fact = (
            f"'{ref.name}' is also held by {owner}, where it is not registered"
            if tensor is ref.param
            else f"{owner} shares memory with the parameter '{ref.name}'"
        )
        yield (
            f"{fact}. FSDP2 puts shards and gathered weights in the registered place only, and "
            "what is held there would keep the first values. Hold the module and read its "
            "parameter in forward, or register it there too (`nn.ParameterList`, "
            "`nn.ParameterDict`)."
        )
