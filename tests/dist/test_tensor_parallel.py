"""Tensor parallelism with FSDP2, against one process that sees the same global batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import clip_grad_norm_, install, prepare_fully_shard
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.step.run import run_of
from tests.support.parity import (
    OPTIMIZERS,
    STATE_TOLERANCE,
    TOLERANCE,
    assert_close,
    assert_same_values,
    full,
)
from tests.support.training import largest_difference

VOCAB, STEPS, SIZE, LENGTH, DEGREE = 32, 20, 8, 7, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": LENGTH,
}


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def llama4() -> nn.Module:
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=2)
    return transformers.Llama4ForCausalLM(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, attention_bias=True))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=4)
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, tie_word_embeddings=False)
    return transformers.Phi3ForCausalLM(config)


def glm4() -> nn.Module:
    config = transformers.Glm4Config(**SIZES, pad_token_id=0)
    return transformers.Glm4ForCausalLM(config)


def stablelm() -> nn.Module:
    """Its attention shapes what the heads give by the model's width."""
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB - 1,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def mpt(**attention: Any) -> nn.Module:
    pytest.importorskip("llmfoundry")
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    install_for_foundry()

    config = MPTConfig(
        d_model=16,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=LENGTH,
        vocab_size=VOCAB,
        attn_config={"attn_impl": "torch", **attention},
        ffn_config={"ffn_type": "mptglu" if attention else "mptmlp"},
    )
    return MPTForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Qwen3": qwen3,
    "Gemma 3": gemma3,
    "Phi-3": phi3,
    "GLM-4": glm4,
    "StableLM": stablelm,
    "GPT-2": gpt2,
    "MPT": mpt,
    "MPT, grouped": lambda: mpt(attn_type="grouped_query_attention", kv_n_heads=2, qk_gn=True),
}

SMOKE = {("Llama", "sgd"), ("GLM-4", "adamw")}

IN_DOUBLE = {
    # Rounding of one process grows tenfold here, whatever divides the model.
    ("Gemma 3", "adamw"),
    # The bias of keys has a gradient that is zero but for rounding, which AdamW makes a full step.
    ("GLM-4", "adamw"),
    ("MPT", "adamw"),
    ("MPT, grouped", "adamw"),
}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def global_batches(steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCAB - 1, (steps, SIZE, LENGTH), generator=generator)


def of_this_group(ids: torch.Tensor, degree: int = DEGREE) -> torch.Tensor:
    """The part of a batch that all ranks of this tensor group read."""
    return ids.chunk(dist.get_world_size() // degree)[dist.get_rank() // degree]


def mean(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def usual_gradient(param: torch.Tensor) -> torch.Tensor:
    gradient = form_of(param).full(param.grad)
    assert gradient is not None
    return gradient


def assert_same_gradients(oracle: nn.Module, model: nn.Module) -> None:
    for (name, alone), sharded in zip(oracle.named_parameters(), model.parameters(), strict=True):
        assert alone.grad is not None
        assert_close(f"gradient of {name}", alone.grad, usual_gradient(sharded))


def assert_same_state(expected: torch.optim.Optimizer, got: torch.optim.Optimizer) -> None:
    ours = got.state_dict()["state"]
    for number, state in expected.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found = full(ours[number][key])
                difference = (found - value).abs().max().item()
                size = max(1.0, value.abs().max().item())
                assert difference <= STATE_TOLERANCE * size, (number, key)


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, **settings: Any
) -> nn.Module:
    prepare_fully_shard(model, optimizer, {"tensor_parallel": DEGREE, **settings})
    return model


# Newer torch warns of blocks that end in a view; nothing in these models changes it in place.
@pytest.mark.table("GLM-4-adamw")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        pytest.param(*case, marks=pytest.mark.smoke if case in SMOKE else ())
        for case in zip(FAMILIES, itertools.cycle(OPTIMIZERS), strict=False)
    ],
)
def test_trains_like_one_process(family: str, optimizer: str):
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = FAMILIES[family]()
    model = model.double() if (family, optimizer) in IN_DOUBLE else model
    holder = [model.state_dict()]
    dist.broadcast_object_list(holder)
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(holder[0])
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], mixed_precision="FULL")
    for step, ids in enumerate(global_batches()):
        expected, got = loss_of(oracle, ids), loss_of(model, of_this_group(ids))
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        if step == 0:
            assert_same_gradients(oracle, model)
        for one in pair:
            one.step()
            one.zero_grad()
    assert TOLERANCE == 1e-6
    assert_same_values(oracle, model)
    assert_same_state(*pair)


WITH: dict[str, dict[str, Any]] = {
    "every": {},
    "last": {"gradient_sync": "last"},
    "recompute": {"activation_checkpointing": True, "gradient_sync": "last"},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "kept": {"reshard_after_forward": False, "forward_prefetch": 2, "order_check": "always"},
}


@pytest.mark.table("GPT-2-recompute")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("settings", WITH)
@pytest.mark.parametrize("family", ["Qwen3", "GPT-2"])
def test_microbatches_norms_and_clipping(family: str, settings: str):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], **WITH[settings])
    sharding = run_of(model)
    assert sharding is not None
    for ids in global_batches(3):
        loss_of(oracle, ids).backward()
        own = of_this_group(ids).chunk(2)
        with sharding.accumulation.batch():
            for number, part in enumerate(own):
                with sharding.accumulation.microbatch(last=number == 1):
                    (loss_of(model, part) / 2).backward()
        expected = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        got = clip_grad_norm_(model.parameters(), 0.1)
        assert_close("norm", expected, got)
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
def test_weights_outside_of_the_plan_cannot_drift():
    model = prepared(llama(), None)
    norm = model.get_parameter("model.norm.weight")
    # As a kernel that adds up in any order may leave it: another rounding on each rank.
    model.get_submodule("model.norm").register_full_backward_pre_hook(
        lambda _module, grads: (grads[0] * (1 + 1e-3 * dist.get_rank()),)
    )
    loss_of(model, of_this_group(global_batches(1)[0])).backward()
    assert norm.grad is not None
    local = norm.grad.to_local()
    everyone = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(everyone, local)
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])


def with_dropout() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH
    )
    assert config.resid_pdrop > 0
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
def test_dropout_draws_the_same_outside_of_divided_layers():
    model = with_dropout()
    torch.manual_seed(dist.get_rank())  # as Composer does
    prepared(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for ids in global_batches(2):
        logits = model(of_this_group(ids)).logits.detach()
        everyone = [torch.empty_like(logits) for _ in range(4)]
        dist.all_gather(everyone, logits)
        assert torch.equal(everyone[0], everyone[1])
        assert torch.equal(everyone[2], everyone[3])


@pytest.mark.world_size(4)
def test_evaluation_compares_batches_as_well():
    model = prepared(llama(), None).eval()
    ids = global_batches(4)
    with pytest.raises(PlanError, match=r"Ranks 0 and 1 .* different batches"), torch.no_grad():
        model(ids[dist.get_rank()])


@pytest.mark.world_size(4)
def test_an_optimizer_that_was_not_given_is_refused():
    model = prepared(gpt2(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, of_this_group(global_batches(1)[0])).backward()
    with pytest.raises(PlanError, match="SGD was built after the model was prepared"):
        optimizer.step()


class Unknown(torch.optim.SGD):
    """Nobody knows what it computes."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "heads": (llama, {"tensor_parallel": 4}, PlanError, "has 2 key and value heads, which 4"),
    "pattern": (
        gpt2,
        {"tensor_parallel": {"degree": 2, "layer_plan": {"*.nothing": "whole"}}},
        PlanError,
        "'\\*.nothing', which matches no module",
    ),
    "part of a block": (
        llama,
        {"tensor_parallel": {"degree": 2, "layer_plan": {"*.k_proj": "whole"}}},
        PlanError,
        "keeps k_proj of 'model.layers.0.self_attn' whole",
    ),
    "one side": (
        llama,
        {"tensor_parallel": {"degree": 2, "layer_plan": {"*.mlp.down_proj": "colwise"}}},
        PlanError,
        "by columns alone",
    ),
    "nothing known": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"tensor_parallel": 2},
        PlanError,
        "nothing in the model is known to be divisible",
    ),
    "experts": (
        llama4,
        {"tensor_parallel": 2},
        PlanError,
        "keeps plain tensors with a division of its own.* write ep: {degree: 2} beside tp",
    ),
    "rows": (
        lambda: llama(intermediate_size=27),
        {"tensor_parallel": 2},
        PlanError,
        "its size 27 is not divisible by the degree 2",
    ),
    "groups of ranks": (
        llama,
        {"tensor_parallel": 2, "reshard_after_forward": 2},
        PlanError,
        "reshard_after_forward is a number",
    ),
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_the_model_is_changed(case: str):
    make, settings, kind, match = REFUSED[case]
    model = make()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(kind, match=match):
        prepare_fully_shard(model, None, settings)
    assert {name: id(param) for name, param in model.named_parameters()} == before


@pytest.mark.world_size(4)
def test_an_optimizer_that_is_not_known_is_refused():
    model = llama()
    with pytest.raises(PlanError, match="Unknown and tensor parallelism are both asked for"):
        prepared(model, Unknown(model.parameters(), lr=0.1))


@pytest.mark.table("Phi-3")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["Phi-3", "Llama, tied"])
def test_save_pretrained_writes_the_order_of_the_model(family: str, tmp_path: Path):
    install()
    torch.manual_seed(0)
    model = FAMILIES[family]()
    before = copy.deepcopy(model.state_dict())
    kind = type(model)
    prepared(model, None)
    model.save_pretrained(str(tmp_path))
    dist.barrier()
    loaded = kind.from_pretrained(str(tmp_path)).state_dict()
    assert before.keys() == loaded.keys()
    assert all(torch.equal(before[name], loaded[name]) for name in before)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_computes_as_without_it(recompute: bool):
    torch.manual_seed(0)
    models = [llama(), llama()]
    models[1].load_state_dict(models[0].state_dict())
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    settings = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    settings["activation_checkpointing"] = recompute
    prepare_fully_shard(models[0], pair[0], settings)
    prepared(models[1], pair[1], **settings)
    for ids in global_batches(5):
        losses = [
            loss_of(models[0], ids.chunk(4)[dist.get_rank()]),
            loss_of(models[1], of_this_group(ids)),
        ]
        for loss, optimizer in zip(losses, pair, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected, got = (mean(loss.float()) for loss in losses)
        assert (expected - got).abs() < 0.05  # three steps of bf16 at this size
    assert largest_difference(models[1], models[0]) < 2e-3


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as weight decay usually has them."""
    params = list(model.parameters())
    flat = [param for param in params if param.ndim == 1]
    wide = [param for param in params if param.ndim > 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3)


@pytest.mark.table("Llama, tied")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ["Phi-3", "GPT-2", "Llama, tied"])
def test_groups_and_state_from_before_are_carried(family: str):
    torch.manual_seed(0)
    oracle = FAMILIES[family]()
    first = grouped(oracle)
    loss_of(oracle, global_batches(1)[0]).backward()
    first.step()
    first.zero_grad()
    model = copy.deepcopy(oracle)
    second = grouped(model)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    prepared(model, second)
    for ids in global_batches(3):
        loss_of(oracle, ids).backward()
        loss_of(model, of_this_group(ids)).backward()
        for one in (first, second):
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)
    assert_same_state(first, second)


class WithSpare(nn.Module):
    """A layer that is never called beside a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = llama(tie_word_embeddings=True)
        self.spare = nn.Linear(8, 8)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return type(module).__name__ == "LlamaDecoderLayer"

    def forward(self, ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.net(ids, **kwargs)


@pytest.mark.table("embed_tokens")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("frozen", ["", "q_proj", "embed_tokens"])
def test_frozen_and_unused_weights(frozen: str):
    torch.manual_seed(0)
    model = WithSpare()
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    oracle = copy.deepcopy(model)
    pair = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (oracle, model)]
    prepared(model, pair[1])
    for ids in global_batches(3):
        loss_of(oracle, ids).backward()
        loss_of(model, of_this_group(ids)).backward()
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)
