"""Experts over ranks, against one process that computes the batch of every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from composer_fsdp2 import Muon, clip_grad_norm_, full_tensor, install, prepare_fully_shard
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.norms import gradient_norm
from composer_fsdp2.parallel.expert.experts import ExpertLayer, Routing, send_rows
from composer_fsdp2.parallel.expert.stacked import StackedExperts, stack_size
from composer_fsdp2.parallel.form import ExpertForm, form_of, group_dividing, part_of
from composer_fsdp2.parallel.parallelism import experts_of
from composer_fsdp2.patches import install_for_foundry
from composer_fsdp2.step.run import run_of
from composer_fsdp2.step.unused_parameters import UnusedParameters
from composer_fsdp2.torch_private.tensors import local_part
from tests.support.experts import EXPERTS, FAMILIES, STACKED, Sparse, choose, force
from tests.support.models import VOCAB
from tests.support.pairs import parametrize_by_turns, parametrize_pairs
from tests.support.parity import (
    OPTIMIZERS,
    TOLERANCE,
    AutocastCPU,
    assert_close,
    assert_same_values,
    full,
    gathered,
)

RANKS, STEPS, ROWS, LENGTH = 4, 20, 2, 6
COMPARED = 1
"""steps whose gradients are compared, beside all weights at the end"""
EXACT = 1e-12

SMOKE = ("Mixtral", "GPT-OSS")
"""families whose experts are lists in one row of README's table, and tensors in another"""

Batch = list[torch.Tensor]
"""token ids of each rank"""

pytestmark = [
    pytest.mark.world_size(RANKS),
    pytest.mark.filterwarnings(r"ignore:FSDP2-wrapped module \((?!Experts\)).* returned a view"),
]


def batches(steps: int = STEPS, lengths: Sequence[int] = (LENGTH,) * RANKS) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(0, VOCAB, (ROWS, length), generator=generator) for length in lengths]
        for _ in range(steps)
    ]


def pair(
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    forced: bool = False,
    experts: int = EXPERTS,
    **sizes: Any,
) -> list[Any]:
    """Two models of equal weights whose loss has the balance of experts in it, if they have one.

    A token has two experts, but for routes by force: the weight of a single one may be 1 whatever
    the router says, and give it no gradient.
    """
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = FAMILIES[family][0](experts, **sizes).to(dtype)
        if hasattr(model.config, "router_aux_loss_coef"):
            model.config.output_router_logits = True
            model.config.router_aux_loss_coef = 0.5
        for module in () if forced else model.modules():
            for name in ("top_k", "num_experts_per_tok"):
                if hasattr(module, name):
                    setattr(module, name, 2)
        if dtype == torch.float64:
            loop_over_experts(model)
            for name, module in model.named_modules():
                if name.endswith(".gate"):
                    module.forward = InDouble()(module.forward)
        models.append(force(model) if forced else model)
    return models


class InDouble(TorchFunctionMode):
    """Has a router compute in double that asks for single precision: DeepSeek's."""

    def __call__(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            with self:
                return compute(*args)

        return forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return func(*wide, **(kwargs or {}))


def loop_over_experts(model: Any) -> None:
    """Torch's grouped products take no double, and no rows of odd sizes in bf16."""
    if hasattr(model, "set_experts_implementation"):  # transformers 5
        model.set_experts_implementation("eager")


def backward(model: Any, ids: Batch, parts: int = 1) -> torch.Tensor:
    """The mean loss of what is given, with its gradients."""
    total = torch.zeros(())
    rows = [part for one in ids for part in one.chunk(parts)]
    for part in rows:
        loss = model(part, labels=part).loss / len(rows)
        loss.backward()
        total += loss.detach()
    return total


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of all ranks' parameters, whole. Collective: yes."""
    names = [name for name, _ in model.named_parameters()]
    found = {name: full_tensor(model, name, gradient=True) for name in names}
    return {
        name.replace("_checkpoint_wrapped_module.", ""): grad
        for name, grad in found.items()
        if grad is not None
    }


def same_gradients(oracle: nn.Module, model: nn.Module, tolerance: float) -> None:
    expected, got = gradients(oracle), gradients(model)
    assert expected.keys() == got.keys()
    for name, grad in expected.items():
        assert_close(f"gradient of {name}", grad, got[name], tolerance)


def same_state(
    oracle: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, tolerance: float
) -> None:
    expected, got = oracle.state_dict(), optimizer.state_dict()
    assert expected["param_groups"] == got["param_groups"]
    assert expected["state"].keys() == got["state"].keys()
    for number, entry in expected["state"].items():
        assert entry.keys() == got["state"][number].keys()
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert_close(
                    f"{key} of {number}", value, full(got["state"][number][key]), tolerance
                )


def train(
    models: list[Any],
    config: dict[str, Any],
    optimizer: str = "sgd",
    *,
    data: list[Batch] | None = None,
    routes: Sequence[Sequence[int]] = (),
    tolerance: float = TOLERANCE,
    microbatches: int = 1,
    clip: float | None = None,
    optimizers: list[Any] | None = None,
) -> None:
    """Trains both and asserts at every step that they agree."""
    oracle, model = models
    optimizers = optimizers or [OPTIMIZERS[optimizer](one.parameters()) for one in models]
    prepare_fully_shard(model, optimizers[1], config, precision="fp32", device="cpu")
    run, rank = run_of(model), dist.get_rank()
    assert run is not None
    for step, ids in enumerate(data or batches()):
        if routes:
            route = list(routes[step % len(routes)])
            total = torch.zeros(())
            for number, one in enumerate(ids):
                choose(oracle, route[number * ROWS : (number + 1) * ROWS])
                loss = oracle(one, labels=one).loss / len(ids)
                loss.backward()
                total += loss.detach()
            choose(model, route[rank * ROWS : (rank + 1) * ROWS])
        else:
            total = backward(oracle, ids, microbatches)
        own = ids[rank].chunk(microbatches)
        got = torch.zeros(())
        with run.accumulation.batch():
            for number, part in enumerate(own, 1):
                with run.accumulation.microbatch(last=number == microbatches):
                    loss = model(part, labels=part).loss / microbatches
                    loss.backward()
                    got += loss.detach()
        assert_close(f"loss of step {step}", total, mean_over_ranks(got), max(tolerance, 1e-6))
        if step < COMPARED or clip is not None:
            same_gradients(oracle, model, tolerance)
        if clip is not None:
            norms = [
                clip_grad_norm_(list(model.parameters()), clip),
                torch.nn.utils.clip_grad_norm_(oracle.parameters(), clip),
            ]
            assert norms[1] > clip
            assert_close("norm", norms[1], full(norms[0]), tolerance)
            same_gradients(oracle, model, tolerance)
        for stepped in optimizers:
            stepped.step()
            stepped.zero_grad()
    assert_same_values(oracle, model, tolerance)
    same_state(optimizers[0], optimizers[1], 10 * tolerance)


LAYOUTS = parametrize_by_turns(family=FAMILIES, degree=[2, 4])


@pytest.mark.table("DeepSeek-V3-2-adamw")
@parametrize_pairs(family=FAMILIES, degree=(4, 2), optimizer=OPTIMIZERS)
def test_as_in_one_process(family: str, degree: int, optimizer: str):
    """Weights, gradients of routers and of the balance of experts, and optimizer state."""
    train(pair(family), {"expert_parallel": {"degree": degree}}, optimizer)


@pytest.mark.table
@pytest.mark.parametrize(
    ("family", "degree"),
    [
        pytest.param(name, degree, marks=pytest.mark.smoke if name in SMOKE else ())
        for name, degree in zip(FAMILIES, itertools.cycle((2, 4)), strict=False)
    ],
)
def test_in_double(family: str, degree: int):
    config = {"expert_parallel": degree, "mixed_precision": "FULL"}
    train(pair(family, torch.float64), config, "adamw", tolerance=EXACT)


ROUTES = {
    "all to one": [[3] * 8],
    "a rank gets none": [[1] * 8, [0, 1, 2, 0, 1, 2, 0, 1]],
    "an expert is dead": [[0, 0, 2, 2, 3, 3, 2, 0]],
    "dead for some steps": [[0, 1, 0, 1, 0, 1, 0, 1], [2, 3, 2, 3, 2, 3, 2, 3], [0, 1, 2, 3] * 2],
}


@pytest.mark.table("DeepSeek-V3-dead for some steps-2")
@parametrize_pairs(family=FAMILIES, routes=ROUTES, degree=(2, 4))
def test_odd_routes(family: str, routes: str, degree: int):
    """An expert without a token has the gradient that the model gives it: zeros, or none."""
    models = pair(family, torch.float64, forced=True)
    config = {"expert_parallel": degree, "mixed_precision": "FULL"}
    train(models, config, "adamw", data=batches(6), routes=ROUTES[routes], tolerance=EXACT)


@pytest.mark.table("DeepSeek-V3-4")
@LAYOUTS
def test_nothing_before_experts_is_trained(family: str, degree: int):
    """Backward has to come to the experts of a rank, and FSDP2 has to wait for it.

    Also where no expert of the rank has a token, and none of them is called.
    """
    is_forced = family == "DeepSeek-V3"
    models = pair(family, forced=is_forced)
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(
                ".experts." in name or name.endswith(("gate.weight", "router.weight"))
            )
    routes = ROUTES["a rank gets none"] if is_forced else ()
    train(models, {"expert_parallel": degree}, "adamw", data=batches(5), routes=routes)


@pytest.mark.table("Qwen3-MoE-4")
@LAYOUTS
def test_lengths_of_each_rank(family: str, degree: int):
    """One rank has padding alone, whose tokens all go to the same experts."""
    models = pair(family)
    for model in models:
        model.config.output_router_logits = False
    data = batches(6, (2, 7, 3, 12))
    for ids in data:
        ids[1].zero_()
    train(models, {"expert_parallel": degree}, data=data)


@pytest.mark.table("Mixtral-2")
@LAYOUTS
def test_clipping(family: str, degree: int):
    train(pair(family), {"expert_parallel": degree}, data=batches(5), clip=0.05)


@pytest.mark.matrix
def test_clipping_after_another_model():
    """Of another layout: torch hands out equal meshes for each other, whose groups differ."""
    ids, models = batches(1)[0][dist.get_rank()], [pair("Mixtral") for _ in range(2)]
    train(models[0], {"expert_parallel": 4}, data=batches(1))
    config = {"expert_parallel": 2, "data_parallel_replicate_degree": 2}
    train(models[1], config, data=batches(3), clip=0.05)
    for _, model in models:
        model(ids, labels=ids).loss.backward()
    params = [list(model.parameters()) for _, model in models]
    norms = torch.stack([gradient_norm(each, dtype=torch.float64) for each in params])
    both = gradient_norm([param for each in params for param in each], dtype=torch.float64)
    assert_close("norm of both", norms.square().sum().sqrt(), both, EXACT)


@pytest.mark.table
@parametrize_by_turns(family=["Mixtral", "Qwen3-MoE"], degree=[2, 4])
def test_sequences_are_divided_too(family: str, degree: int):
    """Two ranks next to each other have half of each sequence, and send the tokens of theirs."""
    models, data = pair(family), [[ids[0], ids[0], ids[2], ids[2]] for ids in batches(6)]
    for model in models:
        model.config.output_router_logits = False
    config = {"expert_parallel": degree, "sequence_parallel": 2, "activation_checkpointing": True}
    train(models, config, "adamw", data=data, clip=0.05)


@pytest.mark.table
@parametrize_by_turns(family=["Mixtral", "Qwen3-MoE"], degree=[2, 4])
def test_other_layers_are_divided_too(family: str, degree: int):
    """Two ranks next to each other have the same seven tokens, and send three or four of them."""
    models = pair(family, torch.float64, num_key_value_heads=2)
    data = [[ids[n][:1] for n in (0, 0, 2, 2)] for ids in batches(6, (7,) * RANKS)]
    config = {"expert_parallel": degree, "tensor_parallel": 2, "mixed_precision": "FULL"}
    config["activation_checkpointing"] = True
    train(models, config, "adamw", data=data, clip=0.05, tolerance=EXACT)
    assert any(group_dividing(param) for param in models[1].parameters())


WITH: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": True},
    "selected": {"activation_checkpointing": {"mode": "selective"}},
    "offloaded": {"activation_checkpointing": True, "activation_cpu_offload": True},
    "kept": {"reshard_after_forward": False},
    "norms in fp32": {"keep_fp32": ["*norm*"]},
    "prefetched": {"forward_prefetch": 1, "backward_prefetch": 1},
    "last": {"gradient_sync": "last"},
    "every": {"gradient_sync": "every"},
    "copies": {"data_parallel_replicate_degree": 2},
    "reduce_scatter_only": {
        "data_parallel_replicate_degree": 2,
        "gradient_sync": "reduce_scatter_only",
    },
}


@pytest.mark.table("copies-Mixtral")
@parametrize_by_turns(with_=WITH, family=["Mixtral", "DeepSeek-V3"])
def test_beside(family: str, with_: str):
    config = {"expert_parallel": 2, **WITH[with_]}
    train(pair(family), config, "adamw", data=batches(5), microbatches=2)


@pytest.mark.table("everywhere", "in a folder")
@pytest.mark.parametrize(
    "start",
    [
        *("everywhere", "on rank 0", "nowhere"),
        pytest.param("in a folder", marks=pytest.mark.smoke),
    ],
)
def test_first_weights_are_those_of_fsdp_alone(start: str, tmp_path: Path):
    """Wherever the weights are before: each rank gets those of its own experts.

    A model that has none starts from numbers drawn in another order than without experts over
    ranks.
    """
    config: dict[str, Any] = {}
    if start == "in a folder":
        config["pretrained_weights"] = str(tmp_path)
        if dist.get_rank() == 0:
            saved: Any = FAMILIES["DeepSeek-V3"][0]()
            saved.save_pretrained(tmp_path)  # which transformers 5 writes as lists too
        dist.barrier()
    meta = start in ("nowhere", "in a folder") or (start == "on rank 0" and dist.get_rank() > 0)
    found: list[dict[str, torch.Tensor]] = []
    for degree in (2 if start == "nowhere" else 1, 4):
        torch.manual_seed(5)
        with torch.device("meta" if meta else "cpu"):
            model = FAMILIES["DeepSeek-V3"][0]()
        torch.manual_seed(5)
        prepare_fully_shard(model, None, {**config, "expert_parallel": degree}, device="cpu")
        found.append(gathered(model))
    alone, over_ranks = found
    assert alone.keys() == over_ranks.keys()
    for name, value in alone.items():
        assert torch.equal(value, over_ranks[name]), name
        assert value.any() or "weight" not in name


@pytest.mark.matrix
@pytest.mark.smoke
def test_save_pretrained_is_that_of_one_process(tmp_path: Path):
    """Where transformers 5 has all experts in one tensor, it writes a matrix for each."""
    install()
    saved, model = pair("Mixtral")
    prepare_fully_shard(model, None, {"expert_parallel": 2}, device="cpu")
    model.save_pretrained(tmp_path)
    dist.barrier()
    loaded = type(saved).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(value, loaded[name]), name


def test_rows_stay_in_the_order_of_ranks_and_tokens():
    """An expert adds up its gradient in one order, in every run and when a block runs again."""
    group: Any = dist.group.WORLD
    rank, tokens = dist.get_rank(), 64
    chosen = torch.randint(0, 2 * RANKS, (tokens, 2), generator=torch.Generator().manual_seed(rank))
    routing = Routing.agree(chosen, 2 * RANKS, group, slice(0, tokens))
    pairs = chosen.flatten().tolist()
    assert routing.order.tolist() == sorted(range(2 * tokens), key=pairs.__getitem__)
    rows = torch.stack((torch.full_like(routing.order, rank), routing.order), dim=1)
    arrived = send_rows(rows, routing, group)[routing.by_expert]
    for part in arrived.split(routing.sizes):
        assert part.tolist() == sorted(part.tolist())


def test_recomputation_keeps_the_routes():
    """Where the router would choose otherwise the second time, as rounding may have it on a GPU."""
    model = pair("Mixtral")[0]
    drawn = torch.Generator().manual_seed(dist.get_rank())
    sizes: dict[ExpertLayer, list[Any]] = {}

    def shift(_gate: Any, _args: Any, found: Any) -> Any:
        if isinstance(found, tuple):  # logits, weights and experts: transformers 5
            moved = torch.randint(0, EXPERTS, found[2].shape[:1], generator=drawn)
            return *found[:2], (found[2] + moved[:, None]) % EXPERTS
        return found + 5 * torch.randn(found.shape, generator=drawn)

    for module in model.modules():
        if type(module).__name__ == "MixtralSparseMoeBlock":
            module.get_submodule("gate").register_forward_hook(shift)
    config = {"expert_parallel": 4, "activation_checkpointing": True}
    prepare_fully_shard(model, None, config, device="cpu")
    for layer in layers_of(model).values():
        sizes[layer] = []
        compute = layer.made_of

        def made_of(rows: Any, found: Any, seen: Any = sizes[layer], compute: Any = compute) -> Any:
            seen.append(found)
            return compute(rows, found)

        layer.made_of = made_of
    own = batches(1)[0][dist.get_rank()]
    model(own, labels=own).loss.backward()
    assert sizes
    for first, second in sizes.values():
        assert first == second


@pytest.mark.smoke
def test_load_counts_each_token_of_training_once():
    """Not in an evaluation, nor where a block runs again in backward."""
    model = pair("Mixtral")[0]
    config = {"expert_parallel": 2, "activation_checkpointing": True}
    prepare_fully_shard(model, None, config, device="cpu")
    own = batches(1)[0][dist.get_rank()]
    with torch.no_grad():
        model(own)
    model(own, labels=own).loss.backward()
    assert layers_of(model)
    for layer in layers_of(model).values():
        assert layer.take_load().sum() == 2 * own.numel()  # a token has two experts
        assert not layer.take_load().any()


def layers_of(model: nn.Module) -> dict[nn.Module, ExpertLayer]:
    """How the experts of each module are shared."""
    found = {module: experts_of(module) for module in model.modules()}
    return {module: layer for module, layer in found.items() if isinstance(layer, ExpertLayer)}


def test_a_rank_has_its_experts():
    model = pair("Mixtral")[0]
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    prepare_fully_shard(model, None, {"expert_parallel": 2}, device="cpu")
    found = layers_of(model)
    assert found
    place = dist.get_rank() % 2
    paths = {module: name for name, module in model.named_modules()}
    for experts, layer in found.items():
        assert isinstance(experts, FSDPModule)
        if isinstance(layer, StackedExperts):
            for name, param in experts.named_parameters():
                assert isinstance(param, DTensor)
                assert len(param) == EXPERTS // 2
                own, part = param.full_tensor(), slice(place * len(param), (place + 1) * len(param))
                assert torch.equal(own, whole[f"{paths[experts]}.{name}"][part])
                assert 2 * param.to_local().numel() == own.numel()
            continue
        names = {
            name.split(".")[0]
            for name, param in experts.named_parameters()
            if local_part(param).numel()
        }
        assert names == {str(place * 2), str(place * 2 + 1)}
        assert all(
            form_of(p).is_remote != bool(local_part(p).numel()) for p in experts.parameters()
        )
        held = sum(local_part(param).numel() for param in experts.parameters())
        assert held == sum(param.numel() for param in experts.parameters()) // RANKS


@pytest.mark.table("Mixtral-2")
@LAYOUTS
def test_autocast_is_that_of_fsdp_alone(family: str, degree: int):
    """Gradients of a step in bf16, which other sums round otherwise."""
    models, ids = pair(family), batches(1)[0][dist.get_rank()]
    for model, config in zip(models, ({}, {"expert_parallel": degree}), strict=True):
        loop_over_experts(model)
        prepare_fully_shard(model, None, config, precision="amp_bf16", device=AutocastCPU())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
    same_gradients(models[0], models[1], 1e-2)


@pytest.mark.table
@parametrize_by_turns(family=["Mixtral", "Qwen3-MoE"], degree=[2, 4])
def test_muon(family: str, degree: int):
    """Each matrix of an expert is orthogonalised by the ranks that shard it."""
    models = pair(family)
    how: dict[str, Any] = {"lr": 0.01, "iteration_dtype": "fp32"}
    optimizers = [Muon(one, **how) for one in models]
    config = {"expert_parallel": degree}
    train(models, config, optimizers=optimizers, data=batches(5), tolerance=1e-5)


@pytest.mark.table("Mixtral-adamw")
@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        pytest.param(*case, marks=pytest.mark.smoke if "Mixtral" in case else ())
        for case in (
            *zip(FAMILIES, itertools.cycle(("adamw", "muon", "sgd")), strict=False),
            ("Mixtral", "muon"),
        )
    ],
)
def test_one_expert_on_each_rank(family: str, optimizer: str):
    """Two ranks share it: they divide another dimension of a tensor with all experts."""
    models = pair(family, experts=2)
    muon: dict[str, Any] = {"lr": 0.01, "iteration_dtype": "fp32"}
    optimizers = [
        Muon(one, **muon) if optimizer == "muon" else OPTIMIZERS[optimizer](one.parameters())
        for one in models
    ]
    tolerance = 1e-5 if optimizer == "muon" else TOLERANCE
    config = {"expert_parallel": 2}
    train(models, config, optimizers=optimizers, data=batches(5), tolerance=tolerance)
    for experts, layer in layers_of(models[1]).items():
        if isinstance(layer, StackedExperts):
            assert all(2 * local_part(p).numel() == p.numel() for p in experts.parameters())
    values, state = models[1].state_dict(), optimizers[1].state_dict()
    values = {name: value.clone() for name, value in values.items()}
    with torch.no_grad():
        for param in models[1].parameters():
            param.zero_()
    models[1].load_state_dict(values)
    optimizers[1].load_state_dict(state)
    assert_same_values(models[0], models[1], tolerance)
    same_state(optimizers[0], optimizers[1], 10 * tolerance)


def mpt(kind: str) -> nn.Module:
    """With `torch_dmoe` of LLM Foundry, whose experts lie one after the other in a matrix."""
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    install_for_foundry()

    experts: dict[str, Any] = {
        "ffn_type": "torch_dmoe",
        "mlp_type": kind,
        "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
        "moe_jitter_eps": None,
        "moe_normalize_expert_weights": 1,
        "uniform_expert_assignment": False,
    }
    config = MPTConfig(
        d_model=12,
        n_heads=2,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=LENGTH,
        vocab_size=VOCAB,
        attn_config={"attn_impl": "torch"},
        ffn_config=experts,
        use_cache=False,
    )
    torch.manual_seed(0)
    return MPTForCausalLM(config)


@pytest.mark.table("glu-2")
@pytest.mark.parametrize("degree", [4, 2])
@pytest.mark.parametrize("kind", ["glu", "mlp"])
def test_foundry(kind: str, degree: int):
    """Such a layer is one unit, and each rank has rows of its own experts."""
    models = [mpt(kind).double() for _ in range(2)]
    for model in models:
        # Nobody sends a token to the last two experts of the first layer.
        router = next(m for name, m in model.named_modules() if name.endswith(".router.layer"))
        router.register_forward_hook(lambda _, __, out: out - torch.tensor([0.0, 0.0, 9.0, 9.0]))
    config = {"expert_parallel": degree, "mixed_precision": "FULL"}
    train(models, config, "adamw", data=batches(6), tolerance=EXACT)
    run = run_of(models[1])
    unused = None if run is None else run.listener(UnusedParameters)
    assert unused is not None
    assert not unused._always  # every rank uses its experts, so that nothing is compared again
    for experts, layer in layers_of(models[1]).items():
        assert isinstance(layer, StackedExperts)
        assert all(len(param) == 24 * EXPERTS // degree for param in experts.parameters())


def test_state_that_is_divided_as_a_parameter_is():
    """Of a whole tensor of all experts, over the ranks that have the same ones."""
    model = mpt("glu")
    optimizer = torch.optim.AdamW(model.parameters())
    prepare_fully_shard(model, optimizer, {"expert_parallel": 2}, precision="fp32", device="cpu")
    backward(model, batches(1)[0][:1])
    optimizer.step()
    saved = optimizer.state_dict()
    divided = {number: dict(entry) for number, entry in saved["state"].items()}
    held = [(n, p) for n, p in enumerate(model.parameters()) if isinstance(form_of(p), ExpertForm)]
    assert held
    for number, param in held:
        assert isinstance(param, DTensor)
        for key in ("exp_avg", "exp_avg_sq"):
            whole = full(saved["state"][number][key])
            divided[number][key] = part_of(whole, param.device_mesh, param.placements)
            local_part(optimizer.state[param][key]).zero_()
    optimizer.load_state_dict({**saved, "state": divided})
    again = optimizer.state_dict()["state"]
    for number, _ in held:
        for key, value in saved["state"][number].items():
            assert torch.equal(full(value), full(again[number][key])), (number, key)


@torch.no_grad()
def test_evaluation():
    oracle, model = pair("Qwen3-MoE")
    prepare_fully_shard(model, None, {"expert_parallel": 4}, device="cpu")
    for one in (oracle, model):
        one.eval()
    ids = batches(1)[0]
    expected = sum(oracle(one, labels=one).loss for one in ids) / RANKS
    own = ids[dist.get_rank()]
    got = mean_over_ranks(model(own, labels=own).loss)
    assert_close("loss", torch.as_tensor(expected), got)


@torch.no_grad()
def test_generate():
    """Prompts of each rank's own length."""
    install()
    oracle, model = pair("Mixtral")
    for one in (oracle, model):
        one.config.output_router_logits = False
        one.eval()
    prepare_fully_shard(model, None, {"expert_parallel": 2}, device="cpu")
    prompt = torch.arange(1, 3 + dist.get_rank())[None]
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(oracle.generate(prompt, **how), model.generate(prompt, **how))


ADAPTED = {
    "Mixtral": ["w1", "w2", "gate"],
    "Qwen3-MoE": ["up_proj", "down_proj"],
    "DeepSeek-V3": ["up_proj"],
    "OLMoE": ["q_proj"],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT with transformers 5
@pytest.mark.table("Mixtral-2")
@parametrize_by_turns(family=ADAPTED, degree=[2, 4])
def test_adapters(family: str, degree: int):
    """An adapter for each expert, where all before it is frozen; or for attention alone."""
    stacked = any(param.ndim == 3 for param in pair(family)[0].parameters())
    layers = ["q_proj", "q_a_proj"] if stacked else ADAPTED[family]
    models = [
        peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM", r=2, target_modules=layers, init_lora_weights=False
            ),
        )
        for model in pair(family)
    ]
    models[1].load_state_dict(models[0].state_dict())
    train(models, {"expert_parallel": degree}, "adamw", data=batches(5))


# --- What is refused ---


class Renamed(nn.Module):
    """A block whose router nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Shared(nn.Module):
    """Holds experts in a tensor, as transformers 5 does, and a bias that all of them share."""

    num_experts, is_transposed = EXPERTS, False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EXPERTS, 2, 2))
        self.bias = nn.Parameter(torch.zeros(1, 2))

    @torch.no_grad()  # a decorator that shows, as that with which transformers exchanges forwards
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.sum(0) + self.bias


class Unknown(nn.Module):
    """Has experts, and nobody knows how they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Shared()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


def _mixtral() -> nn.Module:
    return pair("Mixtral")[0]


def _quantised() -> nn.Module:
    model = _mixtral()
    name = next(name for name, _ in model.named_parameters() if ".experts." in name)
    path, _, attribute = name.rpartition(".")
    whole = torch.ones(model.get_parameter(name).shape, dtype=torch.int8)
    setattr(model.get_submodule(path), attribute, nn.Parameter(whole, requires_grad=False))
    return model


def _adapted() -> nn.Module:
    """As PEFT adapts a tensor with all experts of a layer."""
    model = mpt("glu")
    name = next(name for name, module in model.named_modules() if stack_size(module) is not None)
    above, _, attribute = name.rpartition(".")
    around = nn.Module()
    around.base_layer = model.get_submodule(name)
    setattr(model.get_submodule(above), attribute, around)
    return model


def _with_one_expert_trained() -> nn.Module:
    model = _mixtral()
    for name, param in model.named_parameters():
        param.requires_grad_(".experts.3." in name or ".experts." not in name)
    return model


def _of_another_version() -> nn.Module:
    """LLM Foundry's experts, of which a class computes otherwise than the one that was read."""

    def forward(_glu: Any, x: torch.Tensor, _number: int) -> torch.Tensor:
        return x

    model = mpt("glu")
    for module in model.modules():
        if stack_size(module) is not None:
            mlp: Any = module.mlp
            mlp.__class__ = type("GLU", (type(mlp),), {"forward": forward})
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "ranks": (_mixtral, {"expert_parallel": 3}, ConfigError, "does not divide the 4 ranks"),
    "experts": (
        lambda: FAMILIES["Mixtral"][0](6),
        {"expert_parallel": {"degree": 4}},
        ConfigError,
        "does not divide the 6 experts .* Use one of 1, 2",
    ),
    "no experts": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        {"expert_parallel": 2},
        PlanError,
        "has no list of experts",
    ),
    "stack": (Unknown, {"expert_parallel": 2}, PlanError, "which lie in one tensor"),
    "another version": (
        _of_another_version,
        {"expert_parallel": 2},
        PlanError,
        "has no list of experts",
    ),
    "router": (Renamed, {"expert_parallel": 2}, PlanError, "not known how Mixture"),
    "no match": (
        _mixtral,
        {"expert_parallel": {"degree": 2, "modules": ["*.gate"]}},
        PlanError,
        "matches no list of experts",
    ),
    "no name": (
        _mixtral,
        {"expert_parallel": {"degree": 2, "modules": ["*.nothing"]}},
        PlanError,
        "matches no module name",
    ),
    "tensor ranks": (
        _mixtral,
        {"expert_parallel": 2, "tensor_parallel": 4},
        ConfigError,
        "tensor_parallel.degree is 4",
    ),
    "tensor layers": (
        _mixtral,
        {
            "expert_parallel": 2,
            "tensor_parallel": {"degree": 2, "layer_plan": {"*.w1": "colwise", "*.w2": "rowwise"}},
        },
        PlanError,
        "belongs to an expert beside expert_parallel",
    ),
    "quantised": (_quantised, {"expert_parallel": 2}, PlanError, "is quantised or divided"),
    "adapted": (_adapted, {"expert_parallel": 2}, PlanError, "adapts a tensor with all experts"),
    "trained": (
        _with_one_expert_trained,
        {"expert_parallel": 2},
        PlanError,
        "would hold 0, 3 trained weights",
    ),
    "units inside": (
        _mixtral,
        {"expert_parallel": 2, "reshard_after_forward": 2},
        PlanError,
        "reshard_after_forward is a number",
    ),
}
if STACKED:  # they are about lists of experts
    del REFUSED["tensor layers"], REFUSED["trained"]


@pytest.mark.table(*(case for case in REFUSED if case not in ("no name", "no match")))
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    """On every rank, before the model is changed."""
    make, config, kind, text = REFUSED[case]
    model = make()
    before = [id(param) for param in model.parameters()]
    with pytest.raises(kind, match=text):
        prepare_fully_shard(model, None, config, device="cpu")
    assert [id(param) for param in model.parameters()] == before


def test_ranks_with_other_experts_are_refused():
    model: Any = pair("Mixtral")[0]
    if dist.get_rank() == 1:
        layer = model.model.layers[0]
        block = getattr(layer, "block_sparse_moe", None) or layer.mlp
        block.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(EXPERTS // 2))
    with pytest.raises(PlanError):
        prepare_fully_shard(model, None, {"expert_parallel": 2}, device="cpu")
