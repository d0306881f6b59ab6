"""What single units can be told, and every form in which the settings may come."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from composer.utils.parallelism import FSDPConfig
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composer_fsdp2 import FSDP2Config, TrainerFSDP2Config, prepare_fully_shard
from composer_fsdp2.config.wrapping import PrecisionSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard import averaging
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from composer_fsdp2.step.run import Run, StepListener, run_of
from tests.support.models import WIDTH, Block, TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import (
    OPTIMIZERS,
    Recipe,
    assert_same_values,
    check_parity,
    model_loss,
    train_together,
)
from tests.support.traffic import Bytes

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
fp32, bf16 = torch.float32, torch.bfloat16


class Configured(TinyLM):
    """Its blocks are units, with the settings `fsdp_wrap_fn` gives the second of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        return self.settings if module is self.blocks[1] else isinstance(module, Block)


class Encoder(TinyLM):
    """Computes in methods other than `forward`."""

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(ids))


class ListsItsMethods(Encoder):
    fsdp_forward_methods = ("encode",)


def sharded(model: nn.Module, config: Any) -> nn.Module:
    prepare_fully_shard(model, None, config)
    return model


# --- What is returned. ---


@pytest.mark.world_size(2)
def test_returns_handles_and_units_by_name():
    model = TinyComposer()
    handles, units = prepare_fully_shard(model, None, {})
    assert handles == []
    assert list(units) == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net"]
    for name, unit in units.items():
        assert isinstance(unit, FSDPModule)
        assert unit is model.get_submodule(name)


@pytest.mark.world_size(2)
def test_units_keep_their_names_under_activation_checkpointing():
    model = TinyLM()
    _, units = prepare_fully_shard(model, None, {"activation_checkpointing": True})
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert set(model.state_dict()) == set(TinyLM().state_dict())


@pytest.mark.world_size(1)
@pytest.mark.parametrize("config", [{}, {"data_parallel_replicate_degree": 1}])
def test_one_rank(config: dict[str, Any]):
    model = check_parity(TinyLM, config)
    assert all(isinstance(param, DTensor) for param in model.parameters())


# --- Methods that compute with parameters. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "config"),
    [(Encoder, {"forward_methods": ["encode"]}), (ListsItsMethods, {})],
    ids=["setting", "attribute"],
)
def test_forward_methods(make: Callable[[], Encoder], config: dict[str, Any]):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = sharded(make(), config)
    ids = batches(1, 2)[0][0]
    for _ in range(2):
        assert torch.equal(model.encode(ids), plain.encode(ids))
        assert torch.allclose(model(ids), plain(ids), atol=1e-6)


class Again(Block):
    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("method", ["forward", pytest.param("again", marks=pytest.mark.matrix)])
def test_an_inner_unit_is_called_before_the_model(method: str):
    """Torch would take it for the root, and refuse the model."""
    torch.manual_seed(0)
    model = TinyLM()
    model.blocks[1] = Again()
    oracle = copy.deepcopy(model)
    policy = {"classes": ["Block", "Again"], "min_unit_bytes": 1}
    sharded(model, {"wrap_policy": policy, "forward_methods": ["blocks.1.again"]})
    block, x = model.blocks[1], torch.ones(2, WIDTH)
    with torch.no_grad():
        result = block(x) if method == "forward" else block.again(x)  # pyright: ignore
        assert torch.equal(result, oracle.blocks[1](x))
    ids, targets = batches(1, 4)[0]
    trains_alike(oracle, model, lambda one: lm_loss(one(ids), targets))


# --- Parameters that are left alone. ---


@pytest.mark.world_size(2)
def test_ignored_params_stay_whole_and_start_from_rank_0():
    models = [_frozen_norm(seed=0), _frozen_norm(seed=dist.get_rank())]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    config = {"ignored_params": ["norm.*", "blocks.1.up.weight"]}
    prepare_fully_shard(models[1], optimizers[1], config)
    left_alone = [n for n, p in models[1].named_parameters() if not isinstance(p, DTensor)]
    assert left_alone == ["blocks.1.up.weight", "norm.weight", "norm.bias"]
    train_together(models[0], optimizers[0], models[1], optimizers[1], Recipe())


def _frozen_norm(seed: int) -> TinyLM:
    torch.manual_seed(seed)
    model = TinyLM()
    nn.init.normal_(model.norm.weight)
    for param in (*model.norm.parameters(), model.blocks[1].up.weight):
        param.requires_grad_(False)
    return model


# --- When parameters are freed. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("reshard", "blocks_held", "root_held"),
    [("auto", False, True), (True, False, False), (False, True, True)],
)
def test_reshard_after_forward(reshard: Any, blocks_held: bool, root_held: bool):
    model = sharded(TinyLM(), {"reshard_after_forward": reshard})
    assert _held_after_forward(model) == {**dict.fromkeys("012", blocks_held), "": root_held}


@pytest.mark.world_size(2)
def test_fsdp_wrap_fn_sets_reshard_of_one_unit():
    model = sharded(Configured(reshard_after_forward=False), {})
    assert _held_after_forward(model) == {"0": False, "1": True, "2": False, "": True}


@pytest.mark.world_size(2)
def test_wrap_policy_sets_reshard_of_some_units():
    policy = {"names": {"blocks.1": {"reshard_after_forward": False}}, "classes": ["Block"]}
    model = sharded(TinyLM(), {"wrap_policy": policy})
    assert _held_after_forward(model) == {"0": False, "1": True, "2": False, "": True}


@pytest.mark.world_size(4)
def test_reshard_to_two_ranks():
    model = sharded(TinyLM(), {"reshard_after_forward": 2})
    rows = model.blocks[0].up.weight.to_local().shape[0]
    model(batches(1, 2)[0][0])
    assert rows == 5
    assert model.blocks[0].up.weight.to_local().shape[0] == 10


def _held_after_forward(model: TinyLM) -> dict[str, bool]:
    """Which units have whole parameters between forward and backward."""
    model(batches(1, 2)[0][0])
    held = {str(i): block.up.weight for i, block in enumerate(model.blocks)}
    held[""] = model.norm.weight
    return {name: not isinstance(param, DTensor) for name, param in held.items()}


# --- In which dtype. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("mixed_precision", "compute", "reduce"),
    [
        ("DEFAULT", fp32, fp32),
        ("PURE", fp32, fp32),
        ("FULL", fp32, fp32),
        ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, bf16, fp32),
        ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, bf16, bf16),
        ({"reduce_dtype": "bf16"}, fp32, bf16),
    ],
)
def test_mixed_precision(mixed_precision: Any, compute: torch.dtype, reduce: torch.dtype):
    model = sharded(TinyLM(), {"mixed_precision": mixed_precision})
    seen = _dtypes_of_blocks(model)
    batch = batches(1, 2)[0]
    with Bytes() as sent:
        logits = model(batch[0])
        logits.float().sum().backward()
    assert logits.dtype == compute
    assert seen == {0: (compute, compute), 1: (compute, compute), 2: (compute, compute)}
    assert set(sent.gathered) == {compute}
    assert set(sent.reduced) == {reduce}
    assert {param.grad.dtype for param in model.parameters()} == {fp32}


@pytest.mark.world_size(2)
def test_output_dtype():
    spec = {**BF16, "output_dtype": "fp32"}
    model = sharded(nn.Sequential(Block(), Block()), {"mixed_precision": spec})
    seen: list[torch.dtype] = []
    model[1].up.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    assert model(torch.randn(2, 10)).dtype == fp32
    assert seen == [bf16]


@pytest.mark.world_size(2)
def test_output_dtype_of_the_run_is_that_of_the_model():
    spec = {**BF16, "output_dtype": "fp32"}
    model = sharded(TinyLM(), {"mixed_precision": spec})
    seen: list[torch.dtype] = []
    model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    assert model(batches(1, 2)[0][0]).dtype == fp32
    assert seen == [bf16]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", ["fsdp_wrap_fn", "wrap_policy"])
def test_mixed_precision_of_one_unit(way: str):
    spec = {**BF16, "output_dtype": "fp32"}
    if way == "fsdp_wrap_fn":
        model = sharded(Configured(mixed_precision=spec), {})
    else:
        policy = {"names": {"blocks.1": {"mixed_precision": spec}}, "classes": ["Block"]}
        model = sharded(TinyLM(), {"wrap_policy": policy})
    seen = _dtypes_of_blocks(model)
    assert model(batches(1, 2)[0][0]).dtype == fp32
    assert seen == {0: (fp32, fp32), 1: (bf16, bf16), 2: (fp32, fp32)}


@pytest.mark.world_size(2)
def test_inputs_are_left_alone_when_told_so():
    spec = {**BF16, "cast_forward_inputs": False, "output_dtype": "fp32"}
    model = nn.Sequential(nn.Linear(10, 10))
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    sharded(model, {"mixed_precision": spec})
    with torch.autocast("cpu", bf16):
        model(torch.randn(2, 10))
    assert seen == [fp32]


class Slopes(Block):
    """A block with an argument that it wants in fp32, as ALiBi's slopes and rotary tables are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        self.seen.append(slopes.dtype)
        return super().forward(x) * slopes.to(x.dtype).mean()


class WithSlopes(TinyLM):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks.extend(Slopes() for _ in range(2))

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        self.scale = scale.dtype
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, slopes=torch.linspace(0.9, 1.1, 7))
        return self.head(self.norm(x))


CASTS: dict[str, tuple[dict[str, Any], list[torch.dtype]]] = {
    # of the model's input, then of the blocks'
    "of the model alone": ({}, [bf16, fp32, fp32]),
    "of every unit": ({"cast_forward_inputs": True}, [bf16, bf16, bf16]),
    "none": ({"cast_forward_inputs": False}, [fp32, fp32, fp32]),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("casts", CASTS)
def test_which_inputs_are_cast(casts: str, recompute: bool):
    """As in FSDP1, what the model hands to its blocks keeps its dtype, also computed again."""
    spec, expected = CASTS[casts]
    config = {"mixed_precision": {**BF16, **spec}, "activation_checkpointing": recompute}
    model = sharded(WithSlopes(), config)
    with torch.autocast("cpu", bf16):
        logits = model(batches(1, 2)[0][0], torch.ones(()))
    assert [model.scale, *(dtype for block in model.blocks for dtype in block.seen)] == expected
    for block in model.blocks:
        block.seen.clear()
    logits.float().sum().backward()
    again = [dtype for block in model.blocks for dtype in block.seen]
    assert again == (expected[1:] if recompute else [])


@pytest.mark.world_size(2)
def test_a_unit_with_a_precision_of_its_own_casts_its_inputs():
    names = {"blocks.0": {}, "blocks.1": {"mixed_precision": BF16}}
    model = sharded(WithSlopes(), {"wrap_policy": {"names": names}})
    with torch.autocast("cpu", bf16):
        model(batches(1, 2)[0][0], torch.ones(()))
    assert [block.seen for block in model.blocks] == [[fp32], [bf16]]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_low_precision_trains(recompute: bool):
    config = {"mixed_precision": BF16, "activation_checkpointing": recompute}
    model = TinyLM("two modules")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare_fully_shard(model, optimizer, config)
    batch = batches(1, 4)[0]
    losses = []
    for _ in range(10):
        loss = model_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_presets(precision: str):
    compute = compute_dtype(precision)
    default, pure, full_precision = (
        resolve_precision(preset, compute) for preset in ("DEFAULT", "PURE", "FULL")
    )
    assert (default.param_dtype, default.reduce_dtype) == (compute, fp32)
    assert (pure.param_dtype, pure.reduce_dtype) == (compute, compute)
    assert (full_precision.param_dtype, full_precision.reduce_dtype) == (None, None)
    assert default.output_dtype is pure.output_dtype is full_precision.output_dtype is None


def _dtypes_of_blocks(model: TinyLM) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """Filled in by forward: dtypes of each block's first weight and of its input."""
    seen: dict[int, tuple[torch.dtype, torch.dtype]] = {}

    def watch(index: int) -> None:
        def note(module: nn.Module, args: Any) -> None:
            seen[index] = (module.weight.dtype, args[0].dtype)

        model.blocks[index].norm.register_forward_pre_hook(note)

    for index in range(len(model.blocks)):
        watch(index)
    return seen


# --- Every form of the settings. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize("form", ["mapping", "ours", "the trainer's", "composer's", "fsdp1"])
def test_forms_of_the_same_settings(form: str):
    model = sharded(TinyLM(), _written(form))
    assert _held_after_forward(model) == {"0": True, "1": True, "2": True, "": True}


def _written(form: str) -> Any:
    if form == "ours":
        return FSDP2Config(reshard_after_forward=False)
    if form == "the trainer's":
        return TrainerFSDP2Config(reshard_after_forward=False)
    if form == "fsdp1":
        return FSDPConfig(sharding_strategy="SHARD_GRAD_OP")
    if form == "composer's":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2 Config/APIs are experimental")
            return ComposerFSDP2Config(reshard_after_forward=False)
    return {"reshard_after_forward": False}


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_composers_config_with_a_mesh_of_its_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2 Config/APIs are experimental")
        config = ComposerFSDP2Config(device_mesh=mesh)
    model = check_parity(TinyLM, config)
    assert model.embed.weight.to_local().shape[0] in (8, 9)


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("strategy", "rows", "held"),
    [
        ("FULL_SHARD", 5, False),
        ("SHARD_GRAD_OP", 5, True),
        ("HYBRID_SHARD", 10, False),
        ("_HYBRID_SHARD_ZERO2", 10, True),
        ("NO_SHARD", 20, True),
    ],
)
def test_fsdp1_strategies(strategy: str, rows: int, held: bool):
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks
    model = check_parity(TinyLM, FSDPConfig(sharding_strategy=strategy))
    assert model.blocks[0].up.weight.to_local().shape == (rows, 10)
    assert _held_after_forward(model)["1"] == held


@pytest.mark.world_size(2)
def test_settings_of_fsdp1_that_are_not_needed_are_named():
    config = FSDPConfig(limit_all_gathers=True, sync_module_states=True)
    with pytest.warns(UserWarning, match="FSDP1 to FSDP2: '.*' is no longer needed") as warned:
        sharded(TinyLM(), config)
    assert len(warned) == 2


@pytest.mark.world_size(2)
def test_precision_spec_may_be_an_object():
    spec = PrecisionSpec(param_dtype="bf16", reduce_dtype="fp32")
    model = sharded(TinyLM(), FSDP2Config(mixed_precision=spec))
    seen = _dtypes_of_blocks(model)
    model(batches(1, 2)[0][0])
    assert seen[1] == (bf16, bf16)


# --- A mesh in an answer, as mixtures of experts of LLM Foundry give it. ---


@pytest.mark.table("degrees2-mesh2")
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [({}, (4,)), ({}, (1, 4)), ({"data_parallel_replicate_degree": 2}, (2, 2))],
)
def test_the_mesh_of_the_run_is_accepted(degrees: dict[str, int], mesh: tuple[int, ...]):
    settings = {"device_mesh": init_device_mesh("cpu", mesh), "reshard_after_forward": False}
    check_parity(lambda: Configured(**settings), degrees, recipe=Recipe(steps=2))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_another_mesh_is_refused(mesh: tuple[int, ...]):
    """Of its ranks, or the part of a mesh that experts split over ranks leave."""
    whole = init_device_mesh("cpu", mesh, mesh_dim_names=("experts", "weights")[: len(mesh)])
    part = whole["weights"] if len(mesh) == 2 else whole
    degrees = {} if len(mesh) == 2 else {"data_parallel_replicate_degree": 2}
    with pytest.raises(ConfigError, match=r"'blocks\.1' its own 'device_mesh', the ranks"):
        prepare_fully_shard(Configured(device_mesh=part), None, degrees)


# --- What torch's own hooks do not see. ---


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.world_size(2)
def test_a_model_without_parameters():
    model = sharded(Doubles(), {})
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))  # pyright: ignore[reportArgumentType]


def trains_alike(oracle: nn.Module, model: nn.Module, loss: Callable[[nn.Module], Any]) -> None:
    """Both after two steps of SGD; the ranks see the same."""
    pairs = [(m, OPTIMIZERS["sgd"](m.parameters())) for m in (oracle, model)]
    for _ in range(2):
        for trained, optimizer in pairs:
            loss(trained).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)


@dataclasses.dataclass
class Handed:
    """What one unit hands to the next."""

    x: torch.Tensor
    more: Any = None


class Hands(nn.Module):
    """Reads and returns a dataclass, in which tensors may lie deep."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.layer, self.deep = nn.Linear(WIDTH, WIDTH), deep

    def forward(self, handed: Handed) -> Any:
        x = self.layer(handed.more["inside"][0].x if self.deep else handed.x)
        return Handed(x.detach(), {"inside": [Handed(x)]}) if self.deep else Handed(x)


class HandsOn(nn.Module):
    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.parts, self.deep = nn.ModuleList(Hands(deep) for _ in range(3)), deep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed = Handed(x, {"inside": [Handed(x)]})
        for part in self.parts:
            handed = part(handed)
        return handed.more["inside"][0].x if self.deep else handed.x


@pytest.mark.world_size(2)
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_units_that_hand_on_dataclasses(deep: bool, recompute: bool):
    """Torch 2.7 looks for tensors in plain containers alone."""
    torch.manual_seed(0)
    model = HandsOn(deep)
    oracle = copy.deepcopy(model)
    policy = {"classes": ["Hands"], "min_unit_bytes": 1}
    sharded(model, {"wrap_policy": policy, "activation_checkpointing": recompute})
    trains_alike(oracle, model, lambda one: one(torch.ones(2, WIDTH)).square().mean())


class Recomputes(TinyLM):
    """As transformers does with `gradient_checkpointing_enable`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@pytest.mark.table("LayerNorm-2")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("forwards", [2, 3])
@pytest.mark.parametrize("inner", ["Linear", "LayerNorm"])
def test_forwards_before_one_backward_through_recomputed_units(inner: str, forwards: int):
    """As a loss of preferences does: torch 2.7 gathers inner units for the first of them alone."""
    torch.manual_seed(0)
    model = Recomputes()
    oracle = copy.deepcopy(model)
    sharded(model, {"wrap_policy": {"classes": ["Block", inner], "min_unit_bytes": 1}})
    data = batches(forwards, 4)

    def loss(one: nn.Module) -> torch.Tensor:
        losses = [lm_loss(one(ids), targets) for ids, targets in data]
        return losses[0] - 0.5 * sum(losses[1:])

    trains_alike(oracle, model, loss)


class _Gathers(StepListener):
    """Counts gathers, and units that hold weights when backward comes to the first block."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.counts = Counter[str]()
        self.held: set[str] = set()

    def before_gather(self, unit: str, group: Any) -> None:
        self.counts[unit] += 1

    def before_backward(self, unit: str, group: Any) -> None:
        if unit == "blocks.0":
            groups = self.run.groups.items()
            self.held = {name for name, held in groups if any(g.is_unsharded for g in held)}


class Bent(Block):
    """Keeps something for backward after its last unit: torch computes the block again there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.world_size(2)
def test_units_in_recomputed_blocks_are_gathered_twice_and_freed_after_their_backward():
    model = Recomputes()
    model.blocks = nn.ModuleList(Bent(WIDTH) for _ in range(3))
    policy = {"classes": ["Bent", "Linear"], "min_unit_bytes": 1}
    sharded(model, {"wrap_policy": policy, "reshard_after_forward": True})
    (ids, targets) = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()
    gathers = _Gathers(run_of(model))
    run_of(model).listen(gathers)
    lm_loss(model(ids), targets).backward()
    inner = {name for name in gathers.counts if name.startswith("blocks.") and name.count(".") > 1}
    assert inner
    assert {gathers.counts[name] for name in inner} == {2}
    assert not {name for name in gathers.held & inner if not name.startswith("blocks.0.")}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_in_inference_mode_before_and_between_steps(reshard: bool):
    torch.manual_seed(0)
    model = TinyLM()
    oracle = copy.deepcopy(model)
    sharded(model, {"reshard_after_forward": reshard})
    ids, targets = batches(1, 4)[0]

    def loss(one: nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            seen = lm_loss(one(ids), targets).item()
        found = lm_loss(one(ids), targets)
        assert found.item() == pytest.approx(seen, abs=1e-6)
        return found

    trains_alike(oracle, model, loss)


def test_an_average_of_many_ranks_is_known_however_it_is_rounded():
    """As NCCL computes it: each rank sends a part of its number, and the sum goes around."""
    ranks = 8192
    sent = np.arange(ranks, dtype=np.float32) / np.float32(ranks)
    found = float(sent.cumsum()[-1])
    assert abs(found - (ranks - 1) / 2) > 1e-3
    assert averaging._is_average(found, ranks)
    assert averaging._is_average(0.5, 2)
    assert not averaging._is_average(1.0, 2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_state_dict_that_was_taken_before_the_first_step(rows: int, loaded: bool):
    """It is the parameters, as without sharding, also where a shard is smaller than others."""
    model = nn.Linear(4, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {}, device="cpu")
    if loaded:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    state, before = model.state_dict(), copy.deepcopy(model.state_dict())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(state[name].to_local(), param.to_local())
        assert (state[name].to_local() != before[name].to_local()).all()
