"""The ready rules, and what a `wrap_policy` makes of a model."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn

from composer_fsdp2.config.wrapping import Selector, UnitSettings, WrapPolicy
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, by_hf_blocks, by_name, policy_rules, root_rule
from composer_fsdp2.plan.wrap_plan import Rule, WrapPlan
from tests.support.models import Block, TinyLM

FREE = UnitSettings(reshard_after_forward=False)


def units(model: nn.Module, rules: list[Rule]) -> dict[str, str]:
    """Unit -> why, without the root."""
    plan = plan_wrapping(model, [*rules, root_rule])
    return {unit.module: unit.reason for unit in plan.units if unit.module}


def by_policy(model: nn.Module, **policy) -> dict[str, str]:
    return units(model, policy_rules(ModuleTree.read(model), WrapPolicy(**policy)))


def error_of(model: nn.Module, **policy) -> str:
    with pytest.raises(PlanError) as caught:
        policy_rules(ModuleTree.read(model), WrapPolicy(**policy))
    return str(caught.value)


def test_by_class_by_name_and_by_type():
    expected = {f"blocks.{n}": "class Block" for n in range(3)}
    assert units(TinyLM(), [by_class("Block")]) == expected
    assert units(TinyLM(), [by_class(Block)]) == expected
    assert units(TinyLM(), [by_class("Embedding", Block)]) == {
        "embed": "class Embedding",
        **expected,
    }


def test_a_class_is_not_its_bases():
    """`SharedBlock` is a `Block`; a rule by class is as narrow as FSDP1's."""
    assert units(TinyLM("all layers"), [by_class(Block)]) == {}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.?", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[01]", ["blocks.0", "blocks.1"]),
        ("Blocks.*", []),
        ("locks.0", []),
        ("*", ["embed", "blocks.0", "blocks.2", "head"]),
        (r"re:blocks\.\d+", ["blocks.0", "blocks.1", "blocks.2"]),
        (r"re:blocks\.[02]", ["blocks.0", "blocks.2"]),
        (r"re:blocks", []),
        ("re:(embed|head)", ["embed", "head"]),
    ],
)
def test_by_name_matches_whole_names(pattern, found):
    rule = by_name(pattern)
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    chosen = [name for name in names if rule(name, nn.Identity())]
    assert set(found) <= set(chosen)
    if pattern != "*":
        assert chosen == found


def test_a_star_crosses_dots_as_in_fnmatch():
    assert by_name("blocks.*")("blocks.0.up", nn.Identity()) is not None
    assert by_name(r"re:blocks\.\d+")("blocks.0.up", nn.Identity()) is None


def test_the_reason_and_the_settings_come_along():
    decision = by_name("a", FREE)("a", nn.Identity())
    assert decision is not None
    assert (decision.wrap, decision.reason, decision.settings) == (True, "name a", FREE)
    assert by_class("Identity", settings=FREE)("a", nn.Identity()).settings is FREE


# --- policies ---


def test_names_come_before_classes_and_the_first_pattern_wins():
    plan = plan_wrapping(
        model := TinyLM(),
        policy_rules(
            ModuleTree.read(model),
            WrapPolicy(
                classes=(Selector("Block"),),
                names=(Selector("blocks.0", FREE), Selector(r"re:blocks\.[01]")),
            ),
        ),
    )
    reasons = {unit.module: unit.reason for unit in plan.units}
    assert reasons["blocks.0"] == "name blocks.0"
    assert reasons["blocks.1"] == r"name re:blocks\.[01]"
    assert reasons["blocks.2"] == "class Block"
    assert [unit.reshard_after_forward for unit in plan.units] == [False, True, True, False]


def test_a_class_that_is_not_there_lists_those_that_are():
    message = error_of(TinyLM(), classes=(Selector("Blok"),))
    assert "wrap_policy.classes names 'Blok'" in message
    assert "Did you mean 'Block'?" in message
    classes = "Block, Embedding, GELU" if "GELU" in message else "Block, Embedding"
    assert classes in message
    for name in ("Identity", "LayerNorm", "Linear", "ModuleList", "TinyLM"):
        assert name in message


def test_a_name_that_matches_nothing_shows_names():
    message = error_of(TinyLM(), names=(Selector("layers.*"),))
    assert "wrap_policy.names holds 'layers.*', which matches no module name" in message
    assert "Names in this model: embed, blocks, blocks.0, " in message
    long = error_of(TinyLM(layers=9), names=(Selector("block.0"),))
    assert "Did you mean 'blocks.0'?" in long
    assert re.search(r" and \d+ more\.$", long)


def test_every_part_that_matches_nothing_is_named_at_once():
    model = nn.Sequential(nn.Linear(2, 2))
    message = error_of(
        model,
        classes=(Selector("Block"), Selector("Linear")),
        names=(Selector("a.*"),),
        embeddings=UnitSettings(),
        lm_head=UnitSettings(),
        min_num_params=10**6,
    )
    for key in ("classes names 'Block'", "names holds 'a.*'", "embeddings", "lm_head", "min_num"):
        assert f"wrap_policy.{key}" in message
    assert "'Linear'" not in message


def test_embeddings():
    assert by_policy(TinyLM(), embeddings=UnitSettings()) == {"embed": "embeddings"}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.lm_head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(x))


class Telling(Named):
    """Says what its head is, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 4)
        del self.lm_head

    def get_output_embeddings(self) -> nn.Module:
        return self.score


def test_the_head_by_name_or_by_what_the_model_says():
    assert by_policy(Named(), lm_head=UnitSettings()) == {"lm_head": "lm_head"}
    assert by_policy(nn.Sequential(Telling()), lm_head=UnitSettings()) == {"0.score": "lm_head"}


def test_a_model_without_a_head_says_so():
    class Silent(Telling):
        def get_output_embeddings(self):
            return None

    assert "wrap_policy.lm_head matches no module" in error_of(Silent(), lm_head=UnitSettings())


# --- by size ---


def test_size_counts_from_the_leaves_without_nested_units():
    """Each block has 450 elements, its largest layer 220; what is left at the root has 360."""
    blocks = {f"blocks.{n}": "min_num_params" for n in range(3)}
    assert by_policy(TinyLM(), min_num_params=400) == blocks
    layers = {f"blocks.{n}.{layer}": "min_num_params" for n in range(3) for layer in ("up", "down")}
    assert by_policy(TinyLM(), min_num_params=210) == layers
    assert by_policy(TinyLM(), min_num_params=2 * 450) == {}


def test_a_shared_weight_is_counted_once():
    pair = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model = nn.Sequential(pair, nn.Linear(20, 20))
    assert set(by_policy(model, min_num_params=150)) == {"0", "1"}
    pair[1].weight = pair[0].weight
    assert set(by_policy(model, min_num_params=150)) == {"1"}


def test_modules_other_rules_choose_do_not_count():
    rules = {"classes": (Selector("Block"),), "min_num_params": 300}
    assert by_policy(TinyLM(), **rules) == {f"blocks.{n}": "class Block" for n in range(3)}


def test_containers_pass_their_size_on():
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), TinyLM())
    assert "1.blocks" not in by_policy(model, min_num_params=500)
    assert by_policy(model, min_num_params=500) == {"1": "min_num_params"}


def test_attention_is_not_entered():
    """It reads the weight of its projection without calling it."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert set(by_policy(model, min_num_params=50)) == {"0", "1"}


# --- Hugging Face ---

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def hf(config, auto=transformers.AutoModelForCausalLM) -> nn.Module:
    with torch.device("meta"):
        return auto.from_config(config)


def hf_plan(model: nn.Module) -> WrapPlan:
    rule = by_hf_blocks(ModuleTree.read(model))
    assert rule is not None
    return plan_wrapping(model, [root_rule, rule])


def names(plan: WrapPlan) -> list[str]:
    return [unit.module for unit in plan.units]


def test_llama():
    model = hf(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    assert names(hf_plan(model)) == ["model.layers.0", "model.layers.1", ""]


def test_gpt2_keeps_its_tie():
    model = hf(transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32))
    plan = hf_plan(model)
    assert names(plan) == ["transformer.h.0", "transformer.h.1", ""]
    assert plan.tied == (("transformer.wte.weight", "lm_head.weight"),)
    head = policy_rules(
        ModuleTree.read(model), WrapPolicy(embeddings=UnitSettings(), lm_head=UnitSettings())
    )
    lifted = plan_wrapping(model, [*head, by_hf_blocks(ModuleTree.read(model))]).owner_of()
    assert lifted["transformer.wte.weight"] == lifted["lm_head.weight"]
    assert lifted["lm_head.weight"].module == ""
    assert lifted["transformer.wpe.weight"].module == "transformer.wpe"


def test_bert_lists_its_embeddings_but_they_cross_a_tie():
    model = hf(transformers.BertConfig(**SMALL), transformers.AutoModelForMaskedLM)
    assert "BertEmbeddings" in model.bert._no_split_modules
    plan = hf_plan(model)
    assert names(plan) == ["bert.encoder.layer.0", "bert.encoder.layer.1", ""]
    word = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    assert word in plan.tied
    forced = plan_wrapping(model, [by_class("BertEmbeddings")]).owner_of()
    assert {forced[name].module for name in word} == {""}
    assert forced["bert.embeddings.LayerNorm.weight"].module == "bert.embeddings"


def test_t5_has_blocks_in_both_stacks():
    config = transformers.T5Config(
        num_layers=2, d_model=8, d_kv=4, d_ff=16, num_heads=2, vocab_size=32
    )
    plan = hf_plan(hf(config, transformers.AutoModelForSeq2SeqLM))
    blocks = [f"{stack}.block.{n}" for stack in ("encoder", "decoder") for n in range(2)]
    assert names(plan) == [*blocks, ""]
    assert len(plan.tied[0]) == 4


def test_mamba_lists_blocks_and_what_is_inside_them():
    config = transformers.MambaConfig(
        hidden_size=8, num_hidden_layers=2, vocab_size=32, state_size=4, time_step_rank=2
    )
    model = hf(config)
    assert {"MambaBlock", "MambaMixer"} <= set(model._no_split_modules)
    assert names(hf_plan(model)) == ["backbone.layers.0", "backbone.layers.1", ""]


def test_a_model_inside_another_is_found():
    model = nn.Sequential(hf(transformers.LlamaConfig(**SMALL, num_key_value_heads=2)))
    assert names(hf_plan(model)) == ["0.model.layers.0", "0.model.layers.1", ""]


def test_models_without_a_list_have_no_rule():
    assert by_hf_blocks(ModuleTree.read(TinyLM())) is None
    listing = TinyLM()
    listing._no_split_modules = ["Elsewhere"]
    assert by_hf_blocks(ModuleTree.read(listing)) is None
    listing._no_split_modules = None
    assert by_hf_blocks(ModuleTree.read(listing)) is None
