"""How large units become: ends taken out of the root, small ones merged, large ones divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from composer.models import HuggingFaceModel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from composer_fsdp2.config.wrapping import Selector, UnitSettings, WrapPolicy
from composer_fsdp2.errors import PlanError
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, root_rule, with_fp32_islands
from composer_fsdp2.plan.unit_size import UnitSizes
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.prepare.conventions import trainer_rules
from tests.support.models import Block, TinyLM, llama_config

BLOCKS = by_class(Block)
LARGE = {"vocab_size": 4096, "hidden_size": 64}
"""an embedding of 1 MiB"""


def llama(**changes: Any) -> HuggingFaceModel:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(**(LARGE | changes)))
    return HuggingFaceModel(model)


def plan(model: nn.Module, **policy: Any) -> WrapPlan:
    return plan_wrapping(model, trainer_rules(ModuleTree.read(model), WrapPolicy(**policy)))


def rows(found: WrapPlan) -> dict[str, tuple[int, Any, str]]:
    return {
        unit.module: (unit.numel, unit.reshard_after_forward, unit.reason) for unit in found.units
    }


# --- Embeddings and heads. ---


def test_untied_ends_are_units_of_their_own():
    found = rows(plan(llama(tied=False)))
    assert found["model.model.embed_tokens"] == (4096 * 64, True, "embeddings")
    assert found["model.lm_head"] == (4096 * 64, False, "lm_head")  # used at once in backward
    assert found["model"] == (64, False, "direct child")


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({"tied": True}, {}),
        ({"tied": False, "vocab_size": 4095}, {}),
        ({"tied": False}, {"embeddings": False, "lm_head": False}),
    ],
    ids=["tied", "small", "turned off"],
)
def test_other_ends_stay_in_the_root(changes: dict[str, Any], policy: dict[str, Any]):
    assert list(rows(plan(llama(**changes), **policy))) == [
        "model.model.layers.0",
        "model.model.layers.1",
        "model",
    ]


def test_one_end_may_be_turned_off():
    assert "model.model.embed_tokens" not in rows(plan(llama(tied=False), embeddings=False))
    assert "model.lm_head" not in rows(plan(llama(tied=False), lm_head=False))


def test_a_head_follows_the_run_and_its_own_settings():
    model = llama(tied=False)
    rules = trainer_rules(ModuleTree.read(model), WrapPolicy())
    freed = plan_wrapping(model, rules, reshard_after_forward=True)
    assert rows(freed)["model.lm_head"][1] is True
    asked = plan(model, lm_head=UnitSettings(reshard_after_forward=2))
    assert rows(asked)["model.lm_head"][1] == 2
    by_name = Selector("*lm_head", UnitSettings(reshard_after_forward=True))
    assert rows(plan(model, names=(by_name,)))["model.lm_head"][1:] == (True, "name *lm_head")


def test_a_frozen_head_in_front_of_what_is_trained_is_kept():
    model = llama(tied=False)
    model.requires_grad_(False)
    assert rows(plan(model))["model.lm_head"][1] is True  # a teacher has no backward
    model.model.model.layers[0].mlp.requires_grad_(True)
    assert rows(plan(model))["model.lm_head"][1] is False


def test_an_embedding_whose_model_names_no_head_stays():
    class Bare(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4096, 64)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

    assert "embed" not in rows(plan(Bare()))


def test_models_without_what_they_have_a_getter_for():
    class Without(TinyLM):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    assert len(plan(Without()).units) == 4


def test_mpt_with_a_head():
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    install_for_foundry()

    def found(tied: bool) -> dict[str, tuple[int, Any, str]]:
        config = MPTConfig(
            d_model=64,
            n_heads=2,
            n_layers=1,
            vocab_size=4096,
            max_seq_len=8,
            attn_config={"attn_impl": "torch"},
            tie_word_embeddings=tied,
        )
        with torch.device("meta"):
            return rows(plan(HuggingFaceModel(MPTForCausalLM(config))))

    untied = found(tied=False)
    assert untied["model.transformer.wte"] == (4096 * 64, True, "embeddings")
    assert untied["model.lm_head"] == (4096 * 64, False, "lm_head")
    assert untied["model"] == (8 * 64 + 2 * 64, False, "direct child, with wpe and norm_f")
    assert found(tied=True)["model.transformer.wte"] == (4096 * 64, True, "_fsdp_wrap")


# --- Small ends. ---


class Marked(TinyLM):
    """Everything beside its blocks is marked, as LLM Foundry does it with an MPT model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for end in (self.embed, self.norm, self.head):
            end._fsdp_wrap = True
        self.norm.to(dtype)


def test_small_norms_and_embeddings_go_with_the_unit_around_them():
    found = rows(plan(Marked()))
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2", "head", ""]
    assert found[""] == (170 + 20, False, "root, with embed and norm")


def test_large_ones_do_not():
    model = Marked()
    model.norm = nn.LayerNorm(2**18)
    model.embed = nn.Embedding(2**18, 1)
    model.norm._fsdp_wrap = model.embed._fsdp_wrap = True
    assert rows(plan(model))["norm"] == (2**19, True, "_fsdp_wrap")
    assert rows(plan(model))["embed"] == (2**18, True, "_fsdp_wrap")


def test_another_dtype_keeps_a_small_end_apart():
    found = rows(plan(Marked(torch.bfloat16)))
    assert found["norm"] == (20, True, "dtype bfloat16")
    assert found[""] == (170, False, "root, with embed")


def test_fp32_keeps_a_small_end_apart():
    model = Marked()
    rules = trainer_rules(
        ModuleTree.read(model), WrapPolicy(), keep_fp32=["norm"], gathered_in=torch.bfloat16
    )
    found = rows(plan_wrapping(model, rules))
    assert found["norm"] == (20, True, "keep_fp32")
    assert found[""][2] == "root, with embed"


def test_settings_of_the_unit_around_keep_a_small_end_apart():
    model = nn.Sequential(Marked())
    around = Selector("0", UnitSettings(mixed_precision="FULL"))
    found = rows(plan(model, names=(around,)))
    assert found["0.norm"] == (20, True, "_fsdp_wrap")
    assert found["0"][2] == "name 0"


def test_whoever_names_a_small_end_gets_a_unit():
    named = rows(plan(Marked(), names=(Selector("norm"),)))
    assert named["norm"] == (20, True, "name norm")
    model = Marked()
    model.fsdp_wrap_fn = lambda module: module is model.norm
    assert rows(plan(model))["norm"] == (20, True, "fsdp_wrap_fn")


def test_a_tied_small_end_stays_with_its_tie():
    model = Marked()
    model.blocks[0].norm.weight = model.norm.weight
    found = plan(model)
    owner = found.owner_of()
    assert owner["norm.weight"] is owner["blocks.0.norm.weight"]
    assert owner["norm.weight"].module == ""


def test_a_mark_of_false_leaves_a_small_end_to_the_unit_around_it():
    model = Marked()
    model.norm._fsdp_wrap = False
    assert rows(plan(model))[""][2] == "root, with embed"


# --- Bounds. ---


def sized(model: nn.Module, **sizes: Any) -> dict[str, tuple[int, Any, str]]:
    return rows(plan_wrapping(model, [BLOCKS, root_rule], sizes=UnitSizes(**sizes)))


def test_small_units_join_the_one_around_them():
    found = rows(
        plan_wrapping(
            TinyLM(),
            [by_class(nn.LayerNorm, nn.Linear), BLOCKS, root_rule],
            sizes=UnitSizes(least=200),
        )
    )
    assert list(found)[:3] == ["blocks.0.up", "blocks.0.down", "blocks.1.up"]
    assert found["blocks.0.up"][0] == 220
    assert found[""][0] == 170 + 4 * 20


def test_a_chain_of_small_units_joins_as_a_whole():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False))))
    kind = by_class(nn.Sequential, nn.Linear)
    for least, units in ((16, 4), (17, 1)):
        made = plan_wrapping(model, [kind, root_rule], sizes=UnitSizes(least=least)).units
        assert len(made) == units


def test_settings_of_its_own_keep_a_small_unit_apart():
    own = by_class(nn.LayerNorm, settings=UnitSettings(reshard_after_forward=False))
    made = plan_wrapping(TinyLM(), [own, BLOCKS, root_rule], sizes=UnitSizes(least=10**6))
    assert list(rows(made)) == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm", ""]


def test_large_units_give_away_their_largest_modules():
    found = sized(TinyLM(layers=1), most=900)
    assert {name: numel for name, (numel, _, _) in found.items()} == {
        "embed": 170,
        "blocks.0.up": 220,
        "blocks.0.down": 210,
        "blocks.0": 20,
        "": 190,
    }
    assert found["blocks.0.up"][2] == "max_unit_bytes"


def test_no_more_is_given_away_than_is_needed():
    assert list(sized(TinyLM(layers=1), most=1000)) == ["embed", "blocks.0.up", "blocks.0", ""]


def test_bytes_are_those_of_the_gathered_dtype():
    assert len(sized(TinyLM(layers=1), most=1800)) == 2
    assert len(sized(TinyLM(layers=1), most=900, gathered_in=torch.bfloat16)) == 2


def test_a_parameter_that_is_too_large_alone_is_named():
    with pytest.warns(UserWarning, match="cannot be divided further") as warned:
        sized(TinyLM(layers=1), most=700)
    assert sorted(str(w.message).split("'")[1] for w in warned) == ["blocks.0.down", "blocks.0.up"]
    assert "'blocks.0.up.weight', has 800" in "".join(str(w.message) for w in warned)


def test_a_tied_weight_is_not_divided():
    with pytest.warns(UserWarning, match="'<root>' gathers 680 bytes.*'embed.weight', has 680"):
        found = sized(TinyLM("two modules", layers=0), most=600)
    assert list(found) == ["norm", ""]


def test_what_a_rule_refused_is_not_made_a_unit():
    model = TinyLM(layers=1)
    model.embed._fsdp_wrap = False
    rules = trainer_rules(ModuleTree.read(model), WrapPolicy())
    found = rows(plan_wrapping(model, rules, sizes=UnitSizes(most=1000)))
    assert "embed" not in found
    assert "head" in found


# --- Several dtypes. ---


def test_modules_of_another_dtype_are_units_of_their_own():
    model = TinyLM()
    model.to(torch.bfloat16)
    model.norm.float()
    model.blocks[1].norm.float()
    found = sized(model)
    assert found["norm"] == (20, True, "dtype float32")
    assert found["blocks.1.norm"] == (20, True, "dtype float32")
    assert found["blocks.1"][0] == 430
    assert "blocks.0.norm" not in found


def test_what_is_registered_on_the_unit_itself_stays():
    block = Block()
    block.scale = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    found = rows(plan_wrapping(nn.Sequential(block), [BLOCKS]))
    assert found["0"][0] == 10
    assert {found[f"0.{name}"][2] for name in ("norm", "up", "down")} == {"dtype float32"}


# --- Modules that stay in fp32. ---


def kept(model: nn.Module, patterns: Any, gathered_in: Any = torch.bfloat16) -> dict[str, Any]:
    rules = with_fp32_islands(ModuleTree.read(model), patterns, gathered_in, [BLOCKS, root_rule])
    units = plan_wrapping(model, rules).units
    return {u.module: u.mixed_precision for u in units if u.mixed_precision is not None}


def test_kept_modules_give_back_the_dtype_around_them():
    found = kept(TinyLM(layers=2), ["re:.*norm"])
    assert list(found) == ["blocks.0.norm", "blocks.1.norm", "norm"]
    assert {(p.param_dtype, p.reduce_dtype, p.output_dtype) for p in found.values()} == {
        ("fp32", "fp32", "torch.bfloat16")
    }


def test_units_inside_a_kept_module_are_kept_too():
    found = kept(nn.Sequential(nn.Sequential(Block()), Block()), ["0"])
    assert list(found) == ["0.0", "0"]
    assert (found["0.0"].param_dtype, found["0.0"].output_dtype) == ("fp32", None)


def test_nothing_to_keep_in_a_run_of_fp32():
    assert kept(TinyLM(), ["re:.*norm"], torch.float32) == {}
    assert kept(TinyLM(), ["re:.*norm"], None) == {}
    low = TinyLM().to(torch.bfloat16)
    assert len(kept(low, ["re:.*norm"], None)) == 4


def test_a_pattern_that_keeps_nothing_is_an_error():
    with pytest.raises(PlanError, match="keep_fp32 holds 'router', which matches no module name"):
        kept(TinyLM(), ["router"])


def test_what_hugging_face_lists_is_for_fp16_unless_strict():
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, vocab_size=31)
    model = transformers.T5ForConditionalGeneration(config)
    assert sorted(kept(model, None, torch.float16)) == [
        "decoder.block.0.layer.2.DenseReluDense.wo",
        "encoder.block.0.layer.1.DenseReluDense.wo",
    ]
    assert kept(model, None) == {}
    assert kept(model, [], torch.float16) == {}
    model._keep_in_fp32_modules_strict = ["final_layer_norm"]
    assert sorted(kept(model, None)) == [
        "decoder.final_layer_norm",
        "encoder.final_layer_norm",
    ]


def test_a_module_that_a_user_has_wrapped_is_kept_too():
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, vocab_size=31)
    model = transformers.T5ForConditionalGeneration(config)
    apply_activation_checkpointing(
        model, check_fn=lambda module: module is model.decoder.final_layer_norm
    )
    model._keep_in_fp32_modules_strict = ["final_layer_norm"]
    assert sorted(kept(model, None)) == ["decoder.final_layer_norm", "encoder.final_layer_norm"]
