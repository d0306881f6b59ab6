"""Rows of LLM Foundry: its two scripts, its Lion optimizers and its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint, asked_by_class, imported

__all__ = ["FOUNDRY_ROWS", "GROUPS", "ONE_RANK", "TRANSFORM"]

TRANSFORM = "composer_fsdp2"
"""the name of `foundry.transform` in LLM Foundry's registry"""

_VERSIONS = "llm-foundry 0.22.0"
_UPSTREAM = "https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry"
_PACKAGE = "llmfoundry"
_TRAIN = "command_utils.train"
_OURS = "composer_fsdp2.trainer.foundry_callbacks"

ONE_RANK = Feature(
    "LLM Foundry's training on one rank with FSDP2",
    "Leave out parallelism_config.fsdp2, or start two ranks.",
)
"""`foundry.transform` asks for it: the Trainer never hears of FSDP2 then"""
GROUPS = Feature("Tensor parallelism in LLM Foundry's training", "Leave out tensor_parallel.")
"""`foundry.transform` asks for it: the batch would be divided by the number of ranks"""
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
    asked_by_class(f"{_PACKAGE}.callbacks.monolithic_ckpt_callback:MonolithicCheckpointSaver"),
)


def _read_evaluation(
    original: Any,
    cfg: Any,
    dataclass_constructor: Any,
    dataclass_fields: Any,
    transforms: Any = None,
    icl_tasks_required: bool = False,
) -> Any:
    if _asks_for_parallelism(cfg):
        transforms = [TRANSFORM, *(transforms or ())]
    return original(cfg, dataclass_constructor, dataclass_fields, transforms, icl_tasks_required)


def _asks_for_parallelism(cfg: Any, *_args: Any, **_kwargs: Any) -> bool:
    return "parallelism_config" in cfg


def _keep_learning_rates(original: Any, optimizer: Any, optimizer_metrics: Any) -> Any:
    from torch.distributed.tensor import DTensor

    steps = (param for group in optimizer.param_groups for param in group["params"])
    if not any(isinstance(param, DTensor) for param in steps):
        return original(optimizer, optimizer_metrics)
    rates = {k: v for k, v in optimizer_metrics.items() if k.startswith("layerwise_lr")}
    return {**original(optimizer, optimizer_metrics), **rates}


def _row(
    feature: Feature,
    target: str,
    replacement: Callable[..., Any],
    fingerprint: str,
    why: str,
    lines: str,
    source: str = "",
) -> PatchPoint:
    return PatchPoint(
        target=f"{_PACKAGE}.{target}",
        replacement=replacement,
        feature=feature,
        why=why,
        upstream=f"{_UPSTREAM}/{lines}",
        fingerprints=frozenset({fingerprint}),
        versions=_VERSIONS,
        source=source and f"{_PACKAGE}.{source}",
    )


FOUNDRY_ROWS: tuple[PatchPoint, ...] = (
    _row(
        ONE_RANK,
        f"{_TRAIN}:dist",
        imported(_OURS, "SharesAlone"),
        "416b2649716bb619",
        "is asked for the number of ranks, to train without FSDP when there is one",
        "command_utils/train.py#L211",
        source=f"{_TRAIN}:train",
    ),
    PatchPoint(
        target=f"{_PACKAGE}.utils.config_utils:update_config_with_batch_size_info",
        replacement=imported("composer_fsdp2.trainer.groups", "show_batch"),
        feature=GROUPS,
        why="logs a batch that is multiplied, so that each group of ranks gets its share",
        upstream=f"{_UPSTREAM}/utils/config_utils.py#L461",
        takes=frozenset({"cfg"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_PACKAGE}.command_utils.eval:make_dataclass_and_log_config",
        replacement=_read_evaluation,
        feature=_EVALUATION,
        why="refuses parallelism_config without asking the transform of any plugin",
        upstream=f"{_UPSTREAM}/utils/config_utils.py#L302",
        takes=frozenset({"transforms"}),
        versions=_VERSIONS,
        refused=_asks_for_parallelism,
    ),
    _row(
        _ADAPTIVE_LIONS,
        "optim.adaptive_lion:dist",
        imported(_OURS, "ReducedNorms"),
        "cfce3c8386498bd1",
        "adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        "optim/adaptive_lion.py#L1",
        source="optim.adaptive_lion",
    ),
    _row(
        _ADAPTIVE_LIONS,
        "optim.adaptive_lion:DecoupledAdaLRLion.pre_reduce_metrics",
        _keep_learning_rates,
        "b7f7609859db1354",
        "squares the learning rates it reports together with the norms",
        "optim/adaptive_lion.py#L232",
    ),
    _row(
        _LION,
        "optim.lion:dist",
        imported(_OURS, "ReducedNorms"),
        "a547062fb6b0f1a6",
        "adds up the ranks' norms, which of a DTensor are whole and no plain tensors",
        "optim/lion.py#L1",
        source="optim.lion",
    ),
    _row(
        _FREEZING,
        "callbacks.resumption_callbacks:LayerFreezing.fit_start",
        imported(_OURS, "freeze_layers"),
        "de185d896618e9c9",
        "does not find a parameter by its plain name under activation checkpointing",
        "callbacks/resumption_callbacks.py#L74",
    ),
    _row(
        _MONOLITH,
        "callbacks.monolithic_ckpt_callback:MonolithicCheckpointSaver._save_checkpoint",
        imported(_OURS, "save_monolith"),
        "214af330304523e7",
        "gathers whole weights with functions that know FSDP1 alone",
        "callbacks/monolithic_ckpt_callback.py#L76",
    ),
)
