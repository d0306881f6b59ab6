"""Tensor parallelism with copies of the model (HSDP): three axes, against one process."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import clip_grad_norm_, install
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.step.run import run_of
from tests.dist.test_tensor_parallel import (
    FAMILIES,
    IN_DOUBLE,
    OPTIMIZERS,
    assert_same_gradients,
    assert_same_state,
    global_batches,
    loss_of,
    mean,
    of_this_group,
    prepared,
)
from tests.dist.test_tensor_trainer import SIZE, STEPS, adamw, built, samples, trained_alone
from tests.matrix.test_tensor_layouts import kept
from tests.support.parity import TOLERANCE, assert_close, assert_same_values
from tests.support.training import largest_difference, trainer_for

COPIES = {"data_parallel_replicate_degree": 2}

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


def train_as_one_process(family: str, optimizer: str, **settings: Any) -> None:
    """Twenty steps with two microbatches each, clipped by the norm over all axes."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = FAMILIES[family]()
    model = model.double() if (family, optimizer) in IN_DOUBLE else model
    holder = [model.state_dict()]
    dist.broadcast_object_list(holder)
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(holder[0])
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], mixed_precision="FULL", **COPIES, **settings)
    sharding = run_of(model)
    assert sharding is not None
    assert sharding.shape.axes == {
        "dp_replicate": 2,
        "dp_shard": dist.get_world_size() // 4,
        "tp": 2,
    }
    for step, ids in enumerate(global_batches()):
        expected = loss_of(oracle, ids)
        expected.backward()
        with sharding.accumulation.batch():
            own = of_this_group(ids).chunk(2)
            losses = []
            for number, part in enumerate(own):
                with sharding.accumulation.microbatch(last=number == 1):
                    losses.append(loss_of(model, part) / 2)
                    losses[-1].backward()
        got = torch.stack(losses).sum()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        if step == 0:
            assert_same_gradients(oracle, model)
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        assert_close(f"norm of step {step}", norm, clip_grad_norm_(model.parameters(), 1.0))
        for one in pair:
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)
    assert_same_state(*pair)
    assert_copies_are_equal(model)


def assert_copies_are_equal(model: nn.Module) -> None:
    """Ranks that hold the same part of the model hold the same bits."""
    world, share = dist.get_world_size(), dist.get_world_size() // 2
    for name, param in model.named_parameters():
        local: torch.Tensor = param.to_local()  # pyright: ignore
        everyone = [torch.empty_like(local) for _ in range(world)] if local.numel() else []
        sizes = [0] * world
        dist.all_gather_object(sizes, tuple(local.shape))
        if len(set(sizes)) > 1 or not everyone:
            continue
        dist.all_gather(everyone, local.detach())
        other = (dist.get_rank() + share) % world
        assert torch.equal(everyone[other], local), name


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize(("family", "optimizer"), [("Llama, tied", "sgd"), ("MPT", "adamw")])
def test_trains_like_one_process_on_four_ranks(family: str, optimizer: str, sync: str):
    train_as_one_process(family, optimizer, gradient_sync=sync)


@pytest.mark.slow
@pytest.mark.world_size(8, timeout=400)
def test_trains_like_one_process_on_eight_ranks():
    train_as_one_process("Llama, tied", "adamw", gradient_sync="last")


# --- The Trainer ---


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_trainer_clips_over_all_axes_and_counts_once():
    install()
    clip = nn.utils.clip_grad_norm_
    expected, _ = trained_alone("gpt2", samples(), lambda params: clip(params, 0.05))
    model = built()
    trainer = trainer_for(
        model,
        adamw(model),
        samples(),
        batch=SIZE // 2,
        parallelism_config={"tp": {"degree": 2}, "fsdp2": COPIES},
        algorithms=[GradientClipping("norm", 0.05)],
        device_train_microbatch_size=2,
    )
    trainer.fit()
    assert trainer.state.timestamp.sample.value == STEPS * SIZE
    assert largest_difference(trainer.state.model, expected) <= TOLERANCE


@pytest.mark.world_size(4)
def test_degrees_that_do_not_fit_are_refused():
    install()
    model = built()
    fsdp2 = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
    with pytest.raises(ConfigError, match=r"1 x .*_replicate_degree 4 does not multiply to 2"):
        trainer_for(
            model, adamw(model), samples(), parallelism_config={"tp": {"degree": 2}, "fsdp2": fsdp2}
        )


LAYOUTS: dict[str, tuple[int, int, int | None]] = {
    "TP 2 x FSDP 1 x 2 copies": (4, 2, 2),
    "TP 2 x FSDP 2 x 2 copies": (8, 2, 2),
    "TP 2 x FSDP 2": (4, 2, None),
    "FSDP 2 x 2 copies": (4, 1, 2),
    "FSDP 3": (3, 1, None),
    "one process": (1, 1, None),
}
"""world size, degree of tensor parallelism, copies"""
FIRST, EIGHT, *OTHERS = LAYOUTS


def run(layout: str, kind: str, state: str, folder: Path, load: Path | None) -> None:
    """Trains in a layout or loads into it, and keeps what it has at the end."""
    world_size, degree, copies = LAYOUTS[layout]
    install()
    model = built(kind)
    fsdp2 = {"state_dict_type": state, "sharded_ckpt_prefix_dir": "last"}
    tp = {"degree": degree} if degree > 1 else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* is not in the state_dict")
        warnings.filterwarnings("ignore", message="The current world size")  # of random states
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        trainer = trainer_for(
            model,
            adamw(model),
            samples(),
            batch=max(SIZE * degree // world_size, 1),
            parallelism_config={
                "fsdp2": {**fsdp2, "data_parallel_replicate_degree": copies},
                "tp": tp,
            },
            max_duration="2ba",
            save_folder=None if load else str(folder / "saved"),
            save_filename="last.pt",
            save_interval="2ba",
            load_path=str(load) if load else None,
        )
        if not load:
            trainer.fit()
        found = kept(trainer)
        trainer.close()
    if dist.get_rank() == 0:
        torch.save(found, folder / "kept.pt")


def compare(before: str, after: str, kind: str, state: str, folder: Path, ranks: Any) -> None:
    """Saves in one layout and loads in another: the difference is 0.0."""
    saved, loaded = folder / "before", folder / "after"
    for path in (saved, loaded):
        path.mkdir()
    ranks(LAYOUTS[before][0], partial(run, before, kind, state, saved, None))
    written = next((saved / "saved").glob("*"))
    ranks(LAYOUTS[after][0], partial(run, after, kind, state, loaded, written))
    expected, got = (torch.load(where / "kept.pt") for where in (saved, loaded))
    assert expected.keys() == got.keys()
    assert {n: d for n, v in expected.items() if (d := (v - got[n]).abs().max().item())} == {}


@pytest.mark.table("one process")
@pytest.mark.parametrize("other", OTHERS)
def test_checkpoints_resume_without_a_difference(other: str, ranks: Any, tmp_path: Path):
    for number, state in enumerate(("sharded", "full")):
        pair = (FIRST, other) if number else (other, FIRST)
        (tmp_path / state).mkdir()
        compare(*pair, "gpt2", state, tmp_path / state, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(EIGHT, "FSDP 3"), ("TP 2 x FSDP 2", EIGHT)])
def test_checkpoints_of_eight_ranks(before: str, after: str, ranks: Any, tmp_path: Path):
    compare(before, after, "gpt2", "sharded", tmp_path, ranks)
