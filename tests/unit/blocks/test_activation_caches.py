"""Key-value caches of Hugging Face models are off where blocks are run again in backward."""

from __future__ import annotations

import logging

import pytest
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig

from composer_fsdp2.blocks.activation import ActivationCheckpointing, plan_activation
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.support.models import llama_config


class TextAndImage(PretrainedConfig):
    """A configuration around that of a language model."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.text_config = llama_config()


def _applied(model: nn.Module, **settings: bool) -> None:
    plan = plan_activation(model, **settings)
    ActivationCheckpointing().apply(ModuleTree.read(model), plan)


def test_the_cache_is_switched_off_and_logged(caplog: pytest.LogCaptureFixture):
    model = LlamaForCausalLM(llama_config())
    assert model.config.use_cache
    with caplog.at_level(logging.WARNING, logger="composer_fsdp2"):
        _applied(model, settings=True)
    assert not model.config.use_cache
    [record] = caplog.records
    assert "use_cache was true and is now false in LlamaConfig" in record.getMessage()


def test_a_nested_configuration_too(caplog: pytest.LogCaptureFixture):
    model = LlamaForCausalLM(llama_config())
    outer = nn.Module()
    outer.net = model
    outer.config = TextAndImage()
    with caplog.at_level(logging.WARNING, logger="composer_fsdp2"):
        _applied(outer, settings=True)
    assert not outer.config.text_config.use_cache
    assert not model.config.use_cache


def test_configurations_inside_each_other_end():
    model = LlamaForCausalLM(llama_config())
    model.config.inner = model.config
    _applied(model, settings=True)
    assert not model.config.use_cache


def test_offloading_alone_leaves_it(caplog: pytest.LogCaptureFixture):
    model = LlamaForCausalLM(llama_config())
    _applied(model, settings=False, offload=True)
    assert model.config.use_cache
    assert not caplog.records


class Closed(PretrainedConfig):
    """As LLM Foundry gives its rotary embedding: all but a few names raise a KeyError."""

    def __getattribute__(self, key: str) -> object:
        if key != "__class__":
            raise KeyError(key)
        return super().__getattribute__(key)


def test_a_configuration_that_cannot_be_read_is_passed_over():
    model = LlamaForCausalLM(llama_config())
    model.model.rotary_emb.config = Closed.__new__(Closed)
    _applied(model, settings=True)
    assert not model.config.use_cache


def test_a_learned_prefix_is_refused():
    """It lies in the cache of every forward, which cannot be switched off."""
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(LlamaForCausalLM(llama_config()), prefix)
    with pytest.raises(PlanError, match="adapter of PrefixTuningConfig, and activation_ch"):
        plan_activation(model)
    plan_activation(model, settings=False, offload=True)
