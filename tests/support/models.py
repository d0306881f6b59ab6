"""Small models, one per way in which weights can be shared; sizes divide nothing on purpose."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import ComposerModel
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

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


class HybridLayer(nn.Module):
    """Attention and a state-space scan side by side, as Hymba has them.

    Every second layer reads keys and values of the one before.
    """

    def __init__(self, has_keys: bool, heads: int = 2, states: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if has_keys else None
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.select = nn.Linear(WIDTH, WIDTH + 2 * states)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.scales = nn.Parameter(torch.tensor([0.9, 1.1]))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, earlier: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        normed = self.norm(x)
        shared = earlier
        if self.key_value is not None:
            shared = tuple(map(self._split, self.key_value(normed).chunk(2, dim=-1)))
        assert shared is not None
        attended = F.scaled_dot_product_attention(
            self._split(self.query(normed)), *shared, is_causal=True
        )
        both = self.scales[0] * attended.transpose(1, 2).flatten(2) + self.scales[1] * self._scan(
            normed
        )
        return x + self.out(both), shared

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _scan(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        states = self.decay.shape[1]
        step, enter, leave = self.select(x).split([WIDTH, states, states], dim=-1)
        step = F.softplus(step)[..., None]
        kept = torch.exp(-step * self.decay.exp())
        entering = step * enter[:, :, None] * x[..., None]
        state, found = torch.zeros_like(kept[:, 0]), list[torch.Tensor]()
        for position in range(x.shape[1]):
            state = kept[:, position] * state + entering[:, position]
            found.append((state * leave[:, position, None]).sum(-1))
        return torch.stack(found, dim=1) + self.skip * x


class HybridLM(nn.Module):
    """Hymba's kind: meta tokens are a parameter of the root, and the head is the embedding."""

    def __init__(self, vocab: int, layers: int = 4, meta: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.meta = nn.Parameter(torch.randn(meta, WIDTH))
        self.layers = nn.ModuleList(HybridLayer(number % 2 == 0) for number in range(layers))
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, HybridLayer)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = torch.cat([self.meta.expand(len(input_ids), -1, -1), self.embed(input_ids)], dim=1)
        shared = None
        for layer in self.layers:
            x, shared = layer(x, shared)
        logits = self.head(x[:, len(self.meta) :])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
