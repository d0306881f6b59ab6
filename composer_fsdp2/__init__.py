"""PyTorch FSDP2 for MosaicML Composer and LLM Foundry. Importing this has no side effect."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_fsdp2.blocks.activation import (
        ActivationPlan,
        ActivationSpec,
        apply_activation,
        plan_activation,
    )
    from composer_fsdp2.config.schema import FSDP2Config, parse_config
    from composer_fsdp2.errors import (
        CheckpointError,
        ConfigError,
        PatchError,
        PlanError,
    )
    from composer_fsdp2.optim.muon.optimizer import Muon
    from composer_fsdp2.optim.norms import clip_grad_norm_
    from composer_fsdp2.parallel.sequence.attention import sequence_attention
    from composer_fsdp2.patches import install, installed, uninstall
    from composer_fsdp2.plan.module_tree import tied_groups
    from composer_fsdp2.plan.planner import plan_wrapping
    from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
    from composer_fsdp2.prepare.model import prepare_fully_shard
    from composer_fsdp2.prepare.settings import TrainerFSDP2Config
    from composer_fsdp2.shard.apply import apply_plan
    from composer_fsdp2.shard.summon import full_tensor, summon_full_params
    from composer_fsdp2.trainer.extensions.monitor import FSDP2Monitor
    from composer_fsdp2.trainer.extensions.weights_out import ModelWeights

__version__ = "0.3.0"

_HOMES = {
    "ActivationPlan": "blocks.activation",
    "ActivationSpec": "config.blocks",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "FSDP2Config": "config.schema",
    "FSDP2Monitor": "trainer.extensions.monitor",
    "ModelWeights": "trainer.extensions.weights_out",
    "Muon": "optim.muon.optimizer",
    "PatchError": "errors",
    "PlanError": "errors",
    "ShardUnit": "plan.wrap_plan",
    "TrainerFSDP2Config": "prepare.settings",
    "WrapPlan": "plan.wrap_plan",
    "apply_activation": "blocks.activation",
    "apply_plan": "shard.apply",
    "clip_grad_norm_": "optim.norms",
    "full_tensor": "shard.summon",
    "install": "patches",
    "installed": "patches",
    "parse_config": "config.schema",
    "plan_activation": "blocks.activation",
    "plan_wrapping": "plan.planner",
    "prepare_fully_shard": "prepare.model",
    "sequence_attention": "parallel.sequence.attention",
    "summon_full_params": "shard.summon",
    "tied_groups": "plan.module_tree",
    "uninstall": "patches",
}

__all__ = [
    "ActivationPlan",
    "ActivationSpec",
    "CheckpointError",
    "ConfigError",
    "FSDP2Config",
    "FSDP2Monitor",
    "ModelWeights",
    "Muon",
    "PatchError",
    "PlanError",
    "ShardUnit",
    "TrainerFSDP2Config",
    "WrapPlan",
    "__version__",
    "apply_activation",
    "apply_plan",
    "clip_grad_norm_",
    "full_tensor",
    "install",
    "installed",
    "parse_config",
    "plan_activation",
    "plan_wrapping",
    "prepare_fully_shard",
    "sequence_attention",
    "summon_full_params",
    "tied_groups",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: torch and Composer take seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
