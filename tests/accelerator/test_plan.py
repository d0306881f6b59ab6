"""The peak of a step as `plan` predicts it for a GPU, against what the device's memory counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.step.run import run_of
from tests.accelerator.device import BACKEND, NAME, held
from tests.accelerator.training import Peak, Pretend
from tests.support.plan_layouts import Layout, mpt, predicted, step, work_of

LENGTH = 256
PRELOAD = ["tests.support.plan_layouts"]


def layout(recomputed: bool) -> Layout:
    """An MPT whose norms and softmax compute in fp32 on GPUs, and in bf16 on CPUs."""
    config = {"activation_checkpointing": recomputed}
    sizes = {"d_model": 32, "n_layers": 3, "vocab_size": 64, "max_seq_len": LENGTH}
    build = functools.partial(mpt, norm_type="layernorm", **sizes)
    return Layout(1, config, build=build, precision="amp_bf16", length=LENGTH)


def counted(recomputed: bool) -> int:
    """The peak of the second step on this rank."""
    given, before, peak = layout(recomputed), held(), 0
    model = given.build()
    optimizer, work = given.optimizer(model), work_of(given)
    prepare_fully_shard(model, optimizer, given.config, given.precision, device=Pretend())
    run = run_of(model)
    assert run is not None

    def compute(model: nn.Module, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        with torch.autocast(NAME, torch.bfloat16):
            return work.compute(model, ids)

    for _ in range(2):
        batch = work.batch().to(NAME)
        with Peak() as seen:
            step(run, optimizer, batch, compute)
        peak = seen.bytes - before
    return peak


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_peak_of_a_step_under_autocast(recomputed: bool, ranks: Callable[..., list[int]]):
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    found = ranks(1, counted, recomputed, backend=BACKEND)[0]
    # The backward of softmax copies its gradient on GPUs, and on no other device: fp32, four heads.
    found += layout(recomputed).rows * 4 * LENGTH**2 * 4
    assert predicted(layout(recomputed), 0, on_gpus=True)["peak"] == pytest.approx(found, rel=0.02)
