"""Sequence parallelism with FSDP2, against one process that sees whole sequences."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from composer_fsdp2 import prepare_fully_shard, sequence_attention
from composer_fsdp2.errors import PlanError
from composer_fsdp2.patches import install_for_foundry
from tests.dist.test_tensor_parallel import usual_gradient
from tests.support.experts import STACKED
from tests.support.parity import OPTIMIZERS, TOLERANCE, assert_close, assert_same_values, full

VOCAB, STEPS, SIZE, LENGTH = 32, 10, 4, 22
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=4)
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=6)
    return transformers.Phi3ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def gpt2(**changes: Any) -> nn.Module:
    config = transformers.GPT2Config(
        **changes,
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    """Its masks keep no documents apart, and positions are counted by the mask: transformers 5."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 24}
    config = transformers.OPTConfig(
        **sizes,
        word_embed_proj_dim=16,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0,
    )
    return transformers.OPTForCausalLM(config)


OPT: dict[str, Callable[[], Any]] = (
    {"OPT": opt} if hasattr(transformers.models.opt.modeling_opt, "ALL_ATTENTION_FUNCTIONS") else {}
)
"""no older OPT calls the attention interface"""


def mpt(**attention: Any) -> nn.Module:
    pytest.importorskip("llmfoundry")
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    install_for_foundry()

    config = MPTConfig(
        d_model=32,
        n_heads=8,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=64,
        vocab_size=VOCAB,
        attn_config={"attn_impl": "torch", **attention},
        learned_pos_emb="rope" not in attention,
    )
    return MPTForCausalLM(config)


class OwnAttention(nn.Module):
    """Llama's weights in a module that computes by itself."""

    fsdp2_attention_heads = (SIZES["num_attention_heads"], SIZES["num_key_value_heads"])

    def __init__(self, llama: Any, window: int | None) -> None:
        super().__init__()
        self.window = window
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(llama, name))

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> Any:
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, SIZES["head_dim"])).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out = sequence_attention(self, query, key, value, window=self.window)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def own(window: int | None = None) -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn, window)
    return model


def adapted() -> nn.Module:
    told = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model: Any = peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", **told))
    return model


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, one key head": lambda: llama(num_key_value_heads=1),
    "Llama, all key heads": lambda: llama(num_key_value_heads=8),
    "Llama, eager": lambda: llama(attn_implementation="eager"),
    "Llama, LoRA": adapted,
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "Gemma 3": gemma3,
    "Phi-3": phi3,
    "Mixtral": mixtral,
    "GPT-2": gpt2,
    "MPT": mpt,
    "MPT, grouped": lambda: mpt(
        attn_type="grouped_query_attention",
        kv_n_heads=2,
        rope=True,
        rope_impl="hf",
        sliding_window_size=5,
    ),
}


WAYS = [
    ("ulysses", "plain", 4),
    ("ulysses", "packed", 2),
    ("gather_kv", "padded", 2),
    ("gather_kv", "packed", 4),
]
"""method, what batches hold, and degree"""


def twice(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Two models of equal weights, in double where rounding grows with every step."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make()
        pair.append(model.double() if "Gemma" in type(model).__name__ else model)
    return pair[0], pair[1]


def batches(
    kind: str,
    steps: int = STEPS,
    *,
    length: int = LENGTH,
    rows: int = SIZE,
    cut: tuple[int, int] = (4, 8),
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        ids = torch.randint(2, VOCAB - 1, (rows, length), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if kind == "padded":
            batch["attention_mask"] = torch.ones_like(ids)
            for row in range(rows):
                batch["attention_mask"][row, length - 3 * row - 1 :] = 0
            batch["labels"][batch["attention_mask"] == 0] = -100
        if kind == "packed":
            cuts = torch.randint(*cut, (rows, 1), generator=generator)
            at = torch.arange(length)[None]
            batch["position_ids"] = torch.where(at < cuts, at, at - cuts)
            batch["labels"] = torch.where(at == cuts, -100, ids)
        found.append(batch)
    return found


def whole_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of one process, of each document by itself where rows are packed."""
    total, count = torch.zeros(()), 0
    for ids, labels, mask in documents(batch):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = labels[:, 1:].flatten()
        total = total + nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets, reduction="sum"
        )
        count += int((targets != -100).sum())
    return total / count


def documents(batch: dict[str, torch.Tensor]) -> Iterator[tuple[Any, Any, Any]]:
    if (positions := batch.get("position_ids")) is None:
        yield batch["input_ids"], batch["labels"], batch.get("attention_mask")
        return
    for row, ids, labels in zip(positions, batch["input_ids"], batch["labels"], strict=True):
        begins = [*torch.nonzero(row == 0).flatten().tolist(), len(ids)]
        for begin, end in itertools.pairwise(begins):
            yield ids[None, begin:end], labels[None, begin:end], None


def part(batch: dict[str, torch.Tensor], degree: int) -> dict[str, torch.Tensor]:
    groups = dist.get_world_size() // degree
    return {k: v.chunk(groups)[dist.get_rank() // degree] for k, v in batch.items()}


def mean(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


@pytest.mark.table("Llama, eager-ulysses-packed-2")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")  # in LLM Foundry
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("family", "method", "kind", "degree"),
    [
        (family, *way)
        for number, family in enumerate(FAMILIES)
        for way in (WAYS[number % 2], WAYS[2 + number // 2 % 2])  # either method
    ],
)
def test_trains_like_one_process(family: str, method: str, kind: str, degree: int):
    train_as_one_process(FAMILIES[family], kind, degree, method)


def train_as_one_process(
    make: Callable[[], Any],
    kind: str,
    degree: int,
    method: str,
    *,
    steps: int = STEPS,
    optimizer: str = "sgd",
    alone: Callable[[nn.Module], object] = id,
    **settings: Any,
) -> None:
    """`alone` changes the model of one process."""
    oracle, model = twice(make)
    alone(oracle)
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    documents = "apart" if kind == "packed" else "as_model"
    divided = {"degree": degree, "method": method, "documents": documents}
    settings |= {"sequence_parallel": divided}
    prepare_fully_shard(model, pair[1], {"mixed_precision": "FULL", **settings})
    size = degree * settings.get("tensor_parallel", 1)  # ranks that read the same batch
    groups = dist.get_world_size() // size
    for step, batch in enumerate(batches(kind, steps)):
        # Every group's sequences weigh the same, as under FSDP2 alone.
        parts = [{k: v.chunk(groups)[n] for k, v in batch.items()} for n in range(groups)]
        expected = torch.stack([whole_loss(oracle, p) for p in parts]).mean()
        got = model(**part(batch, size), use_cache=False).loss
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach().to(got.dtype), mean(got))
        if step == 0:
            for (name, alone), sharded in zip(
                oracle.named_parameters(), model.parameters(), strict=True
            ):
                if alone.grad is not None:
                    assert_close(f"gradient of {name}", alone.grad, usual_gradient(sharded))
        for one in pair:
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)


@pytest.mark.world_size(4)
def test_key_heads_are_repeated_where_an_attention_is_a_unit():
    """FSDP2's classes cannot be copied: to make one is to make the attention anew."""
    policy = {"names": ["model.layers.*", "*.self_attn"]}
    make = FAMILIES["Llama, eager"]
    train_as_one_process(make, "plain", 4, "ulysses", steps=2, wrap_policy=policy)


TENSOR: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Llama", "ulysses", "packed", {}),
    ("Qwen3", "gather_kv", "padded", {"chunked_loss": {"chunks": 2}}),
    ("MPT, grouped", "gather_kv", "packed", {"activation_checkpointing": True}),
]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")  # in LLM Foundry
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("family", "method", "kind", "settings"), TENSOR)
def test_with_tensor_parallel(family: str, method: str, kind: str, settings: dict[str, Any]):
    train_as_one_process(FAMILIES[family], kind, 2, method, steps=4, tensor_parallel=2, **settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(8)
def test_three_axes():
    """Two groups of four ranks: each of two ranks that divide a layer has half of a sequence."""
    train_as_one_process(llama, "padded", 2, "ulysses", steps=2, tensor_parallel=2)


def compare_a_batch(
    oracle: nn.Module,
    model: nn.Module,
    batch: dict[str, Any],
    whole: Callable[[nn.Module, dict[str, Any]], torch.Tensor] = whole_loss,
) -> None:
    """Loss and gradients, where all ranks are one group."""
    expected = whole(oracle, batch)
    got = model(**batch, use_cache=False).loss
    expected.backward()
    got.backward()
    assert_close("loss", expected.detach(), got.detach())
    for (name, alone), sharded in zip(oracle.named_parameters(), model.parameters(), strict=True):
        if alone.grad is not None:
            assert_close(f"gradient of {name}", alone.grad, full(sharded.grad))


@pytest.mark.table("ulysses-3", "gather_kv-None")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_attention_of_the_user(method: str, window: int | None):
    """Beside the same modules whole, which are transformers' own where there is no window."""
    oracle, model = twice(lambda: own(window))
    prepared(model, sequence_parallel={"degree": 2, "method": method})
    (batch,) = batches("packed", 1)
    if window is None:
        whole = whole_loss(oracle, batch)
        assert_close("loss", whole_loss(twice(llama)[0], batch), whole)
    compare_a_batch(oracle, model, batch)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
def test_other_heads_than_the_module_names_are_an_error():
    model: Any = own()
    for layer in model.model.layers:
        layer.self_attn.fsdp2_attention_heads = (4, 4)
    prepared(model, sequence_parallel=2)
    (batch,) = batches("plain", 1)
    with pytest.raises(PlanError, match=r"given 8 heads .* \(8, 2\)"):
        model(**batch, use_cache=False)


def test_attention_of_the_user_in_one_process():
    """Queries that are the last of the sequence see what they see among all of them."""
    query, key, value = (torch.randn(2, heads, 9, 4) for heads in (4, 2, 2))
    for window in (None, 3):
        whole = sequence_attention(nn.Module(), query, key, value, window=window)
        last = sequence_attention(nn.Module(), query[:, :, 6:], key, value, window=window)
        assert_close("attention", whole[:, :, 6:], last)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    masked = sequence_attention(nn.Module(), query, key, value, mask=seen)
    assert_close("attention", sequence_attention(nn.Module(), query, key, value), masked)


def prepared(model: nn.Module, **settings: Any) -> nn.Module:
    prepare_fully_shard(model, None, {"mixed_precision": "FULL", **settings})
    return model


WITH: dict[str, dict[str, Any]] = {
    "recompute": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "chunks and tiles": {"chunked_loss": {"chunks": 2}, "tiled_mlp": {"shards": 2}},
    "copies": {"data_parallel_replicate_degree": 2},
    "kept": {"reshard_after_forward": False, "forward_prefetch": 2, "order_check": "always"},
    "freed": {"reshard_after_forward": True, "unused_parameters": True},
}


@pytest.mark.table("gather_kv-kept")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("settings", WITH)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_two_forwards_before_a_backward(method: str, settings: str):
    """As of preferences: a block that runs again sees the sequence of its own forward."""
    oracle, model = twice(llama)
    divided = {"degree": 4, "method": method, "documents": "apart"}
    prepared(model, sequence_parallel=divided, **WITH[settings])
    (first,), (second,) = batches("padded", 1), batches("packed", 1)
    (whole_loss(oracle, first) + 2 * whole_loss(oracle, second)).backward()
    loss = model(**first, use_cache=False).loss
    (loss + 2 * model(**second, use_cache=False).loss).backward()
    for (name, alone), sharded in zip(oracle.named_parameters(), model.parameters(), strict=True):
        assert_close(f"gradient of {name}", alone.grad, full(sharded.grad))


@pytest.mark.table("Llama, LoRA", "MPT")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["Llama", "Llama, LoRA", "MPT"])
def test_evaluation_and_generation_get_whole_sequences(family: str):
    oracle, model = twice(FAMILIES[family])
    prepared(model, sequence_parallel=2)
    (batch,) = batches("padded", 1)
    own = part(batch, 2)
    for one in (oracle, model):
        one.eval()
    with torch.no_grad():
        expected, got = oracle(**own, use_cache=False), model(**own, use_cache=False)
        real = own["attention_mask"].bool()
        assert_close("logits", expected.logits[real], got.logits[real])
        assert_close("loss", whole_loss(oracle, own), got.loss)
        prompt = own["input_ids"][:, :5]
        kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(oracle.generate(prompt, **kwargs), model.generate(prompt, **kwargs))


@pytest.mark.table("True-Mixtral", "False-MPT")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["Mixtral", "MPT"])
@pytest.mark.parametrize("caches", [True, False])
def test_ranks_generate_from_prompts_of_their_own(family: str, caches: bool):
    """Those of a tensor group have the same, and those of a sequence other lengths and ends."""
    oracle, model = twice(FAMILIES[family])
    # Tensor parallelism alone divides no tensor of all experts.
    beside = {"expert_parallel": 2} if STACKED and family == "Mixtral" else {}
    prepared(model, sequence_parallel=2, tensor_parallel=2, **beside)
    number = dist.get_rank() // 2
    prompt = (torch.arange(3 + 2 * number)[None] * 5 + number) % 23 + 1
    kwargs = {"max_new_tokens": 2 + 3 * number, "do_sample": False, "pad_token_id": 0}
    for one in (oracle, model):
        one.train(caches)
    kwargs["use_cache"] = caches
    assert torch.equal(oracle.generate(prompt, **kwargs), model.generate(prompt, **kwargs))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_masks_of_the_user(method: str, kind: torch.dtype):
    """A prefix that all tokens see."""
    oracle, model = twice(llama)
    prepared(model, sequence_parallel={"degree": 2, "method": method})
    (batch,) = batches("plain", 1)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[:, :5] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = oracle(**batch, attention_mask=added[None, None], use_cache=False).loss
    mask = (seen if kind == torch.bool else added)[None, None]
    assert_close("loss", expected, model(**batch, attention_mask=mask, use_cache=False).loss)


class Handing(nn.Module):
    """Hands batches on past the hooks of the model, as wrappers of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, **batch: Any) -> Any:
        return self.inner.forward(**batch)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
def test_a_model_that_is_not_called_itself_is_an_error():
    model = prepared(Handing(), sequence_parallel=2)
    (batch,) = batches("plain", 1)
    with pytest.raises(PlanError, match="without a call of it"):
        model(**batch, use_cache=False)


class Backwards(transformers.LlamaForCausalLM):
    """Its tokens see the ones before them in pairs, which no argument of attention says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(_see_pairs, with_kwargs=True)


def _see_pairs(_attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    length = kwargs["hidden_states"].shape[1]
    at = torch.arange(length) // 2
    seen = at[None, :] <= at[:, None]
    mask = torch.zeros(length, length).masked_fill(~seen, -1e9)[None, None]
    return args, kwargs | {"attention_mask": mask}


def phi3_long() -> nn.Module:
    scaling = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0]}
    config = transformers.Phi3Config(
        **(SIZES | {"num_attention_heads": 4}),
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_scaling=scaling,
    )
    return transformers.Phi3ForCausalLM(config)


BY_LENGTH: dict[str, Callable[[], Any]] = {
    "Phi-3, longrope": phi3_long,
    "Llama, dynamic": lambda: llama(
        max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0}
    ),
}


@pytest.mark.table("ulysses-Phi-3, longrope")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("family", BY_LENGTH)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_rotary_frequencies_are_those_of_the_full_length(method: str, family: str):
    """One sequence is longer than those that the frequencies begin with, and one is not."""
    for length in (LENGTH, 9):
        oracle, model = (made.double() for made in twice(BY_LENGTH[family]))
        with torch.no_grad():
            for param in (*oracle.parameters(), *model.parameters()):
                param.mul_(5 if param.ndim > 1 else 1)
        prepared(model, sequence_parallel={"degree": 2, "method": method})
        (batch,) = batches("plain", 1, length=length)
        compare_a_batch(oracle, model, batch, lambda model, b: model(**b, use_cache=False).loss)


@pytest.mark.table("gather_kv")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_attention_that_is_not_known_is_an_error_in_the_first_step(method: str):
    model = prepared(
        Backwards(transformers.LlamaConfig(**SIZES)),
        sequence_parallel={"degree": 2, "method": method},
    )
    (batch,) = batches("plain", 1)
    with pytest.raises(PlanError, match=r"attention 'model.layers.0.self_attn'.*% off"):
        model(**batch, use_cache=False)


PACKED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "as it is": (llama, {}),
    "mask of ones": (llama, {"attention_mask": True}),
    "eager": (FAMILIES["Llama, eager"], {}),
    "MPT": (mpt, {}),
    "MPT, numbers": (mpt, {"sequence_id": True}),
    "MPT, numbers that are read": (lambda: mpt(attn_uses_sequence_id=True), {"sequence_id": True}),
    **{name: (make, {}) for name, make in OPT.items()},
}


@pytest.mark.table("as it is", "MPT, numbers")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.filterwarnings("ignore:MPT received non-None input for `sequence_id`")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", PACKED)
def test_packed_rows_are_seen_as_the_model_sees_them(case: str):
    make, more = PACKED[case]
    oracle, model = twice(make)
    prepared(model, sequence_parallel=2)
    (batch,) = batches("packed", 1)
    if "attention_mask" in more:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "sequence_id" in more:
        batch["sequence_id"] = (batch["position_ids"] == 0).long().cumsum(1) - 1
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    log = logging.getLogger("composer_fsdp2.parallel.sequence.group")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        compare_a_batch(oracle, model, batch, lambda model, b: model(**b, use_cache=False).loss)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    if case == "as it is" and dist.get_rank() == 0:
        assert told.getvalue().count("Rows hold several documents") == 1


@pytest.mark.table("gather_kv-300-packed")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_blocks_of_queries(method: str, window: int | None, kind: str):
    """Of sequences that are longer than the queries that are computed together."""
    length = 1201
    sizes = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": length}

    def make() -> nn.Module:
        config = transformers.MistralConfig(**sizes, sliding_window=window)
        return transformers.MistralForCausalLM(config)

    oracle, model = twice(make)
    documents = "apart" if kind == "packed" else "as_model"
    divided = {"degree": 2, "method": method, "documents": documents}
    prepared(model, sequence_parallel=divided)
    (batch,) = batches(kind, 1, length=length, rows=2, cut=(400, 900))
    compare_a_batch(oracle, model, batch)
