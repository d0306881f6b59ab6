"""What of a model is refused by name; `tests/matrix/test_odd_models.py` trains the rest."""

from __future__ import annotations

import abc
import functools
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.held_tensors import held_tensors
from composer_fsdp2.plan.module_tree import ModuleTree, memory_of
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, root_rule
from composer_fsdp2.plan.wrap_plan import WrapPlan
from tests.support.limits import Limit


def plan(model: nn.Module, **kwargs: Any) -> WrapPlan:
    return plan_wrapping(model, [root_rule], **kwargs)


def error_of(model: nn.Module) -> str:
    with pytest.raises(PlanError) as caught:
        plan(model)
    return str(caught.value)


class Thing:
    """An object of a user's own."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def method(self) -> None:
        """Is bound."""


WAYS: dict[str, Any] = {
    "itself": lambda w: w,
    "a list": lambda w: [1, w],
    "keys": lambda w: {w: 0.1},
    "nested": lambda w: {"a": ({"b": [w]},)},
    "an object": lambda w: Thing(a=Thing(b=[w])),
    "a bound method": lambda w: Thing(a=w).method,
    "a closure": lambda w: lambda: w,
    "a default": lambda w: lambda x=w: x,
    "partial": lambda w: functools.partial(torch.add, w),
    "a hidden module": lambda w: [_with(nn.Linear(2, 2), weight=w)],
}


def _with(module: nn.Module, **params: nn.Parameter) -> nn.Module:
    for name, param in params.items():
        setattr(module, name, param)
    return module


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_held_elsewhere_is_found(way: str):
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model)["kept"] = WAYS[way](model[0].weight)
    message = error_of(model)
    assert message.startswith("'0.weight' is also held by 'kept' of the model")
    assert "read its parameter in forward" in message


KEPT: list[torch.Tensor] = []


class InALambda(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: x @ KEPT[0], input)


def test_a_global_variable_of_a_function_in_a_method_is_found():
    model = nn.Sequential(InALambda(2, 2))
    KEPT[:] = [model[0].weight]
    assert "'0.weight' is also held by 'KEPT (a global variable)'" in error_of(model)
    KEPT.clear()
    plan(model)


def test_a_view_is_found_and_a_copy_is_not():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].__dict__["kept"] = [model[0].weight.detach().clone()]
    plan(model)
    model[0].__dict__["kept"].append(model[0].weight.detach()[1])
    assert error_of(model).startswith("'kept' of '0' shares memory with the parameter '0.weight'")


def test_each_parameter_is_told_of_once():
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model).update(a=[model[0].weight], b=[model[0].weight], c=list(model.parameters()))
    message = error_of(model)
    assert message.count("'0.weight' is also held") == 1
    assert message.count("'0.bias' is also held") == 1


def test_many_are_cut_off():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(50)])
    vars(model)["kept"] = list(model.parameters())
    assert error_of(model).count("is also held") == 5


def test_what_torch_holds_is_no_fault():
    model = nn.Sequential(
        nn.LSTM(2, 2),
        parametrizations.spectral_norm(nn.Linear(2, 2)),
        prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5),
        nn.TransformerEncoderLayer(2, 1, 2),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
        model.append(nn.utils.weight_norm(nn.Linear(2, 2)))
    vars(model)["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    vars(model[0])["parent"] = model
    plan(model)


def test_a_hook_may_have_a_name_of_any_kind():
    class Named:
        name = ("a", ["b"])

        def __call__(self, *_: Any) -> None:
            """Changes nothing."""

    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(Named())
    plan(model)


def test_ignored_parameters_may_be_held():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    vars(model)["kept"] = [model[0].weight]
    plan(model, ignored_params=["0.*"])


def test_a_large_model_is_read_in_linear_time():
    """Shared objects are opened once: the vocabulary here would be opened a thousand times."""
    words = {str(number): [number] for number in range(20_000)}
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(1000)])
    for module in model:
        vars(module)["words"] = words
    limit = Limit(5)
    assert list(held_tensors(ModuleTree.read(model))) == []
    assert limit.left()


def test_an_aliasing_buffer_is_found_on_meta_too():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("kept", model[0].weight.detach()[0])
    assert error_of(model).startswith("The buffer '0.kept' shares memory with the parameter")


def test_memory_of_tensors_without_any():
    assert memory_of(torch.zeros(0)) is None
    assert memory_of(torch.eye(2).to_sparse()) is None
    a = torch.zeros(4)
    first, second = memory_of(a[:2]), memory_of(a[2:])
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((0, 8), (8, 16))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_or_are_sparse(kind: Any):
    message = error_of(nn.Sequential(kind(3, 2, max_norm=1.0, sparse=True)))
    assert f"'0' ({kind.__name__}) has max_norm=1.0" in message
    assert f"'0' ({kind.__name__}) has sparse=True" in message
    frozen = nn.Sequential(kind(3, 2, sparse=True).requires_grad_(False), nn.Linear(1, 1))
    plan(frozen)


def test_a_circle_is_refused():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].add_module("up", model)
    assert error_of(model).startswith("'0.up' is the whole model again")


def test_a_lazy_module_is_refused():
    message = error_of(nn.Sequential(nn.LazyLinear(2), nn.Linear(1, 1)))
    assert message.startswith("'0.weight', '0.bias' has no shape yet")


FROZEN = {
    "a scalar": torch.tensor(1.0),
    "integers": torch.arange(3),
    "booleans": torch.tensor([True]),
    "nothing": torch.zeros(0, 3),
    "float8": torch.zeros(2).to(torch.float8_e4m3fn),
    "complex": torch.zeros(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parameters_that_cannot_be_sharded_stay_whole(what: str):
    model = nn.Linear(2, 2)
    model.register_parameter("held", nn.Parameter(FROZEN[what], requires_grad=False))
    assert plan(model).ignored == ("held",)


@pytest.mark.parametrize("what", ["a scalar", "nothing", "complex", "float8"])
def test_trained_ones_are_refused(what: str):
    model = nn.Linear(2, 2)
    model.register_parameter("held", nn.Parameter(FROZEN[what]))
    message = error_of(model)
    assert message.startswith("'held' ")


def test_much_that_stays_whole_is_told():
    ints = nn.Parameter(torch.empty(2**24, dtype=torch.int8, device="meta"), requires_grad=False)
    model = nn.Linear(2, 2)
    model.register_parameter("held", ints)
    with pytest.warns(UserWarning, match="every rank keeps all 16,777,216 bytes"):
        plan(model)


def test_memory_that_is_trained_and_frozen_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    assert "'0.weight' is trained and '1.weight' is frozen" in error_of(model)


class Abstract(abc.ABC):
    """A mixin whose layout torch's class for units does not have."""

    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Plain:
    """A mixin with attributes of its own."""


class WithSlots:
    __slots__ = ()


@pytest.mark.parametrize("bases", [(Abstract, nn.Linear), (WithSlots, nn.Linear)])
def test_a_class_that_begins_with_a_mixin_of_another_layout(bases: tuple[type, ...]):
    methods = {"forward": nn.Linear.forward}
    kind = types.new_class("Head", bases, exec_body=lambda body: body.update(methods))
    found = error_of(kind(2, 2))
    assert f"Head({bases[0].__name__}, Linear) derives from a class without attributes" in found
    assert "Name nn.Module, or the class that derives from it, first." in found
    inner = nn.Sequential(kind(2, 2))
    plan(inner)  # no unit of its own
    with pytest.raises(PlanError, match="'0' is of the class Head"):
        plan_wrapping(inner, [by_class(kind)])
    plan(types.new_class("Turned", bases[::-1])(2, 2))  # nn.Module is first
    plan(types.new_class("Usual", (Plain, nn.Linear))(2, 2))
