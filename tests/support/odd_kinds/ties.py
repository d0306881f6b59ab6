"""Weights with more than one name, and modules used more than once."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.odd_models import VOCAB, WIDTH, odd

MERGED = "Two parameters of shape"


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Chain(nn.Module):
    """Calls its children one after the other."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


@odd("two layers hold one weight")
def two_layers_one_weight() -> nn.Module:
    first, second = layer(), layer()
    second.weight = first.weight
    return Chain(first, second)


@odd("two layers hold two `Parameter` objects over one memory", warns=MERGED)
def two_parameters_over_one_memory() -> nn.Module:
    first, second = layer(), layer()
    second.weight = nn.Parameter(first.weight.data)
    return Chain(first, second)


@odd("the weight of an embedding is that of the output head", takes="ids")
class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.middle = layer()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


@odd(
    "the output is a product with the embedding's weight, without a head",
    takes="ids",
    refused="forward_methods",
    only=("every module",),
    instead="a unit that holds both: `wrap_policy.names` with the module around them",
)
class LogitsOfEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.out_bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embedding(ids), self.embedding.weight, self.out_bias)


@odd("one module is registered under two names")
class OneModuleTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layer()
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@odd("one parameter is registered under two names of one module")
class OneParameterTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.same = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.same


@odd("one block is in a list eight times")
def one_block_eight_times() -> nn.Module:
    return Chain(*[layer()] * 8)


@odd("one block of a list is applied again and again in forward (recurrent)")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.cell(x))
        return x


@odd("layers share a bias but not their weights")
def shared_bias() -> nn.Module:
    first, second = layer(), layer()
    second.bias = first.bias
    return Chain(first, second)


@odd("a tie crosses three levels of nesting")
def tie_across_levels() -> nn.Module:
    first, second = layer(), layer()
    second.weight = first.weight
    return Chain(Chain(Chain(first)), layer(), Chain(second))


@odd(
    "a weight is a transposed view of another one",
    refused="share memory but are different views",
    instead="one parameter, and `.t()` in forward",
)
def tied_transpose() -> nn.Module:
    first, second = layer(), layer()
    second.weight = nn.Parameter(first.weight.data.t())
    return Chain(first, second)


@odd(
    "a parameter is a part (a view) of another one",
    refused="share memory but are different views",
    instead="one parameter, and the part taken in forward",
)
def part_of_another() -> nn.Module:
    first, second = layer(), nn.Linear(WIDTH, 4)
    second.weight = nn.Parameter(first.weight.data[:4])
    return Chain(first, second)


@odd("two parameters are two pieces of one tensor")
def two_pieces_of_one_tensor() -> nn.Module:
    both = torch.randn(2, WIDTH, WIDTH) / 4
    first, second = layer(), layer()
    first.weight, second.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    return Chain(first, second)


@odd("an encoder and a decoder share their embedding", takes="ids")
class SharedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.Sequential(shared, layer())
        self.decoder = nn.Sequential(shared, layer())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(ids) + self.decoder(ids.flip(0))


@odd("one block is used by two parts of the model")
class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Chain(layer(), layer())
        self.left, self.right = Chain(layer(), shared), Chain(shared, layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


@odd("a tie in a frozen part")
def frozen_tie() -> nn.Module:
    first, second = layer(), layer()
    second.weight = first.weight
    return Chain(first.requires_grad_(False), second.requires_grad_(False), layer())


@odd(
    "memory that is trained under one name and frozen under another",
    refused="both are the same memory",
    instead="one parameter, and its `.detach()` where no gradient is wanted",
)
def tie_of_frozen_and_trained() -> nn.Module:
    first, second = layer(), layer()
    second.weight = nn.Parameter(first.weight.data, requires_grad=False)
    return Chain(first, second)
