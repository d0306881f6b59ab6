"""The real checkpoints that Composer's FSDP1 wrote, in `tests/data/fsdp1_checkpoints`."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import composer.core.state as composer_state
import pytest
import torch
import torch.distributed as dist
from composer import Callback, Trainer
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.utils import dist as composer_dist
from torch.utils.data import DataLoader

from tests.support.data_folder import FSDP1_CHECKPOINTS as FOLDER

SAVED_AT, NEXT = 3, 5
"""batches before the save and after it"""

NAMES = (
    "ddp_2r",
    "full_2r",
    "full_actckpt_2r",
    "full_flatparam_2r",
    "full_weights_only_2r",
    "sharded_dtensor_2r",
    "sharded_dtensor_4r",
    "sharded_dtensor_actckpt_2r",
    "sharded_dtensor_dropout_2r",
    "sharded_dtensor_hsdp_2x2",
    "sharded_dtensor_weights_only_2r",
    "sharded_flatparam_2r",
    "sharded_flatparam_shardedtensor_2r",
    "sharded_legacy_optimizer_root_2r",
    "sharded_shardedtensor_2r",
    "sharded_shardedtensor_hsdp_2x2",
    "single_process",
)


def path_of(name: str) -> Path:
    """The `load_path` of a fixture."""
    folder = FOLDER / name / "checkpoint"
    return folder if folder.is_dir() else FOLDER / name / "checkpoint.pt"


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """What the live model and optimizer were when the fixture was saved, and how it went on."""
    return json.loads((FOLDER / name / "expected.json").read_text())


@functools.cache
def tiny_model() -> ModuleType:
    """The model, data and optimizer all fixtures are of."""
    spec = importlib.util.spec_from_file_location("tiny_model", FOLDER / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a whole tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def settings_of(name: str, model: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a Trainer that goes on from a fixture as its own run did."""
    tiny, facts = tiny_model(), expected(name)
    data = tiny.build_dataset()
    settings: dict[str, Any] = {
        "model": model,
        "schedulers": CosineAnnealingWithWarmupScheduler("2ba", "20ba", alpha_f=0.1),
        "train_dataloader": DataLoader(
            data,
            batch_size=tiny.GLOBAL_BATCH // dist.get_world_size(),
            sampler=composer_dist.get_sampler(data, shuffle=False, drop_last=True),
        ),
        "max_duration": f"{SAVED_AT + NEXT}ba",
        "device": "cpu",
        "precision": "fp32",
        "seed": 7,
        "load_path": str(path_of(name)),
        "load_weights_only": facts["weights_only"],
        "progress_bar": False,
    }
    if "optimizers" not in kwargs:
        settings["optimizers"] = tiny.build_optimizer(model, facts["optimizer_groups"])
    return settings | kwargs


class Recorder(Callback):
    """The loss of each batch, averaged over the ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        del logger
        loss = state.loss.detach().double().clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
        self.values.append(loss.item() / dist.get_world_size())


# The checkpoints have a callback of this name, and Composer warns of one they do not have.
Recorder.__qualname__ = "train_and_save.<locals>.Recorder"


def fsdp1_losses(name: str, fsdp1: dict[str, Any] | None = None, **kwargs: Any) -> list[float]:
    """The losses of Composer alone, under FSDP1 on the CPU, from a fixture or `load_path`.

    Collective: yes.
    """
    model = tiny_model().build_model(9, **expected(name)["model_kwargs"])
    fsdp1 = fsdp1 or expected(name)["parallelism_config"]["fsdp"]
    losses = Recorder()
    with fsdp1_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            **settings_of(
                name, model, parallelism_config={"fsdp": fsdp1}, callbacks=[losses], **kwargs
            )
        )
        trainer.fit()
        trainer.close()
    return losses.values


@contextmanager
def fsdp1_on_cpu() -> Iterator[None]:
    """FSDP1 was written for CUDA: it asks for the current device, and takes `.cpu()` for a copy."""
    real = composer_state.StateDictOptions

    def options(**given: Any) -> Any:
        return real(**given | ({"cpu_offload": False} if given["full_state_dict"] else {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(composer_state, "StateDictOptions", options)
        yield
