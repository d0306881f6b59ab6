"""Tensor parallelism where FSDP2 cannot share the rows of a divided layer evenly."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import PlanError, clip_grad_norm_, full_tensor, prepare_fully_shard
from composer_fsdp2.parallel.form import FusedRowsForm, form_of
from tests.dist.test_tensor_parallel import SIZES, grouped, llama, loss_of
from tests.support.parity import STATE_TOLERANCE, assert_close, assert_same_values, full

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
VOCAB, STEPS, SIZE, LENGTH = 26, 4, 12, 7
ODD = {"vocab_size": VOCAB, "hidden_size": 12, "intermediate_size": 26, "head_dim": 2}


def odd_llama(**changes: Any) -> Any:
    biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    return llama(**(ODD | biases | changes))


def odd_phi3() -> nn.Module:
    sizes = SIZES | ODD | {"hidden_size": 16, "head_dim": 4}
    config = transformers.Phi3Config(**sizes, pad_token_id=0, tie_word_embeddings=False)
    return transformers.Phi3ForCausalLM(config)


def odd_gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": 18, "n_layer": 2, "n_head": 2, "n_inner": 26}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**(sizes | quiet | changes), n_positions=LENGTH)
    )


ODD_FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama, tied": odd_llama,
    "Phi-3": odd_phi3,
    "GPT-2": odd_gpt2,
}


def odd_batches(steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, VOCAB, (steps, SIZE, LENGTH), generator=generator)


@pytest.mark.table("2-Phi-3")
@pytest.mark.parametrize("family", ODD_FAMILIES)
@pytest.mark.parametrize(
    "shards", [pytest.param(n, marks=pytest.mark.world_size(2 * n)) for n in (2, 3)]
)
def test_uneven_rows_train_like_one_process(family: str, shards: int):
    torch.manual_seed(0)
    oracle = ODD_FAMILIES[family]()
    model = copy.deepcopy(oracle)
    pair = [grouped(m) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], {"tensor_parallel": 2}, precision="fp32")
    padded = [
        p
        for p in model.parameters()
        if isinstance(form := form_of(p), FusedRowsForm) and form.padding
    ]
    assert padded
    for ids in odd_batches():
        expected, own = loss_of(oracle, ids), ids.chunk(shards)[dist.get_rank() // 2]
        got = loss_of(model, own)
        expected.backward()
        got.backward()
        norms = [torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)]
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        assert_close("norm", *norms)
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)
    state = pair[1].state_dict()["state"]
    for number, values in pair[0].state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            found = full(state[number][key])
            assert found.shape == values[key].shape
            assert (found - values[key]).abs().max() <= STATE_TOLERANCE
    for param in padded:
        form = form_of(param)
        assert isinstance(form, FusedRowsForm)
        whole = full(param.detach())
        assert torch.equal(form.to_ranks(form.to_model(whole)), whole)  # padding stays zero


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_state_dicts_of_uneven_rows_are_loaded_again():
    torch.manual_seed(0)
    model = odd_llama()
    optimizer = grouped(model)
    prepare_fully_shard(model, optimizer, {"tensor_parallel": 2}, precision="fp32")
    loss_of(model, odd_batches(1)[0][:6]).backward()
    optimizer.step()
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = {name: full(value).clone() for name, value in kept[0].items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    after = {name: full(value) for name, value in model.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    for number, values in kept[1]["state"].items():
        for key, value in optimizer.state_dict()["state"][number].items():
            assert torch.equal(full(values[key]), full(value))


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.world_size(4)
@pytest.mark.parametrize("vocabulary", [26, 27])
def test_a_vocabulary_that_the_degree_does_not_divide_stays_whole(vocabulary: int):
    heard, log = Heard(), logging.getLogger("composer_fsdp2.parallel.tensor")
    log.addHandler(heard)
    model = odd_gpt2(vocab_size=vocabulary)
    prepare_fully_shard(model, None, {"tensor_parallel": 2}, precision="fp32")
    log.removeHandler(heard)
    is_whole = len(model.lm_head.weight.placements) == 1
    assert is_whole == (vocabulary % 2 == 1)
    told = is_whole and dist.get_rank() == 0
    assert [("lm_head" in line, "the degree 2" in line) for line in heard.lines] == [
        (True, True)
    ] * told


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_another_vocabulary_in_one_process_and_what_is_no_word():
    for vocabulary in (34, 26, 28):  # torch remembers shapes of the first one
        torch.manual_seed(0)
        oracle = odd_llama(vocab_size=vocabulary)
        model = copy.deepcopy(oracle)
        prepare_fully_shard(model, None, {"tensor_parallel": 2}, precision="fp32")
        ids = odd_batches(1)[0]
        loss_of(oracle, ids).backward()
        loss_of(model, ids).backward()
        weight = model.lm_head.weight
        assert_close("gradient", oracle.lm_head.weight.grad, form_of(weight).full(weight.grad))
    with pytest.raises(IndexError, match="index out of range"):
        model(torch.full((1, 3), vocabulary))


@pytest.mark.world_size(4)
def test_full_tensor_has_the_rows_of_the_model():
    """The DTensors' own has them in another order, with rows of padding."""
    torch.manual_seed(0)
    oracle = odd_phi3()
    model = copy.deepcopy(oracle)
    prepare_fully_shard(model, None, {"mixed_precision": "FULL", "tensor_parallel": 2})
    for one in (oracle, model):
        one(odd_batches(1)[0]).logits.square().mean().backward()
    for name, alone in oracle.named_parameters():
        value = full_tensor(model, name)
        assert value is not None
        assert torch.equal(value, alone), name
        assert_close(name, alone.grad, full_tensor(model, name, gradient=True))
    with pytest.raises(PlanError, match=r"'lm_head.weigth' is no parameter.*'lm_head.weight'"):
        full_tensor(model, "lm_head.weigth")
