"""Values that are changed in forward"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.odd_kinds.calls import One, Two
from tests.support.odd_kinds.ties import layer
from tests.support.odd_models import VOCAB, WIDTH, odd

STEP = "a callback after the step, or the change as a part of the computation"
WRITTEN = "in place"
# Where a layer is a unit, who holds it writes to its shards before it gathers them.
WHOLE = ("one unit", "automatic")
Tensor = torch.Tensor


@odd("a weight is clamped in forward", refused=WRITTEN, instead=STEP, only=WHOLE)
class Clamped(One):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


@odd("a weight is assigned in forward (`weight.data = ...`)", refused=WRITTEN, instead=STEP)
class Assigned(One):
    def forward(self, x: Tensor) -> Any:
        self.inner.weight.data = self.inner.weight.data * 0.9
        return self.inner(x)


@odd("a weight is written with `copy_` in forward", refused=WRITTEN, instead=STEP, only=WHOLE)
class Copied(One):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.inner.weight.copy_(self.inner.weight / self.inner.weight.norm())
        return self.inner(x)


@odd("a weight is written through `.data`", refused=WRITTEN, instead=STEP, only=WHOLE)
class WrittenData(One):
    def forward(self, x: Tensor) -> Any:
        self.inner.weight.data.mul_(0.9)
        return self.inner(x)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(3 * torch.randn(VOCAB, WIDTH))


@odd("`F.embedding(max_norm=...)`", takes="ids", refused=WRITTEN, instead=STEP)
class FunctionalMaxNorm(Table):
    def forward(self, x: Tensor) -> Any:
        return F.embedding(x, self.weight, max_norm=0.5)


@odd("`F.embedding_bag(max_norm=...)`", takes="ids", refused=WRITTEN, instead=STEP)
class FunctionalBag(Table):
    def forward(self, x: Tensor) -> Any:
        return F.embedding_bag(x, self.weight, max_norm=0.5)


@odd("a weight is written by `out=`", refused=WRITTEN, instead=STEP, only=WHOLE)
class WrittenOut(One):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            torch.mul(self.inner.weight, 0.5, out=self.inner.weight)
        return self.inner(x)


@odd("a frozen teacher follows the student in forward", refused=WRITTEN, instead=STEP, only=WHOLE)
class Follows(Two):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = layer().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for own, others in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
                own.lerp_(others, 0.1)
        return self.out(self.inner(x) + self.teacher(x))


@odd("a weight is written by a hook of backward", refused=WRITTEN, instead=STEP)
class WrittenInBackward(Two):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_full_backward_hook(_halve)


def _halve(module: Any, *_grads: Any) -> None:
    module.weight.data.mul_(0.5)


@odd("`numpy()` of a weight in forward", refused="numpy", instead="`.detach().clone().numpy()`")
class ReadByNumpy(One):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * float(abs(self.inner.weight.detach().numpy()).max())


@odd("a frozen parameter is counted up in forward", refused=WRITTEN, instead="a buffer")
class CountsUp(One):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x) * self.calls.mean()


@odd("a frozen scalar is counted up in forward: it is whole on every rank")
class CountsScalar(One):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x) * self.calls


class AddsInPlace(One):
    """Changes its input."""

    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.inner(x)


@odd("a part changes its input in place")
class InputInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = layer(), AddsInPlace()

    def forward(self, x: Tensor) -> Any:
        return self.part(self.first(x))


@odd("the result of a layer is changed in place")
class OutputInPlace(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        x.mul_(2)
        return self.out(x)


@odd("the result of a block is changed in place")
class BlockInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Two(), layer()

    def forward(self, x: Tensor) -> Any:
        x = self.block(x)
        x += 1
        return self.out(x)


@odd("a view that a part returns is changed in place")
class ViewInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Viewed(), layer()

    def forward(self, x: Tensor) -> Any:
        x = self.block(x)
        x *= 2
        return self.out(x)


class Viewed(One):
    """Returns a view."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).view(-1, WIDTH)


@odd("in-place activations (`ReLU(inplace=True)`)")
class InPlaceActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(layer(), nn.ReLU(inplace=True), layer())

    def forward(self, x: Tensor) -> Any:
        return self.parts(x)


@odd("a result is written into rows of another tensor")
class WrittenRows(Two):
    def forward(self, x: Tensor) -> Any:
        held = torch.zeros(2, *x.shape)
        held[0] = self.inner(x)
        held[1] = self.out(x)
        return held


@odd("a new module is registered in the first forward, without parameters")
class NewModule(One):
    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "act"):
            self.act = nn.Tanh()
        return self.act(self.inner(x))


@odd("an attribute is counted up in forward")
class Attribute(One):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x) * self.calls


@odd("an activation of the last step is kept (detached)")
class KeepsActivation(Two):
    def forward(self, x: Tensor) -> Any:
        before = getattr(self, "last", 0)
        x = self.inner(x)
        self.last = x.detach()
        return self.out(x + before)


@odd("a random mask that differs between ranks")
class RandomMask(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(self.inner(x) * torch.bernoulli(torch.full_like(x, 0.5)))
