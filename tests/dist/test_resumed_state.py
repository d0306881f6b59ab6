"""After a resume each parameter has the optimizer state that the checkpoint has, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer import Callback, Trainer
from composer.models import HuggingFaceModel
from torch import distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from composer_fsdp2 import Muon, installed, prepare_fully_shard
from composer_fsdp2.errors import CheckpointError, ConfigError
from tests.dist.test_tensor_parallel import global_batches, llama, of_this_group
from tests.dist.test_trainer_checkpoints import FORMATS, HALF, STEPS, _state
from tests.support.models import TinyComposer
from tests.support.parity import full
from tests.support.training import (
    Tokens,
    built,
    largest_difference,
    samples_of,
    trainer_for,
    weights,
)

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "without state": lambda params: torch.optim.SGD(params, lr=0.02),
}


class Late(TinyComposer):
    """Has a layer that a batch uses from batch 7 on; `used` counts batches of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(self.net.embed.weight.shape[1], 1)
        self.batch = 0

    def loss(self, outputs: Any, batch: Any, *args: Any) -> torch.Tensor:
        loss = super().loss(outputs, batch, *args)
        if self.batch >= 7:
            loss = loss + self.extra(self.net.embed(batch[0])).square().mean()
        return loss


class Changes(Callback):
    """Tells the model its batch, and trains the first block in some batches only."""

    def __init__(self, trained: tuple[int, int]) -> None:
        self.trained = trained

    def set(self, model: Any, batch: int) -> None:
        model.batch = batch
        model.net.blocks[0].requires_grad_(self.trained[0] <= batch < self.trained[1])

    def batch_start(self, state: Any, logger: Any) -> None:
        del logger
        self.set(state.model, int(state.timestamp.batch))


def run(
    folder: Path,
    settings: dict[str, Any],
    trained: tuple[int, int] = (0, STEPS),
    optimizer: str = "adamw",
    groups: Any = None,
    until: int = STEPS,
    begin: Callable[[Trainer], Any] = id,
    **kwargs: Any,
) -> Trainer:
    torch.manual_seed(1 if "load_path" in kwargs else 0)
    model, changes = Late(), Changes(trained)
    changes.set(model, 0)
    params = list(model.parameters())
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS[optimizer](params if groups is None else groups(params)),
            samples_of(STEPS, 8),
            settings,
            max_duration=f"{until}ba",
            save_folder=str(folder),
            save_interval=f"{HALF}ba",
            callbacks=[changes],
            **kwargs,
        )
        begin(trainer)
        trainer.fit()
    trainer.close()
    return trainer


def same(a: Trainer, b: Trainer) -> bool:
    """Whether weights and state are equal, of what this rank has. Collective: yes."""
    pairs = _state(a), _state(b)
    found, expected = ({k: v for k, v in state.items() if v.numel()} for state in pairs)
    return largest_difference(found, expected) == 0.0


def check(tmp_path: Path, settings: dict[str, Any], *args: Any) -> Trainer:
    """Five and five steps are ten, to the last bit, and the same parameters have state."""
    whole = run(tmp_path / "whole", settings, *args)
    run(tmp_path / "first", settings, *args, until=HALF)
    path = tmp_path / "first" / FORMATS[settings["state_dict_type"]]
    resumed = run(tmp_path / "second", settings, *args, load_path=str(path))
    assert same(resumed, whole)
    return resumed


@pytest.mark.table("until 2-sharded-adamw", "from 7-full-adamw")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "trained",
    [(0, STEPS), (2, STEPS), (7, STEPS), (0, 3), (STEPS, STEPS)],
    ids=["always", "until 2", "from 7", "until 3", "never"],
)
def test_frozen_for_some_batches(
    trained: tuple[int, int], kind: str, optimizer: str, tmp_path: Path
):
    """The other layer has no gradient until the second half."""
    check(tmp_path, {"state_dict_type": kind}, trained, optimizer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_before_the_first_step(kind: str, tmp_path: Path):
    """No counter begins at 1, neither in the run that goes on nor in one that resumes."""
    settings = {"state_dict_type": kind}
    whole = run(tmp_path / "whole", settings)
    saving = run(
        tmp_path / "saving",
        settings,
        begin=lambda trainer: trainer.save_checkpoint(str(tmp_path / "0" / "ba{batch}-{rank}.pt")),
    )
    path = tmp_path / "0" / {"full": "ba0-0.pt", "sharded": "ep0-ba0"}[kind]
    resumed = run(tmp_path / "resumed", settings, load_path=str(path))
    assert same(saving, whole)
    assert same(resumed, whole)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_other_state_of_the_same_class(kind: str, tmp_path: Path):
    """Saved settings go on, so the momentum of this run would have no effect."""
    settings = {"state_dict_type": kind}
    run(tmp_path / "first", settings, optimizer="without state", until=HALF)
    path = tmp_path / "first" / FORMATS[kind]
    with pytest.raises(CheckpointError, match="momentum of group 0 is 0 in the"):
        run(tmp_path / "second", settings, optimizer="momentum", load_path=str(path))


def _three(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": [], "lr": 0.5},
        {"params": params[:3], "lr": 3e-3},
        {"params": [], "weight_decay": 0.25},
        {"params": params[3:], "lr": 1e-3},
    ]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_groups_without_parameters(kind: str, tmp_path: Path):
    resumed = check(tmp_path, {"state_dict_type": kind}, (0, STEPS), "adamw", _three)
    groups = resumed.state.optimizers[0].param_groups
    assert [len(group["params"]) > 0 for group in groups] == [False, True, False, True]
    assert groups[0]["lr"] == 0.5
    assert groups[2]["weight_decay"] == 0.25


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_muon_with_experts_of_other_ranks(kind: str, tmp_path: Path):
    """torch gives every parameter a gradient of zeros, also those of another mesh."""

    def mixture(until: int, folder: str, seed: int = 0, **kwargs: Any) -> Trainer:
        torch.manual_seed(seed)
        config = MixtralConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            use_cache=False,
        )
        model = HuggingFaceModel(MixtralForCausalLM(config), use_logits=True, shift_labels=True)
        parallelism = {"fsdp2": {"state_dict_type": kind}, "ep": {"degree": 2}}
        with installed():
            trainer = trainer_for(
                model,
                Muon(model, lr=0.01, iteration_dtype="fp32"),
                Tokens(8 * STEPS),  # pyright: ignore
                max_duration=f"{until}ba",
                save_folder=str(tmp_path / folder),
                save_interval=f"{HALF}ba",
                parallelism_config=parallelism,
                auto_log_hparams=False,
                **kwargs,
            )
            trainer.fit()
        trainer.close()
        return trainer

    whole = mixture(STEPS, "whole")
    mixture(HALF, "first")
    path = str(tmp_path / "first" / FORMATS[kind])
    resumed = mixture(STEPS, "second", seed=1, load_path=path)
    assert same(resumed, whole)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
def test_state_of_dtensors_has_the_layout_of_its_parameter():
    """`torch.maximum(..., out=...)` leaves another one on strided shards."""

    def state(settings: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = llama().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, foreach=False)
        names = [name for name, _ in model.named_parameters()]
        if settings is not None:
            prepare_fully_shard(model, optimizer, settings, device="cpu")
        for ids in global_batches(3):
            ids = ids if settings is None else of_this_group(ids)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.state_dict()["state"]
        return {
            f"{names[number]} {key}": full(value)
            for number, held in found.items()
            for key, value in held.items()
        }

    settings = {"tensor_parallel": 2, "local_step": False, "mixed_precision": "FULL"}
    found, expected = state(settings), state(None)
    dist.barrier()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-14), key


class OwnNames(nn.Module):
    """Leaves a frozen part out of its state dict, or adds a tensor to it."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.frozen, self.trained = nn.Linear(width, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        nn.init.ones_(self.frozen.weight)  # as a base that is loaded from elsewhere
        nn.init.zeros_(self.frozen.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        if self.adds:
            found[f"{prefix}added"] = torch.ones(3)
        else:
            for name in [name for name in found if name.startswith(f"{prefix}frozen.")]:
                del found[name]
        return found


class WithNames(Late):
    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.inside = OwnNames(self.net.embed.weight.shape[1], adds=adds)

    def loss(self, outputs: Any, batch: Any, *args: Any) -> torch.Tensor:
        inside = self.inside(self.net.embed(batch[0])).square().mean()
        return super().loss(outputs, batch, *args) + inside


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_module_with_a_state_dict_of_its_own(kind: str, tmp_path: Path):
    settings = {"state_dict_type": kind}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.Late", partial(WithNames, adds=False))
        check(tmp_path, settings)
        patch.setattr(f"{__name__}.Late", partial(WithNames, adds=True))
        with pytest.raises(ConfigError, match=r"has 'inside\.added', and no module has"):
            run(tmp_path / "added", settings)


class Keeps(Callback):
    """Has state in containers, of which a new one lacks a part."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class KeepsMore(Keeps):
    """Needs all of its state where it is given any."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"n": state["n"]})


KEPT: dict[str, Any] = {
    "best": {"eval": 0.5, "metrics": {"loss": np.float64(0.25)}},
    "by layer": {0: 7, 1: 8, 2: 9},
    "lists": [[1, 2], {"a": torch.ones(2)}],
    "moments": {"mean": torch.arange(3.0)},
    "nothing": {},
    "none": None,
}
NEW: dict[str, Any] = {
    "best": {},
    "by layer": {0: 0, 1: 0},
    "lists": [],
    "moments": None,
    "nothing": {},
    "none": None,
}


def _with_callbacks(
    folder: Path, kind: str, *callbacks: Callback, until: int = HALF, **kwargs: Any
) -> Trainer:
    model = built(TinyComposer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-3))
    with installed():
        trainer = trainer_for(
            model,
            optimizer,
            samples_of(STEPS, 8),
            {"state_dict_type": kind},
            max_duration=f"{until or STEPS}ba",
            save_folder=str(folder),
            save_interval=f"{HALF}ba",
            callbacks=list(callbacks),
            **kwargs,
        )
        if until:
            trainer.fit()
    trainer.close()
    return trainer


@pytest.mark.filterwarnings("ignore:.*KeepsMore")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_containers_of_callbacks(kind: str, tmp_path: Path):
    _with_callbacks(tmp_path / "first", kind, Keeps(KEPT))
    path = str(tmp_path / "first" / FORMATS[kind])
    kept, more = Keeps(copy.deepcopy(NEW)), KeepsMore({"best": {}, "n": 0})
    _with_callbacks(tmp_path / "second", kind, kept, more, until=STEPS, load_path=path)
    assert str(kept.values) == str(KEPT)
    assert more.values == {"best": {}, "n": 0}


@pytest.mark.world_size(1)
def test_a_run_with_a_progress_bar(tmp_path: Path):
    """A rank that shows the bar saves its numbers, and at the start there is none to fill."""
    _with_callbacks(tmp_path / "first", "sharded", progress_bar=True)
    path = str(tmp_path / "first" / FORMATS["sharded"])
    kwargs = {"until": STEPS, "load_path": path, "progress_bar": True}
    trainer = _with_callbacks(tmp_path / "second", "sharded", **kwargs)
    assert int(trainer.state.timestamp.batch) == STEPS


@pytest.mark.world_size(2)
def test_a_function_that_takes_keys_out_of_a_file(tmp_path: Path):
    """It is for the file: the run may have less, or other keys."""
    first = _with_callbacks(tmp_path / "first", "full")
    path = str(tmp_path / "first" / FORMATS["full"])

    def change(values: dict[str, Any]) -> None:
        values.pop("rng")
        values["state"].pop("optimizers")
        values["state"]["model"].pop("net.head.weight")

    loaded = _with_callbacks(
        tmp_path / "second",
        "full",
        until=0,
        load_path=path,
        load_weights_only=True,
        load_ignore_keys=change,
    )
    differs = {
        name
        for name, value in weights(loaded.state.model).items()
        if not torch.equal(value, weights(first.state.model)[name])
    }
    assert differs == {"net.head.weight"}
