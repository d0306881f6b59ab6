"""Full parameters at any moment between steps: read, written, and gone again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ConfigError,
    PlanError,
    installed,
    prepare_fully_shard,
    summon_full_params,
    uninstall,
)
from tests.support.models import TinyComposer, TinyLM, batches
from tests.support.parity import (
    OPTIMIZERS,
    assert_close,
    assert_same_gradients,
    assert_same_state,
    assert_same_values,
    full,
    model_loss,
)


class Scaled(TinyLM):
    """The root owns a parameter itself; some are frozen."""

    def __init__(self) -> None:
        super().__init__("two modules")
        self.scale = nn.Parameter(torch.ones(3))
        self.norm.requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale.sum()


class Halves(TinyLM):
    """Units of different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].to(torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        return self.head(self.norm(x.float()))


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tie": (lambda: TinyLM("two modules"), {"reshard_after_forward": True}),
    "shared by all layers": (lambda: TinyLM("all layers"), {}),
    "nested units": (TinyLM, {"wrap_policy": {"names": ["blocks.0.norm", "blocks.0", "blocks.1"]}}),
    "kept": (lambda: TinyLM("inside one module"), {"reshard_after_forward": False}),
    "checkpointed": (
        lambda: TinyLM("module registered twice"),
        {"activation_checkpointing": True},
    ),
    "own, ignored, frozen": (Scaled, {"ignored_params": ["norm.*"]}),
    "dtypes": (Halves, {"mixed_precision": "FULL"}),
}


@torch.no_grad()
def scale(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(1.01)


def shift(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data + 0.01


def turn(model: nn.Module) -> None:
    values = {name: value.flip(0).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values)


class Twins:
    """A sharded model and an unsharded one that has to stay its equal."""

    def __init__(self, make: Callable[[], nn.Module], config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.plain = make()
        torch.manual_seed(0)
        self.model = make()
        pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (self.plain, self.model)]
        self.plain_optimizer, self.optimizer = pair
        prepare_fully_shard(self.model, self.optimizer, config)
        self.stepped = self.optimizer.param_groups[0]["params"]
        self.names = {n for n, p in self.model.named_parameters() if isinstance(p, DTensor)}
        self.data = iter(batches(40, 4 * dist.get_world_size()))
        self.save()

    # --- what may happen between steps ---

    def step(self) -> None:
        whole = next(self.data)
        mine = tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in whole)
        model_loss(self.plain, whole).backward()
        model_loss(self.model, mine).backward()
        assert_same_gradients(self.plain, self.model)
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        whole = next(self.data)
        assert_close("loss", model_loss(self.plain, whole), model_loss(self.model, whole))

    def read(self, **how: Any) -> None:
        with summon_full_params(self.model, writeback=False, **how):
            self.assert_whole()

    def read_on_rank_0(self) -> None:
        with summon_full_params(self.model, writeback=False, rank0_only=True):
            if dist.get_rank() == 0:
                self.assert_whole()
            else:
                self.assert_sharded()
            self.evaluate()

    def write(self, edit: Callable[[nn.Module], None] = scale) -> None:
        edit(self.plain)
        with summon_full_params(self.model):
            edit(self.model)
            self.assert_whole()

    def write_and_evaluate(self) -> None:
        shift(self.plain)
        with summon_full_params(self.model):
            shift(self.model)
            self.evaluate()
            self.assert_whole()

    def write_in_vain(self) -> None:
        with summon_full_params(self.model, writeback=False):
            self.spoil()

    def fail(self) -> None:
        with contextlib.suppress(KeyError), summon_full_params(self.model):
            self.spoil()
            raise KeyError

    @torch.no_grad()
    def spoil(self) -> None:
        """Not the ignored ones, which have no shards to go back to."""
        for name, param in self.model.named_parameters():
            if name in self.names:
                param.fill_(7.0)
        model_loss(self.model, next(self.data))

    def nest(self) -> None:
        shift(self.plain)
        with summon_full_params(self.model):
            self.write_in_vain()
            with summon_full_params(self.model):
                shift(self.model)
            self.fail()
            self.assert_whole()

    def save(self) -> None:
        self.saved = [
            {name: value.clone() for name, value in model.state_dict().items()}
            for model in (self.plain, self.model)
        ]

    def load(self) -> None:
        for model, values in zip((self.plain, self.model), self.saved, strict=True):
            model.load_state_dict(values)

    # --- what has to hold ---

    def assert_whole(self) -> None:
        expected, got = self.plain.state_dict(keep_vars=True), self.model.state_dict(keep_vars=True)
        assert expected.keys() == got.keys()
        for name, param in expected.items():
            assert not isinstance(got[name], DTensor), name
            assert got[name].requires_grad == param.requires_grad, name
            assert_close(name, param.detach(), got[name].detach())
        assert _ties(got) == _ties(expected)

    def assert_sharded(self) -> None:
        found = {id(param) for param in self.model.parameters()}
        assert found == {id(param) for param in self.stepped}
        assert {n for n, p in self.model.named_parameters() if isinstance(p, DTensor)} == self.names

    def check(self) -> None:
        """What the optimizer steps has the twin's values, and is what the model uses."""
        for expected, param in zip(self.plain.parameters(), self.stepped, strict=True):
            assert_close("a stepped parameter", expected.detach(), full(param))
        shards = {id(p) for p in self.model.parameters() if isinstance(p, DTensor)}
        assert shards <= {id(param) for param in self.stepped}

    def finish(self) -> None:
        self.step()
        self.evaluate()
        assert_same_values(self.plain, self.model)
        assert_same_state(self.plain_optimizer, self.optimizer)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                assert "_apply" not in vars(module)
        self.assert_sharded()


def _ties(params: dict[str, Any]) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, param in params.items():
        names.setdefault(id(param), set()).add(name)
    return {frozenset(group) for group in names.values()}


OPERATIONS = {
    "step": Twins.step,
    "evaluate": Twins.evaluate,
    "read": Twins.read,
    "read on rank 0": Twins.read_on_rank_0,
    "write": Twins.write,
    "write by load_state_dict": lambda twins: twins.write(turn),
    "write and evaluate": Twins.write_and_evaluate,
    "write in vain": Twins.write_in_vain,
    "fail": Twins.fail,
    "nest": Twins.nest,
    "save": Twins.save,
    "load": Twins.load,
}


def _random_operations(layout: str, seed: int, config: dict[str, Any]) -> Twins:
    """Every rank draws the same."""
    make, settings = LAYOUTS[layout]
    twins = Twins(make, {**settings, **config})
    done: list[str] = []
    try:
        for name in random.Random(f"{layout} {seed}").choices(list(OPERATIONS), k=12):
            done.append(name)
            OPERATIONS[name](twins)
            twins.check()
    except AssertionError as error:
        raise AssertionError(f"{done}: {error}") from error
    twins.finish()
    return twins


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_sequence_of_operations(layout: str):
    _random_operations(layout, 0, {})


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("seed", range(1, 4))
def test_other_sequences(seed: int):
    _random_operations("tie", seed, {})


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_any_sequence_of_operations_under_hsdp():
    twins = _random_operations("own, ignored, frozen", 0, {"data_parallel_replicate_degree": 2})
    for value in twins.model.state_dict().values():
        everyone = [torch.empty_like(full(value)) for _ in range(4)]
        dist.all_gather(everyone, full(value).contiguous())
        assert all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.world_size(1)
def test_any_sequence_of_operations_on_one_rank():
    _random_operations("tie", 0, {})


BEFORE_ANY_FORWARD = ["read", "read on rank 0", "write", "write and evaluate", "fail", "nest"]


@pytest.mark.table("read on rank 0", "write and evaluate")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("operation", BEFORE_ANY_FORWARD)
def test_before_any_forward(operation: str):
    """FSDP2 sets itself up in the first one."""
    twins = Twins(*LAYOUTS["shared by all layers"])
    OPERATIONS[operation](twins)
    twins.check()
    twins.finish()


# --- Values and gradients. ---


def sharded(make: Callable[[], nn.Module] = TinyLM, config: Any = None) -> Any:
    torch.manual_seed(0)
    model = make()
    prepare_fully_shard(model, None, config or {})
    return model


@pytest.mark.world_size(2)
def test_values_are_those_the_optimizer_steps_and_not_rounded():
    spec = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    model, ids = sharded(config={"mixed_precision": spec}), batches(1, 2)[0][0]
    torch.manual_seed(0)
    expected = TinyLM().head.weight
    with torch.no_grad():
        before = model(ids)
        with summon_full_params(model):
            assert torch.equal(model.head.weight, expected)
            model.head.weight.mul_(2)
            assert model(ids).dtype == torch.bfloat16
            assert torch.equal(model(ids), before * 2)
        assert torch.equal(model(ids), before * 2)
    assert torch.equal(full(model.state_dict()["head.weight"]), expected * 2)


@pytest.mark.world_size(2)
def test_attributes_of_parameters_are_there():
    model = TinyLM()
    model.head.weight.kind = "head"
    prepare_fully_shard(model, None, {})
    with summon_full_params(model):
        assert model.head.weight.kind == "head"
    assert set(vars(model.head.weight)) == {"_is_param", "kind"}


@pytest.mark.world_size(2)
def test_gradients():
    twins = Twins(*LAYOUTS["own, ignored, frozen"])
    whole = next(twins.data)
    for model in (twins.plain, twins.model):
        model_loss(model, whole).backward()
    for keep in (True, False):
        with summon_full_params(twins.model, with_grads=True, writeback=keep):
            pairs = list(zip(twins.plain.parameters(), twins.model.parameters(), strict=True))
            for expected, param in pairs:
                assert (param.grad is None) == (expected.grad is None)
                if expected.grad is not None:
                    assert_close("gradient", expected.grad, param.grad)
                    param.grad.mul_(2)
                    expected.grad.mul_(2 if keep else 1)
            if keep:
                twins.model.scale.grad = twins.plain.scale.grad = None
    with summon_full_params(twins.model):
        assert all(param.grad is None for param in twins.model.parameters())
    reading = {"with_grads": True, "writeback": False}
    with summon_full_params(twins.model, with_grads=True):
        for _ in range(2):
            with summon_full_params(twins.model, **reading):
                assert_close(
                    "gradient", twins.plain.embed.weight.grad, twins.model.embed.weight.grad
                )
                twins.model.embed.weight.grad.zero_()
    assert_same_gradients(twins.plain, twins.model)
    twins.plain_optimizer.step()
    twins.optimizer.step()
    twins.check()


@pytest.mark.world_size(2)
def test_recurse_false_leaves_nested_units_alone():
    model, ids = sharded(), batches(1, 2)[0][0]
    with torch.no_grad(), summon_full_params(model, recurse=False):
        assert not isinstance(model.head.weight, DTensor)
        assert all(isinstance(param, DTensor) for param in model.blocks.parameters())
        model.head.weight.zero_()
        assert not model(ids).any()
        assert all(isinstance(param, DTensor) for param in model.blocks[0].parameters())
    assert not full(model.head.weight).any()


@pytest.mark.world_size(2)
def test_a_nested_unit_alone():
    model, ids = sharded(), batches(1, 2)[0][0]
    model(ids)
    block = model.blocks[1]
    with torch.no_grad(), summon_full_params(block):
        block.up.weight.zero_()
        assert all(isinstance(param, DTensor) for param in model.blocks[0].parameters())
        model(ids)
        assert not isinstance(block.up.weight, DTensor)
    assert not full(block.up.weight).any()


class Adapted(nn.Linear):
    """Says itself what is trained, as wrappers of adapters do."""

    def parameters(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter([self.bias])


@pytest.mark.world_size(2)
def test_a_nested_unit_with_parameters_of_its_own_making():
    def make() -> nn.Module:
        model: Any = TinyLM()
        up = model.blocks[1].up
        model.blocks[1].up = Adapted(up.in_features, up.out_features)
        return model

    model = sharded(make)
    model(batches(1, 2)[0][0])
    with summon_full_params(model.blocks[1]):
        assert not isinstance(model.blocks[1].up.weight, DTensor)


@pytest.mark.world_size(2)
def test_a_method_registered_as_forward():
    model = sharded(TinyComposer)
    batch = batches(1, 2)[0]
    with torch.no_grad():
        model.eval_forward(batch)
        with summon_full_params(model):
            model.net.head.weight.zero_()
            assert not model.eval_forward(batch).any()
            assert not model.net.head.weight.any()
    assert not full(model.net.head.weight).any()


@pytest.mark.world_size(2)
def test_a_model_without_fsdp2():
    model = TinyLM()
    before = dict(model.named_parameters())
    with summon_full_params(model):
        assert dict(model.named_parameters()) == before
        scale(model)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("static", [True, False])
def test_fsdp1s_method_is_led_here(static: bool):
    uninstall()  # a test before this one, on the same ranks, may have left it installed
    model = sharded()
    with installed():
        summon = FSDP.summon_full_params if static else FSDP.__new__(FSDP).summon_full_params
        with summon(model, writeback=False):
            assert not any(isinstance(param, DTensor) for param in model.parameters())
        with (
            pytest.raises(ConfigError, match="rank0_only and writeback"),
            summon(model, rank0_only=True),
        ):
            pass
        with summon(TinyLM()):
            pass
    with FSDP.summon_full_params(model):
        assert all(isinstance(param, DTensor) for param in model.parameters())


# --- What is refused, on every rank, leaving everything as it was. ---


def backward(model: Any) -> None:
    model(batches(1, 2)[0][0]).sum().backward()


def replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))


def reshape(model: Any) -> None:
    model.head.weight.data = torch.zeros(1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("deed", [backward, replace, reshape])
def test_writes_that_would_get_lost_are_refused(deed: Callable[[Any], None]):
    model = sharded()
    expected = full(model.head.weight)
    summoned = summon_full_params(model)
    summoned.__enter__()
    nn.init.zeros_(model.norm.weight)
    deed(model)
    with pytest.raises(PlanError, match="none were written"):
        summoned.__exit__(None, None, None)
    assert torch.equal(full(model.head.weight), expected)
    assert full(model.norm.weight).all()
    backward(model)


@pytest.mark.world_size(2)
def test_a_step_inside_is_refused():
    model = sharded()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    backward(model)
    with pytest.raises(PlanError, match="its shards had changed"), summon_full_params(model):
        optimizer.step()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.world_size(2)
def test_conversion_inside_is_refused():
    model = sharded()
    with summon_full_params(model):
        for refused in (model.half, model.unshard):
            with pytest.raises(PlanError, match="Convert copies"):
                refused()
    backward(model)
    assert model.to(torch.float64).head.weight.dtype == torch.float64


ASKING: dict[str, tuple[dict[str, Any], str]] = {
    "write on rank 0": ({"rank0_only": True}, "Add writeback=False to read on rank 0"),
    "gradients elsewhere": (
        {"offload_to_cpu": True, "with_grads": True},
        "gradient has to be where its parameter is",
    ),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ASKING)
def test_arguments_that_contradict(case: str):
    model = sharded()
    how, said = ASKING[case]
    with pytest.raises(ConfigError, match=said), summon_full_params(model, **how):
        pass
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.world_size(2)
def test_copies_on_every_rank_of_a_node_are_warned_about():
    warning = pytest.warns(UserWarning, match="for every rank of a node")
    with warning as warned, summon_full_params(sharded(), offload_to_cpu=True):
        pass
    assert warned[0].filename == __file__


@pytest.mark.world_size(2)
@pytest.mark.parametrize("more", [{"writeback": False}, {"with_grads": True}])
def test_a_block_that_asks_for_more_than_the_one_around_it(more: dict[str, Any]):
    model = sharded()
    outer = {} if "with_grads" in more else {"rank0_only": True, "writeback": False}
    refusal = pytest.raises(ConfigError, match="is summoned already")
    with summon_full_params(model, **outer), refusal, summon_full_params(model, **more):
        pass
    backward(model)


@pytest.mark.world_size(2)
def test_inside_a_forward():
    model = sharded()

    def hook(*_: Any) -> None:
        with summon_full_params(model):
            pass

    handle = model.norm.register_forward_hook(hook)
    with pytest.raises(PlanError, match="inside a forward or backward"):
        backward(model)
    handle.remove()


@pytest.mark.world_size(2)
def test_a_module_inside_a_unit():
    model = sharded()
    backward(model)
    with pytest.raises(PlanError, match="belong to a unit around"), summon_full_params(model.head):
        pass
    with summon_full_params(model), summon_full_params(model.head), torch.no_grad():
        model.head.weight.zero_()
    assert not full(model.head.weight).any()


@pytest.mark.world_size(2)
def test_a_weight_of_the_root_inside_a_unit():
    model = sharded(lambda: TinyLM("all layers"))
    model(batches(1, 2)[0][0])
    with pytest.raises(PlanError, match="belong to a unit"), summon_full_params(model.blocks[0]):
        pass
    with summon_full_params(model), summon_full_params(model.blocks[0]):
        assert not isinstance(model.blocks[0].mix.weight, DTensor)


@pytest.mark.world_size(2)
def test_a_forward_that_fails_inside():
    model = sharded()
    handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    expected = full(model.blocks[0].up.weight)
    with contextlib.suppress(ZeroDivisionError), summon_full_params(model):
        nn.init.zeros_(model.blocks[0].up.weight)
        model(batches(1, 2)[0][0])
        pytest.fail("the forward did not fail")
    handle.remove()
    assert torch.equal(full(model.blocks[0].up.weight), expected)
    with contextlib.suppress(PlanError), summon_full_params(model):
        pass
    backward(model)
