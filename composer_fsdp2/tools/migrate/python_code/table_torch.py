"""Uses of torch's own FSDP1, and what each becomes."""

from __future__ import annotations

from composer_fsdp2.tools.migrate.python_code.row import (
    GET_MODEL,
    GET_OPTIMIZER,
    IS_FSDP2,
    SET_OPTIMIZER,
    STATE_DICT,
    CodeRow,
    Found,
    Kind,
    named,
)

__all__ = ["TORCH_ROWS"]

_FSDP_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.api",
)
_FSDP = tuple(f"{home}.FullyShardedDataParallel" for home in _FSDP_HOMES)


def _member(
    *names: str,
    use: str,
    reason: str,
    distinctive: bool = False,
    strangers: tuple[str, ...] = (),
) -> CodeRow:
    return CodeRow(
        title=f"FSDP.{names[0]}",
        found=Found.MEMBER,
        names=names,
        homes=_FSDP,
        kind=Kind.BY_HAND,
        use=use,
        reason=reason,
        distinctive=distinctive,
        strangers=strangers,
    )


def _argument(*names: str, use: str, reason: str, distinctive: bool = False) -> CodeRow:
    return CodeRow(
        title=f"FSDP(..., {names[0]}=)",
        found=Found.ARGUMENT,
        names=names,
        homes=_FSDP,
        kind=Kind.BY_HAND,
        use=use,
        reason=reason,
        distinctive=distinctive,
    )


_CLASSES = (
    CodeRow(
        title="isinstance(..., FSDP)",
        found=Found.CHECK,
        names=("FullyShardedDataParallel",),
        homes=_FSDP_HOMES,
        kind=Kind.BY_HAND,
        use=IS_FSDP2,
        reason="FSDP2 changes the class of a module in place and wraps nothing: the check "
        "would be False",
        distinctive=True,
    ),
    named(
        "FullyShardedDataParallel",
        homes=_FSDP_HOMES,
        use="where it wraps: composer_fsdp2.prepare_fully_shard(model, optimizer, {...})",
        reason="shards the model in place and moves the optimizer; there is no wrapper object, "
        "so the model keeps its name",
        distinctive=True,
    ),
    CodeRow(
        title="torch.optim.Muon",
        found=Found.NAME,
        names=("Muon",),
        homes=("torch.optim", "dion"),
        kind=Kind.BY_HAND,
        use="composer_fsdp2.Muon(model, lr=..., adjust_lr_fn='original'), alone: it steps all "
        "other parameters by AdamW",
        reason="on shards its result depends on the number of ranks; ours brings each matrix to "
        "one rank, and Composer takes one optimizer",
    ),
    named(
        "ShardedGradScaler",
        homes=("torch.distributed.fsdp.sharded_grad_scaler",),
        use="torch.amp.GradScaler(...)",
        reason="for DTensors it finds infinities on all ranks by itself",
        distinctive=True,
    ),
    named(
        "FlatParameter",
        "FlatParamHandle",
        homes=("torch.distributed.fsdp", "torch.distributed.fsdp._flat_param"),
        use="torch.distributed.tensor.DTensor",
        reason="there are no flat parameters: each parameter is a DTensor of its own",
        distinctive=True,
    ),
    named(
        "ShardingStrategy",
        homes=_FSDP_HOMES,
        use="reshard_after_forward, data_parallel_shard_degree, data_parallel_replicate_degree",
        reason="FULL_SHARD is auto, SHARD_GRAD_OP false; HYBRID_SHARD is the two degrees, "
        "NO_SHARD shard degree 1",
    ),
    named(
        "MixedPrecision",
        homes=_FSDP_HOMES,
        use="mixed_precision={'param_dtype': ..., 'reduce_dtype': ..., 'buffer_dtype': ...}",
        reason="without keep_low_precision_grads: gradients have the dtype of the shards",
    ),
    named(
        "BackwardPrefetch",
        homes=_FSDP_HOMES,
        use="take it out",
        reason="FSDP2 prefetches the next unit of backward by itself",
    ),
    named(
        "CPUOffload",
        homes=_FSDP_HOMES,
        use="cpu_offload=True",
        reason="or cpu_offload={'pin_memory': False}",
    ),
    named(
        "StateDictType",
        "StateDictConfig",
        "FullStateDictConfig",
        "LocalStateDictConfig",
        "ShardedStateDictConfig",
        "OptimStateDictConfig",
        "FullOptimStateDictConfig",
        "LocalOptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "StateDictSettings",
        "OptimStateKeyType",
        homes=_FSDP_HOMES,
        use=f"{STATE_DICT}.StateDictOptions(full_state_dict=..., cpu_offload=...)",
        reason="full or sharded is an option of get_model_state_dict; local exists no more",
    ),
    named(
        "ModuleWrapPolicy",
        "transformer_auto_wrap_policy",
        homes=("torch.distributed.fsdp.wrap",),
        use="wrap_policy={'classes': ['<name of the block class>']}",
        reason="blocks are chosen by the name of their class",
    ),
    named(
        "size_based_auto_wrap_policy",
        homes=("torch.distributed.fsdp.wrap",),
        use="wrap_policy={'min_num_params': ...}",
        reason="blocks are chosen by their number of parameters",
    ),
    named(
        "CustomPolicy",
        "lambda_auto_wrap_policy",
        "always_wrap_policy",
        "enable_wrap",
        "wrap",
        homes=("torch.distributed.fsdp.wrap",),
        use="fsdp_wrap_fn(module) of the model, or wrap_policy={'classes': ..., 'names': ...}",
        reason="a function of the model decides, module by module, and may return settings",
    ),
)

_MEMBERS = (
    _member(
        "summon_full_params",
        use="composer_fsdp2.summon_full_params(model, ...), with the same arguments",
        reason="torch's own is for FSDP1 only; after install() a call of it reaches this function",
        distinctive=True,
    ),
    _member(
        "state_dict_type",
        "set_state_dict_type",
        "get_state_dict_type",
        use=GET_MODEL,
        reason="full or sharded is an option of the call, not a mode of the module",
    ),
    _member(
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "optim_state_dict",
        "rekey_optim_state_dict",
        use=GET_OPTIMIZER,
        reason="one function for full and sharded states, with names of parameters as keys",
    ),
    _member(
        "optim_state_dict_to_load",
        "scatter_full_optim_state_dict",
        "shard_full_optim_state_dict",
        "flatten_sharded_optim_state_dict",
        use=SET_OPTIMIZER,
        reason="it reshards and loads in one call",
        distinctive=True,
    ),
    _member(
        "fsdp_modules",
        use=f"[module for module in model.modules() if {IS_FSDP2}]",
        reason="FSDP2 has no such list",
    ),
    _member(
        "clip_grad_norm_",
        use="composer_fsdp2.clip_grad_norm_(model.parameters(), max_norm)",
        reason="the norm over all ranks in one reduction, as a plain tensor; torch's own function "
        "is right too, and .full_tensor() of what it returns is the number",
        distinctive=True,
        strangers=("accelerator", "clip_grad", "fabric", "utils"),
    ),
    _member(
        "no_sync",
        use="model.set_requires_gradient_sync(False), and True before the last microbatch",
        reason="a switch of the module instead of a context; set it on each unit that has no "
        "unit above it",
    ),
    _member(
        "register_comm_hook",
        use="model.set_all_reduce_hook(hook)",
        reason="the hook gets the reduced gradient of a unit; the reduction stays torch's",
    ),
    _member(
        "check_is_root",
        use="take it out",
        reason="FSDP2 finds its roots in the first forward",
    ),
    _member(
        "module",
        use="the model itself",
        reason="FSDP2 wraps nothing",
    ),
    CodeRow(
        title="_fsdp_wrapped_module",
        found=Found.ATTRIBUTE,
        names=("_fsdp_wrapped_module",),
        kind=Kind.BY_HAND,
        use="the module itself",
        reason="FSDP2 wraps nothing",
        distinctive=True,
    ),
    CodeRow(
        title="'_fsdp_wrapped_module' in a string",
        found=Found.TEXT,
        names=("_fsdp_wrapped_module",),
        kind=Kind.BY_HAND,
        use="take it out",
        reason="names of parameters are the same before and after sharding",
    ),
    CodeRow(
        title="_flat_param",
        found=Found.ATTRIBUTE,
        names=("_flat_param",),
        kind=Kind.BY_HAND,
        use="module.parameters()",
        reason="there are no flat parameters: each parameter is a DTensor of its own",
        distinctive=True,
    ),
    CodeRow(
        title="'_flat_param' in a string",
        found=Found.TEXT,
        names=("_flat_param",),
        kind=Kind.BY_HAND,
        use="the names of model.named_parameters()",
        reason="there are no flat parameters: each keeps its own name",
    ),
)

_ARGUMENTS = (
    _argument(
        "sharding_strategy",
        use="reshard_after_forward, data_parallel_shard_degree, data_parallel_replicate_degree",
        reason="FULL_SHARD is auto, SHARD_GRAD_OP false; HYBRID_SHARD is the two degrees, "
        "NO_SHARD shard degree 1",
    ),
    _argument(
        "process_group",
        "device_mesh",
        use="data_parallel_shard_degree and data_parallel_replicate_degree",
        reason="the mesh is built from degrees",
    ),
    _argument(
        "cpu_offload",
        use="cpu_offload=True",
        reason="or cpu_offload={'pin_memory': False}",
    ),
    _argument(
        "auto_wrap_policy",
        use="wrap_policy={'classes': [...], 'names': [...], 'min_num_params': ...}",
        reason="or fsdp_wrap_fn(module) of the model",
    ),
    _argument(
        "mixed_precision",
        use="mixed_precision={'param_dtype': ..., 'reduce_dtype': ..., 'buffer_dtype': ...}",
        reason="without keep_low_precision_grads: gradients have the dtype of the shards",
    ),
    _argument(
        "ignored_modules",
        "ignored_states",
        use="ignored_params=[<globs of parameter names>]",
        reason="names instead of objects; the parameters have to be frozen",
    ),
    _argument(
        "param_init_fn",
        use="param_init_fn(module) of the model, or reset_parameters() of its modules",
        reason="a model on meta is initialised by its own methods",
    ),
    _argument(
        "use_orig_params",
        use="take it out",
        reason="always: there are no flat parameters",
        distinctive=True,
    ),
    _argument(
        "sync_module_states",
        use="take it out",
        reason="always: every rank starts from rank 0's weights",
    ),
    _argument(
        "backward_prefetch",
        "forward_prefetch",
        "limit_all_gathers",
        use="take it out",
        reason="FSDP2 prefetches and frees by itself",
    ),
    _argument(
        "device_id",
        use="device='gpu' or 'cpu' of prepare_fully_shard",
        reason="the current accelerator by default",
    ),
)

_PRIVATE = CodeRow(
    title="private module of FSDP1",
    found=Found.NAME,
    names=(
        "_common_utils",
        "_debug_utils",
        "_dynamo_utils",
        "_exec_order_utils",
        "_flat_param",
        "_fsdp_extensions",
        "_init_utils",
        "_limiter_utils",
        "_optim_utils",
        "_runtime_utils",
        "_state_dict_utils",
        "_trace_utils",
        "_traversal_utils",
        "_unshard_param_utils",
        "_wrap_utils",
    ),
    homes=("torch.distributed.fsdp",),
    kind=Kind.BY_HAND,
    use="public functions of torch.distributed.fsdp and methods of its FSDPModule",
    reason="inner workings of FSDP1, which an FSDP2 model does not run",
)

TORCH_ROWS: tuple[CodeRow, ...] = (*_CLASSES, *_MEMBERS, *_ARGUMENTS, _PRIVATE)
