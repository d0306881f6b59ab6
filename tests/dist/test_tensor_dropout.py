"""Dropout of a model that tensor parallelism divides draws for the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.parallel.tensor.divide import draws
from tests.dist.test_tensor_parallel import LENGTH, VOCAB, global_batches, gpt2, loss_of
from tests.support.parity import full

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
RATE = 0.4


def dropping(**rates: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        attn_implementation="eager",
        **({"attn_pdrop": RATE, "resid_pdrop": RATE, "embd_pdrop": RATE} | rates),
    )
    return transformers.GPT2LMHeadModel(config)


def prepared(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # as Composer does
    settings = {"tensor_parallel": 2, **settings}
    prepare_fully_shard(model, None, settings, precision="fp32")
    return model


def everyone(value: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


@pytest.mark.world_size(4)
def test_heads_of_a_group_drop_other_weights_and_the_rest_the_same():
    torch.manual_seed(0)
    model = prepared(dropping())
    kept: dict[str, list[torch.Tensor]] = {}
    causal = torch.ones(LENGTH, LENGTH).tril().bool()

    def keep(name: str, output: torch.Tensor) -> None:
        passed = (output != 0).float()
        passed = passed[..., causal] if "attn_dropout" in name else passed
        kept.setdefault(name, []).append(passed.flatten())

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "attn_dropout" not in name:
            module.register_forward_hook(lambda _m, _a, out, name=name: keep(name, out))
    ids = global_batches(1)[0]
    for _ in range(3):
        for number, weights in enumerate(model(ids, output_attentions=True).attentions):
            keep(f"{number}.attn_dropout", weights)
    assert len(kept) == 7
    for name, masks in kept.items():
        inside = "attn_dropout" in name
        first, second = everyone(torch.cat(masks))[:2]
        differing = (first != second).float().mean().item()
        assert abs(first.mean().item() - (1 - RATE)) < 0.05, name
        # Two that know nothing of each other differ where one keeps and the other drops.
        expected = 2 * RATE * (1 - RATE) if inside else 0.0
        assert abs(differing - expected) < (0.05 if inside else 1e-9), name
        assert not torch.equal(masks[0], masks[1]), name
    logits = everyone(model(ids).logits.detach())
    assert torch.equal(logits[0], logits[1])


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_drops_the_same(mode: str):
    ids = global_batches(2)[1]
    gradients: list[list[torch.Tensor]] = []
    for settings in ({}, {"activation_checkpointing": {"mode": mode}}):
        torch.manual_seed(0)
        model = prepared(dropping(), **settings)
        for _ in range(2):  # another step after one that was recomputed
            model.zero_grad()
            loss_of(model, ids).backward()
        names = (
            name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
        )
        gradients.append({n: full(p.grad) for n, p in zip(names, model.parameters(), strict=True)})
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


@pytest.mark.world_size(4)
def test_an_error_between_divided_layers_leaves_one_stream():
    torch.manual_seed(0)
    model = prepared(dropping())
    ids = global_batches(1)[0]
    model(ids)
    inner = model.get_submodule("transformer.h.0.attn.c_proj")

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = inner.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(ids)
    handle.remove()
    logits = everyone(model(ids).logits.detach())
    assert torch.equal(logits[0], logits[1])


@pytest.mark.world_size(4)
def test_models_without_dropout_are_left_alone():
    assert draws(dropping(attn_pdrop=0.0, embd_pdrop=0.0))
    assert not draws(gpt2())
    model = prepared(gpt2())
    state = torch.get_rng_state()
    model(global_batches(1)[0])
    after = torch.get_rng_state()
    model(global_batches(1)[0])
    assert torch.equal(after, torch.get_rng_state())
    assert state.shape == after.shape
