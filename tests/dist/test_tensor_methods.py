"""Methods of a model whose layers are divided: full parameters, and generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed as dist

from composer_fsdp2 import install, summon_full_params
from composer_fsdp2.errors import PlanError
from tests.dist.test_tensor_parallel import (
    DEGREE,
    FAMILIES,
    global_batches,
    loss_of,
    mean,
    of_this_group,
    prepared,
)
from tests.support.parity import OPTIMIZERS, assert_close, assert_same_values


@pytest.mark.table("Phi-3")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["GPT-2", "Phi-3", "Llama, tied"])
def test_full_parameters_are_those_of_one_process(family: str):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1])
    ids = global_batches(1)[0]
    loss_of(oracle, ids).backward()
    loss_of(model, of_this_group(ids)).backward()
    with summon_full_params(model, with_grads=True):
        for name, alone in oracle.named_parameters():
            whole = model.get_parameter(name)
            assert torch.equal(alone, whole), name
            assert alone.grad is not None
            assert whole.grad is not None
            assert_close(f"gradient of {name}", alone.grad, whole.grad)
            for param in (alone, whole):
                param.data.mul_(1 + 2**-4)
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in oracle.state_dict().items())
        with torch.no_grad():  # it computes with what was written
            expected, got = loss_of(oracle, ids), loss_of(model, of_this_group(ids))
        assert_close("loss", expected, mean(got))
    for one in pair:
        one.step()
    assert_same_values(oracle, model)
    with summon_full_params(model, writeback=False):
        for param in model.parameters():
            param.data.zero_()
    assert_same_values(oracle, model)


@pytest.mark.table("GPT-2")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["Qwen3", "GPT-2"])
def test_generates_what_one_process_does(family: str):
    install()
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    oracle = copy.deepcopy(model)
    prepared(model, None)
    group = dist.get_rank() // DEGREE
    prompts = global_batches(1)[0, group : group + 2, : 2 + group]
    told: dict[str, Any] = {"max_new_tokens": 4 - group, "pad_token_id": 0, "eos_token_id": 1}
    for told["do_sample"] in (False, True):
        torch.manual_seed(group)
        expected = oracle.generate(prompts, **told)
        torch.manual_seed(group if dist.get_rank() % DEGREE == 0 else 7)  # the first one's counts
        assert torch.equal(expected, model.generate(prompts, **told))
    with pytest.raises(PlanError, match="different batches"):
        model.generate(prompts + dist.get_rank() % DEGREE, **told)
