"""Forwards that are given containers, and ways in which results leave a unit, drawn by chance.

`run_given` and `run_way` train a case beside one process with SGD, which shows a wrong factor, and
compare losses, weights, and what the caller's containers hold.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import PlanError
from tests.support.drawn import Result
from tests.support.parity import assert_close, gathered

__all__ = ["Given", "Way", "draw_given", "draw_way", "run_given", "run_way"]

WIDTH, STEPS = 4, 4


@dataclass
class Holder:
    """A dataclass around a container."""

    inside: Any


# --- Containers that a forward is given. ---

MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(list, pairs),
}
SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "deque": deque}
NESTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bare": (lambda box: box, lambda given: given),
    "in a tuple": (lambda box: (None, box), lambda given: given[1]),
    "in a list": (lambda box: [box, "text"], lambda given: given[0]),
    "in a dict": (lambda box: {"more": {"inside": box}}, lambda given: given["more"]["inside"]),
    "in a dataclass": (Holder, lambda given: given.inside),
}
"""puts a container into another, and finds it there"""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A forward that is given a container. Its text can be pasted into a test."""

    kind: str = "dict"
    nesting: str = "bare"
    change: str = "append"
    place: str = "between"
    by_name: bool = False
    alone: bool = False
    """whether units get no tensor beside the container"""
    recompute: bool = False
    cast: bool = False
    loss: str = "both"
    """computed from the output, from what is in the container afterwards, or from both"""
    reshard: Any = None
    frozen: bool = False
    """whether the layers are"""

    @property
    def settings(self) -> dict[str, Any]:
        precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "cast_forward_inputs": True}
        return {
            "wrap_policy": {"classes": ["Layer"], "min_unit_bytes": 1},
            "activation_checkpointing": {"classes": ["Layer"]} if self.recompute else False,
            "mixed_precision": precision if self.cast else "FULL",
            **({} if self.reshard is None else {"reshard_after_forward": self.reshard}),
        }


def draw_given(number: int) -> Given:
    """Returns the case of that number, always the same."""
    rng = random.Random(f"given {number}")
    change, recompute = rng.choice(["read", "append", "replace", "delete"]), rng.random() < 0.4
    return Given(
        kind=rng.choice([*MAPPINGS, *SEQUENCES]),
        nesting=rng.choice(list(NESTINGS)),
        change=change,
        place=rng.choice(["root", "unit", "between"]),
        by_name=rng.random() < 0.5,
        # What is deleted is not there when the layer runs again: torch refuses that.
        alone=rng.random() < 0.3 and not (recompute and change == "delete"),
        recompute=recompute,
        cast=rng.random() < 0.4,
        loss="output" if change == "read" else rng.choice(["output", "container", "both"]),
        reshard=rng.choice([None, True, False]),
        frozen=rng.random() < 0.15,
    )


def tensors_of(box: Any) -> dict[Any, Tensor]:
    pairs = box.items() if isinstance(box, dict) else enumerate(box)
    return {key: item for key, item in pairs if isinstance(item, Tensor)}


def change_box(change: str, box: Any, value: Tensor, number: int) -> Tensor:
    """Changes a container, and returns what is read there."""
    first, read = next(iter(tensors_of(box).items()))
    if change == "delete":
        del box[first]
    if change in ("append", "delete"):
        if isinstance(box, dict):
            box[f"new {number} {len(box)}"] = value
        else:
            box.append(value)
    if change == "replace":
        box[first] = read + value
    mean = sum(item.to(value.dtype) for item in tensors_of(box).values()) / len(box)
    return torch.tanh(mean + read.to(value.dtype))


class Layer(nn.Module):
    """Computes with what is in a container, and changes it."""

    def __init__(self, case: Given, number: int) -> None:
        super().__init__()
        self.case, self.number = case, number
        self.linear, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, given: Any) -> Any:
        box = NESTINGS[self.case.nesting][1](given)
        if x is None:
            x = next(iter(tensors_of(box).values()))
        read = change_box(self.case.change, box, self.value(x), self.number)
        return torch.tanh(x + self.linear(x)) * read


class Stack(nn.Module):
    """Hands a container to layers, and may change it."""

    def __init__(self, case: Given) -> None:
        super().__init__()
        self.case = case
        self.embed, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(case, number) for number in range(3))
        self.layers.requires_grad_(not case.frozen)

    def forward(self, x: Any, given: Any) -> Any:
        case = self.case
        wrap, find = NESTINGS[case.nesting]
        outer = find(given)
        if x is None:
            x = next(iter(tensors_of(outer).values()))
        x = self.embed(x)
        if case.place == "between":
            for layer in self.layers:
                first = None if case.alone else x
                y = layer(x=first, given=given) if case.by_name else layer(first, given)
                x = torch.tanh(x + y)
            return x
        for layer in self.layers:
            # `left` is of another dtype than the layer's where there is a cast.
            left = torch.ones(WIDTH, dtype=torch.double)
            own = box_of(case, {"x": x, "left": left, "number": 3, "more": x * 2, "last": x})
            inside, first = wrap(own), None if case.alone else x
            y = layer(x=first, given=inside) if case.by_name else layer(first, inside)
            if case.change != "delete":
                assert any(item is left for item in tensors_of(own).values())
            x = torch.tanh(y + sum(item.to(y.dtype) for item in tensors_of(own).values()) / 9)
        if case.place == "root":
            x = x + change_box(case.change, outer, self.value(x), 9)
        return x


def box_of(case: Given, items: Mapping[str, Any]) -> Any:
    if case.kind in MAPPINGS:
        return MAPPINGS[case.kind](items.items())
    return SEQUENCES[case.kind](items.values())


def run_given(case: Given) -> Result:
    """Trains a case; both ranks see the same batches. Collective: yes.

    Raises:
        AssertionError: for a number or an object that is not that of one process.
    """
    torch.manual_seed(0)
    model = Stack(case).double()
    oracle = copy.deepcopy(model)
    for index, layer in enumerate(oracle.layers if case.recompute else ()):
        oracle.layers[index] = Recomputed(layer)
    pair = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (oracle, model)]
    try:
        prepare_fully_shard(model, pair[1], case.settings, device="cpu")
        for step in range(STEPS):
            with torch.no_grad():
                compare_calls(case, oracle, model, step)
            losses = compare_calls(case, oracle, model, step)
            for loss, optimizer in zip(losses, pair, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                assert torch.isfinite(loss)
    except PlanError as error:
        return Result(outcome="refused", text=str(error))
    assert_same_weights(oracle, model, 1e-5 if case.cast else 1e-9)
    return Result(outcome="equal")


class Recomputed(nn.Module):
    """A layer under torch's own checkpointing."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inside, *args, use_reentrant=False, **kwargs)


def compare_calls(case: Given, oracle: nn.Module, model: nn.Module, step: int) -> list[Tensor]:
    """Calls both, and goes backward where there are gradients; returns the losses."""
    losses, shown = [], []
    for one in (oracle, model):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, WIDTH, generator=generator, dtype=torch.double)
        leaf = torch.randn(2, WIDTH, generator=generator, dtype=torch.double, requires_grad=True)
        items = {"x": x + leaf, "left": leaf * 2, "text": "text", "number": 3}
        items = {**items, "old": x * 2, "older": leaf * 3, "oldest": x * 4, "last": leaf}
        if case.kind in SEQUENCES:
            del items["text"], items["number"]
        box = box_of(case, items)
        given = NESTINGS[case.nesting][0](box)
        first = None if case.alone else x
        output = one(x=first, given=given) if case.by_name else one(first, given)
        loss = torch.zeros((), dtype=torch.double)
        if case.loss != "container":
            loss = loss + output.double().square().mean()
        if case.loss != "output":
            loss = loss + sum(item.double().square().mean() for item in tensors_of(box).values())
        shown.append(places_of(box, items))
        if torch.is_grad_enabled():
            loss.backward()
            shown[-1] += places_of(box, items)
        losses.append(loss.detach())
    assert len(shown[0]) == len(shown[1])
    for expected, got in zip(*shown, strict=True):
        if isinstance(expected, Tensor):
            assert_close("in the container", expected, got.double(), 1e-5 if case.cast else 1e-9)
        else:
            assert expected == got
    assert_close("loss", *losses, 1e-5 if case.cast else 1e-9)
    return losses


def places_of(box: Any, items: Mapping[str, Any]) -> list[Any]:
    """What is where: names of the caller's own objects, values of others."""
    names = {id(item): name for name, item in items.items()}
    pairs = box.items() if isinstance(box, dict) else enumerate(box)
    return [
        part
        for key, item in pairs
        for part in (key, names.get(id(item), item.detach() if isinstance(item, Tensor) else item))
    ]


# --- Ways out of a unit. ---


class Bag:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class OwnMapping(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, value: Any) -> None:
        self._held = {"value": value}

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class OwnDict(dict[str, Any]):
    """A subclass of dict."""


class OwnList(list[Any]):
    """A subclass of list."""


def cache_of(value: Tensor) -> DynamicCache:
    cache = DynamicCache()
    cache.update(value[None, None], value[None, None], 0)
    return cache


def from_cache(cache: Any) -> Tensor:
    layers = getattr(cache, "layers", None)
    return (cache.key_cache[0] if layers is None else layers[0].keys)[0, 0]


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda v: v, lambda out: out),
    "tuple": (lambda v: (None, v), lambda out: out[1]),
    "nested dict": (lambda v: {"a": [{"b": v}]}, lambda out: out["a"][0]["b"]),
    "deque": (lambda v: deque([v]), lambda out: out[0]),
    "dataclass": (Holder, lambda out: out.inside),
    "ModelOutput": (lambda v: BaseModelOutput(last_hidden_state=v), lambda out: out[0]),
    "SimpleNamespace": (lambda v: types.SimpleNamespace(value=v), lambda out: out.value),
    "object": (Bag, lambda out: out.value),
    "object in an object": (lambda v: Bag([Bag(v)]), lambda out: out.value[0].value),
    "object with slots": (Slotted, lambda out: out.value),
    "UserDict": (lambda v: UserDict(value=v), lambda out: out["value"]),
    "BatchEncoding": (lambda v: BatchEncoding({"value": v}), lambda out: out["value"]),
    "BatchFeature": (lambda v: BatchFeature({"value": v}), lambda out: out["value"]),
    "own mapping": (OwnMapping, lambda out: out["value"]),
    "subclass of dict": (lambda v: OwnDict(value=v), lambda out: out["value"]),
    "subclass of list": (lambda v: OwnList([v]), lambda out: out[0]),
    "distribution": (lambda v: torch.distributions.Normal(v, 1.0), lambda out: out.mean),
    "frozenset": (lambda v: frozenset([v]), lambda out: next(iter(out))),
    "generator": (lambda v: (item for item in [v]), next),
    "closure": (lambda v: lambda: v * 1, lambda out: out()),
    "partial": (lambda v: functools.partial(torch.mul, v, 1), lambda out: out()),
    "DynamicCache": (cache_of, from_cache),
}
"""puts a value into something, and takes it out"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How results leave a unit. Its text can be pasted into a test."""

    kind: str = "object"
    place: str = "returned"
    """or: attribute, hook of the unit, hook inside, global"""
    reshard: str = "default"
    """or: true, false; inner is of units below the root"""
    late: bool = False
    """whether something computes after the forward of the unit, with its weights"""
    beside: bool = False
    """whether the loss also depends on a tensor that is returned"""
    recompute: bool = False


def draw_way(number: int) -> Way:
    """Returns the case of that number, always the same."""
    rng = random.Random(f"way {number}")
    place = rng.choice(
        ["returned", "returned", "attribute", "hook of the unit", "hook inside", "global"]
    )
    kind = rng.choice(list(WAYS))
    return Way(
        kind=kind,
        place=place,
        reshard=rng.choice(["default", "true", "inner", "inner"]),
        late=kind in ("generator", "closure") and place == "returned" and rng.random() < 0.5,
        beside=place != "returned" and rng.random() < 0.5,
        recompute=rng.random() < 0.2,
    )


KEPT: list[Any] = []


class Part(nn.Module):
    """Has its result leave in the way of the case."""

    def __init__(self, case: Way) -> None:
        super().__init__()
        self.case, self.kept = case, None
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        wrap = WAYS[self.case.kind][0]
        if self.case.late:
            if self.case.kind == "closure":
                return lambda: self.second(torch.tanh(self.first(x)))
            return (self.second(torch.tanh(self.first(part))) for part in [x])
        value = self.second(torch.tanh(self.first(x)))
        if self.case.place == "attribute":
            self.kept = wrap(value.square())
        elif self.case.place == "global":
            KEPT.append(wrap(value.square()))
        return wrap(value) if self.case.place == "returned" else value


class Whole(nn.Module):
    """Hands results of one part to the next."""

    def __init__(self, case: Way) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part(case) for _ in range(2))
        for part in self.parts if case.place.startswith("hook") else ():
            hooked = part.first if case.place == "hook inside" else part
            hooked.register_forward_hook(
                lambda _module, _args, output: KEPT.append(WAYS[case.kind][0](output))
            )

    def forward(self, x: Tensor) -> Any:
        wrap, take = WAYS[self.case.kind]
        x = self.embed(x)
        for part in self.parts:
            x = take(part(x)) if self.case.place == "returned" else part(x)
        return wrap(self.embed(x)) if self.case.place == "returned" else x

    def loss(self, x: Tensor) -> Tensor:
        """Computed outside of the model."""
        KEPT.clear()
        output, take = self(x), WAYS[self.case.kind][1]
        if self.case.place == "returned":
            return take(output).square().mean()
        parts: Any = [getattr(part, "inside", part) for part in self.parts]
        kept = [part.kept for part in parts] if self.case.place == "attribute" else list(KEPT)
        loss = torch.stack([take(value).square().mean() for value in kept]).sum()
        return loss + output.square().mean() if self.case.beside else loss


def run_way(case: Way) -> Result:
    """Trains a case; both ranks see the same batches. Collective: yes.

    Raises:
        AssertionError: for a number that is not that of one process.
    """
    torch.manual_seed(0)
    model, oracle = Whole(case), Whole(case)
    oracle.load_state_dict(model.state_dict())
    for index, part in enumerate(oracle.parts if case.recompute else ()):
        oracle.parts[index] = Recomputed(part)
    pair = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (oracle, model)]
    recompute = {"classes": ["Part"]} if case.recompute else False
    settings: dict[str, Any] = {"activation_checkpointing": recompute}
    if case.reshard != "default":
        settings["reshard_after_forward"] = True
    if case.reshard == "inner":
        settings["wrap_policy"] = {"classes": ["Part"], "min_unit_bytes": 1}
    try:
        prepare_fully_shard(model, pair[1], settings, device="cpu")
        for step in range(STEPS):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
            losses = []
            for one, optimizer in zip((oracle, model), pair, strict=True):
                loss = one.loss(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert_close("loss", *losses)
    except PlanError as error:
        return Result(outcome="refused", text=str(error))
    assert_same_weights(oracle, model, 1e-6)
    return Result(outcome="equal")


def assert_same_weights(oracle: nn.Module, model: nn.Module, tolerance: float) -> None:
    """Compares what `Recomputed` has renamed."""
    found = gathered(model)
    for name, value in oracle.state_dict().items():
        assert_close(name, value, found.pop(name.replace(".inside.", ".")), tolerance)
    assert not found
