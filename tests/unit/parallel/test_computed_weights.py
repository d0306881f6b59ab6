"""Layers whose weight is computed from other parameters are not divided, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from composer_fsdp2 import PlanError
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.parallel.tensor.layers import LayerPlan, plan_layers
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.dist.test_tensor_parallel import llama

HOW: dict[str, Callable[[nn.Module], Any]] = {
    "parametrized by weight_norm": parametrizations.weight_norm,
    "parametrized by spectral_norm": parametrizations.spectral_norm,
    "parametrized to be orthogonal": parametrizations.orthogonal,
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
}
OLD = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")


def planned(model: nn.Module, **layer_plan: str) -> LayerPlan:
    settings = parse_config({"tensor_parallel": {"degree": 2, "layer_plan": layer_plan}})
    assert settings.tensor_parallel is not None
    return plan_layers(ModuleTree.read(model), settings.tensor_parallel, 2)


@OLD
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_layer_that_would_be_divided(name: str, how: str):
    model, name = llama(), f"model.layers.1.{name}"
    HOW[how](model.get_submodule(name))
    with pytest.raises(PlanError, match=rf"The weight of '{name}' is computed from other .* whole"):
        planned(model)
    block = f"{name.rpartition('.')[0]}.*"
    assert name not in planned(model, **{block: "whole"}).cuts


@OLD
@pytest.mark.parametrize("how", HOW)
def test_a_head(how: str):
    model = llama()
    HOW[how](model.get_submodule("lm_head"))
    with pytest.raises(PlanError, match=r"The weight of 'lm_head' .* \({'lm_head': whole}\)"):
        planned(model)
    assert "lm_head" not in planned(model, lm_head="whole").cuts
