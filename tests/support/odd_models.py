"""Odd models: each is trained like an unsharded copy of it, or refused with a sentence.

A kind is a class or function in `tests/support/odd_kinds/` under `@odd(...)`, which makes the odd
part of a model; `Host` puts a layer before it. `run_kind` trains it in every wrapping. A
description ends in what a user may do instead, when the kind is refused.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from composer.models import ComposerModel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import ConfigError, PatchError, PlanError, ShardReadError
from tests.support import odd_kinds

WIDTH, VOCAB, SIZE, STEPS = 8, 11, 4, 3

WRAPPINGS: dict[str, str] = {
    "one unit": "`{}` on a plain module: the root gathers everything",
    "automatic": "`{}` on a ComposerModel: its direct children are units",
    "every module": "`{wrap_policy: {min_num_params: 1}}`: whatever holds a parameter is a unit",
}

_SAID_BY_TORCH = (
    "FSDP2-wrapped module .* returned a view tensor",
    "The .grad attribute of a Tensor that is not a leaf",
)
"""warnings of newer torch: about views, and of its compiler about what the compiler itself does"""


@dataclass(frozen=True, kw_only=True)
class Odd:
    """One kind of odd model."""

    says: str
    """what is odd about it, for the page"""
    make: Callable[[], nn.Module]
    refused: str = ""
    """words of the refusal; empty where it trains"""
    instead: str = ""
    """what to write instead, for the page"""
    only: tuple[str, ...] = tuple(WRAPPINGS)
    """wrappings in which it is refused"""
    depends: tuple[str, ...] = ()
    """wrappings in which it is refused with a newer torch alone"""
    takes: Literal["floats", "ids"] = "floats"
    call: Callable[[Any, torch.Tensor], Any] | None = None
    """calls the part, instead of `part(x)`"""
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    """forward and backward of the whole model, instead of the usual"""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = 1e-5
    warns: str = ""
    """a warning of torch's own, by its first words"""

    def words(self, wrapping: str) -> str:
        """Words of the refusal in a wrapping, empty where it trains."""
        return self.refused if wrapping in self.only else ""


def odd(says: str, **facts: Any) -> Callable[[Any], Any]:
    """Marks what makes the odd part of a model."""

    def mark(make: Any) -> Any:
        make.odd = Odd(says=says, make=make, **facts)
        return make

    return mark


def kinds() -> dict[str, dict[str, Odd]]:
    """Title of each file of kinds -> its kinds by name, in the order of writing."""
    found: dict[str, dict[str, Odd]] = {}
    for entry in sorted(pkgutil.iter_modules(odd_kinds.__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{odd_kinds.__name__}.{entry.name}")
        title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
        own = {k: v for k, v in vars(module).items() if isinstance(vars_of(v).get("odd"), Odd)}
        if own:
            found[title] = {name: made.odd for name, made in own.items()}
    return found


def vars_of(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def kind_of(name: str) -> Odd:
    """The kind of that name."""
    return next(group[name] for group in kinds().values() if name in group)


def loss_of(output: Any) -> torch.Tensor:
    """Mean squares of all that has a gradient."""
    leaves = [leaf for leaf in tree_leaves(_opened(output)) if isinstance(leaf, torch.Tensor)]
    squares = [(leaf * leaf.conj()).real if leaf.is_complex() else leaf**2 for leaf in leaves]
    return torch.stack([s.float().mean() for s in squares if s.numel()] or [torch.zeros(())]).sum()


def _opened(output: Any) -> Any:
    return vars(output) if hasattr(output, "__dataclass_fields__") else output


class _Host:
    """A layer, and the odd part behind it."""

    def hold(self: Any, kind: Odd) -> None:
        self.before = nn.Linear(WIDTH, WIDTH)
        self.odd = kind.make()
        self.__dict__["kind"] = kind

    def loss_for(self: Any, x: torch.Tensor) -> torch.Tensor:
        kind: Odd = self.__dict__["kind"]
        hidden = self.before(x)
        given = (x.abs() * 97).long() % VOCAB if kind.takes == "ids" else hidden
        output = kind.call(self.odd, given) if kind.call else self.odd(given)
        return loss_of(output) + (hidden**2).mean()


class Host(_Host, nn.Module):
    """The whole model, by itself."""

    def __init__(self, kind: Odd) -> None:
        super().__init__()
        self.hold(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss_for(x)


class ComposerHost(_Host, ComposerModel):
    """The whole model, as Composer's Trainer has it."""

    def __init__(self, kind: Odd) -> None:
        super().__init__()
        self.hold(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss_for(x)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs


@dataclass(frozen=True)
class Result:
    """What became of one kind in one wrapping, on this rank."""

    outcome: Literal["equal", "wrong", "refused", "error"]
    text: str = ""


@dataclass(frozen=True)
class Trained:
    """What training left: losses and values by name."""

    losses: list[float]
    values: dict[str, torch.Tensor]


def run_kind(name: str, wrappings: Collection[str] = tuple(WRAPPINGS)) -> dict[str, Result]:
    """Trains a kind unsharded and in the wrappings. Collective: yes."""
    kind = kind_of(name)
    with warnings.catch_warnings():
        for said in (*_SAID_BY_TORCH, *([kind.warns] if kind.warns else [])):
            warnings.filterwarnings("ignore", message=said)
        trains = any(not kind.words(wrapping) for wrapping in wrappings)
        alone = _alone(kind) if trains else Trained([], {})
        return {wrapping: _cell(kind, wrapping, alone) for wrapping in wrappings}


def _cell(kind: Odd, wrapping: str, alone: Trained) -> Result:
    try:
        found = _sharded(kind, wrapping)
    except (ConfigError, PlanError, PatchError, ShardReadError) as refusal:
        foreign = _FOREIGN.match(str(refusal)) is not None
        return Result("error" if foreign else "refused", str(refusal))
    except Exception as error:
        return Result("error", f"{type(error).__name__}: {error}")
    difference, where = _difference(found, alone)
    return Result("equal") if difference <= kind.tolerance else Result("wrong", where)


_FOREIGN = re.compile(r"\w+(Error|Warning|Exception): ")
"""how an error that is not ours reads when it is raised on all ranks"""


def _built(kind: Odd, host: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return host(kind)


def _sharded(kind: Odd, wrapping: str) -> Trained:
    model = _built(kind, ComposerHost if wrapping == "automatic" else Host)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings: dict[str, Any] = dict(kind.settings)
    if wrapping == "every module":
        settings["wrap_policy"] = {**settings.get("wrap_policy", {}), "min_num_params": 1}
    prepare_fully_shard(model, optimizer, settings, precision="fp32", device="cpu")
    losses = _train(kind, model, optimizer, lambda: None)
    return Trained(losses, _values(model))


def _alone(kind: Odd) -> Trained:
    """Every rank trains its part of the batch, and gradients are averaged by hand."""
    model = _built(kind, Host)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = _train(kind, model, optimizer, lambda: _average(list(model.parameters())))
    return Trained(losses, _values(model))


def _train(
    kind: Odd, model: nn.Module, optimizer: torch.optim.Optimizer, average: Callable[[], object]
) -> list[float]:
    losses: list[float] = []
    for number in range(STEPS):
        torch.manual_seed(100 * number + dist.get_rank() + 7)
        x = torch.randn(SIZE, WIDTH)
        if kind.step is not None:
            loss = kind.step(model, x)
        else:
            loss = model(x)
            loss.backward()
        losses.append(loss.item())
        average()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _average(params: list[nn.Parameter]) -> None:
    """The gradient is the mean over the ranks; none counts as zero where a rank has one."""
    trained = [param for param in params if param.requires_grad]
    used = torch.tensor([float(param.grad is not None) for param in trained] or [0.0])
    dist.all_reduce(used)
    for param, count in zip(trained, used.tolist(), strict=bool(trained)):
        if not count:
            continue
        dense = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        sent = torch.view_as_real(dense) if dense.is_complex() else dense
        sent = sent.contiguous()
        dist.all_reduce(sent)
        sent /= dist.get_world_size()
        param.grad = torch.view_as_complex(sent) if dense.is_complex() else sent


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name.replace("_orig_mod.", ""): _whole(tensor) for name, tensor in named}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    value = value.detach()
    return copy.deepcopy(value.dequantize() if value.is_quantized else value)


def _difference(found: Trained, alone: Trained) -> tuple[float, str]:
    """The largest difference, and where it is."""
    if found.values.keys() != alone.values.keys():
        return float("inf"), f"other names: {found.values.keys() ^ alone.values.keys()}"
    pairs = {
        f"loss of step {number}": abs(a - b)
        for number, (a, b) in enumerate(zip(found.losses, alone.losses, strict=True))
    }
    for name, value in found.values.items():
        other = alone.values[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf"), f"'{name}': {value.shape} {value.dtype}"
        if value.numel():
            wide = torch.complex128 if value.is_complex() else torch.float64
            pairs[name] = (value.to(wide) - other.to(wide)).abs().max().item()
    worst = max(pairs, key=lambda name: pairs[name])
    broken = [name for name, gap in pairs.items() if gap != gap]
    if broken:
        return float("inf"), f"'{broken[0]}' is not a number"
    return pairs[worst], f"'{worst}' is {pairs[worst]:.1e} off"
