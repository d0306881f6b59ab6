"""The table of `verbose`: a step as predicted, and as it is on real ranks."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.utils import dist

from composer_fsdp2 import installed
from composer_fsdp2.config.schema import FORECAST, parse_config
from composer_fsdp2.estimate.forecast import forecast
from composer_fsdp2.estimate.trace import Work
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.prepare.trace import compute_loss, preparing, traced_settings
from tests.support.models import TinyComposer, batches
from tests.support.training import built, loader_of, samples_of, trainer_for

MICROBATCH, MICROBATCHES = 2, 3
HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
TITLE = "FSDP2, the second step:"
HELD = ("parameters", "gradients", "optimizer state")


def table(fsdp2: dict[str, Any], told: dict[str, Any] | None, steps: int = 3) -> str:
    """Trains, with an evaluation after each step, and returns what this rank has shown."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written), installed(), pytest.MonkeyPatch.context() as patch:
        patch.delenv(FORECAST, raising=False)
        if told is not None:
            patch.setenv(FORECAST, json.dumps(told))
        model = built(TinyComposer)
        samples = samples_of(steps, MICROBATCH * MICROBATCHES * dist.get_world_size())
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            samples,
            fsdp2,
            batch=MICROBATCH * MICROBATCHES,
            device_train_microbatch_size=MICROBATCH,
            eval_dataloader=loader_of(samples, MICROBATCH),
            eval_interval="1ba",
        )
        trainer.fit()
        trainer.close()
    assert written.getvalue().count(TITLE) <= 1
    return written.getvalue().partition(TITLE)[2]


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the table by kind."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[1:]]
    return {kind: cells for kind, *cells in lines if cells}


def predicted(fsdp2: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of `table`, as doctor predicts it."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    model, (settings, _) = TinyComposer(), traced_settings(parse_config(fsdp2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = PreparePlan(
        model, optimizer, settings, "fp32", "cpu", mesh=None, transformations=TRANSFORMATIONS
    )
    work = Work(
        prepare=preparing(settings, "fp32"),
        batch=lambda: batches(1, MICROBATCH)[0],
        compute=compute_loss("fp32"),
        microbatches=MICROBATCHES,
        ranks=ranks,
        ranks_per_node=ranks,
    )
    found = forecast(model, optimizer, plan.units, work)
    numbers = found.of_a_step()
    assert numbers is not None
    assert numbers["peak_allocated_bytes"] == found.peak_bytes
    return numbers


@pytest.mark.table("hsdp")
@pytest.mark.parametrize(
    ("count", "config"),
    [(2, {}), (2, {"gradient_sync": "last"}), (4, HSDP)],
    ids=["every", "last", "hsdp"],
)
def test_collectives_of_a_step_are_as_predicted(
    count: int, config: dict[str, Any], ranks: Callable[..., list[str]], monkeypatch
):
    numbers = predicted({**config, "verbose": True}, count, monkeypatch)
    first, *others = ranks(count, table, {**config, "verbose": True}, numbers)
    rows = rows_of(first)
    assert list(rows) == [*HELD, "all-gathers of units", "reductions of units"]  # a CPU has no peak
    for expected, measured, difference in rows.values():
        assert expected == measured != "0 B"
        assert difference == "+0.0%"
    assert others == [""] * (count - 1)


def test_a_wrong_prediction_is_a_difference(ranks: Callable[..., list[str]]):
    told = {
        **dict.fromkeys(("parameters", "gradients"), 0),
        "optimizer": 2**20,
        "gathered_bytes": 2**30,
        "reduced_bytes": 2**14,
        "peak_allocated_bytes": 0,
        "notes": ["n"],
    }
    text = ranks(2, table, {"verbose": True}, told)[0]
    rows = rows_of(text)
    assert rows["all-gathers of units"][0::2] == ["1 GiB", "-100.0%"]
    assert rows["reductions of units"][2].startswith("+")
    assert rows["optimizer state"][0] == "1 MiB"
    assert rows["optimizer state"][2].startswith("-")
    assert "note: n" in text.splitlines()


@pytest.mark.parametrize(
    ("config", "told", "steps"),
    [({"verbose": True}, False, 2), ({}, True, 2), ({"verbose": True}, True, 1)],
    ids=["no forecast", "not verbose", "one step"],
)
def test_nothing_is_compared(
    config: dict[str, Any], told: bool, steps: int, ranks: Callable[..., list[str]]
):
    numbers = {"gathered_bytes": 1, "reduced_bytes": 1, "peak_allocated_bytes": 1, "notes": []}
    assert ranks(2, table, config, numbers if told else None, steps) == ["", ""]
