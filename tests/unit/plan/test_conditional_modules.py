"""Which modules a rank may leave out, and what becomes of units in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from composer_fsdp2.config.wrapping import PrecisionSpec, UnitSettings
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, by_name
from composer_fsdp2.plan.unit_size import UnitSizes
from composer_fsdp2.plan.wrap_plan import LEFT_OUT, WrapPlan
from tests.support.experts import FAMILIES, STACKED, Mixture, Sparse
from tests.support.models import TinyLM, llama_config


def found(model: nn.Module, *patterns: str) -> list[str]:
    return [*conditional_modules(ModuleTree.read(model), patterns)]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of(family: str):
    names = found(FAMILIES[family][0]())
    assert bool(names) is not STACKED  # a tensor of all experts always gets a gradient
    assert {name.rpartition(".")[2] for name in names} <= {"experts"}


@pytest.mark.parametrize("attribute", ["experts", "expert_mlps", "members"])
def test_experts_by_name_or_by_router(attribute: str):
    assert found(Sparse(attribute)) == [f"blocks.{n}.{attribute}" for n in (1, 3)]


class Gated(TinyLM):
    """Has something called a gate, which is no router of its blocks."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.gate = nn.Linear(columns, columns)


def vision() -> nn.Module:
    shape = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    tower = transformers.CLIPVisionConfig(**shape, num_attention_heads=2, image_size=8)
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=llama_config(), attn_implementation="eager"
    )
    return transformers.LlavaForConditionalGeneration(config)


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "vocab_size": 64}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **heads, **ends)
    )


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (TinyLM, []),
        (lambda: Gated(5), []),
        (vision, ["vision_tower"]),
        (t5, []),
        (whisper, []),
        (lambda: nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}), []),
    ],
)
def test_towers_and_what_is_none(make: Callable[[], nn.Module], names: list[str]):
    with torch.device("meta"):
        assert [name.removeprefix("model.") for name in found(make())] == names


def test_named_ones():
    assert found(TinyLM(), "blocks.2", "re:blocks.*up") == [
        "blocks.0.up",
        "blocks.1.up",
        "blocks.2",
    ]
    with pytest.raises(PlanError, match=r"unused_parameters holds 'tower'.*Names in this model"):
        found(TinyLM(), "tower")


def planned(rules: list[Any], **kwargs: Any) -> WrapPlan:
    model = Sparse()
    return plan_wrapping(model, rules, optional=found(model), **kwargs)


def test_units_move_out_of_what_may_be_left_out():
    with pytest.warns(UserWarning, match=r"'blocks.1.experts.0'.* and 3 more .*'blocks.1', 'bl"):
        plan = planned([by_name("re:blocks.*experts.[0-9]")])
    units = {unit.module: unit for unit in plan.units}
    assert set(units) == {"", "blocks.1", "blocks.3"}
    assert {units[f"blocks.{n}"].reason for n in (1, 3)} == {LEFT_OUT}
    assert len(units["blocks.1"].params) == 2 + 4 * 6


def test_size_does_not_divide_them():
    with pytest.warns(UserWarning, match="cannot be divided further"):
        plan = planned([by_class(Mixture)], sizes=UnitSizes(most=64))
    assert not any("experts" in unit.module for unit in plan.units)


def test_a_unit_with_settings_of_its_own_cannot_move():
    own = UnitSettings(mixed_precision=PrecisionSpec(param_dtype="bf16"))
    with (
        pytest.warns(UserWarning, match="takes more memory"),
        pytest.raises(PlanError, match=r"settings of its own.*unused_parameters: false"),
    ):
        planned([by_name("blocks.1.experts.0", own)])


def test_units_move_out_of_a_graph():
    """Its hooks would be in it, and nobody traces them."""
    model = TinyLM()
    model.blocks[0].compile(backend="eager", fullgraph=True)
    said = "^'blocks.0' would be units, and lie in what you compiled .* so '<root>' gathers"
    with pytest.warns(UserWarning, match=said):
        plan = plan_wrapping(model, [by_class(type(model.blocks[0]))])
    assert "blocks.0" not in {unit.module for unit in plan.units}
