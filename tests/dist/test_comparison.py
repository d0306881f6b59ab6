"""The table of `verbose`: bytes of the first step as predicted, and as they are on a real rank."""

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

from composer_fsdp2 import Muon, installed
from composer_fsdp2.config.schema import FORECAST, parse_config
from composer_fsdp2.estimate.forecast import forecast
from composer_fsdp2.estimate.trace import STATE, Work
from composer_fsdp2.step.run import run_of
from composer_fsdp2.trainer.comparison import first_step
from composer_fsdp2.trainer.forecast import compute_loss, preparing, traced_settings
from composer_fsdp2.trainer.prepare import TRANSFORMATIONS
from composer_fsdp2.trainer.prepare_plan import PreparePlan
from tests.support.models import TinyComposer, batches
from tests.support.training import built, samples_of, trainer_for

TRAFFIC = ("all-gathers of units", "reductions of units")
TITLE = "FSDP2: the first step of rank 0, in bytes:"
MICROBATCH = 2
KINDS = ("parameters", "gradients", "optimizer state")
CONFIG = {"verbose": True}


def shown(
    fsdp2: dict[str, Any],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    told: dict[str, Any] | None = None,
) -> str:
    """Trains two batches, and returns what this rank has written about memory."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written), installed(), pytest.MonkeyPatch.context() as patch:
        if told is not None:
            patch.setenv(FORECAST, json.dumps(told))
        model = built(TinyComposer)
        adam = optimizer(model.parameters(), lr=1e-3)
        trainer = trainer_for(
            model, adam, samples_of(2, 8), fsdp2, device_train_microbatch_size=MICROBATCH
        )
        run = run_of(trainer.state.model)
        assert run is not None
        count = len(run.listeners)
        trainer.fit()
        trainer.close()
    is_told = fsdp2.get("verbose", False) and dist.get_global_rank() == 0
    assert count - len(run.listeners) == is_told
    assert written.getvalue().count(TITLE) == is_told
    return written.getvalue().partition(TITLE)[2]


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the table by kind."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {kind: cells for kind, *cells in lines}


@pytest.mark.world_size(2)
def test_the_state_is_as_predicted():
    text = shown(CONFIG)
    if dist.get_global_rank() == 0:
        rows = rows_of(text)
        assert [rows[kind][2] for kind in KINDS] == ["none"] * 3
        assert all(rows[kind][0] == rows[kind][1] != "0 B" for kind in KINDS)
        assert rows["all-gathers of units"][0] == "unknown"
        assert "note: the peak is not measured on the CPU" in text
        assert "note: `composer-fsdp2 train RUN.yaml`, and `plan`, predict a whole step" in text


@pytest.mark.world_size(2)
def test_nothing_is_shown_without_verbose():
    assert shown({}) == ""


@pytest.mark.world_size(2)
def test_a_wrong_prediction_is_a_difference():
    wrong = {
        "parameters": 2**20,
        "gradients": 1,
        "reduced": 2**30,
        "peak": 2**30,
        "notes": ["told"],
    }
    text = shown(CONFIG, told=wrong)
    if dist.get_global_rank() == 0:
        rows = rows_of(text)
        assert rows["parameters"][0] == "1 MiB"
        assert re.fullmatch(r"-\d+(\.\d+)? KiB", rows["parameters"][2])
        assert rows["gradients"][2].startswith("+")
        assert rows["optimizer state"][0] == "unknown"
        assert rows["reductions of units"][2] == "-1 GiB"
        assert rows["peak"] == ["1 GiB", "unknown"]
        assert text.endswith("note: the peak is not measured on the CPU\nnote: told\n")


@pytest.mark.world_size(2)
def test_what_ranks_divide_in_another_way_is_not_predicted():
    text = shown(CONFIG, Muon)
    if dist.get_global_rank() == 0:
        assert [rows_of(text)[kind][0] for kind in KINDS] == ["unknown"] * 3


def predicted(fsdp2: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The first step of `shown`, as doctor predicts it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, (settings, _) = TinyComposer(), traced_settings(parse_config(fsdp2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = PreparePlan(
        model, optimizer, settings, "fp32", "cpu", mesh=None, transformations=TRANSFORMATIONS
    )
    work = Work(
        prepare=preparing(settings, "fp32"),
        batch=lambda: batches(1, MICROBATCH)[0],
        compute=compute_loss("fp32"),
        microbatches=2,
        ranks=2,
        ranks_per_node=2,
    )
    return first_step(forecast(model, optimizer, plan.units, work))


def test_a_whole_step_is_as_predicted(ranks: Callable[..., list[str]], monkeypatch):
    """With reductions in every microbatch; with `last` they differ in the first step."""
    found = predicted(CONFIG, monkeypatch)
    assert sum(found[kind] for kind in STATE) < found["peak"] < found["resumed"]
    rows = rows_of(ranks(2, shown, CONFIG, torch.optim.AdamW, found)[0])
    assert [rows[kind][2] for kind in (*KINDS, *TRAFFIC)] == ["none"] * 5
    assert rows["peak"][1] == "unknown"
