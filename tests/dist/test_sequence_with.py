"""Sequence parallelism beside fp8 and torch.compile, and the optimizer with state of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2.blocks.fp8 import Float8Linear, Float8Plan
from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.dist.test_blocks import fresh_compiler, graphs
from tests.dist.test_sequence_parallel import (
    FAMILIES,
    Backwards,
    batches,
    llama,
    mean,
    part,
    prepared,
    train_as_one_process,
)
from tests.support.parity import OPTIMIZERS, full

VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
EAGER = {"backend": "aot_eager"}


def wide() -> nn.Module:
    """Sizes that fp8 can have."""
    return llama(hidden_size=32, intermediate_size=64, num_key_value_heads=4)


def in_fp8(recipe: Any, **more: Any) -> dict[str, Any]:
    return {"recipe": recipe, "emulate": True, "names": ["model.layers.*"], **more}


def convert(model: nn.Module, recipe: Any) -> None:
    """By torchao itself."""
    names = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n)
    spec = Float8Spec(emulate=True, recipe=recipe)
    plan = Float8Plan(modules=names, gathered=(), settings=spec)
    Float8Linear().apply(ModuleTree.read(model), plan)


@pytest.mark.table("gather_kv-padded-rowwise_with_gw_hp-settings1")
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("method", "kind", "recipe", "settings"),
    [
        ("ulysses", "plain", "rowwise", {}),
        ("gather_kv", "padded", "rowwise_with_gw_hp", {"activation_checkpointing": True}),
    ],
)
def test_fp8_with_a_scale_for_each_token(
    method: str, kind: str, recipe: Any, settings: dict[str, Any]
):
    """In double: which way a cast rounds is a matter of the last digit."""
    pytest.importorskip("torchao.float8", reason="needs the extra fp8")
    train_as_one_process(
        lambda: wide().double(),
        kind,
        2,
        method,
        steps=4,
        alone=lambda model: convert(model, recipe),
        fp8=in_fp8(recipe),
        **settings,
    )


HALF_A_STEP = 2**-4
"""what rounding to three bits after the first changes a number by at most"""


@pytest.mark.table("gather_kv-more1")
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("method", "more"), [("ulysses", {"compile": EAGER}), ("gather_kv", {}), ("ulysses", {})]
)
def test_fp8_with_a_scale_for_each_part(method: str, more: dict[str, Any]):
    """Ranks that have parts of a batch round it otherwise than one process.

    So do those of FSDP2 alone, each of which has rows. Neither is farther from one process than a
    number from its cast.
    """
    pytest.importorskip("torchao.float8", reason="needs the extra fp8")
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(wide())
    oracle, rows, divided = models
    convert(oracle, "tensorwise")
    fp8 = in_fp8("tensorwise", all_gather=not more)
    prepared(rows, fp8=fp8)
    prepared(divided, fp8=fp8, sequence_parallel={"degree": 2, "method": method}, **more)
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    with fresh_compiler():
        for batch in batches("plain", 3):
            given = (batch, part(batch, 1), batch)
            losses = [m(**b, use_cache=False).loss for m, b in zip(models, given, strict=True)]
            for loss in losses:
                loss.backward()
            expected, *grads = (
                torch.cat([full(p.grad).flatten() for p in model.parameters()]) for model in models
            )
            for loss, grad in zip(losses[1:], grads, strict=True):
                assert abs(mean(loss) - losses[0].detach()) < 1e-3
                assert (grad - expected).norm() / expected.norm() < HALF_A_STEP
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


COMPILED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "alone": ("Llama", "packed", "ulysses", {}),
    "recompute": ("MPT, grouped", "padded", "gather_kv", {"activation_checkpointing": True}),
    "budget": ("Llama", "padded", "gather_kv", {"activation_checkpointing": {"memory_budget": 0}}),
    "offload": (
        "Qwen3",
        "plain",
        "ulysses",
        {"activation_checkpointing": True, "activation_cpu_offload": True},
    ),
}


@pytest.mark.table
@VIEWS
@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")  # in LLM Foundry
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks(case: str):
    family, kind, method, settings = COMPILED[case]
    with fresh_compiler():
        train_as_one_process(FAMILIES[family], kind, 2, method, steps=3, compile=EAGER, **settings)
        assert graphs() > 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"compile": {"fullgraph": True}}, "'compile.fullgraph' is true"),
        (
            {"compile": True, "activation_checkpointing": {"mode": "selective"}},
            "compiles nothing while it selects",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(settings: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        prepared(llama(), sequence_parallel=2, **settings)


@pytest.mark.table("settings0")
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "settings", [{"fp8": {"emulate": True, "names": ["*.q_proj"]}}, {"compile": EAGER}]
)
def test_attention_that_is_not_known_is_an_error_here_too(settings: dict[str, Any]):
    if "fp8" in settings:
        pytest.importorskip("torchao.float8", reason="needs the extra fp8")
    model = prepared(Backwards(llama().config), sequence_parallel=2, **settings)
    (batch,) = batches("plain", 1)
    with pytest.raises(PlanError, match=r"attention 'model.layers.0.self_attn'.*% off"):
        model(**batch, use_cache=False)


@pytest.mark.table("gather_kv")
@VIEWS
@pytest.mark.world_size(2)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_adamw(method: str):
    train_as_one_process(llama, "padded", 2, method, optimizer="adamw")
