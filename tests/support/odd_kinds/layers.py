"""Layers of torch and what is built on them"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.support.odd_kinds.ties import Chain, layer
from tests.support.odd_models import SIZE, VOCAB, WIDTH, odd

AFTER = "the rows rescaled in forward, or by a callback after the step"
OLD = "`torch.nn.utils.weight_norm` is deprecated|`torch.nn.utils.weight_norm`"


class Images(nn.Module):
    """Sees 8 numbers as an image of 2 channels."""

    def __init__(self, *parts: nn.Module, shape: tuple[int, ...] = (2, 4)) -> None:
        super().__init__()
        self.parts, self.shape = nn.Sequential(*parts), shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(x.shape[0], *self.shape)
        return self.parts(torch.cat([x, x.roll(1, -1)], dim=-1))


class Sequences(nn.Module):
    """Sees 8 numbers as three tokens."""

    def __init__(self, inner: nn.Module, *others: str) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(torch.stack([x, x.roll(1, -1), x.roll(2, -1)], dim=1))


@odd("`Conv1d`")
def conv1d() -> nn.Module:
    return Images(nn.Conv1d(2, 3, 3))


@odd("`Conv2d`")
def conv2d() -> nn.Module:
    return Images(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 4, 1), shape=(2, 2, 2))


@odd("`Conv3d`")
def conv3d() -> nn.Module:
    return Images(nn.Conv3d(1, 3, 2), shape=(1, 2, 2, 2))


@odd("a grouped convolution")
def grouped() -> nn.Module:
    return Images(nn.Conv1d(2, 4, 2, groups=2))


@odd("`ConvTranspose1d`")
def conv_transposed() -> nn.Module:
    return Images(nn.ConvTranspose1d(2, 3, 3))


@odd("images in `channels_last`")
class ChannelsLastInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(x.shape[0], 2, 2, 2)
        return self.conv(image.contiguous(memory_format=torch.channels_last))


@odd("`BatchNorm1d`: each rank has running statistics of its own")
def batch_norm() -> nn.Module:
    return Chain(layer(), nn.BatchNorm1d(WIDTH), layer())


@odd("`BatchNorm1d` that is frozen and evaluates")
class FrozenBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm.eval()(x)


@odd("`GroupNorm`, `LayerNorm` and `RMSNorm`")
def norms() -> nn.Module:
    return Chain(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH))


@odd("norms without weights")
def norms_without_weights() -> nn.Module:
    return Chain(layer(), nn.LayerNorm(WIDTH, elementwise_affine=False))


@odd("`Dropout`")
def dropout() -> nn.Module:
    return Chain(layer(), nn.Dropout(0.5), layer())


@odd("`PReLU`: one weight")
def prelu() -> nn.Module:
    return Chain(layer(), nn.PReLU())


@odd("`Bilinear`")
class UsesBilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(1))


@odd("`Embedding`", takes="ids")
def embedding() -> nn.Module:
    return nn.Embedding(VOCAB, 3)


@odd("`Embedding(padding_idx=...)`", takes="ids")
def padding_idx() -> nn.Module:
    return nn.Embedding(VOCAB, 3, padding_idx=2)


@odd("`Embedding(scale_grad_by_freq=True)`", takes="ids")
def scale_grad_by_freq() -> nn.Module:
    return nn.Embedding(VOCAB, 3, scale_grad_by_freq=True)


@odd("`Embedding(max_norm=...)`", takes="ids", refused="max_norm", instead=AFTER)
def max_norm() -> nn.Module:
    return nn.Embedding(VOCAB, 3, max_norm=0.5)


@odd("`Embedding(sparse=True)`", takes="ids", refused="sparse", instead="`sparse=False`")
def sparse() -> nn.Module:
    return nn.Embedding(VOCAB, 3, sparse=True)


@odd("`EmbeddingBag`", takes="ids")
def embedding_bag() -> nn.Module:
    return nn.EmbeddingBag(VOCAB, 3)


@odd("`EmbeddingBag(max_norm=...)`", takes="ids", refused="max_norm", instead=AFTER)
def bag_with_max_norm() -> nn.Module:
    return nn.EmbeddingBag(VOCAB, 3, max_norm=0.5)


@odd("`EmbeddingBag(sparse=True)`", takes="ids", refused="sparse", instead="`sparse=False`")
def sparse_bag() -> nn.Module:
    return nn.EmbeddingBag(VOCAB, 3, sparse=True)


@odd("a frozen `Embedding(sparse=True)`", takes="ids")
def frozen_sparse() -> nn.Module:
    return nn.Embedding(VOCAB, 3, sparse=True).requires_grad_(False)


@odd("a frozen embedding", takes="ids")
def frozen_embedding() -> nn.Module:
    return nn.Embedding(VOCAB, 3).requires_grad_(False)


@odd("`LSTM`")
def lstm() -> nn.Module:
    return Sequences(nn.LSTM(WIDTH, 3, num_layers=2, batch_first=True))


@odd("`GRU` in both directions")
def gru() -> nn.Module:
    return Sequences(nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True))


@odd("`LSTMCell` in a loop")
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        return state


@odd("`LSTM` with projections", warns="LSTM with projections")
def lstm_with_projections() -> nn.Module:
    return Sequences(nn.LSTM(WIDTH, 4, proj_size=2, batch_first=True))


@odd("`MultiheadAttention`, which reads its projection's weight without calling it")
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.stack([x, x.roll(1, -1)], dim=1)
        return self.inner(x, x, x)


@odd("`MultiheadAttention` with keys and values of other widths")
class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=4, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x[None], x[None, :, :4], x[None, :, 4:])


def transformer_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


@odd("`TransformerEncoderLayer`")
def encoder_layer() -> nn.Module:
    return Sequences(transformer_layer())


@odd("`TransformerEncoder`: copies of one layer", warns="enable_nested_tensor")
def encoder() -> nn.Module:
    return Sequences(nn.TransformerEncoder(transformer_layer(), 3))


@odd(
    "`TransformerEncoder` in evaluation: torch's fast path reads weights of parts",
    warns="enable_nested_tensor",
)
class FastPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(transformer_layer(), 2)
        self.out = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([x, x.roll(1, -1)], dim=1)
        with torch.no_grad():
            seen = self.inner.eval()(tokens)
        return self.out(seen)


@odd("`Transformer`: encoder and decoder", warns="enable_nested_tensor")
class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.stack([x, x.roll(1, -1)], dim=1)
        return self.inner(x, x)


@odd("`parametrizations.weight_norm`")
def weight_norm() -> nn.Module:
    return Chain(parametrizations.weight_norm(layer()), layer())


@odd("`parametrizations.spectral_norm`")
def spectral_norm() -> nn.Module:
    return Chain(parametrizations.spectral_norm(layer()), layer())


@odd("`parametrizations.orthogonal`")
def orthogonal() -> nn.Module:
    return Chain(parametrizations.orthogonal(layer()), layer())


class Symmetric(nn.Module):
    """The symmetric part of a matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x.T) / 2


class Scaled(nn.Module):
    """A matrix times one number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@odd("a parametrization without parameters")
def symmetric() -> nn.Module:
    module = layer()
    parametrize.register_parametrization(module, "weight", Symmetric())
    return Chain(module, layer())


@odd("a parametrization with a parameter of its own")
def scaled() -> nn.Module:
    module = layer()
    parametrize.register_parametrization(module, "weight", Scaled())
    return Chain(module, layer())


@odd("the old `torch.nn.utils.weight_norm`", warns=OLD)
def old_weight_norm() -> nn.Module:
    return Chain(nn.utils.weight_norm(layer()), layer())


@odd("the old `torch.nn.utils.spectral_norm`", warns=OLD)
def old_spectral_norm() -> nn.Module:
    return Chain(nn.utils.spectral_norm(layer()), layer())


@odd("pruned weights (`torch.nn.utils.prune`)")
def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return Chain(prune.l1_unstructured(layer(), "weight", amount=0.3), layer())


@odd("buffers: kept in checkpoints or not, of integers, bool and complex numbers")
class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("order", torch.randperm(WIDTH), persistent=False)
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("turn", torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)[:, self.order] * self.mask + self.table
        return x * self.turn


@odd("a buffer that is changed in forward")
class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


@odd("a buffer that is replaced in forward")
class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("last", torch.zeros(SIZE, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x) + 0.1 * self.last
        self.last = found.detach()
        return found


@odd(
    "an old-style quantisation observer (`FakeQuantize`)", warns="torch.ao.quantization|.*observer"
)
def fake_quantize() -> nn.Module:
    from torch.ao.quantization import FakeQuantize

    return Chain(layer(), FakeQuantize())


@odd("a loss with weights of its own")
class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(x), torch.arange(x.shape[0]) % WIDTH)
