"""The model, data and optimizer behind the FSDP1 checkpoint fixtures.

Everything is deterministic and runs on CPU. Dimensions are chosen so that sharding over 2 or 4
ranks is *uneven* for some tensors (9, 30 and 1 rows), because those are the cases that break.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from composer.models import ComposerModel

VOCAB = 64
SEQ_LEN = 9
GLOBAL_BATCH = 8
BATCHES_PER_EPOCH = 6


class Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.ln_2 = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.ln_1(x))
            .view(b, t, 3, self.n_heads, d // self.n_heads)
            .permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.proj(a), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, self.training)


class TinyLM(nn.Module):
    """A causal transformer with ``lm_head.weight`` tied to ``wte.weight``."""

    def __init__(
        self,
        d_model: int = 16,
        n_heads: int = 2,
        n_layers: int = 2,
        d_ff: int = 30,
        dropout: float = 0.0,
        scale_rows: int = 1,
    ):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, d_model)
        self.wpe = nn.Embedding(SEQ_LEN, d_model)
        self.blocks = nn.ModuleList(
            [Block(d_model, n_heads, d_ff, dropout) for _ in range(n_layers)]
        )
        self.ln_f = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        # With one row the shard of every rank but the first is empty.
        self.logit_scale = nn.Parameter(torch.full((scale_rows,), 0.5))
        # A persistent buffer: part of the state dict, never sharded.
        self.register_buffer("out_bias", torch.randn(VOCAB))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)) * self.logit_scale + self.out_bias

    # Composer reads these two to decide what to shard and what to recompute.
    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)


class TinyComposerModel(ComposerModel):
    def __init__(self, **kwargs):
        super().__init__()
        self.model = TinyLM(**kwargs)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def build_model(seed: int, **kwargs) -> TinyComposerModel:
    """Same ``seed``, same weights. Load a fixture into a model built with *another* seed, or the
    test cannot tell a loaded tensor from one that was never touched."""
    torch.manual_seed(seed)
    return TinyComposerModel(**kwargs)


def build_dataset() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1234)
    return torch.randint(0, VOCAB, (GLOBAL_BATCH * BATCHES_PER_EPOCH, SEQ_LEN), generator=generator)


def build_optimizer(model: nn.Module, groups: int = 2) -> torch.optim.Optimizer:
    """AdamW with two parameter groups: matrices decay, vectors do not and have another lr."""
    if groups == 1:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
        ],
        lr=1e-2,
    )
