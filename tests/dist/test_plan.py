"""Steps on fake tensors in one process, against the same steps on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.plan_layouts import (
    LAYOUTS,
    PEAKS,
    Dense,
    Layout,
    allocated,
    counted,
    predicted,
)

PRELOAD = ["tests.support.plan_layouts"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]


def counted_on(name: str) -> dict[str, Any]:
    return counted(LAYOUTS[name], dist.get_rank())


@pytest.mark.table("experts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_takes_what_was_predicted(name: str, ranks: Callable[..., list[dict[str, Any]]]):
    """Bytes and calls of collectives, FLOPs and bytes held exactly, the peak within 10 %."""
    count = LAYOUTS[name].ranks
    found = ranks(count, counted_on, name)
    for rank in {0, count - 1}:
        expected, real = predicted(LAYOUTS[name], rank), found[rank]
        assert expected.pop("peak") == pytest.approx(real.pop("peak"), rel=0.1)
        assert expected == real


def allocated_on(name: str) -> int:
    return allocated(PEAKS[name], dist.get_rank())


@pytest.mark.table
@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_that_of_the_allocator(name: str, ranks: Callable[..., list[int]]):
    if name.startswith("MPT"):
        pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    found = ranks(PEAKS[name].ranks, allocated_on, name)
    assert predicted(PEAKS[name], 0)["peak"] == pytest.approx(found[0], rel=0.1)


def together(foreach: bool | None) -> Layout:
    """Small in activations, so that the step of the optimizer has the most memory."""

    def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)

    return Layout(2, build=lambda: Dense(layers=16), optimizer=adamw, rows=1, length=2)


def allocated_by_a_step_of_all() -> int:
    return allocated(together(True), dist.get_rank())


def test_on_gpus_torch_steps_all_tensors_at_once(ranks: Callable[..., list[int]]):
    # A thread of gloo may hold what it has reduced for a moment longer, so the least of some.
    found = min(min(ranks(2, allocated_by_a_step_of_all)) for _ in range(5))
    unsaid = together(None)
    assert predicted(unsaid, 0, on_gpus=True)["peak"] == pytest.approx(found, rel=0.02)
    assert predicted(unsaid, 0)["peak"] < 0.95 * found


ONE_BLOCK = Layout(
    2,
    build=lambda: Dense(width=1024, layers=1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    rows=1,
    length=2,
)


def test_copies_that_gloo_makes_are_in_the_peak():
    """Beside what a unit is gathered into gloo has as much; the peak may be at another moment."""
    with_copies, without = (predicted(ONE_BLOCK, 0, on_gpus=gpu)["peak"] for gpu in (False, True))
    unit_bytes = sum(param.nbytes for param in ONE_BLOCK.build().blocks[0].parameters())
    assert 0.4 * unit_bytes < with_copies - without <= unit_bytes
