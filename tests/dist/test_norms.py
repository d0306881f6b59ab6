"""Norms and clipping on local shards: the numbers of whole tensors, in one collective."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.algorithms.sam.sam import SAMOptimizer
from composer.callbacks import OptimizerMonitor
from composer.core import Event
from composer.optim import DecoupledAdamW
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import clip_grad_norm_, installed, prepare_fully_shard
from composer_fsdp2.optim.norms import whole_metrics
from composer_fsdp2.trainer.extensions.callbacks import logged_norms
from composer_fsdp2.trainer.extensions.step_record import recorded_norm
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import OPTIMIZERS, assert_same_gradients, full
from tests.support.training import samples_of, trainer_for

HSDP = {"data_parallel_replicate_degree": 2}
ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf]


class Seen(TorchDispatchMode):
    """Counts collectives, and the times the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collectives += func.namespace in ("c10d", "_c10d_functional") and (
            func.overloadpacket.__name__ != "wait_tensor"
        )
        self.numbers += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# --- Parameters that are sharded in several ways ---

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((5, 3), torch.float32),
    ((1,), torch.float32),  # empty on all ranks but one
    ((4, 2), torch.float64),
    ((7, 2), torch.bfloat16),
    ((), torch.float32),
    ((6,), torch.float32),
]


class Params:
    """Parameters and their whole gradients; the last one has none."""

    def __init__(self, mesh: DeviceMesh, *placements: Placement) -> None:
        generator = torch.Generator().manual_seed(4)
        self.whole: list[torch.Tensor] = []
        self.params: list[nn.Parameter] = []
        for shape, dtype in SHAPES:
            value = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
            plain = not shape
            param = nn.Parameter(value if plain else distribute(value, mesh, placements))
            param.grad = value.clone() if plain else distribute(value.clone(), mesh, placements)
            self.whole.append(value)
            self.params.append(param)
        self.params.append(nn.Parameter(distribute(torch.ones(3), mesh, placements)))

    def norm(self, order: float) -> torch.Tensor:
        every = torch.cat([grad.flatten().double() for grad in self.whole])
        return torch.linalg.vector_norm(every, order)

    def check(self, order: float, collectives: int) -> None:
        expected = self.norm(order)
        limit = expected.item() / 2
        with Seen() as seen:
            norm = clip_grad_norm_(iter(self.params), limit, order)
        assert type(norm) is torch.Tensor
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        assert (seen.collectives, seen.numbers) == (collectives, 0)
        for param, whole in zip(self.params, self.whole, strict=False):
            clipped = whole * (limit / (expected + 1e-6))
            assert param.grad is not None
            assert param.grad.dtype == whole.dtype
            torch.testing.assert_close(full(param.grad), clipped.to(whole.dtype))
        assert self.params[-1].grad is None


@pytest.mark.world_size(2)
@pytest.mark.parametrize("order", ORDERS)
def test_one_collective_for_all_dtypes(order: float):
    Params(init_device_mesh("cpu", (2,)), Shard(0)).check(order, 1)


@pytest.mark.world_size(2)
def test_metrics_that_are_norms_share_a_collective():
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.arange(4.0 * number).reshape(number, 4) for number in (2, 3, 5)]
    metrics = {str(len(w)): distribute(w, mesh, [Shard(0)]).norm() for w in whole}
    with Seen() as seen:
        found = whole_metrics(metrics)
    assert found == pytest.approx({str(len(w)): w.norm().item() for w in whole})
    assert seen.collectives == 1


@pytest.mark.world_size(3)
@pytest.mark.parametrize("order", ORDERS)
def test_shards_of_different_sizes(order: float):
    Params(init_device_mesh("cpu", (3,)), Shard(0)).check(order, 1)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("order", ORDERS)
def test_copies_count_once(order: float):
    """One collective over the shard axis; a mesh whose ranks all have copies needs none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    Params(mesh, Replicate(), Shard(0)).check(order, 1)
    Params(mesh, Replicate(), Replicate()).check(order, 0)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_parameters_of_several_meshes(order: float):
    """Torch's own function refuses them. One collective for each axis is all that they need."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parts = [
        Params(mesh, Shard(0), Replicate()),
        Params(mesh["a"], Shard(0)),
        Params(mesh["b"], Shard(0)),
        Params(mesh, Shard(0), Shard(0)),
        Params(init_device_mesh("cpu", (4,)), Shard(0)),
    ]
    params = [param for part in parts for param in part.params]
    norms = torch.stack([part.norm(order) for part in parts])
    with pytest.raises((RuntimeError, ValueError)):
        nn.utils.clip_grad_norm_(params, 1.0, order)
    with Seen() as seen:
        norm = clip_grad_norm_(params, 1e9, order)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(norms, order), rtol=1e-6, atol=0.0)
    assert seen.collectives == 3


@pytest.mark.world_size(2)
def test_terms_of_a_sum_are_added_up_first():
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute(torch.ones(2), mesh, [Replicate()]))
    term = torch.tensor([3.0, 4.0 + dist.get_rank()])
    param.grad = DTensor.from_local(term, mesh, [Partial()])
    norm = clip_grad_norm_([param], 1.0)
    assert norm.item() == pytest.approx(math.hypot(6, 9))
    assert full(param.grad).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_all_ranks_hear_of_what_is_not_finite_on_one(order: float, value: float):
    held = Params(init_device_mesh("cpu", (2,)), Shard(0))
    grad = held.params[0].grad
    assert isinstance(grad, DTensor)
    if dist.get_rank() == 1:
        grad.to_local()[0, 0] = value
    before = copy.deepcopy([full(g.grad) for g in held.params if g.grad is not None])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(held.params, 1.0, order, error_if_nonfinite=True)
    after = [full(g.grad) for g in held.params if g.grad is not None]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    norm = clip_grad_norm_(held.params, 1.0, order).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


@pytest.mark.world_size(2)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_rank_without_gradients_holds_up_nobody(order: float):
    """It gets the norm of the others' shards; plain tensors are its own business."""
    held = Params(init_device_mesh("cpu", (2,)), Shard(0))
    params = [param for param in held.params if isinstance(param, DTensor)]
    shards = [p.grad.to_local().flatten() for p in params if isinstance(p.grad, DTensor)]
    expected = torch.linalg.vector_norm(torch.cat(shards).double(), order)
    dist.broadcast(expected, src=0)
    if dist.get_rank() == 1:
        for param in params:
            param.grad = None
    torch.testing.assert_close(clip_grad_norm_(params, 1e9, order), expected)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_plain_tensors_have_the_bits_of_torch(foreach: bool | None, order: float):
    torch.manual_seed(0)
    pair = [nn.Parameter(torch.ones(40, 3)), nn.Parameter(torch.ones(7))]
    twins = copy.deepcopy(pair)
    for one, other in zip(pair, twins, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = clip_grad_norm_(pair, 0.5, order, foreach=foreach)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(twins, 0.5, order, foreach=foreach))
    for one, other in zip(pair, twins, strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, math.nan])
def test_an_order_that_is_not_above_zero_is_refused(order: float):
    with pytest.raises(ValueError, match="needs an order above 0"):
        clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, order)


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0) == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, math.inf) == 0


# --- Models ---


def backward(model: nn.Module) -> None:
    ids, targets = batches(1, 8)[0]
    lm_loss(model(ids), targets).backward()


def both(config: dict[str, Any], make: Callable[[], nn.Module] = TinyLM) -> list[nn.Module]:
    """An unsharded model and a sharded one, with the same gradients."""
    torch.manual_seed(0)
    oracle = make()
    model = copy.deepcopy(oracle)
    prepare_fully_shard(model, None, config)
    for one in (oracle, model):
        backward(one)
    return [oracle, model]


CLIPPING = {"norm": (0.05, 1), "value": (0.003, 0)}


def check_composers_clipping(kind: str, config: dict[str, Any]) -> None:
    from composer.algorithms.gradient_clipping import gradient_clipping as home

    threshold, collectives = CLIPPING[kind]
    models = both(config)
    before = [full(p.grad).clone() for p in models[0].parameters() if p.grad is not None]
    with installed():
        home.apply_gradient_clipping(models[0], kind, threshold, False)
        with Seen() as seen:
            home.apply_gradient_clipping(models[1], kind, threshold, False)
    after = [p.grad for p in models[0].parameters() if p.grad is not None]
    assert not all(map(torch.equal, before, after))
    assert_same_gradients(*models)
    assert (seen.collectives, seen.numbers) == (collectives, 0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", CLIPPING)
def test_composers_clipping(kind: str):
    check_composers_clipping(kind, {})


@pytest.mark.world_size(3)
@pytest.mark.parametrize("kind", CLIPPING)
def test_composers_clipping_of_uneven_shards(kind: str):
    check_composers_clipping(kind, {})


@pytest.mark.table("norm")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", CLIPPING)
def test_composers_clipping_with_copies(kind: str):
    check_composers_clipping(kind, HSDP)


@pytest.mark.world_size(2)
def test_the_algorithm_of_the_trainer_gets_it():
    """Not only the function: `GradientClipping` looks it up when it clips."""
    model = TinyComposer()
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            samples_of(1, 8),
            algorithms=GradientClipping("norm", 0.05),
        )
        trainer.fit()
        backward(trainer.state.model.net)
        (algorithm,) = trainer.state.algorithms
        with Seen() as seen:
            algorithm.apply(Event.AFTER_TRAIN_BATCH, trainer.state, trainer.logger)
        trainer.close()
    assert seen.collectives == 1


@pytest.mark.world_size(2)
def test_recorded_norm_takes_one_collective():
    oracle, model = both({})
    with Seen() as seen:
        norm = recorded_norm(model)
    expected = nn.utils.clip_grad_norm_(oracle.parameters(), math.inf).item()
    assert norm == pytest.approx(expected, rel=1e-6)
    assert seen.collectives == 1


@pytest.mark.world_size(2)
def test_sam_climbs_by_the_whole_norm():
    oracle, model = both({})
    found = []
    with installed():
        for one in (oracle, model):
            sam = SAMOptimizer(OPTIMIZERS["sgd"](one.parameters()), rho=0.1)
            with Seen() as seen:
                sam.first_step()
            found.append(seen.collectives)
    assert found == [0, 1]
    for one, other in zip(oracle.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other), one, rtol=0, atol=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_a_scaler_divided():
    """A step whose gradients overflow on one rank is left out on all."""
    oracle, model = both({})
    for one in (oracle, model):
        one.zero_grad()
    optimizers = [OPTIMIZERS["sgd"](one.parameters()) for one in (oracle, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for overflow in (False, True, False):
        for one, optimizer, scaler in zip((oracle, model), optimizers, scalers, strict=True):
            ids, targets = batches(1, 8)[0]
            scaler.scale(lm_loss(one(ids), targets)).backward()
            if overflow:
                first = next(p.grad for p in one.parameters())
                if one is oracle or dist.get_rank() == 1:
                    local = first.to_local() if isinstance(first, DTensor) else first
                    assert local is not None
                    local.view(-1)[0] = math.inf
            scaler.unscale_(optimizer)
            clip_grad_norm_(one.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            one.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for one, other in zip(oracle.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other), one, rtol=0, atol=1e-6)


# --- OptimizerMonitor ---


class Odd(DecoupledAdamW):
    """Reports a number that no rank can add up from shards, as a DTensor."""

    def report_per_parameter_metrics(
        self, param: torch.Tensor, name: str, optimizer_metrics: dict[str, Any]
    ) -> dict[str, Any]:
        super().report_per_parameter_metrics(param, name, optimizer_metrics)
        optimizer_metrics[f"largest/{name}"] = param.detach().abs().max()
        return optimizer_metrics


REPORTING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "DecoupledAdamW": lambda params: DecoupledAdamW(params, lr=1e-3, weight_decay=1e-4),
    "AdamW": OPTIMIZERS["adamw"],
    "Odd": lambda params: Odd(params, lr=1e-3, weight_decay=1e-4),
}


def check_logged(name: str, config: dict[str, Any]) -> None:
    models = both(config)
    found = []
    for one in models:
        optimizer = REPORTING[name](one.parameters())
        optimizer.step()
        params = dict(one.named_parameters())
        params["blocks.1.up.bias"].requires_grad_(False)
        params["norm.bias"].grad = None
        with Seen() as seen:
            found.append(logged_norms(one, optimizer, reported=True))
        assert set(optimizer.state) <= set(params.values())
    assert found[0].keys() == found[1].keys()
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-7)
    assert "l2_norm/grad/blocks.0.up.weight" in found[1]
    assert not [key for key in found[1] if key.endswith("blocks.1.up.bias")]
    assert ("l2_norm/moment/embed.weight" in found[1]) == (name != "AdamW")
    assert "l2_norm/grad/norm.bias" not in found[1]
    if name != "Odd":
        assert seen.collectives == 1


@pytest.mark.table("DecoupledAdamW", "Odd")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", REPORTING)
def test_one_collective_for_everything_that_is_logged(name: str):
    check_logged(name, {})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["AdamW", "Odd"])
def test_a_gradient_on_one_rank_alone_is_logged(name: str):
    models = both({})
    optimizer = REPORTING[name](models[1].parameters())
    optimizer.step()
    param = dict(models[1].named_parameters())["blocks.0.up.weight"]
    whole = dict(models[0].named_parameters())["blocks.0.up.weight"].grad
    assert whole is not None
    if dist.get_rank() == 0:
        param.grad = None
    found = logged_norms(models[1], optimizer, reported=True)
    expected = whole[len(whole) // 2 :].norm().item()
    assert found["l2_norm/grad/blocks.0.up.weight"] == pytest.approx(expected, rel=1e-5)
    assert (param.grad is None) == (dist.get_rank() == 0)


@pytest.mark.world_size(3)
def test_what_is_logged_of_uneven_shards():
    check_logged("DecoupledAdamW", {})


@pytest.mark.world_size(4)
def test_what_is_logged_with_copies():
    check_logged("DecoupledAdamW", HSDP)


@pytest.mark.world_size(2)
def test_the_callback_uses_it():
    model = TinyComposer()
    counts: list[int] = []

    class Counting(OptimizerMonitor):
        def batch_end(self, state: Any, logger: Any) -> None:
            with Seen() as seen:
                super().batch_end(state, logger)
            counts.append(seen.collectives)

    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for(
            model,
            REPORTING["DecoupledAdamW"](model.parameters()),
            samples_of(2, 8),
            callbacks=Counting(batch_log_interval=1),
        )
        trainer.fit()
        trainer.close()
    assert counts == [1, 1]
