"""State in another form in runs of the Trainer: checkpoints, averages, norms, another attempt."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer import algorithms as A
from composer.callbacks import OptimizerMonitor
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW

from composer_fsdp2 import installed, prepare_fully_shard, summon_full_params
from composer_fsdp2.optim.state import KeptState
from tests.dist.test_fsdp1_checkpoints import check_state, fit, resume
from tests.dist.test_out_of_memory import FITS, Memory
from tests.dist.test_state_policies import POLICIES
from tests.support.models import VOCAB, TinyComposer, TinyLM, lm_loss
from tests.support.pairs import parametrize_by_turns
from tests.support.parity import full
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

STEPS, HALF = 6, 3
FORMATS = {"sharded": f"ep0-ba{HALF}", "full": f"ep0-ba{HALF}-rank0.pt"}
State = dict[str, torch.Tensor]


class Wide(TinyComposer):
    """Has matrices of 5,000 elements, which no rank holds a round number of, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyLM("two modules", width=50)


def run(
    folder: Path | str | None,
    policy: str | None,
    *,
    until: int = STEPS,
    close: bool = True,
    seed: int = 0,
    fsdp2: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trainer:
    """Trains from weights of a seed or from a checkpoint; with `until=0` it only loads."""
    model = built(Wide, seed)
    config = {**(fsdp2 or {}), "optimizer_state": POLICIES[policy] if policy else {}}
    saves = {"save_folder": str(folder), "save_interval": f"{HALF}ba"} if folder else {}
    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        trainer = trainer_for(
            model,
            DecoupledAdamW(model.parameters(), lr=1e-2, weight_decay=1e-5),
            samples_of(STEPS, 12),
            config,
            batch=12 // dist.get_world_size(),
            max_duration=f"{until or STEPS}ba",
            **saves,
            **kwargs,
        )
        if until:
            trainer.fit()
    if close:
        trainer.close()
    return trainer


def state_of(trainer: Trainer) -> State:
    """Whole weights and state of the optimizer. Collective: yes."""
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    found = weights(model)
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                found[f"{name} {key}"] = full(value).clone()
    return found


def is_kept(trainer: Trainer) -> bool:
    return any(isinstance(s, KeptState) for s in trainer.state.optimizers[0].state.values())


# --- Checkpoints. ---


@pytest.mark.table("8 bits-full")
@pytest.mark.world_size(2)
@parametrize_by_turns(policy=POLICIES, kind=FORMATS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(policy: str, kind: str, tmp_path: Path):
    config = {"state_dict_type": kind}
    whole = run(tmp_path / "whole", policy, fsdp2=config)
    path = str(tmp_path / "whole" / FORMATS[kind])
    resumed = run(tmp_path / "second", policy, fsdp2=config, seed=1, load_path=path)
    assert int(resumed.state.timestamp.batch) == STEPS
    assert is_kept(resumed)
    assert largest_difference(state_of(resumed), state_of(whole)) == 0.0


@pytest.mark.table("8 bits cpu")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("policy", ["bf16", "8 bits cpu"])
def test_with_copies(policy: str, tmp_path: Path):
    config = {"data_parallel_replicate_degree": 2}
    whole = run(tmp_path / "whole", policy, fsdp2=config)
    path = str(tmp_path / "whole" / FORMATS["sharded"])
    resumed = run(tmp_path / "second", policy, fsdp2=config, seed=1, load_path=path)
    assert largest_difference(state_of(resumed), state_of(whole)) == 0.0


def _saved(folder: str, policy: str, kind: str) -> State:
    return state_of(run(folder, policy, until=HALF, fsdp2={"state_dict_type": kind}))


def _loaded(path: str, policy: str | None) -> State:
    return state_of(run(None, policy, until=0, seed=1, load_path=path))


@pytest.mark.table
@parametrize_by_turns(policy=["bf16", "8 bits", "8 bits cpu"], kind=FORMATS)
def test_saved_on_three_ranks_and_loaded_on_fewer(
    policy: str, kind: str, tmp_path: Path, ranks: Callable[..., list[Any]]
):
    saved = ranks(3, _saved, str(tmp_path), policy, kind)[0]
    for count in (1, 2):
        found = ranks(count, _loaded, str(tmp_path / FORMATS[kind]), policy)[0]
        assert found.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found.items())


@pytest.mark.table
@pytest.mark.world_size(2)
@parametrize_by_turns(policy=POLICIES, kind=FORMATS)
@pytest.mark.filterwarnings("ignore:.*lose precision")
def test_switched_on_and_off_in_the_middle(policy: str, kind: str, tmp_path: Path):
    config = {"state_dict_type": kind}
    own = run(tmp_path / "own", None, until=HALF, fsdp2=config)
    loaded = run(None, policy, until=0, seed=1, load_path=str(tmp_path / "own" / FORMATS[kind]))
    assert is_kept(loaded)
    one, other = state_of(own), state_of(loaded)
    limit = {"bf16": 2**-7, "8 bits": 2**-3, "cpu": 0.0}[policy.removesuffix(" cpu")]
    for name, value in one.items():
        block = value.abs().max() * 2**-15
        assert ((value - other[name]).abs() <= limit * value.abs() + block).all(), name
        assert torch.equal(value, other[name]) or ("exp_avg" in name and limit), name

    kept = run(tmp_path / "kept", policy, until=HALF, fsdp2=config)
    path = str(tmp_path / "kept" / FORMATS[kind])
    back = run(tmp_path / "back", None, until=0, seed=1, load_path=path)
    assert not is_kept(back)
    assert largest_difference(state_of(back), state_of(kept)) == 0.0
    assert all(value.dtype is torch.float32 for value in state_of(back).values())
    # And it goes on.
    run(tmp_path / "on", None, seed=1, load_path=path, fsdp2=config)


@pytest.mark.world_size(2)
def test_a_checkpoint_that_loses_precision_says_so(tmp_path: Path):
    run(tmp_path, None, until=HALF)
    told = pytest.warns(UserWarning, match="lose precision")
    with told if dist.get_rank() == 0 else contextlib.nullcontext():
        run(None, "bf16", until=0, seed=1, load_path=str(tmp_path / FORMATS["sharded"]))


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:optimizer_state has no effect")
@pytest.mark.parametrize("name", ["full_2r", "full_flatparam_2r", "sharded_dtensor_4r"])
def test_checkpoints_of_fsdp1(name: str):
    for policy in ("cpu", "8 bits"):
        trainer, _ = resume(name, {"fsdp2": {"optimizer_state": POLICIES[policy]}})
        check_state(trainer, name)
        assert is_kept(trainer) == (policy == "cpu")
        fit(trainer)


# --- With other things. ---

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "EMA": lambda: A.EMA(half_life="2ba"),
    "SWA": lambda: A.SWA("0.3dur", "0.7dur", "1ba"),
    "norm": lambda: A.GradientClipping("norm", 0.05),
    "value": lambda: A.GradientClipping("value", 0.001),
    "adaptive": lambda: A.GradientClipping("adaptive", 0.01),
    "SAM": lambda: A.SAM(rho=0.05, interval=2),
}


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:S.* has known issues")
def test_algorithms_find_what_they_find_otherwise(name: str):
    found = []
    for policy in ("cpu", None, "8 bits"):
        trainer = run(None, policy, algorithms=ALGORITHMS[name]())
        found.append(weights(trainer.state.model))
        # SAM's optimizer is another one, around the one with moments.
        assert is_kept(trainer) == (policy is not None) or name == "SAM"
    assert largest_difference(found[0], found[1]) == 0.0
    assert 0.0 < largest_difference(found[2], found[1]) < 0.05


@pytest.mark.table("SWA")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["EMA", "SWA"])
@pytest.mark.filterwarnings("ignore:S.* has known issues")
def test_averages_go_on_after_a_checkpoint(name: str, tmp_path: Path):
    whole = run(tmp_path / "whole", "8 bits", algorithms=ALGORITHMS[name]())
    path = str(tmp_path / "whole" / FORMATS["sharded"])
    again = run(tmp_path / "again", "8 bits", seed=1, load_path=path, algorithms=ALGORITHMS[name]())
    assert largest_difference(state_of(again), state_of(whole)) == 0.0


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_the_monitor_sees_moments():
    logged = []
    for policy in ("cpu", None, "8 bits"):
        memory = InMemoryLogger()
        monitor = OptimizerMonitor(log_optimizer_metrics=True, batch_log_interval=1)
        run(None, policy, callbacks=[monitor], loggers=[memory])
        logged.append({k: v[-1][1] for k, v in memory.data.items() if k.startswith("l2_norm/")})
    assert "l2_norm/moment/net.blocks.0.up.weight" in logged[0]
    assert logged[0] == logged[1]
    assert logged[2] == pytest.approx(logged[1], rel=0.1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", ["bf16", "8 bits cpu"])
def test_weights_that_were_written_are_stepped(policy: str):
    trainer = run(None, policy, until=2, close=False)
    model = trainer.state.model
    with summon_full_params(model):
        before = model.net.blocks[0].up.weight.detach().clone()
        model.net.blocks[0].up.weight.data.mul_(2)
    with installed():
        trainer.fit(duration="2ba")
    trainer.close()
    after = full(model.net.blocks[0].up.weight)
    assert 0 < (after - 2 * before).abs().max() < 0.1


@pytest.mark.table("cpu-0")
@pytest.mark.world_size(2)
@parametrize_by_turns(policy=POLICIES, start=[0, 1])
def test_another_attempt_starts_from_the_state_of_before(policy: str, start: int):
    def tried_again_from(point: str) -> Trainer:
        model = built(Wide)
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            samples_of(3, 16),
            {"optimizer_state": POLICIES[policy]},
            batch=8,
            device_train_microbatch_size="auto",
        )
        # In the second batch there is state, and an optimizer that has stepped is put back.
        memory = Memory.of(trainer, point, {1}, start=start)
        with memory.limited():
            trainer.fit()
        assert memory.times == (2 if memory.here else 0)
        return trainer

    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA out of memory or excessive")
        stepped, before = tried_again_from("optimizer"), tried_again_from("forward")
    assert stepped.state.device_train_microbatch_size == FITS
    assert largest_difference(state_of(stepped), state_of(before)) == 0.0


# --- The loss. ---


def successors(steps: int, size: int, length: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens, each followed by one of two that depend on it."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (steps, size, 1), generator=generator)
    for _ in range(length):
        choice = torch.randint(2, (steps, size, 1), generator=generator)
        ids = torch.cat([ids, (3 * ids[..., -1:] + 1 + 4 * choice) % VOCAB], dim=-1)
    return [(step[:, :-1], step[:, 1:]) for step in ids]


def held_out_loss(policy: str | None) -> float:
    torch.manual_seed(0)
    model = TinyLM(width=64)
    optimizer = DecoupledAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    state = {"optimizer_state": POLICIES[policy] if policy else {}}
    prepare_fully_shard(model, optimizer, state, precision="fp32")
    *train, (ids, targets) = successors(201, 16)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for inputs, wanted in train:
        lm_loss(model(inputs[mine]), wanted[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return lm_loss(model(ids), targets).item()


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_the_loss_after_200_steps_is_within_a_hundredth():
    own = held_out_loss(None)
    assert math.log(2) < own < 0.8 * math.log(VOCAB)
    for policy in ("bf16", "8 bits"):  # the place of state changes no bit
        assert held_out_loss(policy) == pytest.approx(own, rel=0.01), policy
