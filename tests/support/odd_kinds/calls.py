"""What forward takes, returns and calls"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.odd_kinds.ties import Chain, layer
from tests.support.odd_models import SIZE, WIDTH, odd

METHODS = "`forward_methods: ['odd.<method>']` and the module as a unit, or `wrap_policy`"
APART = ".* were chosen as units, and some ranks may leave them out"
Tensor = torch.Tensor


class One(nn.Module):
    """A layer called `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Two(One):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layer()

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.inner(x)))


@odd("returns a tuple with `None` in it")
class ReturnsTuple(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        return x, None, self.out(x)


@odd("returns a nested dict")
class ReturnsDict(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        return {"a": [x], "b": {"c": self.out(x), "d": "text", "e": 3}}


@dataclasses.dataclass
class Answer:
    """What a model returns."""

    first: Tensor
    second: Tensor


@odd("returns a dataclass")
class ReturnsDataclass(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        return Answer(x, self.out(x))


@odd("a part inside returns a dataclass, which another part reads")
class DataclassInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReturnsDataclass(), One()

    def forward(self, x: Tensor) -> Any:
        answer = self.first(x)
        return self.second(answer.first + answer.second)


class Hands(One):
    """Reads and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return Answer(self.inner(x.first) * self.scale, x.second)


@odd("parts inside hand a dataclass to each other")
class DataclassBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Hands(), Hands()

    def forward(self, x: Tensor) -> Any:
        answer = self.second(self.first(Answer(x, x)))
        return answer.first + answer.second


@odd("returns a Hugging Face `ModelOutput`")
class ReturnsModelOutput(Two):
    def forward(self, x: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        x = self.inner(x)
        return BaseModelOutput(last_hidden_state=self.out(x), hidden_states=(x,))


class SideEffect(One):
    """Leaves its result in an attribute."""

    def forward(self, x: Tensor) -> None:
        self.result = self.inner(x)


@odd("a part returns `None` and leaves its result in an attribute", call=lambda part, x: part(x))
class ReturnsNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SideEffect(), One()

    def forward(self, x: Tensor) -> Any:
        self.first(x)
        return self.second(self.first.result)


@odd("returns a tensor without a gradient beside one with")
class ReturnsNoGradient(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        return self.out(x), x.argmax(dim=1), x.detach()


@odd("returns its input unchanged beside the result")
class ReturnsInput(One):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x), x


@odd("returns a view of its result")
class ReturnsView(One):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[:, 2:5]


@odd("returns a generator-made list of many tensors")
class ReturnsMany(One):
    def forward(self, x: Tensor) -> Any:
        return [self.inner(row) for row in x.unbind()]


class Keywords(One):
    """Takes keywords only."""

    def forward(self, *, x: Tensor, scale: float = 1.0, mode: str = "a") -> Any:
        return self.inner(x) * scale if mode == "b" else x


@odd("a part that takes keywords only, and no tensors beside one")
class CallsKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Keywords()

    def forward(self, x: Tensor) -> Any:
        return self.part(x=x, scale=2.0, mode="b")


class NoTensor(One):
    """Takes a number of rows."""

    def forward(self, rows: int) -> Any:
        return self.inner(torch.ones(rows, WIDTH))


@odd("a part whose inputs hold no tensor")
class CallsNoTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = NoTensor()

    def forward(self, x: Tensor) -> Any:
        return self.part(3).mean() * x


class Appends(One):
    """Appends its loss to a list, and reads what others have put into a dict."""

    def forward(self, x: Tensor, losses: list[Tensor], shared: dict[str, Tensor]) -> Any:
        x = self.inner(x * shared.setdefault("scale", self.inner(x).mean()))
        losses.append(x.square().mean())
        return x


@odd("parts append losses to a list, and share values through a dict, that they are given")
class CallsAppending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Appends() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        losses: list[Tensor] = []
        shared: dict[str, Tensor] = {}
        for part in self.parts:
            x = part(x, losses, shared)
        return x, sum(losses)


class Opaque:
    """An object of the user's own."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsOpaque(One):
    """Returns its result in such an object."""

    def forward(self, x: Tensor) -> Any:
        return Opaque(self.inner(x))


@odd("parts return an object of the user's own", call=lambda part, x: part(x).value)
class HandsOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReturnsOpaque(), ReturnsOpaque()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).value)


class Lazy(One):
    """Returns a generator, which computes later."""

    def forward(self, x: Tensor) -> Any:
        return (self.inner(row) for row in x.unbind())


@odd("a part returns a generator, which computes after its forward")
class ReturnsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Lazy()

    def forward(self, x: Tensor) -> Any:
        return list(self.part(x))


@odd("the loss depends on what a forward hook has kept, and on no result")
class KeptByHook(Two):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Any:
        self.out(x)
        self.inner(x)
        return self.kept.square()


@odd("inputs in a nested container")
class TakesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Unpacks()

    def forward(self, x: Tensor) -> Any:
        return self.part({"a": [x, (x,)]}, None)


class Unpacks(One):
    """Takes a dict of lists."""

    def forward(self, batch: Any, other: None) -> Any:
        return self.inner(batch["a"][0] + batch["a"][1][0])


@odd("an early exit that depends on the data, the same on every rank")
class EarlyExit(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.inner(x)
        return x if self.calls == 2 else self.out(x)


@odd("parts chosen by the number of the step, the same on every rank")
class ByStep(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return (self.inner if self.calls % 2 else self.out)(x)


def rank() -> int:
    from torch import distributed

    return distributed.get_rank()


@odd("a parameter is used on one rank only")
class OnOneRank(One):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * (self.extra if rank() else 1)


@odd(
    "ranks use different layers after the first step",
    settings={"wrap_policy": {"names": ["odd"]}},
    refused="ran different units",
    only=("every module",),
    instead="one unit around the layers",
)
class DifferentLayers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.out(self.inner(x))
        return self.out(x) if rank() else self.inner(x)


class Router(nn.Module):
    """Experts, of which each token sees the best `top`."""

    def __init__(self, top: int, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList([layer() for _ in range(count)])
        self.top = top

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=1).topk(self.top)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return result


@odd("experts, one for each token; some get none on some rank", warns=APART)
def top_one() -> nn.Module:
    return Router(1)


@odd("experts, two for each token", warns=APART)
def top_two() -> nn.Module:
    return Router(2)


@odd("two layers of experts, one behind the other", warns=APART)
def layers_of_experts() -> nn.Module:
    return Chain(Router(1), layer(), Router(2))


@odd("experts in one parameter of three dimensions")
class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(dim=1)
        return torch.einsum("bi,eij,be->bj", x, self.experts, chosen)


@odd(
    "a method other than `forward` computes with the weights",
    call=lambda part, x: part.encode(x),
    refused="forward_methods",
    only=("automatic", "every module"),
    instead=METHODS,
)
class OtherMethod(Two):
    def encode(self, x: Tensor) -> Any:
        return F.linear(x, self.inner.weight) + self.inner.bias


class OwnWeight(nn.Module):
    """A weight of its own, and no parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight


@odd(
    "a method other than `forward`, named in `forward_methods`",
    call=lambda part, x: part.encode(x),
    settings={"forward_methods": ["odd.encode"], "wrap_policy": {"names": ["odd"]}},
)
class ListedMethod(OwnWeight):
    def encode(self, x: Tensor) -> Any:
        return x @ self.weight


@odd(
    "a method other than `forward`, named by the module (`fsdp_forward_methods`)",
    call=lambda part, x: part.encode(x),
    settings={"wrap_policy": {"names": ["odd"]}},
)
class NamedMethod(OwnWeight):
    fsdp_forward_methods = ("encode",)

    def encode(self, x: Tensor) -> Any:
        return x @ self.weight


@odd(
    "a method other than `forward` that calls parts only",
    call=lambda part, x: part.encode(x),
    refused="forward_methods",
    only=("automatic",),
    instead=METHODS,
)
class CallsParts(Two):
    def encode(self, x: Tensor) -> Any:
        return self.out(self.inner(x))


@odd(
    "a layer's weight is read outside the layer",
    refused="forward_methods",
    only=("every module",),
    instead=METHODS,
)
class ReadsWeightOutside(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(F.linear(x, self.inner.weight))


@odd(
    "a part of a block is used outside the block, by the model itself",
    call=lambda part, x: part(x) + part.block.out(x),
)
class PartOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Two()

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


@odd("a method is set as `forward` on the instance")
class ForwardOnInstance(Two):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other  # type: ignore[method-assign]

    def other(self, x: Tensor) -> Any:
        return self.inner(x) + self.out(x)


@odd("`__call__` is overridden")
class OwnCall(Two):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


@odd(
    "`forward` is called by its name",
    call=lambda part, x: part.forward(x),
    refused="forward_methods",
    only=("automatic",),
    instead="call the module: `part(x)`",
)
class CalledByName(Two):
    pass


@odd("a part is called under `no_grad`")
class UnderNoGrad(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            seen = self.inner(x)
        return self.out(seen) + self.inner(x)


@odd("a frozen teacher under `inference_mode`")
class UnderInference(Two):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            seen = self.inner(x)
        return self.out(x) * seen.clone()


@odd("the result of a part is detached")
class Detached(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(self.inner(x).detach()), x


@odd("autocast in forward, bf16", tolerance=3e-2)
class Autocast(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.out(self.inner(x)).float()


@odd(
    "a module is replaced in forward by an equal one that it holds",
)
class Swaps(Two):
    def forward(self, x: Tensor) -> Any:
        self.inner, self.out = self.out, self.inner
        return self.out(self.inner(x))


@odd("switches itself between training and evaluation")
class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = layer(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        calm = self.eval()._once(x)
        return self.train()._once(x) + calm

    def _once(self, x: Tensor) -> Any:
        return self.drop(self.inner(x))


@odd("a batch without rows on one rank")
class NoRows(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x if rank() else x[:0])
        return self.out(x).sum() / SIZE


@odd("a subclass of `ModuleList` with a forward of its own")
class ListWithForward(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([layer(), layer()])

    def forward(self, x: Tensor) -> Any:
        for part in self:
            x = part(x)
        return x


@odd("a `ModuleDict` whose members are called by key")
class ByKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": layer(), "b": layer()})

    def forward(self, x: Tensor) -> Any:
        return self.parts["b"](self.parts["a"](x))
