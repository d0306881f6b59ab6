"""Small models, one per way in which weights can be shared; sizes divide nothing on purpose."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import ComposerModel
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig

VOCAB = 17
WIDTH = 10


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SharedBlock(Block):
    """A block with a weight that a `TinyLM` may share between all of them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.mix(x)


class TwoNames(nn.Module):
    """One module that holds the same parameter under two names."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.there = nn.Parameter(torch.randn(width, width) / width)
        self.back = self.there

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.there @ self.back.T


TIES = (
    "none",
    "two modules",
    "all layers",
    "inside one module",
    "module registered twice",
    "storage",
)


class TinyLM(nn.Module):
    """Embedding, blocks, norm, head; `tie` chooses what is shared."""

    def __init__(self, tie: str = "none", layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        kind = SharedBlock if tie == "all layers" else Block
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(kind(width) for _ in range(layers))
        self.extra = TwoNames(width) if tie == "inside one module" else nn.Identity()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.last = self.blocks[0] if tie == "module registered twice" else nn.Identity()
        if tie == "two modules":
            self.head.weight = self.embed.weight
        elif tie == "storage":
            self.head.weight = nn.Parameter(self.embed.weight.data)
        elif tie == "all layers":
            for block in self.blocks:
                block.mix.weight = self.blocks[0].mix.weight

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.last(self.extra(x))))


def lm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class TinyComposer(ComposerModel):
    """A ComposerModel around a `TinyLM`; a batch is (ids, targets)."""

    def __init__(self, tie: str = "none", layers: int = 3) -> None:
        super().__init__()
        self.net = TinyLM(tie, layers)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> torch.Tensor:
        return lm_loss(outputs, batch[1])


class AcrossChildren(TinyComposer):
    """The embedding is one direct child and the head, tied to it, another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.embed = self.net.embed
        self.head = self.net.head
        self.head.weight = self.embed.weight
        del self.net

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.body(self.embed(batch[0])))


class Grandchild(TinyComposer):
    """A grandchild is registered again on the ComposerModel, as FSDP1-style models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.net.blocks
        self.embedding = self.net.embed


def batches(
    steps: int, size: int, length: int = 5, seed: int = 7
) -> list[tuple[torch.Tensor, ...]]:
    """Global batches of (ids, targets), each `(size, length)`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, 2, size, length)
    data = torch.randint(VOCAB, shape, generator=generator)
    return [(step[0], step[1]) for step in data]


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""of a Hugging Face language model, by their names there"""


def llama_config(tied: bool = True, **changes: Any) -> LlamaConfig:
    """Two layers; `changes` are other arguments of the configuration."""
    own = {"max_position_embeddings": 16, "tie_word_embeddings": tied}
    return LlamaConfig(**{**SIZES, **own, **changes})
