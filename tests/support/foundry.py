"""LLM Foundry's runs inside a pool's ranks, from the settings that a YAML would hold."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, State, Time
from composer.loggers import Logger, LoggerDestination
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from tests.support.limits import scaled
from tests.support.models import llama_config
from tests.support.parity import full
from tests.support.shards import free_numbers

__all__ = [
    "FSDP2",
    "MODEL",
    "PRELOAD",
    "VOCAB",
    "Told",
    "llama",
    "loader_of",
    "merged",
    "plain_weights",
    "run_of",
    "tell",
    "trained",
    "write_assets",
]

PRELOAD = ("llmfoundry.command_utils", "tests.support.foundry_asked_once")
"""for the server that ranks are forked from: importing it takes longer than all tests here"""
LENGTH = 24
VOCAB = 300
FSDP2: dict[str, Any] = {"parallelism_config": {"fsdp2": {}}}
MODEL: dict[str, Any] = {
    "name": "mpt_causal_lm",
    "init_device": "cpu",
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 3,
    "expansion_ratio": 2,
    "max_seq_len": LENGTH,
    "vocab_size": VOCAB,
    "attn_config": {"attn_impl": "torch"},
    "loss_fn": "torch_crossentropy",
}


def llama(assets: Path, folder: str = "llama", **changes: Any) -> dict[str, Any]:
    """A model of LLM Foundry read from a folder of the assets."""
    return {
        "model": {
            "name": "hf_causal_lm",
            "pretrained_model_name_or_path": f"{assets}/{folder}",
            "pretrained": True,
            "init_device": "cpu",
            "use_auth_token": False,
            **changes,
        }
    }


LOADER: dict[str, Any] = {
    "drop_last": True,
    "num_workers": 0,
    "pin_memory": False,
    "prefetch_factor": None,
    "persistent_workers": False,
}
WORDS = tuple("abcdefghijklmnopqr")


def write_assets(folder: Path) -> None:
    """Tokenizer, MDS shards of text, prompts with responses, and questions with answers."""
    from streaming import MDSWriter

    _write_tokenizer(folder / "tokenizer")
    for split, count in (("train", 64), ("val", 12)):
        with MDSWriter(out=str(folder / "mds" / split), columns={"text": "str"}) as writer:
            for number in range(count):
                writer.write({"text": _sentence(number, 40)})
        rows = [
            {"prompt": _sentence(n, 4), "response": _sentence(n + 7, n % 9 + 2)}
            for n in range(count)
        ]
        _write_rows(folder / "finetuning" / f"{split}.jsonl", rows)
    for tied in (True, False):
        torch.manual_seed(0)
        config = llama_config(
            tied=tied, vocab_size=VOCAB, hidden_size=16, max_position_embeddings=LENGTH
        )
        LlamaForCausalLM(config).save_pretrained(folder / ("llama-tied" if tied else "llama"))
    questions = [{"context": _sentence(n, 6), "continuation": WORDS[n]} for n in range(8)]
    _write_rows(folder / "questions.jsonl", questions)


def _sentence(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 5 + i * (number % 4 + 1)) % len(WORDS)] for i in range(length))


def _write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_sentence(n, 40) for n in range(64)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|end|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=LENGTH,
    ).save_pretrained(folder)


def run_of(assets: Path, *changes: dict[str, Any], loader: str = "text") -> dict[str, Any]:
    """Settings of a run of four batches of 8 samples; each of `changes` takes blocks' places."""
    settings: dict[str, Any] = {
        "run_name": "test",
        "max_seq_len": LENGTH,
        "model": MODEL,
        "tokenizer": {"name": f"{assets}/tokenizer", "kwargs": {"model_max_length": LENGTH}},
        "train_loader": loader_of(assets, "train", loader),
        "optimizer": {
            "name": "decoupled_adamw",
            "lr": 3e-3,
            "betas": [0.9, 0.95],
            # Some gradients are 0 but for rounding, which Adam would make steps of.
            "eps": 1e-3,
            "weight_decay": 0.0,
        },
        "scheduler": {"name": "constant_with_warmup", "t_warmup": "0ba"},
        "max_duration": "4ba",
        "eval_interval": 0,
        "global_train_batch_size": 8,
        "device_train_microbatch_size": 2,
        "device_eval_batch_size": 2,
        "precision": "fp32",
        "loggers": {"told": {}},
        "log_to_console": False,
        "log_config": False,
        "python_log_level": None,
        "dist_timeout": scaled(60),
    }
    return merged(settings, *changes)


def loader_of(assets: Path, split: str, kind: str = "text") -> dict[str, Any]:
    dataset: dict[str, Any] = {"split": split, "max_seq_len": LENGTH, "shuffle": False}
    if kind == "text":
        return {**LOADER, "name": kind, "dataset": {**dataset, "local": f"{assets}/mds"}}
    dataset |= {
        "hf_name": f"{assets}/finetuning",
        "decoder_only_format": True,
        "allow_pad_trimming": False,
    }
    return {**LOADER, "name": kind, "dataset": dataset}


def merged(settings: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with `changes` in it; a dotted key leads into blocks."""
    result = copy.deepcopy(settings)
    for change in changes:
        for key, value in change.items():
            *path, last = key.split(".")
            block = result
            for part in path:
                block = block.setdefault(part, {})
            block[last] = copy.deepcopy(value)
    return result


class Recorded(LoggerDestination):
    """Keeps the losses of a run, and the newest value of every metric."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: dict[str, float] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(state.total_loss_dict["loss/train/total"])

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.update({k: float(v) for k, v in metrics.items() if not isinstance(v, str)})


class Iterations(Callback):
    """Composer counts iterations of the length somebody gives them, and has no default."""

    def __init__(self, length: str) -> None:
        self.length = length

    def iteration_start(self, state: State, logger: Logger) -> None:
        state._iteration_length = Time.from_timestring(self.length)


class Interruption(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            raise InterruptedError


class Seasoning(Callback):
    """After the first batch, gives a Lion's trackers the memory of a run that is older."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch != 1:
            return
        for values in state.optimizers[0].state.values():
            tracker = values.get("grad_tracker") or values["moment_tracker"]
            (norm,) = tracker.intermediate_data_queue
            older = [norm * (0.1 + 0.01 * (n % 7)) for n in range(499)]
            tracker.intermediate_data_queue.extend(older)
            tracker.delayed_moving_average.extend(older[:9])


def trained(cfg: dict[str, Any]) -> Trainer:
    """Runs LLM Foundry's `train` on this rank. Collective: yes."""
    from llmfoundry import registry
    from llmfoundry.command_utils.train import train
    from omegaconf import OmegaConf

    from composer_fsdp2.foundry.transform import transform
    from composer_fsdp2.patches import install_for_foundry

    install_for_foundry()  # as `composer-fsdp2 train` does, also for a run without FSDP2
    registry.config_transforms.register("composer_fsdp2", func=transform)
    registry.loggers.register("told", func=Recorded)
    registry.callbacks.register("interruption", func=Interruption)
    registry.callbacks.register("iterations", func=Iterations)
    registry.callbacks.register("seasoning", func=Seasoning)
    if dist.get_rank() == 0:
        free_numbers()
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(OmegaConf.create(cfg))


@dataclass
class Told:
    """What a run came to, as plain data."""

    losses: list[float]
    metrics: dict[str, float]
    """of evaluation, at the end"""
    logged: dict[str, float]
    weights: dict[str, torch.Tensor] = field(repr=False)
    sharded: bool = False
    batches: int = 0


def tell(cfg: dict[str, Any]) -> Told:
    """Trains and tells. Collective: yes."""
    trainer = trained(cfg)
    (recorded,) = [item for item in trainer.logger.destinations if isinstance(item, Recorded)]
    told = Told(
        losses=recorded.losses,
        logged=recorded.logged,
        metrics={
            f"{loader}/{name}": float(metric.compute())
            for loader, metrics in trainer.state.eval_metrics.items()
            for name, metric in metrics.items()
        },
        weights=plain_weights(trainer.state.model),
        sharded=all(isinstance(param, DTensor) for param in trainer.state.model.parameters()),
        batches=trainer.state.timestamp.batch.value,
    )
    trainer.close()
    return told


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights under their plain names. Collective: yes."""
    return {
        name.removeprefix("module."): full(value).detach().clone()
        for name, value in model.state_dict().items()
        if "metric" not in name
    }
