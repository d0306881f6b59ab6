"""Everything that stands beside tensor parallelism: equal to one process, or refused by name."""

from __future__ import annotations

import ast
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composer import algorithms as A
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import install, prepare_fully_shard
from composer_fsdp2.blocks.fp8 import Float8Linear, Float8Plan
from composer_fsdp2.blocks.transformation import ModelFacts
from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.codec import ShardPosition, Stored, decode, encode
from composer_fsdp2.optim.state import SMALL
from composer_fsdp2.parallel.tensor.transformation import TensorParallel
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import WrapPlan
from tests.dist.test_tensor_parallel import (
    DEGREE,
    SIZE,
    SIZES,
    VOCAB,
    assert_same_gradients,
    assert_same_state,
    global_batches,
    gpt2,
    llama,
    loss_of,
    mean,
    mpt,
    of_this_group,
    phi3,
    prepared,
    qwen3,
)
from tests.dist.test_tensor_trainer import FORMS, adamw, built, samples, trained_alone
from tests.support.experts import STACKED
from tests.support.pairs import parametrize_by_turns
from tests.support.parity import OPTIMIZERS, TOLERANCE, assert_close, assert_same_values, full
from tests.support.tensor_pairs import METHODS, MODELS, SETTINGS, TRAINER, Pair
from tests.support.training import largest_difference, trainer_for, weights

VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
GRADS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
OWN = {name: pair for name, pair in SETTINGS.items() if not pair.test}
EQUAL = [name for name, pair in OWN.items() if not pair.refused]
REFUSED = [name for name, pair in OWN.items() if pair.refused]
STEPS = 6


def test_each_row_of_the_table_is_a_test():
    here = Path(__file__).parent
    for pair in (*SETTINGS.values(), *TRAINER.values(), *MODELS.values(), *METHODS.values()):
        if pair.test:
            file, _, function = pair.test.partition("::")
            tree = ast.parse((here / file).read_text())
            assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        else:
            assert pair.settings


def skip_where_missing(pair: Pair) -> None:
    if pair.needs == "torchao":
        pytest.importorskip("torchao.float8", reason="needs the extra fp8")
    elif pair.needs and not hasattr(FSDPModule, pair.needs):
        pytest.skip(f"torch has no {pair.needs}")


def groups_together(
    oracle: nn.Module,
    model: nn.Module,
    pair: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    steps: int = STEPS,
) -> None:
    """Trains both; one process sees the batch of one group after the other."""
    groups = dist.get_world_size() // DEGREE
    for step, ids in enumerate(global_batches(steps)):
        expected = torch.zeros(())
        for part in ids.chunk(groups):
            loss = loss_of(oracle, part) / groups
            loss.backward()
            expected = expected + loss.detach()
        got = loss_of(model, of_this_group(ids))
        got.backward()
        assert_close(f"loss of step {step}", expected, mean(got))
        if step == 0:
            assert_same_gradients(oracle, model)
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)


@pytest.mark.table
@VIEWS
@GRADS
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", EQUAL)
def test_settings_that_are_equal_to_one_process(name: str):
    given = SETTINGS[name]
    skip_where_missing(given)
    in_fp8 = "fp8" in given.settings
    # Where a cast is a matter of rounding, AdamW makes a full step of it.
    optimizer = OPTIMIZERS["sgd" if in_fp8 else "adamw"]
    torch.manual_seed(0)
    model: nn.Module = (
        llama(hidden_size=32, intermediate_size=64, head_dim=8) if in_fp8 else qwen3()
    )
    oracle = copy.deepcopy(model)
    if in_fp8:
        convert(oracle, given.settings["fp8"].get("recipe", "tensorwise"))
    pair = (optimizer(oracle.parameters()), optimizer(model.parameters()))
    prepared(model, pair[1], **given.settings)
    groups_together(oracle, model, pair)
    assert_same_state(*pair)


def convert(model: nn.Module, recipe: Any) -> None:
    """Gives the layers of all MLPs torchao's forward."""
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    names = tuple(name for name in linear if ".mlp." in name)
    spec = Float8Spec(emulate=True, recipe=recipe)
    plan = Float8Plan(modules=names, gathered=(), settings=spec)
    Float8Linear().apply(ModuleTree.read(model), plan)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(name: str):
    given, model = SETTINGS[name], llama()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises((ConfigError, PlanError), match=given.refused):
        prepared(model, None, **given.settings)
    assert {name: id(param) for name, param in model.named_parameters()} == before


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_islands_compute_in_fp32():
    """In bf16 one process cannot be met to the last digit: FSDP2 alone is what it is held to."""
    low = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}
    settings = {"mixed_precision": low, "keep_fp32": ["*norm*"]}
    torch.manual_seed(0)
    models = [llama(), llama()]
    models[1].load_state_dict(models[0].state_dict())
    seen: list[torch.dtype] = []
    prepare_fully_shard(models[0], None, settings)
    prepared(models[1], None, **settings)
    models[1].get_submodule("model.layers.0.input_layernorm").register_forward_hook(
        lambda module, _inputs, _output: seen.append(module.weight.dtype)
    )
    ids = global_batches(1)[0]
    own = (ids.chunk(4)[dist.get_rank()], of_this_group(ids))
    losses = [loss_of(model, part) for model, part in zip(models, own, strict=True)]
    for loss in losses:
        loss.backward()
    assert seen == [torch.float32]
    assert (mean(losses[0]) - mean(losses[1])).abs() < 5e-3
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert one.grad is not None
        assert other.grad is not None
        assert (full(one.grad) - full(other.grad)).abs().max() < 2e-2, name


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_state_in_bf16_has_the_bits_of_one_process():
    """Which way a moment is rounded depends on all its digits, and on its place.

    Gradients that differ in the last digit are therefore rounded apart. So one process is given the
    gradients of the group, and must keep the same bits.
    """
    torch.manual_seed(0)
    # The embedding is whole on each rank of a group, and large enough for the setting.
    model, rate = wide_gpt2(), 0.02
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    whole = {"degree": 2, "layer_plan": {"lm_head": "whole"}}
    prepared(model, optimizer, tensor_parallel=whole, optimizer_state={"dtype": "bf16"})
    values = [full(param).clone() for param in model.parameters()]
    kept: list[Stored | None] = [None] * len(values)
    for ids in global_batches(3):
        loss_of(model, of_this_group(ids)).backward()
        for number, param in enumerate(model.parameters()):
            assert param.grad is not None
            moment = full(param.grad).clone()
            place = ShardPosition(len(moment), moment[0].numel(), 0, moment[0].numel())
            if (before := kept[number]) is not None:
                moment += 0.9 * decode(before, place)
            form = "bf16" if moment.numel() >= SMALL else "own"
            kept[number] = encode(form, moment, place, 0, "momentum_buffer")
            values[number] -= rate * moment
        optimizer.step()
        optimizer.zero_grad()
    large = 0
    for param, weight, expected in zip(model.parameters(), values, kept, strict=True):
        assert expected is not None
        large += expected.form == "bf16"
        found = full(optimizer.state[param]["momentum_buffer"])
        assert torch.equal(found, expected.values.to(found.dtype))
        assert (full(param) - weight).abs().max() <= TOLERANCE
    assert large == 5
    local = model.get_parameter("transformer.wte.weight").to_local()
    everyone = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(everyone, local)
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])


def wide_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=160,
        n_layer=1,
        n_head=4,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


# --- Trainer ---


DIVIDED: dict[str, Any] = {"tp": {"degree": 2}, "fsdp2": {}}


def averaged(item: Any, parallelism: dict[str, Any] | None, until: str, **more: Any) -> Any:
    model = built()
    batch = SIZE // (2 if parallelism and "tp" in parallelism else 4)
    told = {"batch": batch, "parallelism_config": parallelism, "max_duration": until, **more}
    trainer = trainer_for(model, adamw(model), samples(), algorithms=[item()], **told)
    trainer.fit()
    return trainer


def averages_of(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.state.algorithms[0].state_dict()
    held = state["ema_model"]["named_parameters_dict"] if "ema_model" in state else None
    values = state["swa_model"] if held is None else held
    return {name.replace("module.", ""): full(value) for name, value in values.items()}


@pytest.mark.table
@VIEWS
@pytest.mark.filterwarnings("ignore:SWA has known issues")
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("name", "kind"), [("EMA", "sharded"), ("EMA", "full"), ("SWA", "full")])
def test_averages_go_on_in_another_layout(name: str, kind: str, tmp_path: Path):
    install()
    item = {"EMA": lambda: A.EMA(half_life="2ba"), "SWA": lambda: A.SWA("0.1dur", "0.9dur", "1ba")}
    run = functools.partial(averaged, item[name])
    expected = run(None, "4ba")
    settings = {"fsdp2": {"state_dict_type": kind}}
    for number, divided in enumerate(({}, DIVIDED)):
        other, folder = {} if divided else DIVIDED, tmp_path / str(number)
        run(divided | settings, "3ba", save_folder=str(folder), save_interval="2ba")
        file = folder / ("ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt")
        resumed = run(other | settings, "4ba", load_path=str(file))
        assert largest_difference(averages_of(resumed), averages_of(expected)) <= TOLERANCE
        ours, theirs = (weights(one.state.model) for one in (resumed, expected))
        plain = {name.replace("module.", ""): value for name, value in theirs.items()}
        assert largest_difference(ours, plain) <= TOLERANCE


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_adaptive_clipping_is_that_of_one_process():
    install()
    item = functools.partial(A.GradientClipping, "adaptive", 1e-3)
    runs = [averaged(item, layout, "4ba") for layout in (None, DIVIDED)]
    expected, got = (weights(run.state.model) for run in runs)
    expected = {name.replace("module.", ""): value for name, value in expected.items()}
    assert largest_difference(got, expected) <= TOLERANCE
    without, _ = trained_alone("gpt2", samples())
    assert largest_difference(weights(without), expected) > 1e-3


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("item", "match"),
    [
        (A.SAM, "SAM and tensor.*in an order of its own"),
        (A.LayerFreezing, "LayerFreezing and tensor.*in an order of its own"),
        (A.SelectiveBackprop, "SelectiveBackprop and tensor.*draws on each rank by itself"),
        (A.MixUp, "MixUp and tensor.*draws on each rank by itself"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* has known issues")
def test_items_are_refused_by_name(item: Any, match: str):
    install()
    model = built()
    with pytest.raises(ConfigError, match=match):
        trainer_for(
            model,
            adamw(model),
            samples(),
            parallelism_config=FORMS["degree"],
            algorithms=[item()],
        )


def test_scaled_gradients_are_refused():
    tree, settings = ModuleTree.read(llama()), parse_config({"tensor_parallel": 2})
    facts = ModelFacts(
        tree=tree,
        settings=settings,
        units=WrapPlan(()),
        blocks=(),
        shard_ranks=1,
        device_type="cuda",
        compute=torch.float16,
    )
    with pytest.raises(ConfigError, match="some of them would step"):
        TensorParallel().plan(facts)


# --- Models ---


def mixtral(**changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2} | changes
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **sizes))
    if STACKED:
        model.set_experts_implementation("eager")  # others do not take float64
    return model


@pytest.mark.table
@pytest.mark.skipif(STACKED, reason="transformers has no lists of experts")
@VIEWS
@pytest.mark.world_size(4)
@parametrize_by_turns(
    # With sixteen experts, some get no token in a batch of 28; six are not divisible.
    changes=[{}, {"num_local_experts": 16, "num_experts_per_tok": 1}, {"num_local_experts": 6}],
    optimizer=OPTIMIZERS,
)
def test_experts_train_like_one_process(changes: dict[str, int], optimizer: str):
    torch.manual_seed(0)
    model = mixtral(**changes)
    oracle = copy.deepcopy(model)
    pair = (OPTIMIZERS[optimizer](oracle.parameters()), OPTIMIZERS[optimizer](model.parameters()))
    prepared(model, pair[1])
    groups_together(oracle, model, pair, steps=20 if not changes else STEPS)
    assert_same_state(*pair)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu())


class Mixture(nn.Module):
    """Sends a whole batch to one expert, and calls no other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)[..., self.chosen, None]
        return x + self.experts[self.chosen](x) * weight


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.lm_head = nn.Linear(16, VOCAB)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Mixture)

    def forward(self, ids: torch.Tensor, **_: Any) -> Any:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            # The third expert of each block is nobody's.
            block.chosen = (0, 1, 3)[(int(ids[0, 0]) + number) % 3]
            x = block(x)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(x))


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_experts_that_a_group_leaves_out():
    torch.manual_seed(0)
    model = Sparse()
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["adamw"](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1])
    for ids in global_batches(STEPS):
        for part in ids.chunk(2):
            (loss_of(oracle, part) / 2).backward()
        loss_of(model, of_this_group(ids)).backward()
        nobodys = model.get_parameter("blocks.0.experts.2.up_proj.weight")
        assert nobodys.grad is None
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)


@pytest.mark.filterwarnings("ignore:.* were chosen as units, and some ranks may leave")
@pytest.mark.world_size(4)
def test_a_tower_is_refused():
    with pytest.raises(PlanError, match=r"may be left out by a rank \(a tower\)"):
        prepared(with_tower(), None)


def with_tower() -> nn.Module:
    text = {**SIZES, "model_type": "llama"}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 4, "patch_size": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**vision),
    )
    return transformers.LlavaForConditionalGeneration(config)


def adapted(model: nn.Module, targets: list[str], **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    told = {"r": 2, "target_modules": targets, "init_lora_weights": False, **settings}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **told))


ADAPTED: dict[str, tuple[Any, list[str]]] = {
    "Qwen3": (qwen3, ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]),
    "Phi-3": (phi3, ["qkv_proj", "down_proj"]),
    "GPT-2": (gpt2, ["c_attn", "c_fc"]),
}


@pytest.mark.table("Phi-3")
@VIEWS
@pytest.mark.world_size(4)
@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_train_like_one_process(family: str):
    torch.manual_seed(0)
    make, targets = ADAPTED[family]
    conv1d = {"fan_in_fan_out": family == "GPT-2"}
    model = adapted(make(), targets, **conv1d)
    # In fp32 AdamW makes a step of what rounding leaves in the gradients of GPT-2's keys, and
    # moments of Qwen3 differ by as much as the sums of some CPUs.
    model = model.double() if family in ("GPT-2", "Qwen3") else model
    oracle = copy.deepcopy(model)
    learned = [[p for p in one.parameters() if p.requires_grad] for one in (oracle, model)]
    pair = [OPTIMIZERS["adamw"](params) for params in learned]
    prepared(model, pair[1], mixed_precision="FULL")
    for step, ids in enumerate(global_batches(STEPS)):
        expected, got = loss_of(oracle, ids), loss_of(model, of_this_group(ids))
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)
    assert_same_state(pair[0], pair[1])
    up = [name for name, p in model.named_parameters() if "lora_B" in name and is_on_two_axes(p)]
    assert len(up) >= 2  # they are divided with their layers


def is_on_two_axes(param: nn.Parameter) -> bool:
    return getattr(param, "device_mesh").ndim > 1  # noqa: B009


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lora_dropout": 0.1}, "q_proj' have dropout, whose numbers"),
        ({"use_dora": True}, "not a plain LoRA of a linear layer"),
    ],
)
def test_adapters_that_are_refused(settings: dict[str, Any], match: str):
    with pytest.raises(PlanError, match=match):
        prepared(adapted(llama(), ["q_proj"], **settings), None)


@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")
@pytest.mark.world_size(4)
def test_alibi_is_refused():
    with pytest.raises(PlanError, match="uses ALiBi"):
        prepared(mpt(alibi=True), None)
