"""What goes wrong in Composer and no other test shows right; see support/upstream_points.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import installed
from tests.support.models import VOCAB, TinyComposer, TinyLM
from tests.support.parity import OPTIMIZERS, check_parity
from tests.support.training import (
    built,
    composers_own,
    largest_difference,
    samples_of,
    train_alone,
    trainer_for,
    weights,
)

SGD = OPTIMIZERS["sgd"]


class OwnParameter(TinyComposer):
    """Holds a parameter itself, outside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return super().forward(batch) * self.scale


class UnwrappedChild(TinyComposer):
    """Two children, one of which is not to be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(VOCAB, VOCAB, bias=False)
        self.after._fsdp_wrap = False

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.after(super().forward(batch))


class NoChildIsAUnit(TinyComposer):
    """Every child refuses, which Composer takes as plain data parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.net._fsdp_wrap = False


@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [OwnParameter, UnwrappedChild, NoChildIsAUnit])
def test_parameters_outside_every_child_that_is_a_unit(make: type[TinyComposer]):
    oracle, model = built(make), built(make)
    samples = samples_of(5, 8)
    train_alone(oracle, SGD(oracle.parameters()), samples, 8)
    with installed():
        trainer = trainer_for(model, SGD(model.parameters()), samples)
        trainer.fit()
    trainer.close()
    assert largest_difference(model, oracle) <= 1e-6
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@pytest.mark.matrix
@pytest.mark.smoke
@pytest.mark.world_size(2)
def test_the_root_of_a_plain_module_is_a_unit():
    model = check_parity(TinyLM, {})
    assert isinstance(model, FSDPModule)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@pytest.mark.world_size(4)
def test_the_mesh_of_composers_config_reaches_the_trainer():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model, SGD(model.parameters()), samples_of(1, 8), composers_own(device_mesh=mesh)
        )
    assert trainer.state.device_mesh is not None
    assert tuple(trainer.state.device_mesh.mesh.shape) == (2, 2)
    assert model.net.embed.weight.to_local().shape[0] in (8, 9)
    trainer.close()


@pytest.mark.world_size(2)
def test_a_model_on_meta_everywhere_trains_in_the_trainer():
    with torch.device("meta"):
        model = TinyComposer()
    with installed():
        trainer = trainer_for(model, SGD(model.parameters()), samples_of(5, 8))
        oracle = TinyComposer()
        oracle.load_state_dict(weights(model))
        trainer.fit()
    trainer.close()
    train_alone(oracle, SGD(oracle.parameters()), samples_of(5, 8), 8)
    assert largest_difference(model, oracle) <= 1e-6
