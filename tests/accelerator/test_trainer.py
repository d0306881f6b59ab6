"""Composer's Trainer on the pretend accelerator: numbers, memory that runs out, checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from composer_fsdp2 import installed
from tests.accelerator import device
from tests.accelerator.device import BACKEND
from tests.accelerator.training import Pretend
from tests.support.models import TinyComposer
from tests.support.parity import OPTIMIZERS
from tests.support.training import (
    built,
    largest_difference,
    samples_of,
    train_alone,
    trainer_for,
    weights,
)

# Torch 2.7 says so of its own offloading, on any device.
pytestmark = pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shards on the CPU": {"cpu_offload": True},
    "state on the CPU": {"optimizer_state": {"device": "cpu"}},
}
MEBIBYTE = 2**20


class Hungry(TinyComposer):
    """Takes three MiB a sample and as much again in the backward."""

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        room = torch.zeros(len(outputs), MEBIBYTE // 4, device=outputs.device)
        unused = (outputs[:, 0, :1] * room).square().sum()
        return super().loss(outputs, batch, *args) + unused


def trained(
    fsdp2: dict[str, Any], steps: int = 3, kind: type[TinyComposer] = TinyComposer, **kwargs: Any
) -> Any:
    """A Trainer after its run; all ranks together see 16 samples a step."""
    model = built(kind)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with installed():
        trainer = trainer_for(
            model,
            optimizer,
            samples_of(steps, 16),
            fsdp2,
            batch=16 // dist.get_world_size(),
            device=Pretend(),
            **kwargs,
        )
        trainer.fit()
        trainer.close()
    return trainer


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        *(pytest.param(n, 1, marks=pytest.mark.world_size(2, backend=BACKEND)) for n in SETTINGS),
        pytest.param("plain", 2, marks=pytest.mark.world_size(4, backend=BACKEND)),
    ],
)
def test_trains_as_an_unsharded_copy(name: str, replicas: int):
    oracle = built(TinyComposer)
    train_alone(oracle, OPTIMIZERS["adamw"](oracle.parameters()), samples_of(3, 16), 16)
    fsdp2 = SETTINGS[name] | ({"data_parallel_replicate_degree": 2} if replicas > 1 else {})
    trainer = trained(fsdp2, device_train_microbatch_size=2)
    assert largest_difference(trainer.state.model, oracle) <= 1e-6


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
@pytest.mark.parametrize("name", SETTINGS)
def test_memory_that_runs_out_on_one_rank_halves_the_microbatch(name: str):
    expected = weights(
        trained(SETTINGS[name], kind=Hungry, device_train_microbatch_size=2).state.model
    )
    is_small = dist.get_rank() == 1
    with device.limited_memory(15 * MEBIBYTE) if is_small else contextlib.nullcontext():
        trainer = trained(SETTINGS[name], kind=Hungry, device_train_microbatch_size="auto")
    assert trainer.state.device_train_microbatch_size == 2
    found = weights(trainer.state.model)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "saving", [{"state_dict_type": "sharded"}, {"state_dict_type": "full"}, {"async_save": True}]
)
def test_a_run_that_resumes_is_the_whole_run(saving: dict[str, Any], name: str, tmp_path: Path):
    def run(folder: str, until: int, **kwargs: Any) -> dict[str, torch.Tensor]:
        trainer = trained(
            {**SETTINGS[name], **saving},
            steps=4,
            max_duration=f"{until}ba",
            save_folder=str(tmp_path / folder),
            save_interval="2ba",
            **kwargs,
        )
        return weights(trainer.state.model)

    whole = run("whole", 4)
    run("first", 2)
    is_full = saving.get("state_dict_type") == "full"
    saved = tmp_path / "first" / ("ep0-ba2-rank0.pt" if is_full else "ep0-ba2")
    assert largest_difference(run("second", 4, load_path=str(saved)), whole) == 0.0
