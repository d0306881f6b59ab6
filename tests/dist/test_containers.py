"""What goes into a unit, and comes out of it, in a container; `tests/matrix` draws more of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import PlanError
from tests.support.containers import Given, Way, run_given, run_way
from tests.support.parity import assert_same_values, gathered

PRELOAD = ["tests.support.containers"]

WIDTH = 4


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "case",
    [
        Given(),
        Given(kind="list", nesting="in a dict", place="root", by_name=True, cast=True),
        Given(kind="deque", nesting="in a tuple", change="replace", place="unit", alone=True),
        Given(kind="OrderedDict", nesting="in a dataclass", change="delete", reshard=True),
        Given(kind="defaultdict", loss="container", reshard=True),
        Given(kind="list", recompute=True, cast=True, alone=True),
        Given(change="replace", place="unit", recompute=True, cast=True),
    ],
    ids=str,
)
def test_containers_are_those_of_the_caller(case: Given):
    assert run_given(case).outcome == "equal"


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "case",
    [
        Way(kind="SimpleNamespace"),
        Way(kind="object with slots", reshard="true"),
        Way(kind="frozenset", reshard="inner", recompute=True),
        Way(kind="generator", reshard="true", late=True),
        Way(kind="closure", reshard="inner", late=True),
        Way(kind="tensor", place="attribute"),
        Way(kind="own mapping", place="attribute", reshard="inner", beside=True),
        Way(kind="tensor", place="hook inside", reshard="true"),
        Way(kind="tensor", place="hook of the unit", reshard="inner"),
    ],
    ids=str,
)
def test_results_train_whichever_way_they_leave(case: Way):
    assert run_way(case).outcome == "equal"


class Encoder(nn.Module):
    """Has a method besides `forward`, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def encode(self, batch: dict[str, Any]) -> None:
        batch["code"] = self.layer(batch["x"])

    def forward(self, batch: dict[str, Any]) -> Any:
        batch["result"] = self.layer(batch["x"])
        if batch.get("fail"):
            raise KeyError("asked for")
        return batch


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_a_method_writes_into_its_batch(reshard: Any):
    torch.manual_seed(0)
    model = Encoder()
    oracle = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (oracle, model)]
    settings = {"forward_methods": ["encode"], "reshard_after_forward": reshard}
    prepare_fully_shard(
        model, optimizers[1], {key: value for key, value in settings.items() if value is not None}
    )
    for _ in range(2):
        for one, optimizer in zip((oracle, model), optimizers, strict=True):
            batch: dict[str, Any] = {"x": torch.ones(2, WIDTH, requires_grad=True)}
            one.encode(batch)
            batch["code"].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)


@pytest.mark.world_size(2)
def test_the_batch_is_returned_itself_and_whole_after_an_error():
    model = Encoder()
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    prepare_fully_shard(model, None, {"mixed_precision": policy})
    x = torch.ones(2, WIDTH)
    batch: dict[str, Any] = {"x": x}
    assert model(batch) is batch
    assert batch["x"] is x
    assert batch["result"].dtype == torch.bfloat16
    batch["fail"] = True
    with pytest.raises(KeyError, match="asked for"):
        model(batch)
    assert batch["x"] is x


class Penalised(nn.Module):
    """Its weight is read outside of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("then", ["step", "forward", "step of another"])
def test_gradients_that_nobody_reduces_are_refused(then: str):
    model = Penalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    prepare_fully_shard(model, optimizer, {})
    before = gathered(model)
    model.unshard()
    model.layer.weight.square().sum().backward()
    calls = {
        "step": optimizer.step,
        "step of another": other.step,
        "forward": lambda: model(torch.ones(2, WIDTH)),
    }
    with pytest.raises(PlanError, match="The root unit holds gradients of a backward"):
        calls[then]()
    model.reshard()
    assert all(torch.equal(value, before[name]) for name, value in gathered(model).items())
