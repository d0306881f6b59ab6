"""Parameters of unusual shape, dtype or kind"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.odd_kinds.ties import Chain, layer
from tests.support.odd_models import WIDTH, odd

DROP = "a layer only where it has a size, `nn.Identity()` else"
EMPTY = "Initializing zero-element tensors is a no-op"
PLAIN = "`nn.Parameter` with an attribute of your own, which is kept"


# A unit gathers in the dtype of the run, which a module that casts its own inputs does not expect.
OTHER = "in another dtype"
WHOLE = ("one unit", "automatic")
"""wrappings in which layers are no units, which cast their inputs"""
CASTS = "`mixed_precision: FULL`, for the module or all, or `x.to(self.weight.dtype)`"


class Holds(nn.Module):
    """A layer, and one parameter that takes part as its mean."""

    def __init__(self, value: torch.Tensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.inner = layer()
        self.held = nn.Parameter(value, requires_grad=requires_grad)

    def forward(self, x: torch.Tensor) -> Any:
        used = self.held.abs() if self.held.is_complex() else self.held
        return self.inner(x) * (1 + used.float().mean())


@odd(
    "a trained scalar (shape `()`)",
    refused="is a scalar parameter",
    instead="shape `(1,)`",
)
def scalar() -> nn.Module:
    return Holds(torch.tensor(0.5))


@odd("a frozen scalar: left whole on every rank")
def frozen_scalar() -> nn.Module:
    return Holds(torch.tensor(0.5), False)


@odd("a parameter of one element")
def one_element() -> nn.Module:
    return Holds(torch.randn(1))


@odd("a parameter of shape (1, 1, 1, 8): fewer rows than ranks")
def fewer_rows_than_ranks() -> nn.Module:
    return Holds(torch.randn(1, 1, 1, WIDTH))


@odd("seven rows on two ranks")
def uneven_rows() -> nn.Module:
    return Holds(torch.randn(7, 3))


@odd("very uneven sizes: 4,001 rows beside one")
def very_uneven() -> nn.Module:
    return nn.Sequential(Holds(torch.randn(4001, 2)), Holds(torch.randn(1)))


@odd(
    "a layer without outputs, `Linear(8, 0)`", refused="has no elements", instead=DROP, warns=EMPTY
)
class NoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.empty = layer(), nn.Linear(WIDTH, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(x), self.empty(x)], dim=1)


@odd("a layer without inputs, `Linear(0, 8)`", refused="has no elements", instead=DROP, warns=EMPTY)
class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.empty = layer(), nn.Linear(0, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.empty(x[:, :0])


@odd("a frozen parameter without elements: left alone")
def frozen_empty() -> nn.Module:
    return Chain(layer(), WithFrozen(torch.zeros(0, WIDTH)))


class WithFrozen(nn.Module):
    """A layer beside a frozen parameter that takes part as its sum."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.inner = layer()
        self.held = nn.Parameter(value, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.held.float().sum() / 100


@odd("a frozen parameter of int64: left whole on every rank")
def frozen_int() -> nn.Module:
    return WithFrozen(torch.arange(6))


@odd("a frozen parameter of bool: left whole on every rank")
def frozen_bool() -> nn.Module:
    return WithFrozen(torch.tensor([True, False, True]))


@odd("a frozen weight of int8 with its scale, as weight-only quantisation keeps it")
class Int8Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        ints = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(ints, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(x), self.weight.float() * self.scale)


@odd("a frozen weight of float8: left whole on every rank")
class Float8Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        values = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(x), self.weight.float())


@odd(
    "a parameter of a quantised dtype (`torch.qint8`)",
    refused="quantised",
    instead="the integers as a buffer and `scale * ints.float()` in forward",
    warns="torch.quantize|.*quantiz",
)
def quantised() -> nn.Module:
    value = torch.quantize_per_tensor(torch.randn(WIDTH, 2), 0.1, 0, torch.qint8)
    return WithQuantised(value)


class WithQuantised(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.inner = layer()
        self.held = nn.Parameter(value, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.held.dequantize().sum() / 100


@odd(
    "a complex parameter",
    refused="complex",
    instead="a real parameter with a last dimension of 2, and `torch.view_as_complex` in forward",
)
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.turn


@odd("a parameter of float64 beside those of float32", refused=OTHER, only=WHOLE, instead=CASTS)
def float64() -> nn.Module:
    return Chain(layer(), Cast(torch.float64), layer())


class Cast(nn.Module):
    """A layer of another dtype that casts its input and output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.inner = dtype, layer().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype)).to(x.dtype)


@odd(
    "a block of bf16 in a model of float32",
    refused=OTHER,
    only=WHOLE,
    instead=CASTS,
    tolerance=2e-2,
)
def bf16_block() -> nn.Module:
    return Chain(layer(), Cast(torch.bfloat16))


@odd(
    "a block of fp16 in a model of float32",
    refused=OTHER,
    only=WHOLE,
    instead=CASTS,
    tolerance=2e-2,
)
def fp16_block() -> nn.Module:
    return Chain(layer(), Cast(torch.float16))


@odd(
    "blocks of four dtypes",
    refused=OTHER,
    only=WHOLE,
    instead=CASTS,
    tolerance=2e-2,
)
def four_dtypes() -> nn.Module:
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.float32)
    return Chain(*[Cast(dtype) for dtype in dtypes])


@odd(
    "one module holds parameters of two dtypes", refused="of different dtypes", instead="one dtype"
)
class TwoDtypesOneModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)
        self.narrow = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.wide.float() + self.narrow


@odd(
    "a parameter with the strides of `channels_last`",
    refused="not contiguous",
    instead="`nn.Parameter(weight.contiguous())`; images may be `channels_last`",
)
def channels_last_weight() -> nn.Module:
    return Holds(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))


@odd("a transposed parameter", refused="not contiguous", instead="`.contiguous()`")
def transposed() -> nn.Module:
    return Holds(torch.randn(3, 5).t())


@odd(
    "an expanded parameter, one number seen as many",
    refused="not contiguous",
    instead="the one number, expanded in forward",
)
def expanded() -> nn.Module:
    return Holds(torch.randn(1, 4).expand(3, 4))


@odd(
    "a parameter that is every second row of a larger tensor",
    refused="not contiguous",
    instead="`.contiguous()`",
)
def strided() -> nn.Module:
    return Holds(torch.randn(8, 4)[:, ::2])


@odd("a parameter that is a part of a larger, unregistered tensor")
def part_of_large() -> nn.Module:
    return Holds(torch.randn(8, 4)[2:5])


class Named(nn.Parameter):
    """A class of a user's own, to tell parameters apart."""


@odd("a parameter of a class of one's own", refused="class", instead=PLAIN)
def subclass_of_parameter() -> nn.Module:
    module = Holds(torch.randn(4))
    module.held = Named(torch.randn(4))
    return module


class Doubled(torch.Tensor):
    """Computes otherwise than a tensor does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.Tensor.float else result


@odd("a tensor subclass that computes otherwise", refused="class", instead=PLAIN)
def tensor_subclass() -> nn.Module:
    module = Holds(torch.randn(4))
    value: Any = torch.randn(4).as_subclass(Doubled).requires_grad_()
    value._is_param = True
    del module.held
    module.register_parameter("held", value)
    return module


@odd("a parameter with attributes of the user's own, which stay")
class WithAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.weight.factor = 3.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@odd(
    "a module that was built lazily and not called",
    refused="has no shape yet",
    instead="one call of the model before it is prepared",
)
def lazy() -> nn.Module:
    return nn.LazyLinear(WIDTH)


@odd("a lazy module after its first call")
def lazy_after_a_call() -> nn.Module:
    module = nn.LazyLinear(WIDTH)
    module(torch.zeros(1, WIDTH))
    return module


@odd("a frozen part between trained ones")
def frozen_between() -> nn.Module:
    return Chain(layer(), layer().requires_grad_(False), layer())


@odd("a frozen bias of a trained layer")
def frozen_bias() -> nn.Module:
    module = layer()
    module.bias.requires_grad_(False)
    return Chain(module, layer())


@odd("everything behind the first layer is frozen")
def all_frozen() -> nn.Module:
    return Chain(layer(), layer()).requires_grad_(False)


@odd("adapters beside frozen weights (LoRA)")
class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = layer().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@odd(
    "adapters of float32 beside frozen weights of bf16",
    refused=OTHER,
    only=("automatic",),
    depends=("one unit",),
    instead=CASTS,
    tolerance=2e-2,
)
class MixedAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = layer().requires_grad_(False).bfloat16()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@odd("a parameter that is registered and never used")
class NeverUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.spare = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@odd("a `ParameterList`")
class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@odd("a `ParameterDict`")
class InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {"a": torch.randn(WIDTH, WIDTH) / 4, "b": torch.ones(WIDTH)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights["a"] + self.weights["b"]


@odd("a `ParameterList` inside a `ParameterDict`")
class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4])
        self.weights = nn.ParameterDict({"a": inner})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights["a"][0]
