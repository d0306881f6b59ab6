"""Reads private members of tensors, modules, compilers, checkpoints and process groups."""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    OffloadWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

__all__ = [
    "PROFILER_MARKS",
    "TENSOR_FACTS",
    "TORCH_FUNCTION_OFF",
    "BatchNorm",
    "OffloadWrapper",
    "base_of",
    "checkpoint_wrapper",
    "compile_within",
    "compiled_call",
    "compiler_backends",
    "compiler_modes",
    "copy_hooks",
    "default_store",
    "empty_parameter",
    "flatten_state_dict",
    "forward_pre_hooks",
    "is_compiled",
    "is_namedtuple",
    "is_plain",
    "is_view",
    "is_whole_graph",
    "layouts_of",
    "local_gradients",
    "local_part",
    "local_tensor",
    "local_value",
    "make_wrapper_subclass",
    "non_persistent_buffers",
    "post_accumulate_hooks",
    "register_first_forward_hook",
    "root_mesh",
    "set_timeout",
    "sharded_like",
    "storage_id",
    "storage_info",
    "tensor_hooks",
    "timeout_of",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unsafe_view",
    "values_known",
    "without_fsdp_hooks_after_load",
    "wrapped_module",
]


default_store: Callable[[], Any] = _get_default_store
"""returns the store at which the ranks met"""
set_timeout: Callable[[datetime.timedelta, dist.ProcessGroup], None] = getattr(
    dist.distributed_c10d, "set_timeout", None
) or getattr(dist.distributed_c10d, "_set_pg_timeout")  # noqa: B009 - newer torch has it no more
"""sets after how long the collectives of a group give up"""

# --- Modules and tensors. ---

_OPERATORS: Any = torch.ops
PROFILER_MARKS: tuple[Any, ...] = (
    _OPERATORS.profiler._record_function_enter_new.default,
    _OPERATORS.profiler._record_function_exit._RecordFunction,
)
"""operators by which torch marks a span in a profile"""

TENSOR_FACTS = (torch.Tensor._is_view, torch.Tensor._base.__get__)  # pyright: ignore
"""whether a tensor is a view, and its base, as `__torch_function__` sees these questions"""

TORCH_FUNCTION_OFF = torch._C.DisableTorchFunctionSubclass
"""a context in which subclasses of tensors are taken for tensors"""

values_known: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
"""a context in which tensors that are made have values, also while those of a step are fake"""

make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # pyright: ignore
"""makes a tensor of a class of one's own that has a shape and no memory"""


def wrapped_module(wrapper: OffloadWrapper) -> nn.Module:
    """Returns the module inside a wrapper of activation checkpointing."""
    return wrapper._checkpoint_wrapped_module


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that a view is of; `None` for other tensors."""
    return tensor._base


def is_namedtuple(value: object) -> bool:
    """Says whether `NamedTuple` has made a value's class, not a base as with PackedSequence."""
    return type(value).__base__ is tuple and hasattr(value, "_fields")


def is_plain(tensor: torch.Tensor) -> bool:
    """Says whether a tensor is of torch's own class, or fake."""
    return type(tensor) in (torch.Tensor, FakeTensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Says whether the tensor is a view of another one."""
    return tensor._is_view()


def unsafe_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values in the same memory, and no view for autograd."""
    return _OPERATORS.aten._unsafe_view(tensor, tensor.shape)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns the local tensor of a DTensor: the same object each time, unlike `to_local`."""
    return tensor._local_tensor


def local_value(value: Any, param: DTensor) -> Any:
    """Returns the local part of an optimizer's state, divided as its parameter is.

    Collective: yes, over the parameter's mesh, if the state has other placements.
    """
    if not isinstance(value, DTensor):
        return value
    if value._spec.placements != param._spec.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return value._local_tensor


def sharded_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor of another one's layout around `local`. Collective: no.

    `DTensor.from_local` would move an offloaded shard to the device of the mesh.
    """
    layout = copy.copy(like._spec)
    assert layout.tensor_meta is not None  # only layouts that torch propagates have none
    layout.tensor_meta = layout.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, layout, requires_grad=False)  # pyright: ignore[reportCallIssue]


def empty_parameter(like: DTensor, requires_grad: bool) -> nn.Parameter:
    """Returns a parameter without elements of a DTensor's layout. Collective: no.

    `nn.Parameter` would detach the DTensor through its dispatch, which takes ten times as long:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/parameter.py#L55
    """
    empty = torch.empty(0, dtype=like.dtype, device=like._local_tensor.device)
    param: Any = DTensor(empty, like._spec, requires_grad=requires_grad)  # pyright: ignore
    param._is_param = True
    return param


def layouts_of(tensors: Iterable[Any]) -> list[Any]:
    """Returns the layouts of DTensors; `None` for other tensors."""
    return [getattr(tensor, "_spec", None) for tensor in tensors]


def local_gradients(
    params: Sequence[Any], grads: Sequence[Any], otherwise: Callable[[Any], torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Returns the local tensor of each gradient, `None` for parameters without one.

    Args:
        params: sharded parameters.
        grads: their gradients, in the same order.
        otherwise: returns the local tensor of a gradient that is divided in another way than its
            parameter, given the parameter.
    """
    local_grads: list[Any] = []
    for param, grad in zip(params, grads, strict=True):
        # By identity: FSDP2 gives a gradient the layout of its parameter, the very object, and
        # comparing layouts costs as much as a step.
        if (
            type(grad) is DTensor
            and grad._spec.placements is param._spec.placements
            and grad._spec.mesh is param._spec.mesh
        ):
            local_grads.append(grad._local_tensor)
        else:
            local_grads.append(None if grad is None else otherwise(param))
    return local_grads


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that tensors over the same memory share, on meta as well.

    Does not call `__torch_function__` of a subclass, which may compute, or refuse.
    """
    with TORCH_FUNCTION_OFF():
        return tensor.untyped_storage()._cdata


def tensor_hooks(tensor: torch.Tensor) -> Any:
    """Returns hooks of `register_hook`."""
    return tensor._backward_hooks


def post_accumulate_hooks(param: torch.Tensor) -> list[Callable[..., None]]:
    """Returns hooks of `register_post_accumulate_grad_hook`."""
    return list((param._post_accumulate_grad_hooks or {}).values())  # pyright: ignore


def copy_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Gives a new parameter the hooks of the parameter that it replaces."""
    # To set this attribute also hands the hooks to autograd.
    new._backward_hooks = old._backward_hooks
    for hook in post_accumulate_hooks(old):
        new.register_post_accumulate_grad_hook(hook)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Returns names of buffers that a state dict leaves out."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Returns hooks of `register_forward_pre_hook`."""
    return list(module._forward_pre_hooks.values())


def register_first_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Registers a hook after forward that runs before all others.

    `prepend` moves a key of an `OrderedDict` and leaves it last in the dict underneath, whose order
    graphs of torch 2.7 go by: they would compare each hook with another one.
    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_dynamo/guards.py
    """
    others = list(module._forward_hooks)
    handle = module.register_forward_hook(hook)
    for key in others:
        module._forward_hooks[key] = module._forward_hooks.pop(key)
    return handle


@contextlib.contextmanager
def without_fsdp_hooks_after_load(module: nn.Module) -> Generator[None]:
    """Keeps FSDP2 from looking for shards after `load_state_dict`, while a block runs."""
    hooks = module._load_state_dict_post_hooks
    module._load_state_dict_post_hooks = OrderedDict(
        (key, hook)
        for key, hook in hooks.items()
        if not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
    )
    try:
        yield
    finally:
        module._load_state_dict_post_hooks = hooks


# --- Compiler, checkpoints and process groups, imported when they are needed. ---


def compiler_backends() -> list[str]:
    """Returns values of `backend` for `torch.compile`."""
    return importlib.import_module("torch._dynamo").list_backends(exclude_tags=())


def compiler_modes() -> dict[str, bool]:
    """Returns values of `mode` for `torch.compile`, and whether each records CUDA graphs."""
    modes: dict[str, dict[str, Any]] = importlib.import_module(
        "torch._inductor"
    ).list_mode_options()
    return {mode: bool(options.get("triton.cudagraphs")) for mode, options in modes.items()}


def compile_within(budget: float, backend: str, mode: str | None, graph: Any, inputs: Any) -> Any:
    """Compiles a graph that may keep a share `budget` of its activations."""
    options: dict[str, Any] = {}
    if mode is not None and backend == "inductor":
        modes = importlib.import_module("torch._inductor")
        options["config_patches"] = modes.list_mode_options(mode)
    partitioning = importlib.import_module("torch._functorch.config")
    # Here and not around the training: the graph is cut into forward and backward in this call.
    with partitioning.patch(activation_memory_budget=budget):
        compiler = importlib.import_module("torch._dynamo").lookup_backend(backend)
        return compiler(graph, inputs, **options)


def is_compiled(model: object) -> bool:
    """Says whether a model is the result of `torch.compile` for a module."""
    compiler = sys.modules.get("torch._dynamo")  # nothing is compiled before it is imported
    return compiler is not None and isinstance(model, compiler.OptimizedModule)


def compiled_call(module: nn.Module) -> object:
    """Returns the compiled call of a module, hooks included, after `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None)


_WHOLE_GRAPH = "ConvertFrameAssert"
"""class of the step of torch's compiler that takes a graph's end for an error"""
_LINKS = ("callable", "backend")
"""names of the next step in older and newer torch"""


def is_whole_graph(compiled: object) -> bool:
    """Says whether a compiled function, or its compiler, was made with `fullgraph=True`."""
    if compiled is None:
        return False
    cells = getattr(compiled, "__closure__", None) or ()
    for function in (compiled, *(getattr(cell, "cell_contents", None) for cell in cells)):
        step = getattr(function, "callback", None)
        while step is not None:
            if type(step).__name__ == _WHOLE_GRAPH:
                return True
            links = (getattr(step, f"_torchdynamo_orig_{name}", None) for name in _LINKS)
            step = next((link for link in links if link is not None), None)
    return False


def storage_info(path: str, offset: int, length: int) -> Any:
    """Returns the record of a checkpoint's metadata for the bytes of an item in a file."""
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
    return filesystem._StorageInfo(path, offset, length)


def flatten_state_dict(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a state dict by the FQNs of a checkpoint, and the keys on the path to each."""
    module = importlib.import_module("torch.distributed.checkpoint._nested_dict")
    return module.flatten_state_dict(state)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """Returns after how long a group's collectives give up; `None` if the backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


# --- Device meshes that are cut out of others. ---


def root_mesh(mesh: Any) -> DeviceMesh:
    """Returns the mesh that a mesh was cut out of, else the mesh itself. Collective: no."""
    get = getattr(mesh, "_get_root_mesh", None)  # of newer torch, which warns about the other way
    return device_mesh._mesh_resources.get_root_mesh(mesh) if get is None else get()
