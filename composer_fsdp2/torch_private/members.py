"""Lists private members of torch, and looks whether the installed torch has them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from composer_fsdp2.errors import PatchError

__all__ = [
    "EVERY_RUN",
    "PRIVATE_MEMBERS",
    "MemberState",
    "PrivateMember",
    "check_private_members",
    "member_states",
]

# --- Members in use, and whether this torch has them. ---

Use = Literal["read", "wrapped", "reset"]

_SHARD = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_SHARD}._fsdp_state:FSDPState"
_GROUP = f"{_SHARD}._fsdp_param_group:FSDPParamGroup"
_STREAMS = f"{_SHARD}._fsdp_param_group:FSDPCommContext"
_PARAM = f"{_SHARD}._fsdp_param:FSDPParam"
_TENSOR = "torch:Tensor"
_DISPATCHER = "torch.distributed.tensor._dispatch:OpDispatcher"
_MODULE = "torch.nn:Module"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

EVERY_RUN = "fully_shard"
"""feature of the rows without which nothing can be sharded"""


@dataclass(frozen=True, slots=True)
class PrivateMember:
    """Names a member of torch that is not public, and its use here."""

    owner: str
    """`module:Class`, or a module"""
    name: str
    """`a|b` for a member that torch has renamed: one of the names is enough"""
    feature: str
    """the setting that needs it"""
    use: Use

    @property
    def title(self) -> str:
        """Returns owner and name, short."""
        return f"{self.owner.rpartition(':')[2]}.{self.name.replace('|', ' or ')}"


def _rows(feature: str, use: Use, members: Mapping[str, str]) -> list[PrivateMember]:
    return [
        PrivateMember(owner, name, feature, use)
        for owner, names in members.items()
        for name in names.split()
    ]


PRIVATE_MEMBERS: tuple[PrivateMember, ...] = (
    *_rows(
        EVERY_RUN,
        "read",
        {
            "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
            _STATE: "_fsdp_param_groups|_fsdp_param_group _is_root _lazy_init "
            "_pre_backward _device",
            _GROUP: "fsdp_params device",
            _PARAM: "sharded_param _sharded_param_data init_dtype_attrs",
            _TENSOR: "_backward_hooks _post_accumulate_grad_hooks _is_view",
            _MODULE: "_forward_hooks _forward_pre_hooks",
            "torch.ops.aten": "_unsafe_view _local_scalar_dense",
            "torch.distributed.tensor:DTensor": "_op_dispatcher _local_tensor _spec",
            _DISPATCHER: "_custom_op_handlers",
            "torch:UntypedStorage": "_cdata",
            "torch.distributed:ProcessGroup": "_get_backend",
            "torch.distributed.distributed_c10d": "_get_default_store set_timeout|_set_pg_timeout",
        },
    ),
    *_rows(
        EVERY_RUN,
        "wrapped",
        {
            _GROUP: "pre_forward post_forward unshard wait_for_unshard _to_unsharded _to_sharded "
            "_to_sharded_post_forward pre_backward post_backward _register_post_backward_hook",
            _STATE: "_root_pre_forward",
            _PARAM: "reset_sharded_param",
            _DISPATCHER: "_propagate_op_sharding_dispatch_slow_path|dispatch",
        },
    ),
    *_rows(
        EVERY_RUN,
        "read",
        {
            _GROUP: "is_unsharded _training_state reshard reduce_grads "
            "_all_gather_result unshard_in_backward",
            _PARAM: "_module_info _unsharded_param all_gather_outputs",
            "torch._C": "_functorch DisableTorchFunctionSubclass",
        },
    ),
    *_rows(
        "gradient_sync",
        "read",
        {_GROUP: "_all_reduce_hook _partial_reduce_output", _PARAM: "_unsharded_param"},
    ),
    *_rows(
        "unused_parameters",
        "read",
        {
            _GROUP: "_training_state _all_reduce_hook reduce_grads all_reduce_grads",
            _PARAM: "_unsharded_param",
            "torch._C": "_current_graph_task_id _will_engine_execute_node",
            "torch.autograd:Variable": "_execution_engine",
        },
    ),
    *_rows(
        "device_train_microbatch_size: auto",
        "read",
        {
            _GROUP: "is_unsharded reduce_grads mesh_info comm_ctx device_handle _all_gather_result",
            _PARAM: "_unsharded_param _sharded_param_data fsdp_placement param_dtype reduce_dtype "
            "orig_dtype",
            _STATE: "_is_root _device_handle",
            _STREAMS: "get_all_gather_streams reduce_scatter_stream",
            f"{_SHARD}._fsdp_common:FSDPMeshInfo": "shard_mesh_size",
            "torch.distributed.distributed_c10d": "_resolve_process_group",
            "torch.distributed._functional_collectives": "all_reduce broadcast wait_tensor",
        },
    ),
    *_rows(
        "device_train_microbatch_size: auto",
        "reset",
        {
            _STATE: "_training_state _modules_to_run_forward _state_ctx _comm_ctx",
            f"{_SHARD}._fsdp_state:FSDPStateContext": "iter_forward_root "
            "post_backward_final_callback_queued",
            _STREAMS: "post_forward_order",
            _GROUP: "_training_state _partial_reduce_output finalize_backward",
        },
    ),
    *_rows(
        "fsdp2_monitor",
        "read",
        {
            _GROUP: "is_unsharded _all_gather_result _all_gather_process_group _all_reduce_hook "
            "reduce_grads all_reduce_grads",
            _PARAM: "all_gather_inputs _sharded_param_data param_dtype reduce_dtype orig_dtype",
        },
    ),
    *_rows("cpu_offload", "read", {_GROUP: "_post_reduce_event"}),
    *_rows("cpu_offload", "reset", {_PARAM: "grad_offload_event"}),
    *_rows("eval_reshard_after_forward", "read", {_STATE: "_lazy_init", _GROUP: "mesh_info"}),
    *_rows("eval_reshard_after_forward", "reset", {_GROUP: "post_forward_mesh_info"}),
    *_rows(
        "summon_full_params",
        "read",
        {
            _STATE: "_is_root _training_state",
            f"{_SHARD}._fully_shard:fully_shard": "_is_fsdp_managed_module",
        },
    ),
    *_rows("summon_full_params", "wrapped", {_MODULE: "_apply _load_state_dict_post_hooks"}),
    *_rows("fp8", "read", {_PARAM: "_sharded_local_tensor"}),
    *_rows("tensor_parallel", "read", {"torch.distributed.device_mesh": "_mesh_resources"}),
    *_rows("fp8", "reset", {_PARAM: "_init_extensions"}),
    *_rows(
        "chunked_loss",
        "read",
        {
            _TENSOR: "_make_wrapper_subclass _base _is_view",
            "torch._C": "DisableTorchFunctionSubclass",
        },
    ),
    *_rows(
        "activation_checkpointing",
        "read",
        {
            _WRAPPER: "checkpoint_wrapper OffloadWrapper",
            f"{_WRAPPER}:ActivationWrapper": "_checkpoint_wrapped_module",
            "torch.ops.profiler": "_record_function_enter_new _record_function_exit",
            _TENSOR: "_base",
        },
    ),
    *_rows(
        "compile",
        "read",
        {
            "torch._dynamo": "list_backends lookup_backend",
            "torch._inductor": "list_mode_options",
            "torch._functorch.config": "patch",
        },
    ),
    *_rows(
        "checkpoints",
        "read",
        {
            "torch.distributed.checkpoint.filesystem": "_StorageInfo",
            "torch.distributed.checkpoint._nested_dict": "flatten_state_dict",
            _MODULE: "_non_persistent_buffers_set",
        },
    ),
)
"""Private members that other versions of torch may lack, but for those that only save time."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """Says whether the installed torch has the member of a row."""

    member: PrivateMember
    found: bool


def member_states() -> tuple[MemberState, ...]:
    """Returns the state of each row of `PRIVATE_MEMBERS`. Collective: no."""
    return tuple(MemberState(member, _is_there(member)) for member in PRIVATE_MEMBERS)


def check_private_members(features: Iterable[str] = ()) -> None:
    """Refuses a torch that lacks members of the features; see [Note: private members].

    Collective: no. To be called before anything is changed. Costs milliseconds, once per process.

    Args:
        features: names in `PRIVATE_MEMBERS`; members of every run are looked up in any case.

    Raises:
        PatchError: naming the members.
    """
    needed = {EVERY_RUN, *features}
    missing = [m for m in PRIVATE_MEMBERS if m.feature in needed and not _is_there(m)]
    if not missing:
        return
    members = ", ".join(dict.fromkeys(f"'{m.title}' (of {m.owner})" for m in missing))
    needing = dict.fromkeys(member.feature for member in missing)
    optional = [name for name in needing if name != EVERY_RUN]
    leave = f", or leave {' and '.join(optional)} out" if len(optional) == len(needing) else ""
    raise PatchError(
        f"torch {torch.__version__} has no {members}, or does not let it be set. "
        f"{' and '.join(needing)} cannot work without it, and would fail in the middle of a run. "
        f"Install a torch this package was tested with (2.7 to 2.15){leave}."
    )


@functools.cache
def _is_there(member: PrivateMember) -> bool:
    try:
        owner = pkgutil.resolve_name(member.owner)
    except (ImportError, AttributeError):
        return False
    return any(_has(owner, name, member.use) for name in member.name.split("|"))


def _has(owner: Any, name: str, use: Use) -> bool:
    if isinstance(owner, types.FunctionType):
        # Newer torch does the same work in a module beside it.
        beside = importlib.import_module(f"{_SHARD}._fsdp_init")
        return any(
            name in inspect.getsource(function) for function in (inspect.unwrap(owner), beside)
        )
    if owner is nn.Module:  # whose methods the compiler replaces
        return hasattr(nn.Module(), name)
    if isinstance(owner, type):
        in_class = inspect.getattr_static(owner, name, None)
        if use == "reset" and isinstance(in_class, property) and in_class.fset is None:
            return False
        return hasattr(owner, name) or name in _set_by_methods(owner)
    return hasattr(owner, name)


@functools.cache
def _set_by_methods(owner: type) -> frozenset[str]:
    """Returns attributes that methods set on `self`, by the source: no instance exists yet."""
    sources: list[str] = []
    for cls in owner.__mro__[:-1]:
        with contextlib.suppress(OSError, TypeError):  # of a class that is not written in Python
            sources.append(inspect.getsource(sys.modules[cls.__module__]))
    return frozenset(re.findall(r"\bself\.(\w+)[^=\n(]*=(?!=)", "\n".join(sources)))
