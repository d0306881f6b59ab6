"""Parameters and modules that are held in other places than torch's own"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.odd_kinds.ties import Chain, layer
from tests.support.odd_models import WIDTH, odd

READ = "the module, and `module.weight` read in forward; or an `nn.ParameterList`"
HELD = "is also held"
Tensor = torch.Tensor


class TwoLayers(nn.Module):
    """A layer whose weight is read in another way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = layer(), layer()
        self.keep()

    def keep(self) -> None:
        """Keeps the weight somewhere."""

    def again(self) -> Tensor:
        """Reads it there."""
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(torch.tanh(self.inner(x)), self.again()))


@odd("a parameter also held in a list", refused=HELD, instead=READ)
class InAPlainList(TwoLayers):
    def keep(self) -> None:
        self.kept = [self.inner.weight]

    def again(self) -> Tensor:
        return self.kept[0]


@odd("a parameter also held in a tuple inside a dict", refused=HELD, instead=READ)
class InAPlainDict(TwoLayers):
    def keep(self) -> None:
        self.kept = {"weights": (1, self.inner.weight)}

    def again(self) -> Tensor:
        return self.kept["weights"][1]  # type: ignore[return-value]


@odd("a parameter also held in `__dict__`", refused=HELD, instead=READ)
class InTheDict(TwoLayers):
    def keep(self) -> None:
        self.__dict__["kept"] = self.inner.weight

    def again(self) -> Tensor:
        return self.kept


@odd("a parameter also held by another object", refused=HELD, instead=READ)
class InAnObject(TwoLayers):
    def keep(self) -> None:
        self.kept = types.SimpleNamespace(inside=types.SimpleNamespace(weight=self.inner.weight))

    def again(self) -> Tensor:
        return self.kept.inside.weight


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


@odd("a parameter also held by an object with `__slots__`", refused=HELD, instead=READ)
class InASlot(TwoLayers):
    def keep(self) -> None:
        self.kept = Slotted(self.inner.weight)

    def again(self) -> Tensor:
        return self.kept.weight


@odd("a parameter also held by a function (a closure)", refused=HELD, instead=READ)
class InAClosure(TwoLayers):
    def keep(self) -> None:
        weight = self.inner.weight
        self.kept = lambda: weight

    def again(self) -> Tensor:
        return self.kept()


@odd("a parameter also held by `functools.partial`", refused=HELD, instead=READ)
class InAPartial(TwoLayers):
    def keep(self) -> None:
        self.kept = functools.partial(torch.mul, self.inner.weight)

    def again(self) -> Tensor:
        return self.kept(1.0)


@odd("a parameter also held by another module, outside registration", refused=HELD, instead=READ)
class OnAnotherModule(TwoLayers):
    def keep(self) -> None:
        self.out.__dict__["kept"] = [self.inner.weight]

    def again(self) -> Tensor:
        return self.out.kept[0]


GLOBAL: list[Tensor] = []


@odd("a parameter also held by a global variable", refused=HELD, instead=READ)
class InAGlobal(TwoLayers):
    def keep(self) -> None:
        GLOBAL[:] = [self.inner.weight]

    def again(self) -> Tensor:
        return next(weight * 1 for weight in GLOBAL)


@odd("a parameter also held by a hook of another module", refused=HELD, instead=READ)
class InAHook(TwoLayers):
    def keep(self) -> None:
        weight = self.inner.weight
        self.out.register_forward_hook(lambda _, args, out: out + F.linear(args[0], weight))


@odd("a parameter also held by a set and a default argument", refused=HELD, instead=READ)
class InASet(TwoLayers):
    def keep(self) -> None:
        def read(weights: set[Tensor] = {self.inner.weight}) -> Tensor:  # noqa: B006
            return next(iter(weights))

        self.read = read

    def again(self) -> Tensor:
        return self.read()


@odd(
    "an array of numpy that shares memory with a parameter",
    refused="shares memory",
    instead="`module.weight` read in forward, or a copy",
)
class InAnArray(TwoLayers):
    def keep(self) -> None:
        self.rows = {"first": [self.inner.weight.detach().numpy()[1:5].T]}

    def again(self) -> Tensor:
        return F.pad(torch.from_numpy(self.rows["first"][0]).T, (0, 0, 0, 4))


@odd("a parameter also held by its class", refused=HELD, instead=READ)
class OnItsClass(TwoLayers):
    kept: list[Tensor]

    def keep(self) -> None:
        type(self).kept = [self.inner.weight]

    def again(self) -> Tensor:
        return self.kept[0]


@odd(
    "a view of a parameter, made when the model was built",
    refused="shares memory",
    instead="the view, made in forward",
)
class HeldView(TwoLayers):
    def keep(self) -> None:
        self.kept = self.inner.weight.detach().t()

    def again(self) -> Tensor:
        return self.kept


@odd(
    "a buffer that aliases a parameter",
    refused="shares memory",
    instead="the parameter read in forward, or `.clone()` for values that stay",
)
class AliasingBuffer(TwoLayers):
    def keep(self) -> None:
        self.register_buffer("kept", self.inner.weight.data)

    def again(self) -> Tensor:
        return self.kept


@odd(
    "a buffer that aliases a part of a parameter",
    refused="shares memory",
    instead="the parameter read in forward, or `.clone()` for values that stay",
)
class AliasingPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("first", self.inner.weight.data[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.first


@odd("two buffers that alias each other")
class TwoBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("a", torch.randn(WIDTH))
        self.register_buffer("b", self.a[:])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.a + self.b


@odd("a copy of a parameter, kept in an attribute")
class HeldCopy(TwoLayers):
    def keep(self) -> None:
        self.kept = self.inner.weight.detach().clone()

    def again(self) -> Tensor:
        return self.kept


@odd("a property that leads to the weight of a child of the same unit")
class AsAProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4])

    @property
    def weight(self) -> Tensor:
        return self.inner[0]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@odd("modules also held in a list")
class ModulesInAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()
        self.order = [self.second, self.first]

    def forward(self, x: Tensor) -> Tensor:
        for module in self.order:
            x = torch.tanh(module(x))
        return x


@odd("a module held in `__dict__` alone: no parameter of the model")
class HiddenModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.__dict__["hidden"] = layer().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(self.inner(x))


class Child(nn.Module):
    """Uses what its parent has."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.inner = layer()
        self.up(parent)

    def up(self, parent: Any) -> None:
        self.parent = parent

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor()

    def factor(self) -> Tensor:
        return self.parent.factor


class Parent(nn.Module):
    """Has a child that knows it."""

    child_class: Any = Child

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.child = self.child_class(self)

    @property
    def factor(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.inner(x))


@odd(
    "a child that registers its parent as a module: a circle",
    refused="contains itself",
    instead="the parent outside registration: `self.__dict__['parent'] = parent`",
)
def cyclic() -> nn.Module:
    return Parent()


class ChildWithDict(Child):
    """Knows its parent outside registration."""

    def up(self, parent: Any) -> None:
        self.__dict__["parent"] = parent


@odd("a child that knows its parent outside registration")
class ParentInDict(Parent):
    child_class = ChildWithDict


class ChildWithWeakref(Child):
    """Knows its parent by a weak reference."""

    def up(self, parent: Any) -> None:
        self.kept = weakref.ref(parent)

    def factor(self) -> Tensor:
        return self.kept().factor


@odd("a child that knows its parent by a weak reference")
class ParentByWeakref(Parent):
    child_class = ChildWithWeakref


@odd(
    "a module that registers itself",
    refused="contains itself",
    instead="nothing: a module need not hold itself",
)
class HoldsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.me = self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@odd("an optimizer held by the model")
class HoldsAnOptimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@odd("a module that overrides `__getattr__`, so that weights are found under other names")
class OtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.own = nn.Parameter(torch.ones(WIDTH))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("own" if name == "factor" else name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


@odd("names that are odd: unicode, spaces, the names of methods")
class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("größe", "with space", "*", "[0]", "re:", "forward_", "weight"):
            self.add_module(name, layer())
        self.register_parameter("~w", nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = torch.tanh(module(x))
        return x * self._parameters["~w"]


@odd("200 levels of nesting")
def deep_nesting() -> nn.Module:
    module: nn.Module = layer()
    for _ in range(199):
        module = nn.Sequential(module)
    return module


@odd("one block 300 times in a list")
def three_hundred_times() -> nn.Module:
    return Chain(*[layer()] * 300)


@odd("an empty model part, without parameters")
class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2
