"""Saving and resuming through Composer, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.optim import LinearScheduler
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Digits, Sequence, Whitespace
from tokenizers.processors import ByteLevel
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from composer_fsdp2 import installed
from tests.support.models import TinyComposer, llama_config
from tests.support.pairs import parametrize_by_turns
from tests.support.parity import OPTIMIZERS, full
from tests.support.training import (
    Tokens,
    built,
    largest_difference,
    samples_of,
    train_alone,
    trainer_for,
    weights,
)

ADAMW = OPTIMIZERS["adamw"]
STEPS, HALF = 10, 5


def _run(
    folder: Path | str,
    fsdp2: dict[str, Any],
    *,
    until: int = STEPS,
    seed: int = 0,
    tie: str = "none",
    **kwargs: Any,
) -> tuple[Trainer, TinyComposer]:
    """Trains from weights of a seed, or from a checkpoint, and saves after five steps.

    With `until=0` it only loads.
    """
    model = built(lambda: TinyComposer(tie), seed)
    optimizer = ADAMW(model.parameters())
    with installed():
        trainer = trainer_for(
            model,
            optimizer,
            samples_of(STEPS, 8),
            fsdp2,
            batch=8 // dist.get_world_size(),
            max_duration=f"{until or STEPS}ba",
            save_folder=str(folder),
            save_interval=f"{HALF}ba",
            **kwargs,
        )
        if until:
            trainer.fit()
    trainer.close()
    return trainer, model


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state. Collective: yes."""
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    found = weights(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{names[id(param)]} {key}"] = full(value).clone()
    return found


def _check_resume(tmp_path: Path, fsdp2: dict[str, Any], saved: str, **kwargs: Any) -> Trainer:
    whole, _ = _run(tmp_path / "whole", fsdp2, **kwargs)
    first, _ = _run(tmp_path / "first", fsdp2, until=HALF, **kwargs)
    path = tmp_path / "first" / saved
    assert path.exists()
    loaded, _ = _run(tmp_path / "0", fsdp2, until=0, seed=1, load_path=str(path), **kwargs)
    assert largest_difference(_state(loaded), _state(first)) == 0.0
    resumed, _ = _run(tmp_path / "second", fsdp2, seed=1, load_path=str(path), **kwargs)
    assert int(resumed.state.timestamp.batch) == STEPS
    assert largest_difference(_state(resumed), _state(whole)) == 0.0
    return resumed


FORMATS = {"sharded": "ep0-ba5", "full": "ep0-ba5-rank0.pt"}


@pytest.mark.table("none-sharded")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tie", ["none", "two modules"])
def test_five_and_five_steps_are_ten(kind: str, tie: str, tmp_path: Path):
    resumed = _check_resume(tmp_path, {"state_dict_type": kind}, FORMATS[kind], tie=tie)
    net = resumed.state.model.net
    assert (net.head.weight is net.embed.weight) is (tie == "two modules")


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_hsdp_resumes(kind: str, tmp_path: Path):
    fsdp2 = {"state_dict_type": kind, "data_parallel_replicate_degree": 2}
    _check_resume(tmp_path, fsdp2, FORMATS[kind])
    if kind == "sharded":
        written = sorted(file.name for file in (tmp_path / "first" / "ep0-ba5").iterdir())
        assert written == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_reshard_to_two_ranks_resumes(tmp_path: Path):
    _check_resume(tmp_path, {"reshard_after_forward": 2}, "ep0-ba5")


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_activation_checkpointing_resumes_without(tmp_path: Path):
    whole, _ = _run(tmp_path / "whole", {})
    _run(tmp_path / "first", {"activation_checkpointing": True}, until=HALF)
    path = tmp_path / "first" / "ep0-ba5"
    resumed, _ = _run(tmp_path / "second", {}, seed=1, load_path=str(path))
    assert largest_difference(_state(resumed), _state(whole)) == 0.0


@pytest.mark.world_size(2)
def test_autoresume_takes_the_latest(tmp_path: Path):
    whole, _ = _run(tmp_path / "whole", {})
    again = {"autoresume": True, "run_name": "again"}
    _run(tmp_path / "run", {}, until=HALF, **again)
    resumed, _ = _run(tmp_path / "run", {}, seed=1, **again)
    assert largest_difference(_state(resumed), _state(whole)) == 0.0


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_sharded_folder_is_named_as_asked(tmp_path: Path):
    fsdp2 = {"sharded_ckpt_prefix_dir": "batch-{batch}"}
    _run(tmp_path, fsdp2, until=HALF)
    assert (tmp_path / "batch-5" / ".metadata").exists()
    _, loaded = _run(tmp_path / "2", fsdp2, seed=1, load_path=str(tmp_path / "batch-5"))
    _, whole = _run(tmp_path / "3", fsdp2)
    assert largest_difference(loaded, whole) == 0.0


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["none", "two modules"])
def test_weights_read_by_rank0_alone_reach_every_rank(tie: str, tmp_path: Path):
    """Each rank has weights of its own before, and they must not survive."""
    fsdp2 = {"state_dict_type": "full"}
    first, _ = _run(tmp_path / "first", fsdp2, tie=tie, until=HALF)
    alone = {**fsdp2, "load_monolith_rank0_only": True}
    load = {"seed": 1 + dist.get_rank(), "load_path": str(tmp_path / "first" / FORMATS["full"])}
    loaded, _ = _run(tmp_path / "0", alone, tie=tie, until=0, **load)
    assert largest_difference(_state(loaded), _state(first)) == 0.0
    _, model = _run(tmp_path / "second", alone, tie=tie, **load)
    oracle = built(lambda: TinyComposer(tie))
    train_alone(oracle, ADAMW(oracle.parameters()), samples_of(STEPS, 8), 8)
    assert largest_difference(model, oracle) <= 1e-6
    assert (model.net.head.weight is model.net.embed.weight) is (tie == "two modules")


@pytest.mark.world_size(2)
def test_weights_alone_are_loaded(tmp_path: Path):
    _, model = _run(tmp_path / "first", {}, until=HALF)
    path = str(tmp_path / "first" / FORMATS["sharded"])
    loaded = built(TinyComposer, seed=1)
    with installed():
        trainer = trainer_for(
            loaded,
            ADAMW(loaded.parameters()),
            samples_of(1, 8),
            load_path=path,
            load_weights_only=True,
        )
    assert largest_difference(loaded, model) == 0.0
    trainer.close()


# --- What may differ between runs, as in Composer without sharding. ---

SCHEDULES: dict[str, Any] = {
    "none": lambda _: None,
    "Composer's": lambda _: LinearScheduler(alpha_f=0.1),
    "torch's": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "another of torch's": lambda optimizer: StepLR(optimizer, 3),
    "two of torch's": lambda optimizer: [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 3)],
}
EXCHANGES = [
    ("none", "Composer's"),
    ("Composer's", "none"),
    ("none", "torch's"),
    ("torch's", "Composer's"),
    ("Composer's", "torch's"),
    ("torch's", "another of torch's"),
    ("torch's", "two of torch's"),
]


def _continued(
    folder: Path, kind: str | None, schedules: tuple[str, str], frozen: tuple[str, ...], lists: bool
) -> tuple[TinyComposer, list[float]]:
    """Weights and rates of a run that goes on with other schedules, or without some layers.

    Args:
        folder: of both runs.
        kind: of the checkpoint; `None` for runs without FSDP2, on the same samples.
        schedules: names of the first and the second run's.
        frozen: parts of names of what the second run does not train.
        lists: whether the optimizer is given the frozen parameters too.
    """
    alone = kind is None
    for number, until in enumerate((HALF, STEPS)):
        model = built(TinyComposer, number)
        for name, param in model.named_parameters():
            param.requires_grad_(number == 0 or not any(part in name for part in frozen))
        params = [param for param in model.parameters() if lists or param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        saved = folder / "0" / FORMATS[kind or "full"]
        with installed():
            trainer = trainer_for(
                model,
                optimizer,
                samples_of(STEPS, 8),
                {"state_dict_type": kind},
                max_duration=f"{until}ba",
                schedulers=SCHEDULES[schedules[number]](optimizer),
                save_folder=str(folder / str(number)),
                save_interval=f"{HALF}ba",
                load_path=str(saved) if number else None,
                **({"parallelism_config": None} if alone else {}),
            )
            trainer.fit()
        trainer.close()
        dist.barrier()
    return model, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:.*is not in the state_dict")
@pytest.mark.filterwarnings("ignore:.*do not both have .*schedulers")
@pytest.mark.filterwarnings("ignore:.*do not both have .*initial_lr")
@pytest.mark.table("schedules5-full")
@pytest.mark.world_size(2)
@parametrize_by_turns(schedules=EXCHANGES, kind=FORMATS)
def test_a_schedule_that_is_added_or_exchanged(
    schedules: tuple[str, str], kind: str, tmp_path: Path
):
    oracle, rates = _continued(tmp_path / "alone", None, schedules, (), True)
    model, found = _continued(tmp_path / "sharded", kind, schedules, (), True)
    assert found == rates
    assert largest_difference(model, oracle) < 1e-5


@pytest.mark.matrix
@pytest.mark.world_size(2)
@parametrize_by_turns(lists=[True, False], kind=FORMATS)
def test_layers_frozen_between_runs(lists: bool, kind: str, tmp_path: Path):
    frozen, schedules = ("embed", "blocks.0"), ("Composer's", "Composer's")
    oracle, rates = _continued(tmp_path / "alone", None, schedules, frozen, lists)
    model, found = _continued(tmp_path / "sharded", kind, schedules, frozen, lists)
    assert found == rates
    assert largest_difference(model, oracle) < 1e-5


def _with_tokenizer(**written: Any) -> HuggingFaceModel:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(31)}, unk_token="w1"))
    for name, value in written.items():
        setattr(words, name, value)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1")
    torch.manual_seed(0)
    return HuggingFaceModel(LlamaForCausalLM(llama_config(True, vocab_size=31)), tokenizer)


@pytest.mark.world_size(2)
def test_a_tokenizer_of_another_version_stops_no_resume(tmp_path: Path):
    """transformers 5 writes a processor and longer lists where transformers 4 writes null."""
    written = {"post_processor": ByteLevel(), "pre_tokenizer": Sequence([Digits(), Whitespace()])}
    samples = Tokens(8)
    for number, (first, second) in enumerate(((written, {}), ({}, written))):
        folder = str(tmp_path / str(number))
        states: list[dict[str, torch.Tensor]] = []
        for kwargs, given in (
            (first, {"save_folder": folder, "save_interval": "1ba", "max_duration": "1ba"}),
            (second, {"load_path": f"{folder}/ep0-ba1", "max_duration": "1ba"}),
        ):
            model = _with_tokenizer(**kwargs)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            with installed():
                trainer = trainer_for(model, optimizer, samples, {}, **given)
                if "save_folder" in given:
                    trainer.fit()
                states.append(_state(trainer))
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
