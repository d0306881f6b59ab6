"""Experts over eight ranks, with copies and divided layers around them, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.test_expert_parallel import EXACT, STEPS, batches, pair, train
from tests.support.pairs import parametrize_by_turns

RANKS = 8

pytestmark = [
    pytest.mark.world_size(RANKS),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

COPIES = {"data_parallel_replicate_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 2 x FSDP 2 in 2 copies": {"expert_parallel": 2, **COPIES},
    "EP 4 in 2 copies": {"expert_parallel": 4, **COPIES},
    "EP 4 x FSDP 2": {"expert_parallel": 4},
    "TP 2 x EP 2 x FSDP 2 in 2 copies": {"tensor_parallel": 2, "expert_parallel": 2, **COPIES},
    "TP 2 x EP 4 x FSDP 2": {"tensor_parallel": 2, "expert_parallel": 4},
}


@parametrize_by_turns(layout=LAYOUTS, optimizer=["sgd", "adamw"])
def test_as_in_one_process(layout: str, optimizer: str):
    config = LAYOUTS[layout]
    models = pair("Mixtral", num_key_value_heads=2)
    data = batches(STEPS if layout == "EP 2 x FSDP 2 in 2 copies" else 5, (6,) * RANKS)
    if "tensor_parallel" in config:  # two ranks next to each other read one batch
        data = [[ids[rank // 2 * 2] for rank in range(RANKS)] for ids in data]
    train(models, config, optimizer, data=data, clip=0.05)


def test_in_double():
    models = pair("Mixtral", torch.float64)
    config = {"expert_parallel": 2, "mixed_precision": "FULL", **COPIES}
    train(models, config, "adamw", data=batches(lengths=(6,) * RANKS), tolerance=EXACT)
