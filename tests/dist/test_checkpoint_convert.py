"""What the Trainer saves under FSDP2, converted offline, and where the run goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from composer_fsdp2 import installed
from composer_fsdp2.cli.main import app
from tests.support.deepspeed import save
from tests.support.models import TinyComposer
from tests.support.parity import OPTIMIZERS, full
from tests.support.training import (
    Tokens,
    built,
    largest_difference,
    samples_of,
    trainer_for,
    weights,
)
from tests.unit.checkpoint.test_huggingface import composers, logits, names_in, tiny, tokenizer

ADAMW = OPTIMIZERS["adamw"]
SAVED = {"sharded": "ep0-ba5", "full": "ep0-ba5-rank0.pt"}
OTHER = {"sharded": "full", "full": "sharded"}


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


def _train(
    folder: Path, kind: str, tie: str, until: int, load: Path | None
) -> dict[str, torch.Tensor]:
    """Weights and optimizer state at the end. Collective: yes."""
    model = built(lambda: TinyComposer(tie), seed=1 if load else 0)
    optimizer = ADAMW(model.parameters())
    with installed():
        trainer = trainer_for(
            model,
            optimizer,
            samples_of(10, 8),
            {"state_dict_type": kind},
            batch=8 // dist.get_world_size(),
            max_duration=f"{until}ba",
            save_folder=str(folder),
            save_interval="5ba",
            load_path=str(load) if load else None,
        )
        trainer.fit()
        trainer.close()
    found = weights(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for param, state in trainer.state.optimizers[0].state.items():
        for slot, value in state.items():
            found[f"{names[id(param)]} {slot}"] = full(value).clone()
    return found


@pytest.mark.table
@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("tie", ["none", "two modules"])
def test_a_run_goes_on_from_the_other_kind(kind: str, tie: str, ranks: Any, tmp_path: Path):
    whole = ranks(2, _train, tmp_path / "whole", kind, tie, 10, None)[0]
    saved, converted = tmp_path / "whole" / SAVED[kind], tmp_path / "converted"
    run("convert", saved, converted, "--to", OTHER[kind])
    assert run("diff", saved, converted).startswith("Equal")
    resumed = ranks(2, _train, tmp_path / "on", OTHER[kind], tie, 10, converted)[0]
    assert largest_difference(resumed, whole) == 0.0
    run("convert", converted, tmp_path / "back", "--to", kind)
    resumed = ranks(2, _train, tmp_path / "back on", kind, tie, 10, tmp_path / "back")[0]
    assert largest_difference(resumed, whole) == 0.0


# --- DeepSpeed. ---


def _load_converted(path: Path) -> dict[str, torch.Tensor]:
    """Collective: yes."""
    model = composers(tiny("llama tied"))
    for param in model.parameters():
        param.data.zero_()
    with installed():
        trainer = trainer_for(
            model,
            ADAMW(model.parameters()),
            Tokens(2 * 8),
            {},
            load_path=str(path),
            load_weights_only=True,
        )
        loaded = weights(model)
        trainer.fit()
        trainer.close()
    return loaded


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_run_begins_with_the_weights_that_deepspeed_trained(
    kind: str, ranks: Any, tmp_path: Path
):
    trained = dict(tiny("llama tied").state_dict())
    groups = [[name for name in trained if name != "lm_head.weight"]]
    shared = {"lm_head.weight": "model.embed_tokens.weight"}
    save(tmp_path / "in", trained, 3, 3, groups=groups, shared=shared)
    run("convert", tmp_path / "in", tmp_path / "out", "--to", kind)
    assert run("diff", tmp_path / "in", tmp_path / "out").startswith("Equal")
    loaded = ranks(2, _load_converted, tmp_path / "out")[0]
    wanted = {f"model.{name}": weight for name, weight in trained.items()}
    assert loaded.keys() == wanted.keys()
    assert largest_difference(loaded, wanted) == 0.0


# --- Hugging Face. ---


def _train_hugging_face(name: str, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights from the live model, not from the files. Collective: yes."""
    model = composers(tiny(name), tokenizer())
    with installed():
        trainer = trainer_for(
            model,
            ADAMW(model.parameters()),
            Tokens(2 * 8),
            {"state_dict_type": kind},
            save_folder=str(folder),
            save_interval="2ba",
        )
        trainer.fit()
        trainer.close()
    return weights(model)


# GPT-2's blocks do; newer torch warns of what could happen to a view.
@pytest.mark.table("llama tied-full")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", ["llama tied", "llama", "gpt2"])
def test_from_pretrained_loads_what_was_trained(name: str, kind: str, ranks: Any, tmp_path: Path):
    trained = ranks(2, _train_hugging_face, name, kind, tmp_path / "run")[0]
    saved = tmp_path / "run" / {"sharded": "ep0-ba2", "full": "ep0-ba2-rank0.pt"}[kind]
    said = run("convert", saved, tmp_path / "out", "--to", "hf")
    assert "The model's class" not in said  # one of transformers, whatever FSDP2 has made of it
    truth = tiny(name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(truth).__name__]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = logits(truth)
    truth.load_state_dict({key.removeprefix("model."): value for key, value in trained.items()})
    assert not torch.equal(logits(truth), before)
    assert torch.equal(logits(loaded), logits(truth))
    assert ("lm_head.weight" in names_in(tmp_path / "out")) is (name == "llama")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.get_vocab() == tokenizer().get_vocab()
