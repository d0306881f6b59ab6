"""Rows of LLM Foundry: its two scripts, its tasks, its Lion optimizers and its callbacks."""

from __future__ import annotations

import functools
import os
from typing import Any

from composer_fsdp2.patches.engine import Feature, PatchPoint, asked_by_class

__all__ = ["FOUNDRY_ROWS", "GROUPS", "ONE_RANK"]

_UPSTREAM = "https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry"
_PACKAGE = "llmfoundry"
_TRAIN = "command_utils.train"
_ICL = "eval.datasets.in_context_learning_evaluation"
_MONOLITH_SAVER = "callbacks.monolithic_ckpt_callback:MonolithicCheckpointSaver"
_row = functools.partial(PatchPoint, versions="llm-foundry 0.22.0")

ONE_RANK = Feature(
    "LLM Foundry's training on one rank with FSDP2",
    "Leave out parallelism_config.fsdp2, or start two ranks.",
)
"""`foundry.transform` asks for the feature: the Trainer never hears of FSDP2 then"""
GROUPS = Feature("Tensor parallelism in LLM Foundry's training", "Leave out tensor_parallel.")
"""`foundry.transform` asks for the feature: the batch would be divided by the number of ranks"""
_EVALUATION = Feature(
    "LLM Foundry's evaluation with parallelism_config", "Leave out parallelism_config."
)
_ADAPTIVE_LIONS = Feature(
    "The optimizers DecoupledAdaLRLion and DecoupledClipLion",
    "Use decoupled_adamw or decoupled_lionw.",
    asked_by_class(
        f"{_PACKAGE}.optim.adaptive_lion:DecoupledAdaLRLion",
        f"{_PACKAGE}.optim.adaptive_lion:DecoupledClipLion",
    ),
)
_LION = Feature(
    "The optimizer DecoupledLionW of LLM Foundry",
    "Use decoupled_adamw.",
    asked_by_class(f"{_PACKAGE}.optim.lion:DecoupledLionW"),
)
_FREEZING = Feature(
    "LLM Foundry's LayerFreezing",
    "Leave layer_freezing out of the callbacks.",
    asked_by_class(f"{_PACKAGE}.callbacks.resumption_callbacks:LayerFreezing"),
)
_MONOLITH = Feature(
    "LLM Foundry's MonolithicCheckpointSaver",
    "Leave mono_checkpoint_saver out of the callbacks and convert a checkpoint instead.",
    asked_by_class(f"{_PACKAGE}.{_MONOLITH_SAVER}"),
)
_TASKS = Feature("icl_tasks on several nodes", "Leave icl_tasks out.")


def _asks_for_parallelism(cfg: Any, *_args: Any, **_kwargs: Any) -> bool:
    return "parallelism_config" in cfg


FOUNDRY_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_PACKAGE}.{_TRAIN}:dist",
        replacement="trainer.dist_views:SharesAlone",
        feature=ONE_RANK,
        why="is asked for the number of ranks, to train without FSDP when there is one",
        upstream=f"{_UPSTREAM}/command_utils/train.py#L211",
        fingerprints={"416b2649716bb619"},
        source=f"{_PACKAGE}.{_TRAIN}:train",
    ),
    _row(
        target=f"{_PACKAGE}.utils.config_utils:update_config_with_batch_size_info",
        replacement="trainer.loop.groups:show_batch",
        feature=GROUPS,
        why="logs a batch that is multiplied, so that each group of ranks gets its share",
        upstream=f"{_UPSTREAM}/utils/config_utils.py#L465",
        takes={"cfg"},
    ),
    _row(
        target=f"{_PACKAGE}.command_utils.eval:make_dataclass_and_log_config",
        replacement="trainer.config:read_evaluation",
        feature=_EVALUATION,
        why="refuses parallelism_config without asking the transform of any plugin",
        upstream=f"{_UPSTREAM}/utils/config_utils.py#L302",
        takes={"transforms"},
        asks=_asks_for_parallelism,
    ),
    _row(
        target=f"{_PACKAGE}.utils.builders:build_icl_evaluators",
        replacement="trainer.nodes:build_evaluators",
        feature=_TASKS,
        why="has all nodes remove and write the same files of the working directory",
        upstream=f"{_UPSTREAM}/utils/builders.py#L550",
        takes={"destination_dir"},
        # On several nodes.
        asks=lambda *_args, **_kwargs: (
            os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
        ),
    ),
    _row(
        target=f"{_PACKAGE}.{_ICL}:dist",
        replacement="trainer.dist_views:OwnPaths",
        feature=_TASKS,
        why="writes each category to the path of rank 0, which other nodes do not read",
        upstream=f"{_UPSTREAM}/eval/datasets/in_context_learning_evaluation.py#L1543",
        fingerprints={"b34ac58ec37a7c4f"},
        source=f"{_PACKAGE}.{_ICL}:partition_dataset_by_category",
    ),
    _row(
        target=f"{_PACKAGE}.optim.adaptive_lion:dist",
        replacement="trainer.dist_views:ReducedNorms",
        feature=_ADAPTIVE_LIONS,
        why="adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        upstream=f"{_UPSTREAM}/optim/adaptive_lion.py#L1",
        fingerprints={"cfce3c8386498bd1"},
        source=f"{_PACKAGE}.optim.adaptive_lion",
    ),
    _row(
        target=f"{_PACKAGE}.optim.adaptive_lion:DecoupledAdaLRLion.pre_reduce_metrics",
        replacement="trainer.extensions.callbacks:keep_learning_rates",
        feature=_ADAPTIVE_LIONS,
        why="squares the learning rates it reports together with the norms",
        upstream=f"{_UPSTREAM}/optim/adaptive_lion.py#L232",
        fingerprints={"b7f7609859db1354"},
    ),
    _row(
        target=f"{_PACKAGE}.optim.lion:dist",
        replacement="trainer.dist_views:ReducedNorms",
        feature=_LION,
        why="adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        upstream=f"{_UPSTREAM}/optim/lion.py#L1",
        fingerprints={"a547062fb6b0f1a6"},
        source=f"{_PACKAGE}.optim.lion",
    ),
    _row(
        target=f"{_PACKAGE}.callbacks.resumption_callbacks:LayerFreezing.fit_start",
        replacement="trainer.extensions.callbacks:freeze_named_parameters",
        feature=_FREEZING,
        why="does not find a parameter by its plain name under activation checkpointing",
        upstream=f"{_UPSTREAM}/callbacks/resumption_callbacks.py#L74",
        fingerprints={"de185d896618e9c9"},
    ),
    _row(
        target=f"{_PACKAGE}.{_MONOLITH_SAVER}._save_checkpoint",
        replacement="trainer.checkpoint.save:save_monolith",
        feature=_MONOLITH,
        why="gathers whole weights with functions that know FSDP1 alone",
        upstream=f"{_UPSTREAM}/callbacks/monolithic_ckpt_callback.py#L76",
        fingerprints={"214af330304523e7"},
    ),
)
