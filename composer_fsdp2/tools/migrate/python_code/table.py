"""Lists the uses of FSDP1 in Python code and what each becomes; each row has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["CODE_ROWS", "CodeRow", "Found", "Kind"]


class Kind(str, Enum):
    """Says how much work a use is."""

    REPLACE = "replace"
    """one word changes; the report shows the new line of each use"""
    BY_HAND = "by hand"
    NOTHING = "nothing to do"
    """goes on working under FSDP2; listed so that nobody has to wonder"""


class Found(str, Enum):
    """Says how a row's names are recognised."""

    NAME = "name"
    """imported from one of `homes`, under any name in the file"""
    CHECK = "type check"
    """such a name as the class of `isinstance` or `issubclass`"""
    MEMBER = "method"
    """of an object that is known to be one of `homes`, or of the class itself"""
    ATTRIBUTE = "attribute"
    """of any object, with `owners` of one whose last name is among them"""
    ARGUMENT = "argument"
    """of a call of one of `homes`"""
    KEY = "key"
    """of a mapping that is an argument named `owners` of a call of one of `homes`"""
    TEXT = "text"
    """inside a string"""
    VARIABLE = "environment variable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRow:
    """Describes one line of the table."""

    title: str
    found: Found
    names: tuple[str, ...]
    kind: Kind = Kind.BY_HAND
    use: str
    """code to write instead"""
    reason: str
    homes: tuple[str, ...] = ()
    """modules for `NAME`, else qualified names of the owners of the names"""
    owners: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    """literal values of an argument or key that need nothing"""
    position: int | None = None
    """of an argument that may be given without its name"""
    distinctive: bool = False
    """nothing else is called so: worth a 'perhaps' where its origin is not known"""
    strangers: tuple[str, ...] = ()
    """last names of objects that have a method of the same name themselves"""
    replacement: str = ""
    """full name of a function that is called the same way"""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """arguments that the other function calls something else, old and new"""

    def qualified(self) -> list[str]:
        """Returns all full names of the row; the bare names where it has no homes."""
        prefixes = [f"{home}." for home in self.homes] or [""]
        return [prefix + name for prefix in prefixes for name in self.names]


_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_GET_MODEL = f"{_STATE_DICT}.get_model_state_dict(model, options=StateDictOptions(...))"
_GET_OPTIMIZER = (
    f"{_STATE_DICT}.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(...))"
)
_SET_OPTIMIZER = (
    f"{_STATE_DICT}.set_optimizer_state_dict(model, optimizer, state, "
    "options=StateDictOptions(...))"
)
_IS_FSDP2 = "isinstance(module, torch.distributed.fsdp.FSDPModule)"
_BLOCK = "parallelism_config={'fsdp2': {...}}"
_FSDP_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.api",
)
_FSDP = tuple(f"{home}.FullyShardedDataParallel" for home in _FSDP_HOMES)


def _named(*names: str, **fields: Any) -> CodeRow:
    return CodeRow(title=names[0], found=Found.NAME, names=names, **fields)


def _member(*names: str, **fields: Any) -> CodeRow:
    return CodeRow(title=f"FSDP.{names[0]}", found=Found.MEMBER, names=names, homes=_FSDP, **fields)


def _argument(*names: str, **fields: Any) -> CodeRow:
    return CodeRow(
        title=f"FSDP(..., {names[0]}=)", found=Found.ARGUMENT, names=names, homes=_FSDP, **fields
    )


_PARALLELISM = ("composer.utils", "composer.utils.parallelism")
_FSDP_CONFIG = tuple(f"{home}.FSDPConfig" for home in _PARALLELISM)
_TRAINER = ("composer.Trainer", "composer.trainer.Trainer", "composer.trainer.trainer.Trainer")

CODE_ROWS: tuple[CodeRow, ...] = (
    # --- Functions of Composer. ---
    CodeRow(
        title="prepare_fsdp_module",
        found=Found.NAME,
        names=("prepare_fsdp_module",),
        homes=(
            "composer.distributed",
            "composer.distributed.dist_strategy",
            "composer.trainer.dist_strategy",
        ),
        kind=Kind.REPLACE,
        use="composer_fsdp2.prepare_fully_shard(model, optimizers, fsdp2_config, ...)",
        reason="same arguments and return value; an FSDPConfig is converted",
        distinctive=True,
        replacement="composer_fsdp2.prepare_fully_shard",
        keywords={"fsdp_config": "fsdp2_config"},
    ),
    _named(
        "prepare_fully_shard",
        "apply_fully_shard",
        homes=("composer.distributed.fsdp2",),
        use="composer_fsdp2.prepare_fully_shard(model, optimizers, fsdp2_config, ...)",
        reason="Composer's function takes other arguments, moves no optimizer, refuses tied "
        "weights and leaves the root unsharded",
    ),
    _named(
        "is_model_fsdp",
        homes=("composer.utils", "composer.utils.misc"),
        use=f"any({_IS_FSDP2} for module in model.modules())",
        reason="knows FSDP1 only, and answers False for a model sharded by FSDP2",
    ),
    _named(
        "fsdp_state_dict_type_context",
        homes=("composer.core.state",),
        use=f"{_GET_MODEL}, with full_state_dict=True or False",
        reason="sets FSDP1's kind of state dict, which FSDP2 modules do not have",
    ),
    _named(
        "get_fsdp_full_optim_state_dict",
        homes=("composer.core.state",),
        use=f"{_GET_OPTIMIZER}, with full_state_dict=True",
        reason="calls a method of FSDP1 modules",
    ),
    _named(
        "get_fsdp_sharded_optim_state_dict",
        homes=("composer.core.state",),
        use=f"{_SET_OPTIMIZER}, with full_state_dict=True",
        reason="calls a method of FSDP1 modules",
    ),
    CodeRow(
        title="apply_gradient_clipping(..., fsdp_enabled=)",
        found=Found.ARGUMENT,
        names=("fsdp_enabled",),
        homes=(
            "composer.algorithms.gradient_clipping.apply_gradient_clipping",
            "composer.algorithms.gradient_clipping.gradient_clipping.apply_gradient_clipping",
            "composer.functional.apply_gradient_clipping",
        ),
        use="fsdp_enabled=False",
        reason="True looks for FSDP1 modules, finds none and clips nothing; False clips "
        "with torch.nn.utils, which handles DTensors",
        harmless=(False,),
        position=3,
    ),
    # --- Configurations of Composer and other trainers. ---
    CodeRow(
        title="isinstance(..., FSDPConfig)",
        found=Found.CHECK,
        names=("FSDPConfig",),
        homes=_PARALLELISM,
        use="composer.utils.parallelism.FSDP2Config, or state.fsdp_config_version == 2",
        reason="the configuration of an FSDP2 run is a subclass of Composer's FSDP2Config",
    ),
    CodeRow(
        title="FSDPConfig (Composer)",
        found=Found.NAME,
        names=("FSDPConfig",),
        homes=_PARALLELISM,
        kind=Kind.NOTHING,
        use="may stay for prepare_fully_shard; elsewhere composer_fsdp2.FSDP2Config(...)",
        reason="prepare_fully_shard converts it; under parallelism_config['fsdp'] it means FSDP1",
    ),
    CodeRow(
        title="FSDPConfig(..., keep_low_precision_grads=)",
        found=Found.ARGUMENT,
        names=("keep_low_precision_grads", "te_shard_fp8_weight"),
        homes=_FSDP_CONFIG,
        use="take it out",
        reason="not supported under FSDP2 yet, and the conversion refuses it",
        harmless=(False, None),
    ),
    CodeRow(
        title="FSDPConfig(..., ignored_modules=)",
        found=Found.ARGUMENT,
        names=("ignored_modules",),
        homes=_FSDP_CONFIG,
        use="ignored_params=[<globs of parameter names>] of composer_fsdp2.FSDP2Config",
        reason="names instead of modules; the parameters have to be frozen",
        harmless=(None,),
    ),
    CodeRow(
        title="FSDPConfig(..., process_group=)",
        found=Found.ARGUMENT,
        names=("process_group",),
        homes=_FSDP_CONFIG,
        use="data_parallel_shard_degree and data_parallel_replicate_degree",
        reason="the mesh is built from degrees, and the conversion refuses a group",
        harmless=(None,),
    ),
    CodeRow(
        title="FSDPConfig(..., auto_wrap=)",
        found=Found.ARGUMENT,
        names=("auto_wrap",),
        homes=_FSDP_CONFIG,
        use="leave FSDP out of the configuration to train without it",
        reason="FSDP2 always makes units, and the conversion refuses False",
        harmless=(True,),
    ),
    CodeRow(
        title="Trainer(fsdp_config=)",
        found=Found.ARGUMENT,
        names=("fsdp_config",),
        homes=_TRAINER,
        use=f"{_BLOCK}, after composer_fsdp2.install()",
        reason="Composer's Trainer no longer has this argument; the keys are converted by "
        "`composer-fsdp2 migrate CONFIG`",
        harmless=(None,),
    ),
    CodeRow(
        title="parallelism_config={'fsdp': ...}",
        found=Found.KEY,
        names=("fsdp",),
        homes=_TRAINER,
        owners=("parallelism_config",),
        use=f"{_BLOCK}, after composer_fsdp2.install()",
        reason="'fsdp' keeps meaning FSDP1; the table of keys says what each setting becomes",
        harmless=(None,),
    ),
    CodeRow(
        title="ParallelismConfig(fsdp=)",
        found=Found.ARGUMENT,
        names=("fsdp",),
        homes=tuple(f"{home}.ParallelismConfig" for home in _PARALLELISM),
        use="ParallelismConfig(fsdp2=composer_fsdp2.TrainerFSDP2Config(...))",
        reason="'fsdp' keeps meaning FSDP1",
        harmless=(None,),
        position=0,
    ),
    CodeRow(
        title="FSDP_VERSION",
        found=Found.VARIABLE,
        names=("FSDP_VERSION",),
        kind=Kind.NOTHING,
        use=f"{_BLOCK} says the same without it",
        reason="after composer_fsdp2.install(), FSDP_VERSION=2 converts an FSDP1 block, every "
        "setting or an error; Accelerate reads a variable of this name, too",
    ),
    CodeRow(
        title="TrainingArguments(fsdp=)",
        found=Found.ARGUMENT,
        names=("fsdp", "fsdp_config"),
        homes=(
            "transformers.TrainingArguments",
            "transformers.training_args.TrainingArguments",
            "transformers.Seq2SeqTrainingArguments",
        ),
        use=f"Composer's Trainer with {_BLOCK}",
        reason="settings of another trainer; as a file, `composer-fsdp2 migrate CONFIG` "
        "converts them",
        harmless=(None, False, ""),
    ),
    _named(
        "FullyShardedDataParallelPlugin",
        homes=("accelerate", "accelerate.utils", "accelerate.utils.dataclasses"),
        use=f"Composer's Trainer with {_BLOCK}",
        reason="settings of another trainer; as a file, `composer-fsdp2 migrate CONFIG` "
        "converts them",
    ),
    # --- Attributes of Composer. ---
    CodeRow(
        title="state.fsdp_modules",
        found=Found.ATTRIBUTE,
        names=("fsdp_modules", "automicrobatch_fsdp_hook_handles"),
        owners=("state",),
        distinctive=True,
        use=f"[module for module in model.modules() if {_IS_FSDP2}]",
        reason="Composer fills it under FSDP1 only; it stays empty",
    ),
    CodeRow(
        title="state.fsdp_enabled",
        found=Found.ATTRIBUTE,
        names=(
            "fsdp_config_version",
            "fsdp_enabled",
            "fsdp_sharded_state_dict_enabled",
            "fsdp_state_dict_type",
        ),
        owners=("state",),
        distinctive=True,
        kind=Kind.NOTHING,
        use="may stay",
        reason="Composer's State answers for FSDP1 and FSDP2",
    ),
    CodeRow(
        title="fsdp_config.sharding_strategy",
        found=Found.ATTRIBUTE,
        names=(
            "activation_checkpointing_reentrant",
            "auto_wrap",
            "backward_prefetch_limit",
            "forward_prefetch_limit",
            "ignored_modules",
            "keep_low_precision_grads",
            "limit_all_gathers",
            "process_group",
            "sharding_strategy",
            "te_checkpoint_wrapper",
            "te_shard_fp8_weight",
        ),
        owners=("fsdp_config",),
        use="reshard_after_forward and the two degrees, or take it out",
        reason="the configuration of an FSDP2 run does not have this attribute",
    ),
    # --- FSDP1's own names. ---
    CodeRow(
        title="isinstance(..., FSDP)",
        found=Found.CHECK,
        names=("FullyShardedDataParallel",),
        homes=_FSDP_HOMES,
        use=_IS_FSDP2,
        reason="FSDP2 changes the class of a module in place and wraps nothing: the check "
        "would be False. A loop that sends weights of such modules to an engine iterates over "
        "composer_fsdp2.ModelWeights(model) instead",
        distinctive=True,
    ),
    _named(
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
        use="composer_fsdp2.Muon(model, lr=..., adjust_lr_fn='original'), alone: it steps all "
        "other parameters by AdamW",
        reason="on shards its result depends on the number of ranks; ours brings each matrix to "
        "one rank, and Composer takes one optimizer",
    ),
    _named(
        "ShardedGradScaler",
        homes=("torch.distributed.fsdp.sharded_grad_scaler",),
        use="torch.amp.GradScaler(...)",
        reason="for DTensors it finds infinities on all ranks by itself",
        distinctive=True,
    ),
    _named(
        "FlatParameter",
        "FlatParamHandle",
        homes=("torch.distributed.fsdp", "torch.distributed.fsdp._flat_param"),
        use="torch.distributed.tensor.DTensor",
        reason="there are no flat parameters: each parameter is a DTensor of its own",
        distinctive=True,
    ),
    _named(
        "ShardingStrategy",
        homes=_FSDP_HOMES,
        use="reshard_after_forward, data_parallel_shard_degree, data_parallel_replicate_degree",
        reason="FULL_SHARD is auto, SHARD_GRAD_OP false; HYBRID_SHARD is the two degrees, "
        "NO_SHARD shard degree 1",
    ),
    _named(
        "MixedPrecision",
        homes=_FSDP_HOMES,
        use="mixed_precision={'param_dtype': ..., 'reduce_dtype': ..., 'buffer_dtype': ...}",
        reason="without keep_low_precision_grads: gradients have the dtype of the shards",
    ),
    _named(
        "BackwardPrefetch",
        homes=_FSDP_HOMES,
        use="take it out",
        reason="FSDP2 prefetches the next unit of backward by itself",
    ),
    _named(
        "CPUOffload",
        homes=_FSDP_HOMES,
        use="cpu_offload=True",
        reason="or cpu_offload={'pin_memory': False}",
    ),
    _named(
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
        use=f"{_STATE_DICT}.StateDictOptions(full_state_dict=..., cpu_offload=...)",
        reason="full or sharded is an option of get_model_state_dict; local exists no more",
    ),
    _named(
        "ModuleWrapPolicy",
        "transformer_auto_wrap_policy",
        homes=("torch.distributed.fsdp.wrap",),
        use="wrap_policy={'classes': ['<name of the block class>']}",
        reason="blocks are chosen by the name of their class",
    ),
    _named(
        "size_based_auto_wrap_policy",
        homes=("torch.distributed.fsdp.wrap",),
        use="wrap_policy={'min_num_params': ...}",
        reason="blocks are chosen by their number of parameters",
    ),
    _named(
        "CustomPolicy",
        "lambda_auto_wrap_policy",
        "always_wrap_policy",
        "enable_wrap",
        "wrap",
        homes=("torch.distributed.fsdp.wrap",),
        use="fsdp_wrap_fn(module) of the model, or wrap_policy={'classes': ..., 'names': ...}",
        reason="a function of the model decides, module by module, and may return settings",
    ),
    # --- Methods and attributes of FSDP1's modules. ---
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
        use=_GET_MODEL,
        reason="full or sharded is an option of the call, not a mode of the module",
    ),
    _member(
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "optim_state_dict",
        "rekey_optim_state_dict",
        use=_GET_OPTIMIZER,
        reason="one function for full and sharded states, with names of parameters as keys",
    ),
    _member(
        "optim_state_dict_to_load",
        "scatter_full_optim_state_dict",
        "shard_full_optim_state_dict",
        "flatten_sharded_optim_state_dict",
        use=_SET_OPTIMIZER,
        reason="it reshards and loads in one call",
        distinctive=True,
    ),
    _member(
        "fsdp_modules",
        use=f"[module for module in model.modules() if {_IS_FSDP2}]",
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
        use="the module itself",
        reason="FSDP2 wraps nothing",
        distinctive=True,
    ),
    CodeRow(
        title="'_fsdp_wrapped_module' in a string",
        found=Found.TEXT,
        names=("_fsdp_wrapped_module",),
        use="take it out",
        reason="names of parameters are the same before and after sharding",
    ),
    CodeRow(
        title="_flat_param",
        found=Found.ATTRIBUTE,
        names=("_flat_param",),
        use="module.parameters()",
        reason="there are no flat parameters: each parameter is a DTensor of its own",
        distinctive=True,
    ),
    CodeRow(
        title="'_flat_param' in a string",
        found=Found.TEXT,
        names=("_flat_param",),
        use="the names of model.named_parameters()",
        reason="there are no flat parameters: each keeps its own name",
    ),
    # --- Arguments of FSDP1's class. ---
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
    CodeRow(
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
        use="public functions of torch.distributed.fsdp and methods of its FSDPModule",
        reason="inner workings of FSDP1, which an FSDP2 model does not run",
    ),
)
"""Holds all uses of FSDP1 that are known; the first row that fits is the one reported."""
