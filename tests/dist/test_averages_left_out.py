"""A checkpoint whose model is EMA's averages, in a run without EMA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composer import Trainer
from composer import algorithms as A
from torch import distributed as dist
from typer.testing import CliRunner

from composer_fsdp2 import CheckpointError, installed
from composer_fsdp2.cli.main import app
from tests.support.models import TinyComposer
from tests.support.parity import OPTIMIZERS
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

CURES = r"(?s)Add EMA.*load_weights_only: true.*--weights trained"


def tied() -> TinyComposer:
    return TinyComposer("two modules")


def prepared(*, ema: bool = False, until: str = "4ba", **settings: Any) -> Trainer:
    model = built(tied)
    algorithms = [A.EMA(half_life="2ba")] if ema else []
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return trainer_for(
        model, optimizer, samples_of(4, 8), algorithms=algorithms, max_duration=until, **settings
    )


def trained(**settings: Any) -> Trainer:
    trainer = prepared(**settings)
    trainer.fit()
    trainer.close()
    return trainer


def saved(folder: Path, kind: str) -> Path:
    """A checkpoint of the second batch, with EMA."""
    settings: dict[str, Any] = {"parallelism_config": None}
    if kind != "unsharded":
        settings = {"parallelism_config": {"fsdp2": {"state_dict_type": kind}}}
    trained(ema=True, until="3ba", save_folder=str(folder), save_interval="2ba", **settings)
    return folder / ("ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt")


@pytest.mark.table("full")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full", "unsharded"])
def test_training_without_ema(kind: str, tmp_path: Path):
    with installed():
        path = saved(tmp_path, kind)
        with pytest.raises(CheckpointError, match=CURES):
            trained(load_path=str(path))
        with pytest.raises(CheckpointError, match=CURES):
            trained(ema=True, load_path=str(path), load_ignore_keys=["state/algorithms"])
        plain = trained()
        with_ema = trained(ema=True, load_path=str(path))
        assert with_ema.state.timestamp.batch == 4
        _check_cures(path, tmp_path, plain)


def _check_cures(path: Path, folder: Path, plain: Trainer) -> None:
    averages = prepared(load_path=str(path), load_weights_only=True)
    averages.fit()
    averages.close()
    new = folder / "trained.pt"
    if dist.get_rank() == 0:
        arguments = ["checkpoint", "convert", str(path), str(new), "--to", "full"]
        result = CliRunner().invoke(app, [*arguments, "--weights", "trained"])
        assert result.exit_code == 0, result.output
    dist.barrier()
    resumed = trained(load_path=str(new))
    assert resumed.state.timestamp.batch == 4
    # EMA does not change what is trained: the oracle is the run that never had it.
    assert largest_difference(weights(resumed.state.model), weights(plain.state.model)) <= 1e-6


@pytest.mark.table("full")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_evaluation_has_the_averages(kind: str, tmp_path: Path):
    with installed():
        path = saved(tmp_path, kind)
        trainer = prepared(load_path=str(path))
        only = prepared(load_path=str(path), load_weights_only=True)
        assert largest_difference(weights(trainer.state.model), weights(only.state.model)) == 0
        trainer.eval(eval_dataloader=trainer.state.train_dataloader)


@pytest.mark.world_size(2)
def test_rank_0_alone_reads(tmp_path: Path):
    with installed():
        path = saved(tmp_path, "full")
        fsdp2 = {"state_dict_type": "full", "load_monolith_rank0_only": True}
        with pytest.raises(CheckpointError, match=CURES):
            trained(load_path=str(path), parallelism_config={"fsdp2": fsdp2})


@pytest.mark.world_size(2)
def test_a_new_optimizer_state_goes_with_averages(tmp_path: Path):
    with installed():
        path = saved(tmp_path, "sharded")
        trained(load_path=str(path), load_ignore_keys=["state/optimizers/*", "state/optimizers"])


@pytest.mark.world_size(1)
def test_a_checkpoint_without_averages_has_no_other_weights(tmp_path: Path):
    with installed():
        trained(until="2ba", save_folder=str(tmp_path), save_interval="2ba")
    arguments = ["checkpoint", "convert", str(tmp_path / "ep0-ba2"), str(tmp_path / "x.pt")]
    result = CliRunner().invoke(app, [*arguments, "--to", "full", "--weights", "trained"])
    assert result.exit_code != 0
    assert "holds no averages" in " ".join(result.output.split())
