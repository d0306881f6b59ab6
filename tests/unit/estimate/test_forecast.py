"""Forecasts: few of equal blocks for all, models that cannot be traced, and unknown collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.estimate import collectives
from composer_fsdp2.estimate.blocks import find_equal_blocks
from composer_fsdp2.estimate.clock import GPUS, gpu_named, step_times
from composer_fsdp2.estimate.collectives import CollectiveCounter
from composer_fsdp2.estimate.forecast import Forecast, forecast
from composer_fsdp2.estimate.report import Batch, answer_lines, fits, preparing_text
from composer_fsdp2.estimate.search import search, search_lines, written
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, root_rule
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.prepare.trace import traced_settings
from composer_fsdp2.tools.doctor import LocalGpu, memory_findings
from tests.support.models import WIDTH
from tests.support.plan_layouts import Dense, Layout, work_of

BATCH = Batch(rows=8, microbatch=2, length=16)


def predicted(
    model: nn.Module, layout: Layout, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Forecast:
    monkeypatch.setenv("WORLD_SIZE", str(layout.ranks))
    optimizer = layout.optimizer(model)
    settings, notes = traced_settings(parse_config(layout.config))
    plan = PreparePlan(
        model, optimizer, settings, "fp32", "cpu", mesh=None, transformations=TRANSFORMATIONS
    )
    return forecast(model, optimizer, plan.units, work_of(layout), notes=notes, **options)


@pytest.mark.table
@pytest.mark.parametrize(
    ("config", "width", "traced"),
    [
        ({}, 16, 4),
        ({"activation_checkpointing": True, "gradient_sync": "last"}, 16, 4),
        ({"activation_checkpointing": True}, 128, 4),
        ({"forward_prefetch": 2, "backward_prefetch": 2}, 128, 5),
    ],
    ids=["kept", "recomputed", "most in a block", "gathered ahead"],
)
def test_few_of_equal_blocks_are_as_all(
    config: dict[str, Any], width: int, traced: int, monkeypatch
):
    layout = Layout(4, config, microbatches=5)
    some = predicted(Dense(layers=11, width=width), layout, monkeypatch)
    assert f"11 blocks of 'blocks' are equal: {traced} of them were traced for all" in some.notes
    monkeypatch.setattr("composer_fsdp2.estimate.forecast.find_equal_blocks", lambda *_: None)
    whole = predicted(Dense(layers=11, width=width), layout, monkeypatch)
    names = ("held", "kept", "sent", "flops", "peak_bytes", "gathered_bytes")
    assert [getattr(some, name) for name in names] == [getattr(whole, name) for name in names]


def test_blocks_that_are_treated_differently_are_not_equal():
    model = Dense(layers=9)
    model.blocks[4].requires_grad_(False)
    units = plan_wrapping(model, [by_class("Block"), root_rule])
    assert find_equal_blocks(model, units) is None
    model.blocks[4].requires_grad_(True)
    assert find_equal_blocks(model, units) is not None
    assert find_equal_blocks(model, units, treated=["blocks.4"]) is None


class Convolves(Dense):
    """Has a convolution over its words, as Mamba has."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.mix(self.embed(ids).mT).square().mean()


def test_layers_with_workspaces_are_named(monkeypatch: pytest.MonkeyPatch):
    found = predicted(Convolves(), Layout(2), monkeypatch)
    assert any(note.startswith("layers of Conv1d compute in workspaces") for note in found.notes)
    assert not any("workspaces" in n for n in predicted(Dense(), Layout(2), monkeypatch).notes)


class Spare(Dense):
    """Has a head that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def test_parameters_without_a_gradient_are_named(monkeypatch: pytest.MonkeyPatch):
    found = predicted(Spare(), Layout(2), monkeypatch)
    said = "'spare.weight', 'spare.bias' got no gradient"
    assert next(note for note in found.notes if "got no gradient" in note).startswith(said)
    assert not any("no gradient" in n for n in predicted(Dense(), Layout(2), monkeypatch).notes)


class Unknown(Dense):
    """Decides by a value that follows from its weights."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (2 if self.norm.weight.sum() > 0 else 1)


def test_a_model_that_cannot_be_traced_shows_its_state_alone(monkeypatch):
    found = predicted(Unknown(), Layout(2), monkeypatch)
    same = predicted(Dense(), Layout(2), monkeypatch)
    assert found.held == same.held
    assert (found.kept, found.sent) == (None, ())
    assert "the model cannot be traced (UntraceableError" in found.notes[0]
    text = "\n".join(answer_lines(found, parse_config({}), BATCH, None, 80.0))
    assert "It is not known to fit in 80 GiB" in text


def test_seconds_of_preparing_are_said_for_many_shard_ranks():
    assert preparing_text(34, 511) is None
    said = preparing_text(34, 2816)
    assert said is not None
    assert "34 units over 2,816 shard ranks takes torch 2.7 about 3.6 CPU seconds" in said


class Dropping(Dense):
    """Skips at random, as OPT skips layers."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (2 if torch.rand([]) < 0.1 else 1)


class Masked(Dense):
    """Asks whether a mask of ones that it made hides anything, as OPT does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(ids.shape)
        return super().forward(ids) * (1 if torch.all(mask == 1) else 2)


@pytest.mark.parametrize("kind", [Dropping, Masked])
def test_values_that_do_not_follow_from_weights_are_known(kind: type[Dense], monkeypatch):
    """A number that decides whether a layer is skipped is such that none is."""
    found = predicted(kind(), Layout(2), monkeypatch)
    assert found.notes == predicted(Dense(), Layout(2), monkeypatch).notes
    assert found.kept is not None


def test_what_is_offloaded_is_not_on_the_device(monkeypatch):
    found = predicted(Dense(), Layout(2), monkeypatch)
    assert found.peak["optimizer"] == found.held["optimizer"]
    assert fits(found, found.peak_bytes / 2**30 * 1.2)
    assert not fits(found, found.peak_bytes / 2**30)
    less = predicted(Dense(), Layout(2), monkeypatch, on_host=["optimizer"])
    assert less.held == found.held
    assert less.peak_bytes == found.peak_bytes - found.held["optimizer"]


def test_doctor_tells_a_run_that_cannot_fit(monkeypatch):
    found = predicted(Dense(), Layout(2), monkeypatch)
    kept = sum(found.held.values())
    assert list(memory_findings(found, LocalGpu("GPU", 2 * found.peak_bytes, (9, 0)))) == []
    (maybe,) = memory_findings(found, LocalGpu("GPU", found.peak_bytes, (9, 0)))
    (never,) = memory_findings(found, LocalGpu("GPU", kept - 1, (9, 0)))
    assert (maybe.level, never.level) == ("warning", "problem")
    assert "The first step would run out of memory." in never.what


def test_a_collective_without_a_row_is_an_error():
    with pytest.raises(PlanError, match=r"'gather_'.* Its bytes would be missing"):
        CollectiveCounter(8).hear("gather_", (), None)


@pytest.mark.table("_allgather_base_")
@pytest.mark.parametrize("name", ["_allgather_base_", "_reduce_scatter_base_"])
def test_a_step_with_a_collective_without_a_row_is_an_error(name: str, monkeypatch):
    """In forward and in backward; a model that cannot be traced would show zero."""
    rows = {key: row for key, row in collectives._ROWS.items() if key != name}
    monkeypatch.setattr(collectives, "_ROWS", rows)
    with pytest.raises(PlanError, match=f"the collective '{name}', which the plan has no row for"):
        predicted(Dense(), Layout(2), monkeypatch)


def test_an_unknown_gpu_names_those_that_are_known():
    assert gpu_named("h100") is GPUS["H100"]
    with pytest.raises(ConfigError, match=r"--gpu is 'K80'.* Write one of A100-40GB"):
        gpu_named("K80")


def test_the_search_leaves_out_what_does_not_fit(monkeypatch):
    layout = Layout(4)
    found = predicted(Dense(), layout, monkeypatch)

    def measure(choice: Any) -> Forecast:
        size = found.held["parameters"] * 4 // choice.shard + choice.rows * 1000
        return dataclasses.replace(found, peak={"activations": size})

    room = found.held["parameters"] * 2 + 3000
    best, lost = search(
        measure,
        ranks=4,
        per_node=2,
        most_rows=2,
        gpu=GPUS["H100"],
        memory_gib=room / 2**30 / 0.92,
        offloads=("none",),
    )
    assert 1 not in {one.choice.shard for one in best}
    assert len(best) == 5
    assert any(choice.shard == 1 and "it takes" in why for choice, why in lost)
    assert any("not shard 1" in line for line in search_lines(best, lost))
    assert step_times(found, GPUS["H100"]).step > 0


@pytest.mark.parametrize(("room", "proposed"), [(5.0, True), (1.5, False)])
def test_the_search_replicates_what_is_frozen_where_memory_allows(monkeypatch, room, proposed):
    found = predicted(Dense(), Layout(4), monkeypatch)
    sent = [dataclasses.replace(found.sent[0], size_bytes=10**12)]

    def measure(choice: Any) -> Forecast:
        if choice.frozen == "shard":
            return dataclasses.replace(found, peak={"parameters": GIB}, sent=sent)
        return dataclasses.replace(found, peak={"parameters": 4 * GIB}, sent=())

    best, _ = search(
        measure,
        ranks=4,
        per_node=4,
        most_rows=1,
        gpu=GPUS["H100"],
        memory_gib=room / 0.92,
        offloads=("none",),
        frozen=("shard", "replicate"),
    )
    first = best[0].choice
    assert (first.frozen == "replicate", "frozen replicate" in str(first)) == (proposed, proposed)
    assert written(first)["frozen"] == first.frozen


GIB = 2**30
STATE = {"parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer": 16 * GIB}


@pytest.mark.parametrize(
    ("settings", "peak", "said"),
    [
        ({}, {**STATE, "activations": 90 * GIB}, "activation_checkpointing: true; activations"),
        (
            {"activation_checkpointing": True},
            {**STATE, "activations": 90 * GIB},
            "device_train_microbatch_size: 1; activations take 74% of the peak",
        ),
        ({}, {**STATE, "logits": 50 * GIB}, "chunked_loss: true; logits"),
        ({}, {**STATE, "optimizer": 80 * GIB}, "more ranks (--gpus 16), or cpu_offload: true"),
        (
            {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
            {**STATE, "optimizer": 80 * GIB},
            "data_parallel_shard_degree: -1 and data_parallel_replicate_degree: null",
        ),
        ({}, {"gathered": 90 * GIB}, "tp: {degree: 2}"),
        ({"activation_checkpointing": True}, STATE, "activation_checkpointing: {mode: selective}"),
        ({}, STATE, None),
    ],
)
def test_what_to_try_first_follows_from_what_takes_most(settings, peak, said):
    found = Forecast(
        ranks=8,
        ranks_per_node=8,
        microbatches=1,
        held=dict(STATE),
        kept={"activations": 1},
        gathered_bytes=0,
        peak=peak,
        moment="the step",
        flops=10**12,
    )
    gpu = GPUS["H100"]
    *_, last = answer_lines(found, parse_config(settings), BATCH, gpu, gpu.memory_gib)
    assert last.startswith(f"Try first: {said}" if said else "Seconds: ")


def test_a_step_that_waits_for_collectives_takes_more_rows(monkeypatch):
    layout = Layout(4, microbatches=4)
    found = predicted(Dense(), layout, monkeypatch)
    *_, seconds, last = answer_lines(found, parse_config({}), BATCH, GPUS["H100"], 80.0)
    assert "most of all" in seconds
    assert last.startswith("Try first: device_train_microbatch_size: 4")
    *_, last = answer_lines(found, parse_config({}), BATCH, GPUS["H100"], 80.0, first="that.")
    assert last == "Try first: that."
