"""Where LLM Foundry's own code takes FSDP1, or one rank, for granted; see `patches`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import dist, format_name_with_dist_and_time, reproducibility
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.write import together
from composer_fsdp2.text import plain_name
from composer_fsdp2.trainer.config import TrainerFSDP2Config
from composer_fsdp2.trainer.groups import View
from composer_fsdp2.trainer.override_attribute import override_attribute
from composer_fsdp2.trainer.save import write_whole_file

__all__ = [
    "TRANSFORM",
    "ReducedNorms",
    "SharesAlone",
    "freeze_layers",
    "keep_learning_rates",
    "read_evaluation",
    "save_monolith",
]

TRANSFORM = "composer_fsdp2"
"""the name of `foundry.transform` in LLM Foundry's registry"""


def read_evaluation(
    original: Callable[..., Any],
    cfg: Any,
    dataclass_constructor: Any,
    dataclass_fields: Any,
    transforms: Any = None,
    icl_tasks_required: bool = False,
) -> Any:
    """Replaces `make_dataclass_and_log_config` of the evaluation script."""
    transforms = [TRANSFORM, *(transforms or ())]
    return original(cfg, dataclass_constructor, dataclass_fields, transforms, icl_tasks_required)


class SharesAlone(View):
    """For the training script, which drops the FSDP settings of a run on one rank."""

    keeps = False
    """whether the settings of the run that starts next are FSDP2's"""

    def get_world_size(self) -> int:
        """Returns at least 2, once for each run that keeps its settings."""
        ranks, keeps, self.keeps = self.wrapped.get_world_size(), self.keeps, False
        return max(2, ranks) if keeps else ranks


class ReducedNorms(View):
    """For the Lion optimizers, which add up what they take for the norms of local shards."""

    def all_reduce(self, tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
        """Leaves a norm of a DTensor alone: it is that of the whole parameter already."""
        if not isinstance(tensor, DTensor):
            self.wrapped.all_reduce(tensor, reduce_operation=reduce_operation)


def keep_learning_rates(
    original: Callable[..., dict[str, Any]], optimizer: Any, optimizer_metrics: dict[str, Any]
) -> dict[str, Any]:
    """Replaces `DecoupledAdaLRLion.pre_reduce_metrics`: learning rates are no norms."""
    rates = {k: v for k, v in optimizer_metrics.items() if k.startswith("layerwise_lr")}
    found = original(optimizer, optimizer_metrics)  # changes what it is given
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {**found, **rates} if any(isinstance(param, DTensor) for param in params) else found


def freeze_layers(original: Callable[..., None], callback: Any, state: State, logger: Any) -> None:
    """Lets `LayerFreezing` find parameters by plain names under activation checkpointing."""
    if state.fsdp_config_version != 2:
        original(callback, state, logger)
        return
    names = {plain_name(name): name for name, _ in state.model.named_parameters()}
    found = {names.get(name, name) for name in callback.layer_names}
    with override_attribute(callback, "layer_names", found):
        original(callback, state, logger)


def save_monolith(original: Callable[..., None], saver: Any, state: State, logger: Any) -> None:
    """Replaces `MonolithicCheckpointSaver._save_checkpoint`.

    Collective: yes.

    Raises:
        CheckpointError: the file could not be written; what had its name is as it was.
    """
    if not isinstance(state.fsdp_config, TrainerFSDP2Config):
        original(saver, state, logger)
        return
    values = state.state_dict()
    del values["model"], values["optimizers"]
    # Whole weights, which rank 0 alone holds.
    with override_attribute(state.fsdp_config, "state_dict_type", "full"):
        values["model"] = state.get_model_state_dict()
        if saver.keep_optimizers:
            values["optimizers"] = state.get_optim_state_dict()
    whole = {"state": values, "rng": reproducibility.get_rng_state()}
    folder, name = (
        format_name_with_dist_and_time(text, state.run_name, state.timestamp)
        for text in (saver.save_dir_format_str, saver.filename_format_str)
    )
    with contextlib.ExitStack() as stack:
        uploads = saver.remote_ud is not None
        local = stack.enter_context(tempfile.TemporaryDirectory()) if uploads else folder
        path, first = Path(local, name), dist.get_global_rank() == 0

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole_file(whole, path)

        together(None, write, path, when=first)
        if first and uploads:
            saver.remote_ud.upload_file(
                state=state,
                remote_file_name=str(Path(folder, name)),
                file_path=path,
                overwrite=saver.overwrite,
            )
