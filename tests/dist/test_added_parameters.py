"""Parameters that a model or its optimizer gets after it was prepared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, full_tensor, prepare_fully_shard


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def head_in_model(model: nn.Sequential) -> list[nn.Parameter]:
    model[1] = nn.Linear(4, 4)
    return list(model[1].parameters())


def scale_beside(_model: nn.Sequential) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.full((2, 4), 1.0 + dist.get_rank())
    loss = model(inputs).square().mean()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    plain = [param for param in params if not isinstance(param, DTensor)]
    (loss + sum(param.sum() for param in plain)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("add", [head_in_model, scale_beside])
def test_added_to_the_optimizer(add: Callable[[nn.Sequential], list[nn.Parameter]]):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {})
    step(model, optimizer)
    optimizer.add_param_group({"params": add(model)})
    with pytest.raises(
        PlanError, match=r"after the model was prepared.*before prepare_fully_shard"
    ):
        step(model, optimizer)


@pytest.mark.world_size(2)
def test_an_optimizer_that_is_built_later():
    """May step what is no part of the model; what is, was not sharded, and is refused."""
    model = layers()
    prepare_fully_shard(model, None, {})
    beside = nn.Parameter(torch.ones(3))
    step(model, torch.optim.SGD([*model.parameters(), beside], lr=0.1))
    model[1] = nn.Linear(4, 4)
    with pytest.raises(PlanError, match=r"'1.weight' was given to SGD after"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.world_size(2)
def test_an_optimizer_that_is_built_after_an_evaluation_steps_shards():
    model = layers()
    prepare_fully_shard(model, None, {})
    with torch.no_grad():
        model(torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_tensor(model, "0.weight").clone()
    step(model, optimizer)
    assert not torch.equal(full_tensor(model, "0.weight"), before)


@pytest.mark.world_size(2)
def test_an_optimizer_of_gathered_parameters_is_refused():
    model = layers()
    prepare_fully_shard(model, None, {})
    loss = model(torch.ones(2, 4)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    with pytest.raises(PlanError, match="SGD was built while the root was gathered"):
        optimizer.step()


@pytest.mark.world_size(2)
def test_frozen_ones_and_shards_are_stepped():
    model = layers()
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {})
    step(model, optimizer)
    model[1].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model[1].weight]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3), requires_grad=False)]})
    step(model, optimizer)


@pytest.mark.world_size(1)
def test_one_rank_has_nothing_to_average():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {})
    (added,) = scale_beside(model)
    optimizer.add_param_group({"params": [added]})
    before = added.detach().clone()
    step(model, optimizer)
    assert not torch.equal(added, before)
