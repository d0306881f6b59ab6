"""Uses of FSDP1 through Composer and other trainers, and what each becomes."""

from __future__ import annotations

from composer_fsdp2.tools.migrate.python_code.row import (
    BLOCK,
    GET_MODEL,
    GET_OPTIMIZER,
    IS_FSDP2,
    SET_OPTIMIZER,
    CodeRow,
    Found,
    Kind,
    Replacement,
    named,
)

__all__ = ["TRAINER_ROWS"]

_PARALLELISM = ("composer.utils", "composer.utils.parallelism")
_FSDP_CONFIG = tuple(f"{home}.FSDPConfig" for home in _PARALLELISM)
_TRAINER = ("composer.Trainer", "composer.trainer.Trainer", "composer.trainer.trainer.Trainer")
_CLIPPING = "composer.algorithms.gradient_clipping"

_FUNCTIONS = (
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
        replacement=Replacement(
            "composer_fsdp2",
            "prepare_fully_shard",
            arguments=(("fsdp_config", "fsdp2_config"),),
        ),
    ),
    named(
        "prepare_fully_shard",
        "apply_fully_shard",
        homes=("composer.distributed.fsdp2",),
        use="composer_fsdp2.prepare_fully_shard(model, optimizers, fsdp2_config, ...)",
        reason="Composer's function takes other arguments, moves no optimizer, refuses tied "
        "weights and leaves the root unsharded",
    ),
    named(
        "is_model_fsdp",
        homes=("composer.utils", "composer.utils.misc"),
        use=f"any({IS_FSDP2} for module in model.modules())",
        reason="knows FSDP1 only, and answers False for a model sharded by FSDP2",
    ),
    named(
        "fsdp_state_dict_type_context",
        homes=("composer.core.state",),
        use=f"{GET_MODEL}, with full_state_dict=True or False",
        reason="sets FSDP1's kind of state dict, which FSDP2 modules do not have",
    ),
    named(
        "get_fsdp_full_optim_state_dict",
        homes=("composer.core.state",),
        use=f"{GET_OPTIMIZER}, with full_state_dict=True",
        reason="calls a method of FSDP1 modules",
    ),
    named(
        "get_fsdp_sharded_optim_state_dict",
        homes=("composer.core.state",),
        use=f"{SET_OPTIMIZER}, with full_state_dict=True",
        reason="calls a method of FSDP1 modules",
    ),
    CodeRow(
        title="apply_gradient_clipping(..., fsdp_enabled=)",
        found=Found.ARGUMENT,
        names=("fsdp_enabled",),
        homes=(
            f"{_CLIPPING}.apply_gradient_clipping",
            f"{_CLIPPING}.gradient_clipping.apply_gradient_clipping",
            "composer.functional.apply_gradient_clipping",
        ),
        kind=Kind.BY_HAND,
        use="fsdp_enabled=False",
        reason="True looks for FSDP1 modules, finds none and clips nothing; False clips "
        "with torch.nn.utils, which handles DTensors",
        harmless=(False,),
        position=3,
    ),
)

_CONFIGURATION = (
    CodeRow(
        title="isinstance(..., FSDPConfig)",
        found=Found.CHECK,
        names=("FSDPConfig",),
        homes=_PARALLELISM,
        kind=Kind.BY_HAND,
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
        kind=Kind.BY_HAND,
        use="take it out",
        reason="not supported under FSDP2 yet, and the conversion refuses it",
        harmless=(False, None),
    ),
    CodeRow(
        title="FSDPConfig(..., ignored_modules=)",
        found=Found.ARGUMENT,
        names=("ignored_modules",),
        homes=_FSDP_CONFIG,
        kind=Kind.BY_HAND,
        use="ignored_params=[<globs of parameter names>] of composer_fsdp2.FSDP2Config",
        reason="names instead of modules; the parameters have to be frozen",
        harmless=(None,),
    ),
    CodeRow(
        title="FSDPConfig(..., process_group=)",
        found=Found.ARGUMENT,
        names=("process_group",),
        homes=_FSDP_CONFIG,
        kind=Kind.BY_HAND,
        use="data_parallel_shard_degree and data_parallel_replicate_degree",
        reason="the mesh is built from degrees, and the conversion refuses a group",
        harmless=(None,),
    ),
    CodeRow(
        title="FSDPConfig(..., auto_wrap=)",
        found=Found.ARGUMENT,
        names=("auto_wrap",),
        homes=_FSDP_CONFIG,
        kind=Kind.BY_HAND,
        use="leave FSDP out of the configuration to train without it",
        reason="FSDP2 always makes units, and the conversion refuses False",
        harmless=(True,),
    ),
    CodeRow(
        title="Trainer(fsdp_config=)",
        found=Found.ARGUMENT,
        names=("fsdp_config",),
        homes=_TRAINER,
        kind=Kind.BY_HAND,
        use=f"{BLOCK}, after composer_fsdp2.install()",
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
        kind=Kind.BY_HAND,
        use=f"{BLOCK}, after composer_fsdp2.install()",
        reason="'fsdp' keeps meaning FSDP1; the table of keys says what each setting becomes",
        harmless=(None,),
    ),
    CodeRow(
        title="ParallelismConfig(fsdp=)",
        found=Found.ARGUMENT,
        names=("fsdp",),
        homes=tuple(f"{home}.ParallelismConfig" for home in _PARALLELISM),
        kind=Kind.BY_HAND,
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
        use=f"{BLOCK} says the same without it",
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
        kind=Kind.BY_HAND,
        use=f"Composer's Trainer with {BLOCK}",
        reason="settings of another trainer; as a file, `composer-fsdp2 migrate CONFIG` "
        "converts them",
        harmless=(None, False, ""),
    ),
    named(
        "FullyShardedDataParallelPlugin",
        homes=("accelerate", "accelerate.utils", "accelerate.utils.dataclasses"),
        use=f"Composer's Trainer with {BLOCK}",
        reason="settings of another trainer; as a file, `composer-fsdp2 migrate CONFIG` "
        "converts them",
    ),
)

_ATTRIBUTES = (
    CodeRow(
        title="state.fsdp_modules",
        found=Found.ATTRIBUTE,
        names=("fsdp_modules", "automicrobatch_fsdp_hook_handles"),
        owners=("state",),
        distinctive=True,
        kind=Kind.BY_HAND,
        use=f"[module for module in model.modules() if {IS_FSDP2}]",
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
        kind=Kind.BY_HAND,
        use="reshard_after_forward and the two degrees, or take it out",
        reason="the configuration of an FSDP2 run does not have this attribute",
    ),
)

TRAINER_ROWS: tuple[CodeRow, ...] = (*_FUNCTIONS, *_CONFIGURATION, *_ATTRIBUTES)
