"""Where LLM Foundry's own code takes FSDP1, or one rank, for granted; see `patches`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import dist, format_name_with_dist_and_time, reproducibility
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.write import together
from composer_fsdp2.trainer.config import TrainerFSDP2Config
from composer_fsdp2.trainer.groups import View
from composer_fsdp2.trainer.load_steps import plain_name
from composer_fsdp2.trainer.save import write_whole_file

__all__ = [
    "ReducedNorms",
    "SharesAlone",
    "freeze_layers",
    "save_monolith",
]


class SharesAlone(View):
    """For the training script, which drops the FSDP settings of a run on one rank."""

    def get_world_size(self) -> int:
        """At least 2 where the caller is about to drop FSDP2's settings, its local variable."""
        block = sys._getframe(1).f_locals.get("fsdp_config")
        keeps = isinstance(block, dict) and block.get("version") == 2
        return max(2, self.wrapped.get_world_size()) if keeps else self.wrapped.get_world_size()


class ReducedNorms(View):
    """For the Lion optimizers, which add up what they take for the norms of local shards."""

    def all_reduce(self, tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
        """Leaves a norm of a DTensor alone: it is that of the whole parameter already."""
        if not isinstance(tensor, DTensor):
            self.wrapped.all_reduce(tensor, reduce_operation=reduce_operation)


def freeze_layers(original: Callable[..., None], callback: Any, state: State, logger: Any) -> None:
    """Lets `LayerFreezing` find parameters by plain names under activation checkpointing."""
    if state.fsdp_config_version != 2:
        original(callback, state, logger)
        return
    wanted = callback.layer_names
    names = {plain_name(name): name for name, _ in state.model.named_parameters()}
    callback.layer_names = {names.get(name, name) for name in wanted}
    try:
        original(callback, state, logger)
    finally:
        callback.layer_names = wanted


def save_monolith(original: Callable[..., None], saver: Any, state: State, logger: Any) -> None:
    """Replaces `MonolithicCheckpointSaver._save_checkpoint`.

    Collective: yes.

    Raises:
        CheckpointError: the file could not be written; what had its name is as it was.
    """
    if not isinstance(state.fsdp_config, TrainerFSDP2Config):
        original(saver, state, logger)
        return
    whole = _whole_state(state, state.fsdp_config, saver.keep_optimizers)
    values = {"state": whole, "rng": reproducibility.get_rng_state()}
    folder, name = (
        format_name_with_dist_and_time(text, state.run_name, state.timestamp)
        for text in (saver.save_dir_format_str, saver.filename_format_str)
    )
    with _local_folder(saver, folder) as local:
        path = Path(local, name)
        first = dist.get_global_rank() == 0
        together(None, lambda: _write(values, path) if first else None, path)
        if first and saver.remote_ud is not None:
            saver.remote_ud.upload_file(
                state=state,
                remote_file_name=str(Path(folder, name)),
                file_path=path,
                overwrite=saver.overwrite,
            )


def _whole_state(state: State, config: TrainerFSDP2Config, keep_optimizers: bool) -> dict[str, Any]:
    """The state with whole weights, which rank 0 alone holds. Collective: yes."""
    values = state.state_dict()
    del values["model"], values["optimizers"]
    kind, config.state_dict_type = config.state_dict_type, "full"
    try:
        values["model"] = state.get_model_state_dict()
        if keep_optimizers:
            values["optimizers"] = state.get_optim_state_dict()
    finally:
        config.state_dict_type = kind
    return values


@contextlib.contextmanager
def _local_folder(saver: Any, folder: str) -> Generator[str]:
    """Where the file is written: a temporary folder when it is to be uploaded."""
    if saver.remote_ud is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield temporary


def _write(values: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole_file(values, path)
