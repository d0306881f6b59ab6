"""What sequence parallelism cannot divide: one error on every rank that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from composer.models import HuggingFaceModel
from torch import distributed as dist
from torch import nn

from composer_fsdp2.errors import ConfigError, PlanError
from tests.dist.test_sequence_parallel import (
    LENGTH,
    SIZE,
    SIZES,
    VOCAB,
    batches,
    gpt2,
    llama,
    mpt,
    own,
    prepared,
    twice,
    whole_loss,
)
from tests.support.parity import assert_close

VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def given(**more: Any) -> dict[str, Any]:
    return {**batches("plain", 1)[0], "use_cache": False, **more}


# --- Models. ---


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config)


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=VOCAB, intermediate_size=16, **sizes)
    return transformers.BertForMaskedLM(config)


def routed() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def alibi() -> nn.Module:
    return mpt(alibi=True)


def bloom() -> nn.Module:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


def flexible() -> nn.Module:
    return llama(attn_implementation="flex_attention")


def unknown_heads() -> nn.Module:
    model: Any = own()
    for layer in model.model.layers:
        layer.self_attn.fsdp2_attention_heads = 8
    return model


def convolved() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].before = nn.Conv1d(16, 16, 2)
    return model


class TokenShift(nn.Module):
    """Named as RWKV's."""


class RwkvBlock(TokenShift):
    pass


def shifting() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].mix = RwkvBlock()
    return model


class LayerSSM(TokenShift):
    pass


def with_state_space() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].mix = LayerSSM()
    return model


def with_sinks() -> nn.Module:
    model: Any = llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.zeros(8))
    return model


class OtherAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)


def other_attention() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].memory = OtherAttention()
    return model


class WithoutPositions(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return super().forward(input_ids, labels=labels)


class OwnLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids, position_ids=position_ids)[0])
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LossOfLogits(HuggingFaceModel):
    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())


def recomputed() -> nn.Module:
    model: Any = llama()
    older = "gradient_checkpointing_enable"  # deprecated in transformers 5
    getattr(model, "activation_checkpointing_enable", getattr(model, older))()
    return model


def of_llama(kind: Any) -> Callable[[], nn.Module]:
    return lambda: kind(transformers.LlamaConfig(**SIZES, pad_token_id=0))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no model of transformers": (TinyLM, 2, "none of transformers"),
    "state space": (mamba, 2, "no module calls the attention interface"),
    "sees later tokens": (bert, 2, "no module calls|sees later tokens"),
    "balance of experts": (routed, 2, "output_router_logits"),
    "alibi": (alibi, 2, "ALiBi"),
    "own attention": (bloom, 2, "no module calls the attention interface"),
    "flexible attention": (flexible, 2, "attn_implementation: sdpa"),
    "heads of the user": (unknown_heads, 2, "fsdp2_attention_heads of 'model.layers.0.self_attn'"),
    "convolution": (convolved, 2, r"'model.layers.1.before' \(Conv1d\) mixes positions"),
    "token shift": (shifting, 2, r"'model.layers.1.mix' \(RwkvBlock\) mixes positions"),
    "state space by name": (with_state_space, 2, r"\(LayerSSM\) mixes positions"),
    "weights of heads": (
        with_sinks,
        {"degree": 2, "method": "ulysses"},
        r"a weight of each head \('sinks'\)",
    ),
    "two kinds of attention": (other_attention, 2, "'model.layers.1.memory' .* of another kind"),
    "recomputed by transformers": (
        recomputed,
        2,
        r"\(gradient_checkpointing\).*write activation_checkpointing: true",
    ),
    "no positions": (of_llama(WithoutPositions), 2, "takes no position_ids"),
    "loss inside": (of_llama(OwnLoss), 2, "OwnLoss computes its loss by itself"),
    "loss outside": (
        lambda: LossOfLogits(llama(), shift_labels=True),  # type: ignore[arg-type]
        2,
        "LossOfLogits computes its loss from logits by itself",
    ),
    "classes": (
        of_llama(transformers.LlamaForSequenceClassification),
        2,
        "is not that of a causal language model",
    ),
    "MPT's capped scores": (
        lambda: mpt(attn_logit_softcapping=1.0),
        2,
        "attn_logit_softcapping",
    ),
    "ranks": (llama, 3, "does not divide the world size 2"),
    "heads": (
        lambda: llama(hidden_size=20, num_attention_heads=5, num_key_value_heads=1),
        {"degree": 2, "method": "ulysses"},
        "5 heads, which 2 ranks cannot share",
    ),
}


@pytest.mark.table(
    "no model of transformers",
    "sees later tokens",
    "heads of the user",
    "weights of heads",
    "no positions",
    "loss outside",
    "heads",
)
@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")  # in LLM Foundry
@pytest.mark.filterwarnings("ignore:The tokenizer was not provided")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_before_the_model_is_changed(case: str):
    make, setting, message = REFUSED[case]
    model = make()
    before = [type(param) for param in model.parameters()]
    with pytest.raises((ConfigError, PlanError), match=message):
        prepared(model, sequence_parallel=setting)
    assert [type(param) for param in model.parameters()] == before


class Shifted(nn.Module):
    """An MLP that also sees the token before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


@pytest.mark.table(
    "0-attention 'model.layers.1.self_attn'-ulysses",
    "1-input of 'lm_head'-gather_kv",
    "1-input of 'lm_head'-ulysses",
)
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
@pytest.mark.parametrize(
    ("layer", "where"), [(0, "attention 'model.layers.1.self_attn'"), (1, "input of 'lm_head'")]
)
def test_layers_that_mix_tokens_without_a_word(layer: int, where: str, method: str):
    model: Any = llama()
    model.model.layers[layer].mlp = Shifted(model.model.layers[layer].mlp)
    prepared(model, sequence_parallel={"degree": 2, "method": method})
    with pytest.raises(PlanError, match=f"{where} of the first .*% off"):
        model(**given())


# --- Batches. ---


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a mask for each head": (
        given(attention_mask=torch.ones(SIZE, 8, LENGTH, LENGTH, dtype=torch.bool)),
        r"mask has the shape \(4, 8, 22, 22\).*Give one of that shape",
    ),
    "a mask of other tokens": (
        given(attention_mask=torch.ones(SIZE, 1, LENGTH, LENGTH + 1, dtype=torch.bool)),
        r"mask has the shape \(4, 1, 22, 23\).*Give one of that shape",
    ),
    "something for each token": (
        given(token_weights=torch.ones(SIZE, LENGTH)),
        r"given 'token_weights' of shape \(4, 22\).*Leave it out",
    ),
    "no tokens": ({"labels": torch.ones(SIZE, LENGTH, dtype=torch.long)}, "without input_ids"),
}


@pytest.mark.table(
    "a mask of other tokens-train", "something for each token-eval", "no tokens-eval"
)
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", BAD)
def test_batches_that_cannot_be_divided(case: str, mode: str):
    batch, message = BAD[case]
    model = prepared(llama(), sequence_parallel=2)
    model.train(mode == "train")
    with pytest.raises(PlanError, match=message):
        model(**batch)


@VIEWS
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("make", "most"), [(gpt2, LENGTH), (mpt, 64)])
def test_sequences_that_are_longer_than_the_model_knows(make: Callable[[], nn.Module], most: int):
    """A rank that has the first part alone would wait for the one that has the end."""
    model = prepared(make(), sequence_parallel=2)
    (batch,) = batches("plain", 1, length=most + 1)
    with pytest.raises(PlanError, match=rf"position {most}, and '.*wpe' has {most}"):
        model(**batch, use_cache=False)
    (batch,) = batches("packed", 1, length=most + 1)
    if make is gpt2:  # documents that are short enough
        model(**batch, use_cache=False).loss.backward()


@pytest.mark.table("ulysses-5")
@VIEWS
@pytest.mark.world_size(4)
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_fewer_tokens_than_parts(method: str, length: int):
    """Some ranks have padding alone."""
    oracle, model = twice(llama)
    prepared(model, sequence_parallel={"degree": 4, "method": method})
    (batch,) = batches("plain", 1, length=length)
    assert_close("loss", whole_loss(oracle, batch), model(**batch, use_cache=False).loss)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
def test_different_batches_in_a_group_are_an_error_on_every_rank():
    model = prepared(llama(), sequence_parallel=2)
    (batch,) = batches("plain", 1)
    if dist.get_rank() == 3:
        batch["input_ids"][0, 0] = 1
    with pytest.raises(
        PlanError, match=r"Ranks 2 and 3 .* sequence parallelism .*different batches"
    ):
        model(**batch, use_cache=False)
