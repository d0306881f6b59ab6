"""A run changes from AdamW to Muon: moments go on where both have them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import composer
import pytest
import torch
from composer import Trainer
from composer.optim import DecoupledAdamW
from torch import distributed as dist
from torch.utils.data import TensorDataset

from composer_fsdp2 import CheckpointError, Muon, installed
from composer_fsdp2.text import plain_name
from tests.support.fsdp1_fixtures import NAMES, SAVED_AT, digest, expected, settings_of, tiny_model
from tests.support.models import TinyComposer
from tests.support.parity import full, gathered
from tests.support.training import built, samples_of, train_alone, trainer_for

RATES: dict[str, Any] = {"lr": 3e-3, "adamw_eps": 1e-5, "iteration_dtype": "fp32"}
FULL: dict[str, Any] = {"state_dict_type": "full"}
RANK_0 = FULL | {"load_monolith_rank0_only": True}
ANEW = ["state/optimizers/*", "state/schedulers/*"]


def _trainer(
    model: Any, optimizer: torch.optim.Optimizer, last: str, fsdp2: Any, **kwargs: Any
) -> Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer_for(
            model,
            optimizer,
            samples_of(4, 12),
            fsdp2,
            batch=12 // dist.get_world_size(),
            max_duration=last,
            schedulers=composer.optim.ConstantWithWarmupScheduler(t_warmup="1ba"),
            **kwargs,
        )


def _states(trainer: Trainer) -> dict[str, Any]:
    (optimizer,) = trainer.state.optimizers
    names = {id(param): name for name, param in trainer.state.model.named_parameters()}
    return {
        f"{names[id(param)]}/{key}": full(value).clone()
        for group in optimizer.param_groups
        for param in group["params"]
        for key, value in optimizer.state.get(param, {}).items()
    }


def _saved(folder: Path, optimizer: Any, fsdp2: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    model = built(TinyComposer)
    given = optimizer(model.parameters())
    kept = {"save_folder": str(folder), "save_interval": "2ba"}
    with installed():
        trainer = _trainer(model, given, "2ba", fsdp2, **kept)
        trainer.fit()
        trainer.close()
    return _states(trainer), gathered(trainer.state.model)


def _resumed(folder: Path, fsdp2: Any, **kwargs: Any) -> Trainer:
    model = built(TinyComposer, 1)
    name = "ep0-ba2" if fsdp2.get("state_dict_type") != "full" else "ep0-ba2-rank0.pt"
    optimizer = Muon(model.parameters(), **RATES)
    return _trainer(model, optimizer, "4ba", fsdp2, load_path=str(folder / name), **kwargs)


def _expected(trainer: Trainer, saved: dict[str, Any]) -> dict[str, Any]:
    """The state of AdamW under Muon's names."""
    (optimizer,) = trainer.state.optimizers
    names = {id(param): name for name, param in trainer.state.model.named_parameters()}
    want: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name in (names[id(param)] for param in group["params"]):
            if group["algorithm"] == "muon":
                want[f"{name}/momentum_buffer"] = saved[f"{name}/exp_avg"]
            else:
                keys = (f"{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq"))
                want |= {key: saved[key] for key in keys}
    return want


@pytest.mark.table("full on rank 0")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("fsdp2", [{}, FULL, RANK_0], ids=["sharded", "full", "full on rank 0"])
def test_moments_go_on(tmp_path: Path, fsdp2: dict[str, Any]):
    adam, weights = _saved(tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), fsdp2)
    with installed():
        trainer = _resumed(tmp_path, fsdp2)
        found, rates = _states(trainer), {g["lr"] for g in trainer.state.optimizers[0].param_groups}
        want = _expected(trainer, adam)
        loaded = gathered(trainer.state.model)
        assert trainer.state.timestamp.batch == 2
        trainer.fit()
        trainer.close()
    assert found.keys() == want.keys()
    assert any(name.endswith("momentum_buffer") for name in found)
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert rates == {RATES["lr"]}
    assert trainer.state.timestamp.batch == 4


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_it_goes_on_as_an_unsharded_run_would(tmp_path: Path):
    adam, weights = _saved(tmp_path, lambda p: DecoupledAdamW(p, lr=1e-2, weight_decay=1e-4), {})
    with installed():
        trainer = _resumed(tmp_path, {})
        want = _expected(trainer, adam)
        trainer.fit()
        trainer.close()
    alone = built(TinyComposer, 1)
    alone.load_state_dict(weights)
    optimizer = Muon(alone, **RATES)
    for name, param in alone.named_parameters():
        held = {key.rpartition("/")[2]: value for key, value in want.items() if _of(key, name)}
        optimizer.state[param] = {key: value.clone() for key, value in held.items()}
    train_alone(alone, optimizer, TensorDataset(*samples_of(4, 12)[24:]), 12)
    found = gathered(trainer.state.model)
    far = max((found[name] - value).abs().max() for name, value in alone.state_dict().items())
    assert far <= 1e-6


def _of(key: str, name: str) -> bool:
    return key.rpartition("/")[0] == name


FSDP1 = [name for name in NAMES if not expected(name)["weights_only"]]


@pytest.mark.table("full_flatparam_2r", "sharded_dtensor_hsdp_2x2")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", FSDP1)
def test_from_a_checkpoint_of_fsdp1(name: str):
    """Moments to the bit, and the rate that the schedule has at this time."""
    facts = expected(name)
    model = tiny_model().build_model(8, **facts["model_kwargs"])
    given = settings_of(name, model, optimizers=Muon(model.parameters(), **RATES))
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**given, parallelism_config={"fsdp2": {}})
        found = {key: digest(value) for key, value in _states(trainer).items()}
        rates = [group["lr"] for group in trainer.state.optimizers[0].param_groups]
        trainer.fit()
        trainer.close()
    saved = {
        f"{plain_name(param)}/{key}": value["sha256"]
        for param, state in facts["at_save"]["optimizer_state"].items()
        for key, value in state.items()
    }
    want = _expected(trainer, saved)
    assert found == want
    assert len(set(rates)) == 1
    part = (SAVED_AT - 2) / (20 - 2)
    assert rates[0] == pytest.approx(
        RATES["lr"] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)))
    )


@pytest.mark.world_size(2)
def test_the_state_starts_anew_when_asked(tmp_path: Path):
    _, weights = _saved(tmp_path, lambda p: torch.optim.AdamW(p, lr=1e-2), {})
    with installed():
        trainer = _resumed(tmp_path, {}, load_ignore_keys=ANEW)
        found, state = gathered(trainer.state.model), _states(trainer)
        trainer.close()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert not state, "torch makes the state for a load, and counts that as a step"


@pytest.mark.world_size(2)
def test_an_optimizer_without_such_moments_is_refused(tmp_path: Path):
    _saved(tmp_path, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {})
    with installed(), pytest.raises(CheckpointError, match=r"optimizer is Muon.*the state of SGD"):
        _resumed(tmp_path, {})
