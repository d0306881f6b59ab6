"""What is decided about initial weights without any rank; the rest is in tests/dist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard.initial_weights import MetaDeviceReport, check_meta_device_reports
from composer_fsdp2.shard.layout import replace_parameter
from tests.support.models import TinyLM


def origins(model: nn.Module) -> MetaDeviceReport:
    return MetaDeviceReport.read(ModuleTree.read(model))


def test_where_a_model_is():
    with torch.device("meta"):
        away = TinyLM("two modules")
    assert origins(TinyLM()).on_meta == "none"
    assert origins(away).on_meta == "all"
    away.norm = nn.LayerNorm(10)
    away.head = nn.Linear(1, 1, bias=False)
    assert origins(away).on_meta == "some"


def test_buffers_and_tensor_attributes_count():
    model = nn.Sequential(nn.Linear(1, 1), nn.Module())
    model[1].register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    partly = origins(model)
    assert partly.on_meta == "some"
    model[1].copy = torch.zeros(3)
    assert partly.attributes == ""
    assert origins(model).attributes == "1.copy torch.Size([3])"
    assert origins(model).digest == partly.digest


def test_rank_0_must_have_what_any_rank_has():
    none, everything = MetaDeviceReport("none", "", ""), MetaDeviceReport("all", "all names", "")
    some = MetaDeviceReport("some", "a name", "")
    check_meta_device_reports([none, everything, none])
    check_meta_device_reports([everything, everything])
    check_meta_device_reports([some, some])
    for first, other in ((everything, none), (everything, some), (some, none)):
        with pytest.raises(PlanError) as caught:
            check_meta_device_reports([first, first, other])
        assert f"({first.on_meta} of it) and rank 2" in str(caught.value)
        assert "init_device: mixed" in str(caught.value)


def test_attributes_must_agree_only_when_a_rank_is_on_meta():
    here, there = MetaDeviceReport("none", "", "a"), MetaDeviceReport("none", "", "b")
    check_meta_device_reports([here, there])
    with pytest.raises(PlanError, match="Modules on rank 1"):
        check_meta_device_reports([here, MetaDeviceReport("all", "all names", "b")])


def test_a_replaced_parameter_keeps_what_hangs_on_it():
    model = TinyLM("two modules")
    old = model.embed.weight
    old.requires_grad_(False)
    old._is_special = True  # pyright: ignore[reportAttributeAccessIssue]
    new = replace_parameter([(model.embed, "weight"), (model.head, "weight")], old, old.data + 1)
    assert model.embed.weight is model.head.weight is new
    assert new is not old
    assert not new.requires_grad
    assert new._is_special  # pyright: ignore[reportAttributeAccessIssue]


def test_a_replaced_parameter_keeps_its_hooks():
    layer = nn.Linear(2, 2, bias=False)
    called: list[str] = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: called.append("hook"))
    replace_parameter([(layer, "weight")], layer.weight, torch.ones(2, 2))
    layer(torch.ones(1, 2)).sum().backward()
    assert called == ["hook"]
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
