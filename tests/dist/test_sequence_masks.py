"""What a query sees of a divided sequence, where models differ: beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.sequence import attention
from tests.dist.test_sequence_parallel import (
    OPT,
    SIZES,
    VOCAB,
    OwnAttention,
    compare_a_batch,
    gemma3,
    gpt2,
    llama,
    mpt,
    prepared,
    twice,
)

LENGTH, ROWS, WINDOW = 21, 3, 6
METHODS = ["ulysses", "gather_kv"]
HAS_OWN_MASKS = hasattr(transformers.LlamaModel, "_update_causal_mask")
"""whether each model of transformers makes its masks by itself"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.world_size(2),
]


def qwen2(**changes: Any) -> nn.Module:
    config = transformers.Qwen2Config(**(SIZES | {"sliding_window": WINDOW} | changes))
    return transformers.Qwen2ForCausalLM(config)


def qwen3(**changes: Any) -> nn.Module:
    config = transformers.Qwen3Config(**(SIZES | {"sliding_window": WINDOW} | changes))
    return transformers.Qwen3ForCausalLM(config)


def mistral(**changes: Any) -> nn.Module:
    config = transformers.MistralConfig(**(SIZES | {"sliding_window": WINDOW} | changes))
    return transformers.MistralForCausalLM(config)


def gemma2(**changes: Any) -> nn.Module:
    config = transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=4, **changes
    )
    return transformers.Gemma2ForCausalLM(config)


def qwen2_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def deepseek() -> nn.Module:
    """Its values have another size than its keys."""
    changes = {"head_dim": 4, "num_key_value_heads": 8, "pad_token_id": 0}
    config = transformers.DeepseekV3Config(
        **(SIZES | changes),
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV3ForCausalLM(config)


class Sinks(OwnAttention):
    """Each head has a weight of its own, by which its output shrinks."""

    def __init__(self, like: Any) -> None:
        super().__init__(like, None)
        self.sinks = nn.Parameter(torch.linspace(0.5, 1, SIZES["num_attention_heads"]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handle = self.o_proj.register_forward_pre_hook(
            lambda _, given: given[0] * self.sinks.repeat_interleave(SIZES["head_dim"])
        )
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


class OssModel(nn.Module):
    """`ossm` is no state-space model."""


def with_sinks() -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        layer.self_attn = Sinks(layer.self_attn)
    model.named = OssModel()
    return model


def a_batch(attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB - 1, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask
        if attention_mask.ndim == 2:
            batch["labels"][attention_mask == 0] = -100
    return batch


def padded_on_the_left() -> torch.Tensor:
    """Rows with 0, 5 and 10 tokens of padding, of which the last predicts a token that counts."""
    return (torch.arange(LENGTH) >= 5 * torch.arange(ROWS)[:, None]).long()


def prefix() -> torch.Tensor:
    """Tokens of a prefix see each other, as only a mask of four dimensions can say."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[:14, :14] = True
    seen[17, :4] = False
    return seen[None, None].expand(ROWS, 1, -1, -1)


def added(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def compare(make: Callable[[], Any], method: str, batch: dict[str, torch.Tensor]) -> None:
    oracle, model = (made.float() for made in twice(make))
    prepared(model, sequence_parallel={"degree": 2, "method": method})
    compare_a_batch(oracle, model, batch, lambda m, given: m(**given, use_cache=False).loss)


WINDOWS: dict[str, Callable[[], Any]] = {
    # Transformers' masks have this window although the attention is told of none.
    "Qwen2": qwen2,
    "Qwen2, eager": lambda: qwen2(attn_implementation="eager"),
    "Qwen3": qwen3,
    "Qwen2, in one layer": lambda: qwen2(use_sliding_window=True, max_window_layers=1),
    "Mistral": mistral,
    "Gemma 2": gemma2,
    "DeepSeek-V3": deepseek,
}
if not HAS_OWN_MASKS:
    # No attention of it is told of the window that the masks have.
    WINDOWS["Qwen2-MoE, in one layer"] = qwen2_moe


@pytest.mark.table("Qwen2, in one layer-ulysses", "Gemma 2-ulysses")
@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_are_those_of_the_models_masks(family: str, method: str):
    compare(WINDOWS[family], method, a_batch())


LEFT: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, eager": lambda: llama(attn_implementation="eager"),
    "Qwen3": qwen3,
    "Gemma 3": gemma3,
    "GPT-2": gpt2,
}


@pytest.mark.table("Qwen3-gather_kv")
@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", LEFT)
def test_padding_on_the_left(family: str, method: str):
    """The first token of a sequence is predicted by a query that sees no key."""
    compare(LEFT[family], method, a_batch(padded_on_the_left()))


@pytest.mark.matrix
@pytest.mark.parametrize(("counts", "masks"), [(False, 0), (True, 2)])
def test_padding_that_nobody_reads_needs_no_mask(counts: bool, masks: int):
    """After all tokens and outside of the loss: a mask would be half of positions x positions."""
    batch = a_batch(padded_on_the_left().flip(1))
    batch["labels"][-1, -1] = 3 if counts else -100
    with mock.patch.object(attention, "mask_of", wraps=attention.mask_of) as made:
        compare(llama, "ulysses", batch)
    assert made.call_count == masks


@pytest.mark.table("MPT")
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.parametrize("family", ["MPT", *OPT])
def test_padding_before_tokens_whose_positions_are_counted_by_the_mask(family: str):
    make: Callable[[], Any] = mpt if family == "MPT" else OPT[family]
    batch = a_batch(padded_on_the_left())
    model = make()
    prepared(model, sequence_parallel=2)
    with pytest.raises(PlanError, match="counts positions by the mask"):
        model.eval()(**batch)
    if family != "MPT":  # which corrects positions of the batch as well
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        compare(make, "ulysses", batch | {"position_ids": positions})


PREFIX: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Llama": (llama, added),
    "Llama, true and false": (llama, torch.clone),
    "Llama, eager": (lambda: llama(attn_implementation="eager"), added),
    "Mistral": (mistral, added),
    "Gemma 2": (gemma2, added),
}


@pytest.mark.table("Llama, eager-ulysses", "Gemma 2-ulysses")
@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", PREFIX)
def test_a_mask_in_which_queries_see_later_keys(family: str, method: str):
    make, form = PREFIX[family]
    compare(make, method, a_batch(form(prefix())))


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor], str]] = {
    "true and false are added": (
        lambda: llama(attn_implementation="eager"),
        prefix,
        "not known what this model makes of it",
    ),
    "whole numbers": (llama, lambda: prefix().long(), "has the dtype torch.int64"),
    "MPT": (mpt, lambda: added(prefix()), "not known what this model makes of it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_of_which_nothing_is_known(case: str):
    make, mask, match = REFUSED[case]
    model = make()
    prepared(model, sequence_parallel=2)
    with pytest.raises(PlanError, match=match):
        model(**a_batch(mask()), use_cache=False)


@pytest.mark.world_size(4)
def test_an_error_of_one_group_is_raised_in_all_of_them():
    model = llama()
    prepared(model, sequence_parallel=2)
    batch = a_batch(prefix().long() if dist.get_rank() > 1 else None)
    with pytest.raises(PlanError, match="has the dtype torch"):
        model(**batch, use_cache=False)


def test_an_order_of_its_own_beside_padding_on_the_left():
    if not HAS_OWN_MASKS:
        return  # transformers 5 has one function for the masks of all models
    model = gpt2(attn_implementation="eager")
    prepared(model, sequence_parallel=2)
    with pytest.raises(PlanError, match="padded on the left"):
        model(**a_batch(padded_on_the_left()), use_cache=False)


def test_weights_of_heads_stay_with_all_heads():
    """And a name with `ssm` in it is no state-space model: GptOssModel."""
    compare(with_sinks, "auto", a_batch())


def test_chunks_of_tokens_are_refused():
    config = transformers.Llama4TextConfig(
        **(SIZES | {"num_hidden_layers": 4}),
        intermediate_size_mlp=24,
        num_local_experts=2,
        attention_chunk_size=8,
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(PlanError, match="sees chunks of 8 tokens alone"):
        prepare_fully_shard(model, None, {"sequence_parallel": 2})
    dist.barrier()
