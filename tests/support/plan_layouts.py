"""Layouts of which a step on fake tensors is compared with a step on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from composer_fsdp2 import Muon, prepare_fully_shard
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.estimate.trace import Trace, Work, observe_steps, trace_steps
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.prepare.trace import compute_loss, preparing, traced_settings
from composer_fsdp2.step.run import Run, run_of
from tests.support.experts import EXPERTS, FAMILIES, choose, force
from tests.support.models import VOCAB, TinyLM, llama_config, lm_loss

ROWS, LENGTH = 4, 6
RANKS_PER_NODE = 2


class Dense(TinyLM):
    """Returns its loss; ids are their own targets."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return lm_loss(super().forward(ids), ids)


class Frozen(Dense):
    """Whose embedding and first block are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class HuggingFace(nn.Module):
    """Returns the loss of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return type(module).__name__.endswith(("DecoderLayer", "GPT2Block", "MPTBlock"))


def llama() -> nn.Module:
    return HuggingFace(
        LlamaForCausalLM(llama_config(tied=False, hidden_size=16, num_key_value_heads=2))
    )


def mixture() -> nn.Module:
    """Routed by force, so that each expert gets as many tokens as the others."""
    model = force(FAMILIES["Mixtral"][0]())
    choose(model, [row % EXPERTS for row in range(ROWS)])
    return HuggingFace(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def wide() -> nn.Module:
    """Whose matrices are large enough that their state is kept in another form."""
    return Dense(width=64)


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = Dense
    microbatches: int = 1
    precision: str = "fp32"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    rows: int = ROWS
    length: int = LENGTH


HSDP = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel": {"degree": 2}}

LAYOUTS: dict[str, Layout] = {
    "one rank": Layout(1),
    "FSDP": Layout(2),
    "FSDP of odd sizes": Layout(3),
    "FSDP on 8": Layout(8),
    "kept": Layout(2, {"reshard_after_forward": False}),
    "freed": Layout(2, {"reshard_after_forward": True}),
    "resharded to 2": Layout(4, {"reshard_after_forward": 2}),
    "HSDP": Layout(4, HSDP),
    "tied": Layout(2, build=lambda: Dense("two modules")),
    "frozen": Layout(2, build=Frozen),
    "frozen, replicated": Layout(2, {"frozen": "replicate"}, build=Frozen),
    "recomputed": Layout(2, {"activation_checkpointing": True}),
    "bf16": Layout(2, precision="amp_bf16"),
    "bf16 alone": Layout(2, {"mixed_precision": "PURE"}, precision="amp_bf16"),
    "each microbatch": Layout(2, microbatches=5),
    "last microbatch": Layout(2, {"gradient_sync": "last"}, microbatches=5),
    "last microbatch, kept": Layout(
        2, {"gradient_sync": "last", "reshard_after_forward": False}, microbatches=4
    ),
    "last all-reduce": Layout(4, {"gradient_sync": "reduce_scatter_only", **HSDP}, microbatches=4),
    "gathered ahead": Layout(2, {"forward_prefetch": 2, "backward_prefetch": 2}),
    "tensor": Layout(4, TENSOR, build=llama),
    "tensor and HSDP": Layout(8, {**TENSOR, **HSDP}, build=llama),
    "sequence, Ulysses": Layout(
        4, {"sequence_parallel": {"degree": 2, "method": "ulysses"}}, build=llama
    ),
    "sequence, gathered": Layout(
        4, {"sequence_parallel": {"degree": 2, "method": "gather_kv"}}, build=llama
    ),
    "experts": Layout(4, {"expert_parallel": 2}, build=mixture),
    "experts, recomputed": Layout(
        4, {"expert_parallel": 4, "activation_checkpointing": True}, build=mixture
    ),
    "experts and HSDP": Layout(4, {"expert_parallel": 2, **HSDP}, build=mixture),
    "Muon": Layout(2, optimizer=lambda model: Muon(model, lr=1e-3)),
    "Muon and HSDP": Layout(4, HSDP, optimizer=lambda model: Muon(model, lr=1e-3)),
    "state in bf16": Layout(2, {"optimizer_state": {"dtype": "bf16"}}, build=wide),
    "state in 8 bits": Layout(2, {"optimizer_state": {"bits": 8}}, build=wide),
}


def work_of(layout: Layout, rank: int = 0, *, on_gpus: bool = False) -> Work:
    settings, _ = traced_settings(parse_config(layout.config))
    return Work(
        prepare=preparing(settings, layout.precision, steps_together=on_gpus),
        on_gpus=on_gpus,
        batch=lambda: torch.arange(layout.rows * layout.length).view(layout.rows, -1) % VOCAB,
        compute=compute_loss(layout.precision),
        microbatches=layout.microbatches,
        ahead=settings.units_ahead,
        ranks=layout.ranks,
        ranks_per_node=RANKS_PER_NODE,
        rank=rank,
    )


def predicted(layout: Layout, rank: int, *, on_gpus: bool = False) -> dict[str, Any]:
    """Bytes of a rank, with no other process."""
    model = layout.build()
    work = work_of(layout, rank, on_gpus=on_gpus)
    return numbers(trace_steps(model, layout.optimizer(model), work))


def counted(layout: Layout, rank: int) -> dict[str, Any]:
    """Bytes of this rank of a process group. Collective: yes."""
    torch.manual_seed(0)
    model = layout.build()
    optimizer, work = layout.optimizer(model), work_of(layout, rank)
    return numbers(observe_steps(work.prepare(model, optimizer), optimizer, work))


def numbers(trace: Trace) -> dict[str, Any]:
    return {
        "held": dict(trace.held),
        "sent": {f"{kind} {axis}": count for (kind, axis), count in trace.sent.items()},
        "calls": {f"{kind} {axis}": count for (kind, axis), count in trace.calls.items()},
        "flops": trace.flops,
        "peak": max(sum(window.kinds.values()) for window in trace.windows),
    }


# --- Models that are large enough for an allocator to be compared with. ---

WIDTH, DEPTH, WORDS, TOKENS = 128, 4, 1024, 128
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=WIDTH, n_layer=DEPTH, n_head=4, vocab_size=WORDS, n_positions=TOKENS)
    return HuggingFace(GPT2LMHeadModel(config))


def mpt(**options: Any) -> nn.Module:
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    install_for_foundry()

    sizes = {"d_model": WIDTH, "n_layers": DEPTH, "vocab_size": WORDS, "max_seq_len": TOKENS}
    config = MPTConfig(n_heads=4, attn_config={"attn_impl": "torch"}, **{**sizes, **options})
    return HuggingFace(MPTForCausalLM(config))


def mixtral() -> nn.Module:
    """Routed by force, so that each expert gets as many tokens as the others."""
    config = MixtralConfig(**_SIZES, num_local_experts=EXPERTS, num_experts_per_tok=1)
    model = force(MixtralForCausalLM(config))
    choose(model, [row % EXPERTS for row in range(ROWS)])
    return HuggingFace(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Dense(width=2 * WIDTH, layers=DEPTH),
    "GPT-2": gpt2,
    "Llama": lambda: HuggingFace(LlamaForCausalLM(LlamaConfig(**_SIZES))),
    "Mixtral": mixtral,
    "MPT": mpt,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "kept, SGD": {
        "ranks": 2,
        "config": {"reshard_after_forward": False},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    },
    "recomputed": {"ranks": 2, "config": {"activation_checkpointing": True}},
    "HSDP in bf16": {"ranks": 4, "config": HSDP, "precision": "amp_bf16"},
}
PEAKS: dict[str, Layout] = {
    f"{model}, {settings}": Layout(build=build, length=TOKENS, **SETTINGS[settings])
    for model, build in MODELS.items()
    for settings in SETTINGS
}


def allocated(layout: Layout, rank: int) -> int:
    """The most that torch's allocator gave out at one moment of a second step, by its own record.

    Collective: yes. Nothing of `estimate/` has a part in it.
    """

    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        model = layout.build()
        optimizer, work = layout.optimizer(model), work_of(layout, rank)
        run = work.prepare(model, optimizer)
        return lambda: step(run, optimizer, work.batch(), work.compute)

    return most_allocated(make)[1]


def most_allocated(make: Callable[[], Callable[[], None]]) -> tuple[Callable[[], None], int]:
    """Makes a step and calls it twice; returns it, with the peak of the second time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        again = make()
        for name in ("first step", "second step"):
            with record_function(name):
                again()
    events: Any = recorded.profiler.kineto_results.events()
    start = min(event.start_ns() for event in events if event.name() == "second step")
    now, peak = 0, 0
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for time, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now) if time >= start else peak
    return again, peak


def allocated_on_gpu(layout: Layout) -> int:
    """The same on this rank's GPU, where the allocator itself knows. Collective: yes."""
    torch.manual_seed(0)
    start = torch.cuda.memory_allocated()
    model = layout.build()
    optimizer, work = layout.optimizer(model), work_of(layout)
    prepare_fully_shard(model, optimizer, layout.config, layout.precision, device="gpu")
    run = run_of(model)
    assert run is not None
    halved = torch.autocast("cuda", torch.bfloat16, enabled=layout.precision == "amp_bf16")

    def compute(model: nn.Module, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        with halved:
            return work.compute(model, ids)

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(run, optimizer, work.batch().cuda(), compute)
    return torch.cuda.max_memory_allocated() - start


def step(
    run: Run,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    compute: Callable[[nn.Module, torch.Tensor], tuple[Any, torch.Tensor]],
) -> None:
    """Makes a step as Composer's Trainer does, which has the optimizer call for the gradients."""

    def closure() -> float:
        optimizer.zero_grad()
        with run.accumulation.batch(), run.accumulation.microbatch(last=True):
            outputs, loss = compute(run.model, batch)
            loss.backward()
        del outputs
        return loss.item()

    optimizer.step(closure)
