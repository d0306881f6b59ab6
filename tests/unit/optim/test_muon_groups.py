"""Which parameters are hidden matrices, in models of many kinds; and what Muon refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DebertaConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    MixtralConfig,
    PersimmonConfig,
    Phi3Config,
    PretrainedConfig,
)

from composer_fsdp2 import ConfigError, Muon, PlanError
from composer_fsdp2.optim.muon.groups import Overrides, choose
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard.optimizer import check_optimizers
from tests.support.models import SIZES, TinyLM, llama_config


def algorithms(model: nn.Module, **overrides: Any) -> dict[str, str]:
    """Name of each parameter, and why it is where it is; `muon` for a hidden matrix."""
    found = choose(ModuleTree.read(model), Overrides(**overrides))
    return {
        name: choice.algorithm if choice.algorithm == "muon" else choice.reason
        for name, param in model.named_parameters()
        for choice in [found[id(param)]]
    }


def blocks(model: nn.Module) -> dict[str, Any]:
    found = choose(ModuleTree.read(model), Overrides())
    return {
        name: (found[id(param)].layout.blocks, found[id(param)].layout.transposed)
        for name, param in model.named_parameters()
        if found[id(param)].algorithm == "muon"
    }


def hf(config: PretrainedConfig) -> nn.Module:
    return AutoModelForCausalLM.from_config(config)


def test_a_language_model():
    assert algorithms(TinyLM(layers=1)) == {
        "embed.weight": "embedding",
        "blocks.0.norm.weight": "vector",
        "blocks.0.norm.bias": "vector",
        "blocks.0.up.weight": "muon",
        "blocks.0.up.bias": "vector",
        "blocks.0.down.weight": "muon",
        "blocks.0.down.bias": "vector",
        "norm.weight": "vector",
        "norm.bias": "vector",
        "head.weight": "head",
    }


@pytest.mark.parametrize(
    ("tie", "name", "reason"),
    [
        ("two modules", "embed.weight", "tied"),
        ("storage", "head.weight", "tied"),
        ("all layers", "blocks.0.mix.weight", "tied"),
        ("inside one module", "extra.there", "tied"),
        ("module registered twice", "blocks.0.up.weight", "muon"),
    ],
)
def test_ties(tie: str, name: str, reason: str):
    assert algorithms(TinyLM(tie))[name] == reason


def test_llama():
    found = algorithms(hf(llama_config(tied=False)))
    layer = "model.layers.0."
    assert found["lm_head.weight"] == "head"
    assert found["model.embed_tokens.weight"] == "embedding"
    hidden = [name for name, why in found.items() if name.startswith(layer) and why == "muon"]
    assert len(hidden) == 7


def test_gpt2_stores_its_matrices_transposed():
    own = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 17, "n_positions": 16}
    model = hf(GPT2Config(**own, bos_token_id=0, eos_token_id=0))
    found = algorithms(model)
    assert found["transformer.wpe.weight"] == "embedding"
    assert found["transformer.wte.weight"] == "tied"
    assert blocks(model) == {
        "transformer.h.0.attn.c_attn.weight": ((8, 8, 8), True),
        "transformer.h.0.attn.c_proj.weight": (None, True),
        "transformer.h.0.mlp.c_fc.weight": (None, True),
        "transformer.h.0.mlp.c_proj.weight": (None, True),
    }


def test_phi3_joins_its_projections():
    config = Phi3Config(**SIZES, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    found = blocks(hf(config))
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == ((12, 6, 6), False)
    assert found["model.layers.0.mlp.gate_up_proj.weight"] == ((20, 20), False)
    assert found["model.layers.0.mlp.down_proj.weight"] == (None, False)


HEADS = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 17}
OLD = {"n_embd": 16, "n_head": 4, "n_layer": 1, "vocab_size": 17, "n_positions": 8, "n_inner": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BY_TURNS: dict[str, tuple[PretrainedConfig, str, tuple[int, ...], int]] = {
    "bloom": (BloomConfig(**HEADS, **ENDS), "query_key_value", (16, 16, 16), 4),
    "codegen": (CodeGenConfig(**OLD, rotary_dim=2, **ENDS), "qkv_proj", (16, 16, 16), 4),
    "deberta": (DebertaConfig(**HEADS), "in_proj", (16, 16, 16), 4),
    "falcon of 7B": (
        FalconConfig(**HEADS, multi_query=True, **ENDS),
        "query_key_value",
        (16, 4, 4),
        1,
    ),
    "falcon of 40B": (
        FalconConfig(**HEADS, new_decoder_architecture=True, num_kv_heads=2, **ENDS),
        "query_key_value",
        (16, 8, 8),
        2,
    ),
    "falcon without groups": (
        FalconConfig(**HEADS, multi_query=False, **ENDS),
        "query_key_value",
        (16, 16, 16),
        4,
    ),
    "bigcode": (GPTBigCodeConfig(**OLD, multi_query=False, **ENDS), "c_attn", (16, 16, 16), 4),
    "bigcode with one key": (GPTBigCodeConfig(**OLD, **ENDS), "c_attn", (16, 4, 4), 1),
    "neox": (GPTNeoXConfig(**HEADS, **ENDS), "query_key_value", (16, 16, 16), 4),
    "neox japanese": (GPTNeoXJapaneseConfig(**HEADS, **ENDS), "query_key_value", (16,) * 3, 4),
    "persimmon": (PersimmonConfig(**HEADS, **ENDS), "query_key_value", (16, 16, 16), 4),
}


@pytest.mark.table("bloom", "bigcode")
@pytest.mark.parametrize("name", BY_TURNS)
def test_query_key_and_value_head_by_head(name: str):
    """Of one token attention is 1, so that gradients show which rows are the value's."""
    config, layer, sizes, turns = BY_TURNS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        model = AutoModel.from_config(config) if name == "deberta" else hf(config)
    found = choose(ModuleTree.read(model), Overrides())
    (weight,) = (p for n, p in model.named_parameters() if n.endswith(f"{layer}.weight"))
    layout = found[id(weight)].layout
    assert (layout.blocks, layout.turns) == (sizes, turns)
    torch.stack(list(model(torch.tensor([[3]]))[0].flatten())).square().sum().backward()
    outputs = layout.outputs(weight.shape)
    largest = [weight.grad.index_select(layout.axis, rows).abs().max() for rows in outputs]
    # On some processors queries and keys get what rounding leaves, 1e-9 of the others.
    used = [bool(one > 1e-6 * max(largest)) for one in largest]
    assert used == ([False, True, False] if name == "codegen" else [False, False, True])
    assert torch.cat(outputs).sort().values.tolist() == list(range(weight.shape[layout.axis]))


class GptOssExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 12))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 10))


def test_gate_and_up_column_by_column():
    model = GptOssExperts()
    layout = choose(ModuleTree.read(model), Overrides())[id(model.gate_up_proj)].layout
    gate, up = layout.outputs(model.gate_up_proj.shape)
    assert layout.axis == -1
    assert gate.tolist() == list(range(0, 12, 2))
    assert up.tolist() == list(range(1, 12, 2))


def test_a_router_is_none_and_experts_are():
    found = algorithms(hf(MixtralConfig(**SIZES, num_local_experts=4)))
    (router,) = {why for name, why in found.items() if name.endswith(".gate.weight")}
    assert router == "router"
    experts = [name for name in found if ".experts." in name]
    assert experts
    assert {found[name] for name in experts} == {"muon"}


class Lists(nn.Module):
    """Experts in one parameter, stored either way."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        up, down = ((10, 12), (6, 10)) if transposed else ((12, 10), (10, 6))
        self.gate_up_proj = nn.Parameter(torch.randn(4, *up))
        self.down_proj = nn.Parameter(torch.randn(4, *down))


@pytest.mark.parametrize("transposed", [True, False])
def test_lists_of_experts(transposed: bool):
    model = nn.ModuleDict({"experts": Lists(transposed)})
    assert blocks(model) == {
        "experts.gate_up_proj": ((6, 6), transposed),
        "experts.down_proj": (None, transposed),
    }


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wqkv = nn.Parameter(torch.randn(18, 10))
        self.out_proj = nn.Linear(10, 10)
        self.table = nn.Parameter(torch.randn(6, 10))


def test_other_layers():
    model = nn.ModuleDict(
        {
            "fused": Fused(),
            "attention": nn.MultiheadAttention(4, 2),
            "conv": nn.Conv1d(4, 4, 3),
            "rnn": nn.LSTM(4, 4),
            "experts": nn.Bilinear(4, 4, 4),
            "shared_expert_gate": nn.Linear(8, 1),
            "gate": nn.Linear(8, 16),
            "router": nn.Linear(8, 4),
        }
    )
    found = algorithms(model)
    assert blocks(model)["fused.Wqkv"] == ((10, 4, 4), False)
    assert blocks(model)["attention.in_proj_weight"] == ((4, 4, 4), False)
    assert found["fused.table"] == "no layer that is known to multiply"
    assert found["conv.weight"] == "no layer that is known to multiply"
    assert found["rnn.weight_ih_l0"] == "no layer that is known to multiply"
    assert found["shared_expert_gate.weight"] == "vector in the shape of a matrix"
    assert found["gate.weight"] == "muon"
    assert found["router.weight"] == "router"


def test_layers_that_are_one_module_stay_hidden():
    config = AlbertConfig(
        vocab_size=17,
        embedding_size=8,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=20,
    )
    found = algorithms(AlbertModel(config))
    assert found["encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"] == "muon"


def test_globs_decide():
    found = algorithms(TinyLM(layers=2), muon=("head.*",), adamw=("blocks.1.*",))
    assert found["head.weight"] == "muon"
    assert found["blocks.1.up.weight"] == "asked for"
    assert found["blocks.0.up.weight"] == "muon"


def test_blocks_by_glob():
    model = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(4, 6), "c": nn.Linear(4, 6)})
    optimizer = Muon(model, blocks={"a.*": 3, "b.*": (4, 2), "re:c[.]weight": None}, lr=0.1)
    assert [layout.blocks for layout in optimizer._layouts[0]] == [(2, 2, 2), (4, 2), None]
    in_turns = Muon(model, blocks={"a.*": {"turns": 2, "outputs": [2, 1]}})._layouts[0][0]
    assert (in_turns.blocks, in_turns.turns) == ((4, 2), 2)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"muon": "nothing.*"}, PlanError, "muon holds 'nothing.*', which matches no parameter"),
    ({"adamw": ["blocks.0.upp.weight"]}, PlanError, "Did you mean 'blocks.0.up.weight'"),
    ({"blocks": {"x": 2}}, PlanError, "blocks holds 'x'"),
    ({"blocks": {"blocks.0.up.weight": [7, 7]}}, PlanError, "add up to 14, but it has 20 outputs"),
    ({"blocks": {"blocks.0.up.weight": 0}}, PlanError, "add up to 0"),
    ({"blocks": {"*.up.weight": {"heads": 2}}}, PlanError, "Write, for 12 heads of 64 outputs"),
    ({"blocks": {"*.up.weight": {"turns": 3, "outputs": [7]}}}, PlanError, "add up to 21"),
    ({"muon": "blocks.0.norm.*"}, PlanError, r"its shape is \(10,\)"),
    ({"muon": "head.*", "adamw": "he*"}, PlanError, "globs of muon and of adamw"),
    ({"lr": -1}, ConfigError, "lr: -1 is invalid"),
    ({"adjust_lr_fn": "match_rms_adam"}, ConfigError, "Did you mean 'match_rms_adamw'"),
    ({"iteration_dtype": "fp16"}, ConfigError, "Expected bf16, fp32"),
    ({"ns_coefficients": (1, 2)}, ConfigError, "Write 3 numbers"),
    ({"momentum": "much"}, ConfigError, "momentum: 'much' is invalid"),
]


@pytest.mark.table(
    "settings2-PlanError-blocks holds 'x'",
    "settings3-PlanError-add up to 14, but it has 20 outputs",
    "settings4-PlanError-add up to 0",
    "settings5-PlanError-Write, for 12 heads of 64 outputs",
    "settings6-PlanError-add up to 21",
    "settings7-PlanError-its shape is \\\\(10,\\\\)",
    "settings8-PlanError-globs of muon and of adamw",
    "settings9-ConfigError-lr: -1 is invalid",
    "settings10-ConfigError-Did you mean 'match_rms_adamw'",
    "settings11-ConfigError-Expected bf16, fp32",
    "settings12-ConfigError-Write 3 numbers",
    "settings13-ConfigError-momentum: 'much' is invalid",
)
@pytest.mark.parametrize(("settings", "kind", "text"), REFUSED)
def test_what_it_refuses(settings: dict[str, Any], kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        Muon(TinyLM(layers=1), **settings)


def test_groups_of_one_algorithm():
    model = TinyLM(layers=1)
    vectors = [param for param in model.parameters() if param.ndim < 2]
    matrices = [model.blocks[0].up.weight]
    mixed = {"params": [*matrices, *vectors[:2]], "algorithm": "muon"}
    with pytest.raises(PlanError, match=r"Group 0 mixes both algorithms.* parameter 1 \(10,\)"):
        Muon([mixed])
    with pytest.raises(PlanError, match="Group 1 gives to Muon what is no matrix"):
        Muon(
            [
                {"params": matrices, "algorithm": "muon"},
                {"params": vectors, "algorithm": "muon"},
            ]
        )
    with pytest.raises(ConfigError, match="has 'blocks' without algorithm: muon"):
        Muon([{"params": matrices, "blocks": 2}])
    with pytest.raises(ConfigError, match="Did you mean 'muon'"):
        Muon([{"params": matrices, "algorithm": "muons"}])
    named = [(name, p) for name, p in model.named_parameters() if "norm" in name]
    with pytest.raises(PlanError, match=r"'blocks.0.norm.weight' \(10,\)"):
        Muon([{"params": named, "algorithm": "muon"}])


def test_settings_of_adamw():
    model = TinyLM(layers=1)
    optimizer = Muon(model, lr=0.02, adamw_lr=1e-3, adamw_weight_decay=0.0)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.02, 0.1),
        (1e-3, 0.0),
    ]
    own = [{"params": list(model.parameters()), "lr": 0.5}]
    late = Muon(own, adamw_lr=1e-3)
    late.assign_groups(late.plan_groups(ModuleTree.read(model)))
    assert [g["lr"] for g in late.param_groups] == [0.5, 0.5]


def test_the_number_of_groups_stays_when_the_model_comes_late():
    model = TinyLM(layers=1)
    groups = [
        {"params": list(model.blocks.parameters())},
        {"params": list(model.embed.parameters())},
    ]
    groups.append({"params": [*model.norm.parameters(), *model.head.parameters()]})
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.01)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 4, 1, 0, 1, 2]
    optimizer.assign_groups(optimizer.plan_groups(ModuleTree.read(model)))
    found = [(g["algorithm"], len(g["params"]), g["lr"]) for g in optimizer.param_groups]
    assert found == [
        ("muon", 2, 0.1),
        ("adamw", 4, 0.01),
        ("muon", 0, 0.1),
        ("adamw", 1, 0.01),
        ("muon", 0, 0.1),
        ("adamw", 3, 0.01),
    ]
    assert all("undecided" not in group for group in optimizer.param_groups)


def test_a_schedule_is_not_left_behind():
    model = TinyLM(layers=1)
    optimizer = Muon(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.assign_groups(optimizer.plan_groups(ModuleTree.read(model)))
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert len(Muon(model.head).param_groups) == 1


def test_an_empty_group_keeps_its_settings():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "table": nn.Embedding(4, 2)})
    optimizer = Muon(model.parameters(), lr=0.1)
    optimizer.decide(model)
    state = optimizer.state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [0, 2]
    state["param_groups"][0] = {"params": []}
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_without_the_model_it_needs_names():
    model = TinyLM(layers=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(PlanError, match="does not know which of its matrices are hidden"):
        Muon(model.parameters()).step()
    by_names, by_model = Muon(model.named_parameters()), Muon(model)
    by_names.step()
    assert [g["params"] == h["params"] for g, h in _pairs(by_names, by_model)] == [True, True]
    assert by_names.param_groups[0]["param_names"] == ["blocks.0.up.weight", "blocks.0.down.weight"]


def _pairs(a: Muon, b: Muon) -> list[tuple[Any, Any]]:
    """Groups by ids: parameters that are compared are tensors of answers."""
    ids = [[{"params": [id(p) for p in g["params"]]} for g in o.param_groups] for o in (a, b)]
    return list(zip(*ids, strict=True))


def test_state_is_there_for_every_trained_parameter_at_once():
    model = TinyLM(layers=1)
    model.norm.requires_grad_(False)
    optimizer = Muon(model)
    optimizer.step()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert {id(param) for param in optimizer.state} == {id(param) for param in trained}


def test_copies_and_state_dicts():
    model = TinyLM(layers=1)
    optimizer = Muon(model, blocks={"blocks.0.up.weight": 2}, iteration_dtype="fp32")
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert loaded._layouts == optimizer._layouts
    optimizer.step()
    again = Muon(copy.deepcopy(model))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["iteration_dtype"] == "fp32"
    again.step()


def test_torchs_own_is_refused_on_shards():
    cls = getattr(torch.optim, "Muon", None)
    if cls is None:
        pytest.skip("torch has no Muon")
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(PlanError, match=r"Use composer_fsdp2.Muon\(model"):
        check_optimizers([cls(model.parameters())], ModuleTree.read(model), gives_values=True)
    check_optimizers([Muon(model)], ModuleTree.read(model), gives_values=True)
