"""Layouts of which a step on fake tensors is compared with a step on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from composer_fsdp2 import Muon
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.estimate.trace import Trace, Work, observe_steps, trace_steps
from composer_fsdp2.trainer.forecast import compute_loss, preparing, traced_settings
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
        return type(module).__name__.endswith("DecoderLayer")


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


def work_of(layout: Layout, rank: int = 0) -> Work:
    settings, _ = traced_settings(parse_config(layout.config))
    return Work(
        prepare=preparing(settings, layout.precision),
        batch=lambda: torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCAB,
        compute=compute_loss(layout.precision),
        microbatches=layout.microbatches,
        ranks=layout.ranks,
        ranks_per_node=RANKS_PER_NODE,
        rank=rank,
    )


def predicted(layout: Layout, rank: int) -> dict[str, Any]:
    """Bytes of a rank, with no other process."""
    model = layout.build()
    return numbers(trace_steps(model, layout.optimizer(model), work_of(layout, rank)))


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
