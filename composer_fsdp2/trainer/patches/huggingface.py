"""Rows of transformers, PEFT and torch: functions that get a sharded model from their user."""

from __future__ import annotations

from typing import Any

from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint

__all__ = ["HUGGINGFACE_ROWS"]

_INSTEAD = "Convert a checkpoint with `composer-fsdp2 checkpoint convert RUN FOLDER --to hf`."

_SAVE = Feature("save_pretrained of a sharded model", _INSTEAD)
_SAVE_ADAPTERS = Feature("save_pretrained of a sharded PEFT model", _INSTEAD)
_GENERATE = Feature(
    "generate of a sharded model", "Generate from a saved model that is not sharded."
)
_SUMMON = Feature(
    "FullyShardedDataParallel.summon_full_params of a sharded model",
    "Use composer_fsdp2.summon_full_params.",
)


def _holds_shards(model: Any, *_args: Any, **_kwargs: Any) -> bool:
    from composer_fsdp2.shard.summon import holds_shards

    return holds_shards(model)


HUGGINGFACE_ROWS: tuple[PatchPoint, ...] = (
    PatchPoint(
        target="transformers.modeling_utils:PreTrainedModel.save_pretrained",
        replacement="trainer.hugging_face:save_pretrained",
        feature=_SAVE,
        why="crashes on shards, and writes the name of the class FSDP2 gave the model",
        upstream="https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L3199",
        takes={"save_directory", "is_main_process", "state_dict"},
        versions="transformers 4.51.3",
        refused=_holds_shards,
    ),
    PatchPoint(
        target="peft.peft_model:PeftModel.save_pretrained",
        replacement="trainer.hugging_face:save_pretrained",
        feature=_SAVE_ADAPTERS,
        why="crashes on adapters that are shards, on the rank that writes them",
        upstream="https://github.com/huggingface/peft/blob/v0.16.0/src/peft/peft_model.py#L178",
        takes={"save_directory", "is_main_process"},
        versions="peft 0.16.0",
        refused=_holds_shards,
    ),
    PatchPoint(
        target="transformers.generation.utils:GenerationMixin.generate",
        replacement="trainer.hugging_face:generate",
        feature=_GENERATE,
        why="repeats a step that does not fit any more when other ranks generate for longer",
        upstream="https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/generation/utils.py#L2112",
        takes={"synced_gpus"},
        versions="transformers 4.51.3",
        refused=_holds_shards,
    ),
    PatchPoint(
        target="torch.distributed.fsdp:FullyShardedDataParallel.summon_full_params",
        replacement="trainer.hugging_face:summon_shards",
        feature=_SUMMON,
        why="knows only FSDP1 and shows the shards of FSDP2 without a word",
        upstream="https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/fully_sharded_data_parallel.py#L861",
        takes={"recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"},
        versions="torch 2.7.0 to 2.15.0",
        refused=_holds_shards,
    ),
)
