"""Reads and replaces members of FSDP2's units and their groups of parameters."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from composer_fsdp2.torch_private.tensors import local_tensor

__all__ = [
    "CHANGES_PARAMETERS",
    "Inputs",
    "Mark",
    "add_zero_gradients",
    "after_backward",
    "all_reduce_hook",
    "all_reduces",
    "announce_backward",
    "attach",
    "backward_number",
    "drop_unreduced",
    "exchange_inputs",
    "free_after_forward",
    "frees_after_forward",
    "gather_again",
    "gather_bytes",
    "gathered_memory",
    "gathered_param",
    "gathers_integers",
    "has_gradient",
    "has_run",
    "hear_backward",
    "holds_gathered",
    "in_function_transform",
    "init_all_gather_extensions",
    "is_busy",
    "is_exported",
    "is_gathered",
    "is_idle",
    "is_inside_unit",
    "is_root",
    "lazy_init",
    "local_shard",
    "param_groups",
    "params_of",
    "partial_reduction",
    "places_of",
    "reduces",
    "reduction_bytes",
    "reserve_gather",
    "reserve_reduction",
    "reset_iteration",
    "runs_backward",
    "sharded_param",
    "shards_of",
    "stands_in",
    "trained_params",
    "will_get_gradient",
]

# --- Units. ---

CHANGES_PARAMETERS = ("_apply", "unshard")
"""methods of a unit after which its parameters are other tensors"""


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def param_groups(unit: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that torch gathers and reduces together in this unit.

    One group, or none without parameters; newer torch may have several.
    """
    state = _state(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in groups or [state._fsdp_param_group] if group is not None]


def is_gathered(group: Any) -> bool:
    """Says whether the unsharded parameters are in the modules."""
    return group.is_unsharded


def is_idle(group: Any) -> bool:
    """Says whether the group is neither in forward nor in backward."""
    return group._training_state.name == "IDLE"


def params_of(group: Any) -> list[Any]:
    """Returns torch's records of the group's parameters."""
    return group.fsdp_params


def holds_gathered(group: Any) -> bool:
    """Says whether a group's unsharded parameters are in memory, or being gathered."""
    return group.is_unsharded or group._all_gather_result is not None


def gather_bytes(group: Any) -> int:
    """Returns the size of the next all-gather of a sharded group.

    In the dtype that is sent, padding included.
    """
    # A tensor subclass such as that of float8 says itself what is sent. Both properties know the
    # smaller groups of `reshard_after_forward: N`.
    inputs = (tensor for param in group.fsdp_params for tensor in param.all_gather_inputs)
    return sum(tensor.nbytes for tensor in inputs) * group._all_gather_process_group.size()


def reduction_bytes(group: Any) -> int:
    """Returns the size of this rank's part of a group's gradients after a reduce-scatter.

    In the dtype that is sent, padding included. The input of the reduce-scatter has this size times
    the number of shards.
    """
    return sum(
        param._sharded_param_data.numel()
        * (param.reduce_dtype or param.param_dtype or param.orig_dtype).itemsize
        for param in group.fsdp_params
        if param.sharded_param.requires_grad
    )


def shards_of(group: Any) -> int:
    """Returns the number of ranks that share the group's parameters."""
    return group.mesh_info.shard_mesh_size


def is_root(unit: FSDPModule) -> bool | None:
    """Says whether a unit is the outermost; `None` before the first forward."""
    return _state(unit)._is_root


def is_busy(unit: FSDPModule) -> bool:
    """Says whether a unit is in the middle of a forward or backward."""
    return _state(unit)._training_state.name != "IDLE"


def hear_backward(unit: FSDPModule, outputs: Iterable[torch.Tensor]) -> None:
    """Has the unit gather when backward comes to one of these outputs of its forward."""
    for output in outputs:
        if output.requires_grad:
            output.register_hook(_state(unit)._pre_backward)


def announce_backward(unit: FSDPModule) -> bool:
    """Gathers a unit that backward is about to compute with; says if torch had not."""
    if all(map(runs_backward, param_groups(unit))):
        return False
    for group in param_groups(unit):
        group.unshard_in_backward = True
    _state(unit)._pre_backward(None)
    return True


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""positional arguments, and those by name"""
Mark = Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]
"""returns tensors in the place of others; when backward passes them, it has left the unit"""


def exchange_inputs(
    unit: FSDPModule,
    mark: Callable[[Mark, Any, Any], Inputs],
    move: Callable[[torch.device, Any, Any], Inputs],
) -> None:
    """Replaces the functions in which torch exchanges inputs, and makes containers anew.

    Collective: no.

    Args:
        unit: just sharded.
        mark: is called with torch's function for some tensors, and the inputs.
        move: is called with the device of the root, and its inputs.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L564
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L146
    """
    state = _state(unit)
    for group in param_groups(unit):
        original = group._register_post_backward_hook
        group._register_post_backward_hook = functools.partial(
            mark, lambda tensors, original=original: original(tensors, {})[0]
        )
    if state._device.type == "cpu":
        return
    begin = state._root_pre_forward

    def root_pre_forward(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inputs:
        is_root = state._state_ctx.iter_forward_root is None
        begin(module, (None,), {})
        return move(state._device, args, kwargs) if is_root else (args, kwargs)

    state._root_pre_forward = root_pre_forward


def gather_again(unit: FSDPModule) -> None:
    """Gathers a unit whose forward is run again in backward, after its gradients were reduced.

    Two forwards before one backward do that to a unit inside a recomputed block. Older torch takes
    it for gathered from the first time on, until the backward ends:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L219
    """
    if _state(unit)._training_state.name == "PRE_BACKWARD":
        for group in param_groups(unit):
            if not group.is_unsharded:
                group.pre_backward(False)


def is_inside_unit(module: nn.Module) -> bool:
    """Says whether a unit shards the module's parameters."""
    # `fully_shard` marks all modules that it takes parameters from, not units alone.
    return getattr(module, "_is_fsdp_managed_module", False)


def lazy_init(unit: FSDPModule) -> None:
    """Initialises a unit as its first forward would. A second call changes nothing."""
    settings = [(group, group.post_forward_mesh_info) for group in param_groups(unit)]
    _state(unit)._lazy_init()
    if not hasattr(unit, "set_reshard_after_forward"):
        # Older torch keeps the first unit that runs gathered, against `reshard_after_forward`.
        # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py#L168
        for group, setting in settings:
            group.post_forward_mesh_info = setting


def runs_backward(group: Any) -> bool:
    """Says whether the group is in backward."""
    return group._training_state.name == "PRE_BACKWARD"


def reduces(group: Any) -> bool:
    """Says whether the group reduces gradients after this backward."""
    return group.reduce_grads


def all_reduce_hook(group: Any) -> Any:
    """Returns the hook of `set_all_reduce_hook`."""
    return group._all_reduce_hook


def all_reduces(group: Any) -> bool:
    """Says whether the group's gradients are reduced over replicas too, after this backward.

    A hook averages over replicas where torch's own HSDP cannot, and has `due` false until then.
    """
    by_torch = group.reduce_grads and group.all_reduce_grads
    return by_torch and getattr(group._all_reduce_hook, "due", True)


def partial_reduction(group: Any) -> torch.Tensor | None:
    """Returns gradients that wait for HSDP's all-reduce; `None` if none do."""
    return group._partial_reduce_output


def frees_after_forward(group: Any) -> Any:
    """Returns torch's record of `reshard_after_forward`, for `free_after_forward`."""
    return group.post_forward_mesh_info


def free_after_forward(group: Any, how: Any) -> None:
    """Sets whether a group is freed after forward.

    Args:
        group: torch's `FSDPParamGroup` of a unit.
        how: `True`, `False`, or the result of `frees_after_forward`.
    """
    # Torch frees by the mesh in this field: the unit's own frees all, a smaller one keeps a part,
    # and `None` keeps everything.
    if isinstance(how, bool):
        how = group.mesh_info if how else None
    group.post_forward_mesh_info = how


# --- Parameters of units. ---


def sharded_param(param: Any) -> nn.Parameter:
    """Returns the parameter that the optimizer steps."""
    return param.sharded_param


def has_run(param: Any) -> bool:
    """Says whether the parameter was gathered before."""
    # The first gather makes it, and it stays when its memory is freed.
    return hasattr(param, "_unsharded_param")


def trained_params(group: Any) -> list[Any]:
    """Returns records of parameters that autograd may give a gradient, gathered or not yet."""
    return [
        param
        for param in group.fsdp_params
        if getattr(param, "_unsharded_param", param.sharded_param).requires_grad
    ]


def has_gradient(param: Any) -> bool:
    """Says whether the parameter has a gradient that is not reduced yet."""
    return param._unsharded_param.grad is not None or _accumulated(param) is not None


def will_get_gradient(param: Any) -> bool:
    """Says whether the backward that runs reaches the parameter, perhaps later.

    A gradient of two uses arrives after the second of them.
    """
    # The unsharded parameter is a leaf: its node adds to its `grad`.
    node = torch.autograd.graph.get_gradient_edge(param._unsharded_param).node
    return torch._C._will_engine_execute_node(node)  # pyright: ignore


def _accumulated(param: Any) -> torch.Tensor | None:
    """Returns the gradient of earlier backwards, which torch before 2.15 keeps apart."""
    return vars(param).get("unsharded_accumulated_grad")


def add_zero_gradients(params: Sequence[Any], missing: Sequence[Any]) -> None:
    """Gives gradients of zeros to parameters of a group.

    Args:
        params: all parameters of the group.
        missing: the parameters without a gradient.
    """
    for param in missing:
        unsharded = param._unsharded_param
        # Newer torch insists on the dtype in which it accumulates.
        unsharded.grad = torch.zeros_like(unsharded, dtype=getattr(unsharded, "grad_dtype", None))
    if any(_accumulated(param) is not None for param in params):
        # Gradients of an earlier microbatch have the dtype of the reduction already.
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def backward_number() -> int:
    """Returns the number of the backward that runs in this thread."""
    # -1 outside of a backward.
    return torch._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Calls `call` at the end of this backward, after callbacks that were queued before."""
    # Torch refuses a callback outside of a backward.
    Variable._execution_engine.queue_callback(call)  # pyright: ignore


def in_function_transform() -> bool:
    """Says whether a transformation of `torch.func` runs, such as `vmap`, `grad` or `jvp`."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]


def local_shard(param: Any) -> torch.Tensor:
    """Returns the tensor that torch gathers, which may have methods for the gather."""
    return param._sharded_local_tensor


def init_all_gather_extensions(param: Any) -> None:
    """Has torch look again for methods of the local shard for the gather."""
    # Torch itself looks when it makes this record, and once more in the first forward.
    param._init_extensions()


def gathered_param(param: Any) -> nn.Parameter:
    """Returns the unsharded parameter, with which modules compute."""
    return param._unsharded_param


def places_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Returns all slots of a parameter: modules and the names of their attributes."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def stands_in(param: Any, tensor: object) -> bool:
    """Says whether a tensor is the parameter, in one of the states that FSDP2 puts into modules."""
    record = vars(param)
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return any(tensor is record.get(name) for name in names)


@functools.cache
def gathers_integers() -> bool:
    """Says whether torch gathers a parameter of integers as it is, in mixed precision too."""
    record = SimpleNamespace(
        sharded_param=torch.empty(0, dtype=torch.uint8), _has_sharded_grad_dtype_override=True
    )
    owner: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    owner.FSDPParam.init_dtype_attrs(record, MixedPrecisionPolicy(torch.bfloat16))
    return record.param_dtype is None


def gathered_memory(param: Any) -> torch.Tensor | None:
    """Returns the unsharded parameter as a plain tensor; `None` for a tensor subclass."""
    unsharded = param._unsharded_param
    # A DTensor cannot be detached in inference mode.
    unsharded = (local_tensor(unsharded) if isinstance(unsharded, DTensor) else unsharded).detach()
    return unsharded if type(unsharded) is torch.Tensor else None


def is_exported(param: Any) -> bool:
    """Says whether numpy has memory of the unsharded parameter, which torch cannot free then."""
    return any(not part.untyped_storage().resizable() for part in param.all_gather_outputs)


# --- What torch does with a group. ---


def attach(group: Any, hear: Callable[[str], bool]) -> None:
    """Replaces the methods in which torch's group changes state, once for all listeners.

    Args:
        group: torch's `FSDPParamGroup` of a unit.
        hear: is called with the name of an event just before torch acts, or afterwards for
            `after_...`; for `may_free` and `may_reduce` it returns whether torch may act now.

    Source: the methods,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L252
    """
    replacements = _Replacements(group, hear)
    for name in replacements.original:
        setattr(group, name, getattr(replacements, name))
    for param in group.fsdp_params:
        param.reset_sharded_param = functools.partial(_keep_shard, param, param.reset_sharded_param)


def _keep_shard(param: Any, reset: Callable[[], None]) -> None:
    """Leaves a shard in its padded memory if it lies there already, as newer torch does.

    Torch 2.7 copies it at the first forward, on ranks whose shard is smaller than others, and a
    state dict that was taken before keeps the old memory.
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L850
    """
    padded, sharded = param._sharded_param_data, param.sharded_param
    shard = sharded._local_tensor
    reset()
    memory = padded.untyped_storage().data_ptr() if type(padded) is torch.Tensor else 0
    copied = param.sharded_param is sharded and sharded._local_tensor is not shard
    pinned = copied and sharded._local_tensor.is_pinned() and not shard.is_pinned()
    if memory and copied and not pinned and shard.untyped_storage().data_ptr() == memory:
        param._sharded_param_data, sharded._local_tensor = padded, shard


_NAMES = (
    "pre_forward",
    "post_forward",
    "unshard",
    "wait_for_unshard",
    "pre_backward",
    "post_backward",
    "_to_unsharded",
    "_to_sharded",
    "_to_sharded_post_forward",
)


class _Replacements:
    """Methods of a group, by torch's names, that call the original ones and announce events."""

    def __init__(self, group: Any, hear: Callable[[str], bool]) -> None:
        self._group, self._hear = group, hear
        self._trained: dict[int, bool] = {}
        """index of a gathered parameter -> whether it was trained when it was last compared"""
        self.original = {name: getattr(group, name) for name in _NAMES}

    def pre_forward(self, *args: Any) -> Any:
        # A unit that stayed gathered; one that is freed carries its flags when it is.
        self._carry_requires_grad()
        self._hear("before_forward")
        return self.original["pre_forward"](*args)

    def post_forward(self, *args: Any) -> Any:
        if backward_number() < 0:
            self.original["post_forward"](*args)
        else:
            # A block is computed again, and backward is about to use the weights. Torch 2.7 would
            # free them, and take this for one more forward: backward then gathers ahead a unit
            # that it has left, which stays gathered to the end. Newer torch does as this does:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
            self._group._training_state = _idle(self._group)
        self._hear("after_group_forward")
        return args[2]

    def unshard(self, *args: Any, **kwargs: Any) -> None:
        backward = runs_backward(self._group) and not self._group.unshard_in_backward
        if not holds_gathered(self._group) and not backward:  # else torch sends nothing now
            self._hear("before_gather")
        self.original["unshard"](*args, **kwargs)

    def wait_for_unshard(self) -> None:
        if torch.is_inference_mode_enabled():
            # Training computes with the same parameters, and tensors of inference mode cannot be
            # saved for backward.
            with torch.inference_mode(False), torch.no_grad():
                self.original["wait_for_unshard"]()
        else:
            self.original["wait_for_unshard"]()

    def pre_backward(self, *args: Any) -> Any:
        self._hear("before_backward")
        return self.original["pre_backward"](*args)

    def post_backward(self, *args: Any) -> None:
        if not self._hear("may_reduce"):
            return
        self._hear("after_backward")
        params = self._group.fsdp_params
        if self._group.reduce_grads and any(has_run(p) and has_gradient(p) for p in params):
            self._hear("before_reduce")
        self.original["post_backward"](*args)
        for param in params:
            # Torch 2.7 has the host wait for the stream that reduces. In HSDP, and after a hook,
            # gradients are copied to the CPU on another one.
            # https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py#L488
            if param.grad_offload_event is not None:
                param.grad_offload_event = self._group._post_reduce_event

    def _to_unsharded(self) -> None:
        self._hear("before_unsharded")
        self.original["_to_unsharded"]()
        params = enumerate(self._group.fsdp_params)
        self._trained = {number: param.sharded_param.requires_grad for number, param in params}
        self._hear("after_unsharded")

    def _to_sharded(self) -> None:
        if self._may_free():
            self.original["_to_sharded"]()

    def _to_sharded_post_forward(self) -> None:
        if self._may_free():
            self.original["_to_sharded_post_forward"]()

    def _may_free(self) -> bool:
        # Hooks of `state_dict` and `load_state_dict` come here too, gathered or not.
        frees = not self._group.is_unsharded or self._hear("may_free")
        if frees:
            self._carry_requires_grad()
        return frees

    def _carry_requires_grad(self) -> None:
        """Gives shards and gathered parameters of a gathered group the same `requires_grad`.

        Whoever freezes or unfreezes a gathered parameter, as PEFT's `disable_adapter` does around a
        reference pass, sets the flag of the gathered copy; an optimizer's groups have the shard.
        The flag that has changed since the gather counts; where both have, that of the shard. Torch
        copies the shard's flag at a gather alone:
        https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L590
        """
        for number, param in enumerate(self._group.fsdp_params if self._group.is_unsharded else ()):
            shard, gathered = param.sharded_param, param._unsharded_param
            if shard.requires_grad != self._trained.get(number, shard.requires_grad):
                gathered.requires_grad_(shard.requires_grad)
            elif shard.requires_grad != gathered.requires_grad:
                shard.requires_grad_(gathered.requires_grad)
            self._trained[number] = shard.requires_grad


# --- Out of memory. ---


def reserve_gather(group: Any) -> None:
    """Fails here, before the ranks agree, if a gather's buffers do not fit.

    The caching allocator keeps freed memory, so that the gather finds it.
    """
    if group.device.type == "cpu" or holds_gathered(group):
        return
    size = group.mesh_info.shard_mesh_size
    sizes = [p._sharded_param_data.numel() * size for p in group.fsdp_params]
    dtype = group.fsdp_params[0].param_dtype or group.fsdp_params[0].orig_dtype
    # On the streams that torch allocates on, because the allocator has a pool for each.
    stream, _ = group.comm_ctx.get_all_gather_streams(False, group._training_state)
    with group.device_handle.stream(stream):
        gathered = torch.empty(sum(sizes), dtype=dtype, device=group.device)
    outputs = [torch.empty(numel, dtype=dtype, device=group.device) for numel in sizes]
    del gathered, outputs


def reserve_reduction(group: Any) -> None:
    """Fails here, before the ranks agree, if a reduction's buffers do not fit."""
    size = reduction_bytes(group)
    if group.device.type == "cpu" or not group.reduce_grads or not size:
        return
    ranks, byte = group.mesh_info.shard_mesh_size, torch.uint8
    # Torch copies gradients of shards that are not made of rows before it sends them.
    copies = [
        torch.empty(
            param._sharded_param_data.numel() * ranks,
            dtype=param.param_dtype or param.orig_dtype,
            device=group.device,
        )
        for param in group.fsdp_params
        if param.sharded_param.requires_grad
        if param.fsdp_placement.dim
    ]
    buffer = torch.empty(size * ranks, dtype=byte, device=group.device)
    with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
        part = torch.empty(size, dtype=byte, device=group.device)
    del buffer, part, copies


def reset_iteration(units: Iterable[FSDPModule]) -> None:
    """Resets the state of units after an aborted forward or backward; skips units that never ran.

    Newer torch has a method for it, which waits for running collectives; older torch has none.
    """
    started = [unit for unit in units if is_root(unit) is not None]
    for unit in started:
        if is_root(unit) and hasattr(unit, "reset_iter_state"):
            unit.reset_iter_state()  # pyright: ignore
    for unit in started:
        state = _state(unit)
        state._training_state = _idle(state)
        state._modules_to_run_forward.clear()
        # Otherwise the next forward would not wait for the optimizer before it gathers.
        state._state_ctx.iter_forward_root = None
        # Otherwise the next backward would queue no callback, and nothing would end it.
        state._state_ctx.post_backward_final_callback_queued = False
        streams = state._comm_ctx
        # Backward prefetches by this order, and would gather what the aborted forward has run.
        streams.post_forward_order.clear()
        for name in ("all_gather_state", "reduce_scatter_state"):
            under_way = getattr(streams, name, None)
            if under_way is not None:
                state._device_handle.current_stream().wait_event(under_way.event)
                setattr(streams, name, None)


def drop_unreduced(group: Any) -> None:
    """Drops the group's gradients that are not reduced yet, after `reset_iteration`."""
    group.finalize_backward()  # waits, on the stream, for what has been sent
    group._training_state = _idle(group)
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        if _accumulated(param) is not None:
            param.unsharded_accumulated_grad = None
        if has_run(param):
            param._unsharded_param.grad = None


def _idle(busy: Any) -> Any:
    return type(busy._training_state).IDLE
