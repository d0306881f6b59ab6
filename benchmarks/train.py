"""Tokens a second, MFU and memory of training in Composer's Trainer, beside published figures.

Method: the model has a published shape and weights from its configuration, nothing is downloaded;
tokens are drawn. Every GPU is a rank, one process each. After a few batches of warm-up the batches
are timed, each with all of its work done; the line of a row has the medians.

- `tokens_per_second` is of one GPU, `mfu` is of its dense bf16 FLOP/s, in FLOPs of the model: 6 for
  a trained weight and token, 4 for a frozen one, and 12 x layers x width x length of attention.
  Nothing counts for what is computed again.
- `peak_gib` is the most that torch's allocator gave out; `predicted_gib` and `predicted_seconds`
  are what `composer-fsdp2 plan` says of this step, at its assumed share of 50 % of the GPU.
- `published` is what others have measured of this row; their hardware is not this one.

    PYTHONPATH=. python benchmarks/train.py --row mpt-760m
    PYTHONPATH=. python benchmarks/train.py --row mpt-760m --peer composer
    PYTHONPATH=. python benchmarks/train.py --row qwen3-0.6b-8k --compile

`--peer composer` is Composer without this package: an unsharded model on one GPU, its FSDP1 on
several. `--device cpu` trains tiny sizes in fp32, on two ranks and Composer's on one, for a try.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import shapes
import torch
from composer import Trainer
from composer.core import Callback, State
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

import composer_fsdp2
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.estimate.clock import GPUS, Gpu, step_times
from composer_fsdp2.estimate.forecast import forecast
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.prepare.trace import traced_settings
from tests.support.plan_layouts import HuggingFace, Layout, work_of

MPT_ATTENTION = "flash" if importlib.util.find_spec("flash_attn") else "torch"
"""flash-attn is a package of its own; without it MPT keeps the scores of whole sequences"""
FSDP1 = {"fsdp": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT"}}


def mpt(**sizes: Any) -> PretrainedConfig:
    from llmfoundry.models.mpt import MPTConfig

    return MPTConfig(attn_config={"attn_impl": MPT_ATTENTION}, vocab_size=50368, **sizes)


def qwen3(**sizes: Any) -> PretrainedConfig:
    return Qwen3Config(vocab_size=151936, tie_word_embeddings=True, **sizes)


def llama3(**sizes: Any) -> PretrainedConfig:
    return LlamaConfig(vocab_size=128256, rope_theta=5e5, max_position_embeddings=8192, **sizes)


SMALL: dict[str, dict[str, Any]] = {
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclass(frozen=True)
class Row:
    """What is trained."""

    config: Callable[..., PretrainedConfig]
    sizes: dict[str, Any]
    length: int
    samples: int
    """a rank and batch"""
    settings: dict[str, Any] = field(default_factory=dict)
    lora: int = 0
    """rank of adapters of all linear layers; 0 trains all weights"""
    published: str = ""


RECOMPUTED = {"activation_checkpointing": True}
ROWS: dict[str, Row] = {
    "mpt-760m": Row(
        mpt,
        {"d_model": 1536, "n_heads": 12, "n_layers": 24},
        length=2048,
        samples=4,
        published="63,147 tokens/s a GPU, FSDP1 on 8 H100 (LLM Foundry)",
    ),
    "mpt-1b": Row(
        mpt,
        {"d_model": 2048, "n_heads": 16, "n_layers": 24},
        length=2048,
        samples=4,
        published="45,455 tokens/s a GPU, FSDP1 on 8 H100 (LLM Foundry)",
    ),
    "qwen3-0.6b-8k": Row(
        qwen3,
        QWEN3,
        length=8192,
        samples=1,
        settings=RECOMPUTED,
        published="26,005 tokens/s at 31.74 GiB on one H100 (prime-rl)",
    ),
    "qwen3-0.6b-16k": Row(
        qwen3,
        QWEN3,
        length=16384,
        samples=1,
        settings=RECOMPUTED,
        published="25,486 tokens/s at 52.84 GiB on one H100 (prime-rl)",
    ),
    "qwen3-0.6b-64k": Row(
        qwen3,
        QWEN3,
        length=65536,
        samples=1,
        settings={**RECOMPUTED, "chunked_loss": {"chunks": 32}},
        published="out of memory on one H100 (prime-rl)",
    ),
    "llama3-8b-lora": Row(
        llama3,
        LLAMA3,
        length=4096,
        samples=2,
        settings=RECOMPUTED,
        lora=8,
        published="12,473 tokens/s on one H100 (Automodel)",
    ),
}


def small(row: Row) -> Row:
    """Returns a row that a CPU trains in seconds."""
    sizes = SMALL["mpt" if "d_model" in row.sizes else "qwen3"]
    return Row(row.config, sizes, 64, row.samples, row.settings, row.lora and 2, row.published)


def build(row: Row, device: str) -> nn.Module:
    """Returns the model, whose forward returns the loss."""
    with torch.device(device):
        if row.config is mpt:
            from llmfoundry.models.mpt import MPTForCausalLM

            composer_fsdp2.install()  # what transformers 5 needs, now that LLM Foundry is loaded
            model: Any = MPTForCausalLM(mpt(max_seq_len=row.length, **row.sizes))
        else:
            model = AutoModelForCausalLM.from_config(row.config(**row.sizes))
        if row.lora:
            import peft

            model = model.to(torch.bfloat16)  # frozen weights, as one loads them for adapters
            adapters = peft.LoraConfig(r=row.lora, lora_alpha=32, target_modules="all-linear")
            model = peft.get_peft_model(model, adapters)
    return HuggingFace(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4)


class Language(ComposerModel):
    """The model of a row for the Trainer; its forward returns the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        return outputs


class Clock(Callback):
    """Seconds of each batch, with all of its work done, and its loss."""

    def __init__(self, device: str, warmup: int) -> None:
        self.device, self.warmup = device, warmup
        self.seconds: list[float] = []
        self.loss = float("nan")
        self._begun = 0.0

    def batch_start(self, state: State, logger: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            if len(self.seconds) == self.warmup:
                torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def batch_end(self, state: State, logger: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        self.loss = float(state.loss)


def model_flops(row: Row, model: nn.Module) -> int:
    """FLOPs of the model for one token, forward and backward, as one counts them for MFU."""
    sizes, weights = row.sizes, 0
    for param in model.parameters():
        weights += param.numel() * (6 if param.requires_grad else 4)
    width = sizes.get("d_model") or sizes["num_attention_heads"] * sizes["head_dim"]
    layers = sizes.get("n_layers") or sizes["num_hidden_layers"]
    return weights + 12 * layers * width * row.length


def measure(
    name: str, row: Row, peer: str, settings: dict[str, Any], device: str, batches: int, told: Any
) -> None:
    """Trains the row on every rank, and prints the line of rank 0."""
    warnings.simplefilter("ignore")
    composer_fsdp2.install()
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = build(row, device)
    flops, vocabulary = model_flops(row, net), net.model.config.vocab_size  # pyright: ignore
    parallelism: Any = {"fsdp2": settings}
    if peer == "composer":
        parallelism = FSDP1 if ranks > 1 else None
    warmup = 2 if device == "cpu" else 3
    clock, model = Clock(device, warmup), Language(net)
    count = (warmup + batches) * row.samples * ranks
    tokens = TensorDataset(torch.randint(0, vocabulary, (count, row.length)))
    sampler = dist.get_sampler(tokens)
    trainer = Trainer(
        model=model,
        optimizers=adamw(model),
        train_dataloader=DataLoader(tokens, batch_size=row.samples, sampler=sampler),
        max_duration=f"{warmup + batches}ba",
        device="gpu" if device == "cuda" else "cpu",
        precision="amp_bf16" if device == "cuda" else "fp32",
        progress_bar=False,
        parallelism_config=parallelism,
        callbacks=[clock],
    )
    trainer.fit()
    seconds = statistics.median(clock.seconds[warmup:])
    speed = row.samples * row.length / seconds
    card, gpu = card_of(device)
    value = {
        **{"row": name, "peer": peer, "device": device, "card": card, "ranks": ranks},
        **{"length": row.length, "samples": row.samples, "compile": "compile" in settings},
        **{"tokens_per_second": speed, "seconds": seconds, "loss": clock.loss},
        **{"mfu": None if gpu is None else speed * flops / gpu.flops},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        **told,
        "published": row.published,
    }
    if rank == 0:
        shapes.emit("train", value)
    trainer.close()


def card_of(device: str) -> tuple[str, Gpu | None]:
    """Returns the name of the GPU, and what is published of it."""
    if device == "cpu":
        return "", None
    name = torch.cuda.get_device_name()
    return name, next((gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name), None)


def predict(row: Row, settings: dict[str, Any], ranks: int, device: str) -> dict[str, Any]:
    """Returns what `composer-fsdp2 plan` says of the step, traced in this process."""
    on_gpus = device == "cuda"
    precision = "amp_bf16" if on_gpus else "fp32"
    config = {key: value for key, value in settings.items() if key != "compile"}
    layout = Layout(
        *(ranks, config), precision=precision, optimizer=adamw, rows=row.samples, length=row.length
    )
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        model = build(row, "meta")
        optimizer, (traced, notes) = adamw(model), traced_settings(parse_config(config))
        plan = PreparePlan(
            model, optimizer, traced, precision, device, mesh=None, transformations=TRANSFORMATIONS
        )
        work = work_of(layout, on_gpus=on_gpus)
        found = forecast(model, optimizer, plan.units, work, notes=notes)
    finally:
        del os.environ["WORLD_SIZE"]
    _, gpu = card_of(device)
    seconds = None if gpu is None else step_times(found, gpu).step
    return {"predicted_gib": found.peak_bytes / 2**30, "predicted_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=list(ROWS), required=True)
    parser.add_argument("--peer", choices=["ours", "composer"], default="ours")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batches", type=int, default=8, help="that are timed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    row, ranks = ROWS[given.row], shapes.ranks_on(given.device, 1 if given.peer != "ours" else 2)
    row = row if given.device == "cuda" else small(row)
    settings = {**row.settings, **({"compile": True} if given.compile else {})}
    told = predict(row, settings, ranks, given.device) if given.peer == "ours" else {}
    body = (given.row, row, given.peer, settings, given.device, given.batches, told)
    shapes.run_ranks(measure, ranks, *body, device=given.device)


if __name__ == "__main__":
    main()
