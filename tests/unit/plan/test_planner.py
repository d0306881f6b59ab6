"""Which modules become units and who owns what: tables for known models, properties for all."""

from __future__ import annotations

import itertools
from collections import Counter
from textwrap import dedent

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer_fsdp2.config.wrapping import PrecisionSpec, UnitSettings, WrapPolicy
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward, tied_groups
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_class, by_hf_blocks, by_name, root_rule
from composer_fsdp2.plan.unit_size import FROZEN_MAY_DIFFER
from composer_fsdp2.plan.wrap_plan import Decision, Rule, ShardUnit, WrapPlan
from composer_fsdp2.prepare.conventions import trainer_rules
from tests.support.models import (
    TIES,
    AcrossChildren,
    Block,
    Grandchild,
    SharedBlock,
    TinyComposer,
    TinyLM,
)

BLOCKS = by_class(Block, SharedBlock)
APART = [BLOCKS, by_name("embed"), by_name("head")]
"""blocks, embedding and head as units of their own"""


def unit_of(plan: WrapPlan, name: str) -> ShardUnit:
    (unit,) = [unit for unit in plan.units if unit.module == name]
    return unit


def owners(plan: WrapPlan) -> dict[str, str]:
    return {name: unit.module for name, unit in plan.owner_of().items()}


def error_of(model: nn.Module, rules: list[Rule], **kwargs) -> str:
    with pytest.raises(PlanError) as caught:
        plan_wrapping(model, rules, **kwargs)
    return str(caught.value)


# --- golden tables ---

TABLES = {
    "none": """
        unit      params  elements  reshard  reason
        embed          1       170  true     name embed
        blocks.0       6       450  true     class Block
        blocks.1       6       450  true     class Block
        head           1       170  true     name head
        <root>         2        20  false    root
        """,
    "two modules": """
        unit      params  elements  reshard  reason
        blocks.0       6       450  true     class Block
        blocks.1       6       450  true     class Block
        <root>         4       190  false    holds tied 'embed.weight'
        tied: embed.weight = head.weight
        """,
    "storage": """
        unit      params  elements  reshard  reason
        blocks.0       6       450  true     class Block
        blocks.1       6       450  true     class Block
        <root>         4       190  false    holds tied 'embed.weight'
        tied: embed.weight = head.weight
        """,
    "all layers": """
        unit      params  elements  reshard  reason
        embed          1       170  true     name embed
        blocks.0       6       450  true     class SharedBlock
        blocks.1       6       450  true     class SharedBlock
        head           1       170  true     name head
        <root>         4       120  false    holds tied 'blocks.0.mix.weight'
        tied: blocks.0.mix.weight = blocks.1.mix.weight
        """,
    "inside one module": """
        unit      params  elements  reshard  reason
        embed          1       170  true     name embed
        blocks.0       6       450  true     class Block
        blocks.1       6       450  true     class Block
        head           1       170  true     name head
        <root>         4       120  false    root
        tied: extra.there = extra.back
        """,
    "module registered twice": """
        unit      params  elements  reshard  reason
        embed          1       170  true     name embed
        blocks.0      12       450  true     class Block
        blocks.1       6       450  true     class Block
        head           1       170  true     name head
        <root>         2        20  false    root
        tied: blocks.0.norm.weight = last.norm.weight
        tied: blocks.0.norm.bias = last.norm.bias
        tied: blocks.0.up.weight = last.up.weight
        tied: blocks.0.up.bias = last.up.bias
        tied: blocks.0.down.weight = last.down.weight
        tied: blocks.0.down.bias = last.down.bias
        """,
}


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_table_of_every_layout_of_ties(tie, device):
    with torch.device(device):
        model = TinyLM(tie, layers=2)
    assert str(plan_wrapping(model, APART)) == dedent(TABLES[tie]).strip()


def test_table_of_a_composer_model():
    model = TinyComposer(layers=2)
    plan = plan_wrapping(model, trainer_rules(ModuleTree.read(model), WrapPolicy()))
    assert str(plan) == dedent("""\
        unit          params  elements  reshard  reason
        net.blocks.0       6       450  true     fsdp_wrap_fn
        net.blocks.1       6       450  true     fsdp_wrap_fn
        net                4       360  false    direct child""")


def test_table_of_a_tie_across_direct_children():
    model = AcrossChildren()
    plan = plan_wrapping(model, trainer_rules(ModuleTree.read(model), WrapPolicy()))
    assert str(plan) == dedent("""\
        unit    params  elements  reshard  reason
        body        12       900  true     direct child
        <root>       2       170  false    holds tied 'embed.weight'
        tied: embed.weight = head.weight""")


def test_a_grandchild_registered_again():
    model = Grandchild()
    plan = plan_wrapping(model, trainer_rules(ModuleTree.read(model), WrapPolicy()))
    assert [unit.module for unit in plan.units] == [
        *(f"net.blocks.{n}" for n in range(3)),
        "net",
        "",
    ]
    owner = owners(plan)
    assert owner["net.blocks.1.up.weight"] == owner["inner.1.up.weight"] == "net.blocks.1"
    assert owner["net.embed.weight"] == owner["embedding.weight"] == ""
    assert plan.units[-1].numel == 170


def hf(kind, config) -> nn.Module:
    with torch.device("meta"):
        return kind.from_config(config)


def test_table_of_gpt2():
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32, n_positions=16)
    tree = ModuleTree.read(hf(transformers.AutoModelForCausalLM, config))
    assert str(plan_wrapping(tree, [root_rule, by_hf_blocks(tree)])) == dedent("""\
        unit             params  elements  reshard  reason
        transformer.h.0      12       872  true     _no_split_modules
        transformer.h.1      12       872  true     _no_split_modules
        <root>                5       400  false    root
        tied: transformer.wte.weight = lm_head.weight""")


def test_table_of_llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    tree = ModuleTree.read(hf(transformers.AutoModelForCausalLM, config))
    assert str(plan_wrapping(tree, [root_rule, by_hf_blocks(tree)])) == dedent("""\
        unit            params  elements  reshard  reason
        model.layers.0       9       656  true     _no_split_modules
        model.layers.1       9       656  true     _no_split_modules
        <root>               3       520  false    root""")


# --- ties ---


def test_a_tie_inside_one_unit_needs_nothing():
    plan = plan_wrapping(TinyLM("inside one module"), [root_rule, by_name("extra")])
    assert unit_of(plan, "extra").params == ("extra.there", "extra.back")
    assert unit_of(plan, "extra").numel == 100


def test_the_parent_a_tie_moves_to_need_not_be_the_root():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    model = nn.Sequential(inner, nn.Linear(4, 4))
    plan = plan_wrapping(model, [by_class(nn.Linear)])
    assert owners(plan) == {
        "0.0.weight": "0",
        "0.0.bias": "0.0",
        "0.1.weight": "0",
        "0.1.bias": "0.1",
        "1.weight": "1",
        "1.bias": "1",
    }
    assert unit_of(plan, "0").reason == "holds tied '0.0.weight'"
    assert unit_of(plan, "0").top_level
    assert not unit_of(plan, "0.0").top_level


def test_a_tie_moves_past_containers():
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
            self.towers[1].weight = self.towers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.towers[1](self.towers[0](x))

    plan = plan_wrapping(nn.Sequential(Towers()), [by_class(nn.Linear)])
    assert [unit.module for unit in plan.units] == ["0"]


def test_a_unit_made_for_one_tie_can_cut_another():
    """a and b need `0`, which then puts c's two names on different sides."""
    inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    inner[1].weight = inner[0].weight
    model = nn.Sequential(nn.Sequential(inner, nn.LayerNorm(3)), nn.Linear(3, 3))
    model[0][1].weight = inner[2].weight
    plan = plan_wrapping(model, [root_rule, by_class(nn.Linear)])
    owner = owners(plan)
    assert owner["0.0.0.weight"] == owner["0.0.1.weight"] == "0.0"
    assert owner["0.0.2.weight"] == owner["0.1.weight"] == "0"


def test_units_that_only_held_a_lifted_weight_are_gone():
    plan = plan_wrapping(TinyLM("two modules"), APART)
    assert {"embed", "head"}.isdisjoint(owners(plan).values())
    assert not any(unit.module in ("embed", "head") for unit in plan.units)


@pytest.mark.parametrize("tie", ["two modules", "storage"])
def test_forbidden_ties_name_both_units_and_the_weight(tie):
    message = error_of(TinyLM(tie), APART, tied_weights="error")
    assert message == (
        "'embed', 'head' were all chosen as FSDP units but share the parameter 'embed.weight' "
        "(also 'head.weight'). Sharding them apart would untie them. Choose fewer of them, or set "
        "`tied_weights: lift` to shard the weight with their parent."
    )


def test_forbidden_ties_with_no_unit_around_them():
    model = TinyLM("two modules")
    message = error_of(model, [*APART, by_name("norm")], tied_weights="error")
    assert message.startswith("'embed', 'head' were all chosen as FSDP units but share")


def test_ties_that_need_no_lifting_are_not_forbidden():
    for tie in ("inside one module", "module registered twice"):
        model = TinyLM(tie)
        strict = plan_wrapping(model, [root_rule, BLOCKS], tied_weights="error")
        assert strict == plan_wrapping(model, [root_rule, BLOCKS])


# --- parameters that no rule selects ---


def test_parameters_no_rule_covers_belong_to_the_root():
    plan = plan_wrapping(TinyLM(layers=1), [BLOCKS])
    assert unit_of(plan, "").params == ("embed.weight", "norm.weight", "norm.bias", "head.weight")
    assert unit_of(plan, "").reason == "root"
    assert plan_wrapping(nn.Linear(2, 2), []).units[0].module == ""


def test_no_root_unit_when_the_rules_cover_everything():
    plan = plan_wrapping(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [by_class(nn.Linear)])
    assert [unit.module for unit in plan.units] == ["0", "1"]
    assert all(unit.top_level for unit in plan.units)


def test_a_model_without_parameters_has_no_units():
    assert plan_wrapping(nn.Sequential(nn.ReLU()), [root_rule]).units == ()


def test_the_first_answer_wins_and_no_is_an_answer():
    rules = [by_name("blocks.0"), lambda name, _: Decision(wrap=False, reason="no"), BLOCKS]
    plan = plan_wrapping(TinyLM(), rules)
    assert [unit.module for unit in plan.units] == ["blocks.0", ""]


def test_a_root_without_parameters_still_holds_its_units_together():
    plan = plan_wrapping(nn.Sequential(Block(), Block()), [root_rule, BLOCKS])
    assert [(unit.module, unit.numel) for unit in plan.units] == [
        ("0", 450),
        ("1", 450),
        ("", 0),
    ]


# --- what cannot be ---


def test_containers_are_refused():
    message = error_of(TinyLM(), [root_rule, by_name("blocks")])
    assert message.startswith("'blocks' (ModuleList) was chosen by name blocks")
    assert "Choose the modules inside it." in message


@pytest.mark.parametrize("rules", [[], [by_name("0")], [root_rule]])
def test_a_root_that_is_never_called_is_refused(rules):
    """Nobody would gather what belongs to it."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert error_of(model, rules).startswith("The model (ModuleList) was chosen by root")


def test_scalars_are_refused():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    message = error_of(model, [])
    assert message.startswith("'scale' is a scalar parameter")
    assert "shape (1,)" in message


def test_non_contiguous_parameters_are_refused():
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.zeros(2, 3).t())
    message = error_of(model, [])
    assert "'weight' is not contiguous (shape (3, 2), stride (1, 3))" in message


def mixed_linear() -> nn.Linear:
    linear = nn.Linear(2, 2)
    linear.bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    return linear


def test_mixed_dtypes_of_one_module_are_refused():
    message = error_of(nn.Sequential(mixed_linear(), nn.Linear(2, 2)), [root_rule])
    assert message.startswith("The root unit holds parameters of different dtypes")
    assert "float32 ('0.weight') and bfloat16 ('0.bias')" in message


def test_frozen_parameters_may_have_another_dtype_where_torch_lets_them():
    linear = mixed_linear()
    linear.bias.requires_grad_(False)
    if FROZEN_MAY_DIFFER:
        assert len(plan_wrapping(linear, [root_rule]).units) == 1
    else:
        assert "of different dtypes" in error_of(linear, [root_rule])


def test_a_top_level_unit_with_nothing_to_train_is_freed():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    model[0].requires_grad_(False)
    both = by_name("re:[01]")
    reshard = [u.reshard_after_forward for u in plan_wrapping(model, [both]).units]
    assert reshard == [True, False]
    asked = plan_wrapping(model, [both], reshard_after_forward=False)
    assert [u.reshard_after_forward for u in asked.units] == [False, False]


def test_all_obstacles_at_once():
    model = nn.Sequential(nn.Linear(2, 2), mixed_linear(), nn.ModuleList())
    model.scale = nn.Parameter(torch.tensor(1.0))
    message = error_of(model, [root_rule, by_name("2")], ignored_params=["3.*"])
    assert message.startswith("The model cannot be divided into FSDP units, for 4 reasons:\n  1. ")
    for name in ("'2' (ModuleList)", "'3.*'", "'scale'", "dtypes"):
        assert name in message


# --- ignored parameters ---


def test_ignored_parameters_belong_to_no_unit():
    model = TinyLM()
    model.embed.requires_grad_(False)
    plan = plan_wrapping(model, [root_rule, BLOCKS], ignored_params=["emb*"])
    assert plan.ignored == ("embed.weight",)
    assert "embed.weight" not in plan.owner_of()
    assert str(plan).endswith("ignored: embed.weight")


def test_ignored_parameters_may_be_what_is_refused_elsewhere():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    assert plan_wrapping(model, [], ignored_params=["scale"]).ignored == ("scale",)


@pytest.mark.parametrize("tie", ["two modules", "storage"])
def test_one_ignored_name_is_enough_for_a_tied_weight(tie):
    model = TinyLM(tie)
    for module in (model.embed, model.head):
        module.requires_grad_(False)
    plan = plan_wrapping(model, [root_rule, BLOCKS], ignored_params=["head.*"])
    assert plan.ignored == ("embed.weight", "head.weight")
    assert plan.tied == ()


def test_trainable_parameters_cannot_be_ignored():
    message = error_of(TinyLM("two modules"), [root_rule], ignored_params=["head.weight"])
    assert "'embed.weight' is left out by ignored_params and trainable" in message
    assert "'head.weight' is left out by ignored_params and trainable" in message


def test_a_pattern_that_ignores_nothing_is_an_error():
    message = error_of(TinyLM(), [root_rule], ignored_params=["embd.weight"])
    assert "'embd.weight' of ignored_params matches no parameter" in message
    assert "Did you mean 'embed.weight'?" in message


# --- settings of units ---


@pytest.mark.parametrize(
    ("run", "own", "top", "inner"),
    [
        ("auto", None, False, True),
        (True, None, True, True),
        (False, None, False, False),
        (2, None, False, 2),
        ("auto", True, True, True),
        ("auto", False, False, False),
        ("auto", 4, 4, 4),
        (False, "auto", False, True),
        (True, "auto", False, True),
        (2, 4, 4, 4),
        (2, True, True, True),
    ],
)
def test_what_reshard_means_for_top_level_and_inner_units(run, own, top, inner):
    settings_ = UnitSettings(reshard_after_forward=own)
    rules: list[Rule] = [
        lambda name, _: Decision(wrap=True, reason="top", settings=settings_) if not name else None,
        by_class(Block, settings=settings_),
    ]
    plan = plan_wrapping(TinyLM(), rules, reshard_after_forward=run)
    assert unit_of(plan, "").reshard_after_forward == top
    assert type(unit_of(plan, "").reshard_after_forward) is type(top)
    assert unit_of(plan, "blocks.1").reshard_after_forward == inner
    assert unit_of(plan, "").top_level
    assert not unit_of(plan, "blocks.1").top_level


def test_units_keep_their_own_precision():
    spec = PrecisionSpec(param_dtype="bf16")
    rule = by_name("blocks.1", UnitSettings(mixed_precision=spec))
    plan = plan_wrapping(TinyLM(), [rule, BLOCKS])
    assert unit_of(plan, "blocks.1").mixed_precision == spec
    assert unit_of(plan, "blocks.0").mixed_precision is None
    assert plan != plan_wrapping(TinyLM(), [BLOCKS])


# --- the plan as a value ---


def test_a_plan_holds_names_and_numbers_alone():
    plan = plan_wrapping(TinyLM("two modules", layers=1), APART)
    block = tuple(f"blocks.0.{m}.{p}" for m in ("norm", "up", "down") for p in ("weight", "bias"))
    rest = ("embed.weight", "norm.weight", "norm.bias", "head.weight")
    assert plan == WrapPlan(
        units=(
            ShardUnit(
                module="blocks.0",
                params=block,
                numel=450,
                reshard_after_forward=True,
                reason="class Block",
            ),
            ShardUnit(
                module="",
                params=rest,
                numel=190,
                reshard_after_forward=False,
                reason="holds tied 'embed.weight'",
                top_level=True,
            ),
        ),
        tied=(("embed.weight", "head.weight"),),
    )


def test_different_plans_are_told_apart_as_text():
    plans = [plan_wrapping(TinyLM(tie), APART) for tie in TIES if tie != "storage"]
    plans.append(plan_wrapping(TinyLM(), APART, reshard_after_forward=False))
    plans.append(plan_wrapping(TinyLM(), [BLOCKS]))
    assert len({str(plan) for plan in plans}) == len(plans)


def test_models_of_two_seeds_have_one_plan():
    torch.manual_seed(1)
    one = plan_wrapping(TinyLM("all layers"), APART)
    torch.manual_seed(2)
    assert one == plan_wrapping(TinyLM("all layers"), APART)


def test_activation_wrappers_change_nothing():
    rules = [root_rule, by_name("blocks.*"), by_name("head")]
    expected = plan_wrapping(TinyLM("two modules"), rules)
    model = TinyLM("two modules")
    for index in range(3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    assert plan_wrapping(model, rules) == expected


def test_every_rule_is_asked_once_for_every_module():
    """Planning stays linear: no module is looked at twice, whatever the ties."""
    model = TinyLM("all layers", layers=40)
    model.last = model.blocks[7]
    asked: Counter[int] = Counter()

    def count(_name: str, module: nn.Module) -> None:
        asked[id(module)] += 1

    plan_wrapping(model, [count, BLOCKS])
    assert asked == Counter({id(module): 1 for module in model.modules()})


# --- properties ---


class Node(nn.Module):
    """A module with some parameters and children; `called` says whether it has a forward."""

    def __init__(self, params: int, children: list[nn.Module]) -> None:
        super().__init__()
        for number in range(params):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(1 + number)))
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)


class Called(Node):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@st.composite
def models(draw) -> nn.Module:
    """Random trees with modules registered twice and weights tied by identity or by storage."""
    made: list[nn.Module] = []

    def node(depth: int) -> nn.Module:
        count = draw(st.integers(0, 3 if depth < 3 else 0))
        children = [
            draw(st.sampled_from(made))
            if made and draw(st.integers(0, 7)) == 0
            else node(depth + 1)
            for _ in range(count)
        ]
        kind = Called if depth == 0 or draw(st.integers(0, 3)) else Node
        made.append(kind(draw(st.integers(0, 2)), children))
        return made[-1]

    root = node(0)
    places = [(m, name) for m in root.modules() for name in m._parameters]
    for _ in range(draw(st.integers(0, 4)) if places else 0):
        (module, name), (other, other_name) = (draw(st.sampled_from(places)) for _ in range(2))
        param = other._parameters[other_name]
        assert param is not None
        module._parameters[name] = nn.Parameter(param.data) if draw(st.booleans()) else param
    return root


def random_rule(chosen: frozenset[str]) -> Rule:
    return lambda name, module: (
        Decision(wrap=True, reason="chosen") if name in chosen and has_forward(module) else None
    )


@st.composite
def cases(draw) -> tuple[nn.Module, list[Rule]]:
    model = draw(models())
    names = [name for name, _ in model.named_modules()]
    return model, [random_rule(draw(st.frozensets(st.sampled_from(names))))]


def above(tree: ModuleTree, entry: int) -> list[nn.Module]:
    """The module of a entry and all above it on that path."""
    line = []
    while entry >= 0:
        line.append(tree.paths[entry].module)
        entry = tree.paths[entry].parent
    return line


@given(cases())
@settings(max_examples=60)
def test_every_parameter_has_exactly_one_owner(case):
    model, rules = case
    plan = plan_wrapping(model, rules)
    names = [name for unit in plan.units for name in unit.params]
    assert sorted(names) == sorted(
        name for name, _ in model.named_parameters(remove_duplicate=False)
    )
    assert len(names) == len(set(names))
    ties = {name: group[0] for group in tied_groups(model) for name in group}
    numel = {ties.get(n, n): p.numel() for n, p in model.named_parameters(remove_duplicate=False)}
    assert sum(unit.numel for unit in plan.units) == sum(numel.values())


@given(cases())
@settings(max_examples=60)
def test_all_names_of_a_tie_have_one_owner_that_is_called_before_any_use(case):
    model, rules = case
    plan = plan_wrapping(model, rules)
    tree = ModuleTree.read(model)
    modules = {entry.path: entry.module for entry in tree.paths}
    owner = owners(plan)
    visit_of = {ref.name: ref.path_index for ref in tree.params}
    assert plan.tied == tied_groups(model)
    for group in plan.tied:
        assert len({owner[name] for name in group}) == 1, group
    for name, unit in owner.items():
        assert modules[unit] in above(tree, visit_of[name])
        assert has_forward(modules[unit])
    for group in plan.tied:
        lines = [above(tree, visit_of[name]) for name in group]
        common = [m for m in lines[0] if has_forward(m) and all(m in line for line in lines)]
        assert modules[owner[group[0]]] in common


@given(cases())
@settings(max_examples=60)
def test_units_are_called_and_children_come_before_parents(case):
    model, rules = case
    plan = plan_wrapping(model, rules)
    tree = ModuleTree.read(model)
    modules = dict(tree.modules())
    order = {id(modules[unit.module]): n for n, unit in enumerate(plan.units)}
    assert len(order) == len(plan.units)
    inner = set()
    for entry in range(len(tree.paths)):
        for below, over in itertools.pairwise(m for m in above(tree, entry) if id(m) in order):
            assert order[id(below)] < order[id(over)]
            inner.add(order[id(below)])
    assert {n for n, unit in enumerate(plan.units) if not unit.top_level} == inner


@given(cases())
@settings(max_examples=30)
def test_planning_twice_gives_one_plan(case):
    model, rules = case
    before = list(model.state_dict())
    first, second = plan_wrapping(model, rules), plan_wrapping(model, rules)
    assert first == second
    assert str(first) == str(second)
    assert list(model.state_dict()) == before


@given(cases())
@settings(max_examples=30)
def test_forbidding_ties_is_an_error_or_the_same_plan(case):
    model, rules = case
    lifted = plan_wrapping(model, rules)
    if any(unit.reason.startswith("holds tied") for unit in lifted.units):
        assert "tied_weights: lift" in error_of(model, rules, tied_weights="error")
        return
    try:
        strict = plan_wrapping(model, rules, tied_weights="error")
    except PlanError:
        assert lifted.tied  # a parent that was a unit anyway took the weight
    else:
        assert strict == lifted


def test_the_unit_is_what_the_user_compiled():
    """Its hooks are around the graph of the block, which they would cut in two from inside."""
    model = TinyLM(layers=2)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    plan = plan_wrapping(model, [by_class(Block), root_rule])
    names = [unit.module for unit in plan.units if unit.module]
    assert [model.get_submodule(name) for name in names] == list(model.blocks)
