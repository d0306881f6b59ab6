"""Errors of torch that come of sharding: a sentence with the line and the cures."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from composer_fsdp2 import (
    PlanError,
    clip_grad_norm_,
    full_tensor,
    installed,
    prepare_fully_shard,
)
from composer_fsdp2.errors import ShardReadError
from composer_fsdp2.guards.explain import explained as explaining
from composer_fsdp2.guards.explain import explained_reading
from composer_fsdp2.step.run import run_of
from tests.support.models import Block, TinyComposer, TinyLM, batches, llama_config, lm_loss
from tests.support.training import largest_difference, samples_of, train_alone, trainer_for

WIDTH = 10
NAMES = ["blocks.0", "blocks.1", "blocks.2"]
POLICY = {"wrap_policy": {"names": NAMES}}


@contextlib.contextmanager
def explained(match: str, cause: type[Exception] | None = RuntimeError) -> Iterator[Any]:
    """Every rank raises the same error, with torch's behind it."""
    with pytest.raises(PlanError, match=match) as caught:
        yield caught
    if cause is not None:
        assert isinstance(caught.value.__cause__, cause)
    said: list[Any] = [None, None]
    dist.all_gather_object(said, str(caught.value))
    assert said[0] == said[1]


def step(model: nn.Module) -> None:
    ids, targets = batches(1, 4)[0]
    lm_loss(model(ids), targets).backward()


class TwoWays(Block):
    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Calls(TinyLM):
    """`use` is what it does with its second block after it has run all of them."""

    def __init__(self, use: Any, settings: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks[1] = TwoWays()
        self.use = use
        prepare_fully_shard(self, None, settings or POLICY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.use(self.blocks[1], x)))


OUTSIDE: dict[str, tuple[Any, str]] = {
    "a method": (lambda b, x: b.again(x), r"F\.gelu\(self\.up\(x\)\).*\['blocks\.1\.again'\]"),
    "a part": (
        lambda b, x: b.down(b.up(x)),
        r"this rank's .* b\.down\(b\.up\(x\)\).*\['path\.to\.module\.method'\]",
    ),
    "a weight": (
        lambda b, x: F.linear(F.linear(x, b.up.weight), b.up.weight.T),
        r"shard of a parameter such as 'blocks\.\d\.up\.weight' .*b\.up\.weight",
    ),
}


def _orthogonal(block: Any, x: torch.Tensor) -> torch.Tensor:
    """As PEFT's AdaLoRA computes its loss, after the forward of the model inside."""
    product = block.up.weight @ block.up.weight.T
    return x + (product - torch.eye(*product.size(), out=torch.empty_like(product))).norm()


@pytest.mark.world_size(2)
def test_an_assertion_of_torch_about_shards():
    with explained(r"computed with this rank's shard of .*torch\.eye", cause=Exception):
        step(Calls(_orthogonal))


@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_unit_used_from_outside(name: str):
    use, match = OUTSIDE[name]
    with explained(match) as caught:
        step(Calls(use))
    said = str(caught.value)
    assert all(word in said for word in ("test_explain.py:", "forward_methods", "wrap_policy"))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", OUTSIDE)
def test_one_rank_alone_tells_the_others(name: str):
    use, match = OUTSIDE[name]

    def use_on_one(block: Any, x: torch.Tensor) -> torch.Tensor:
        return use(block, x) if dist.get_rank() == 1 else x

    with explained(rf"On rank 1: .*{match}", cause=None):
        step(Calls(use_on_one))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("folder", ["torch", "composer_fsdp2"])
def test_the_line_of_a_file_in_a_folder_of_any_name(folder: str):
    code = "def use(b, x):\n    return x @ b.up.weight.T"
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, folder, "models.py")
        file.parent.mkdir()
        file.write_text(code)
        scope: dict[str, Any] = {}
        exec(compile(code, str(file), "exec"), scope)
        with pytest.raises(PlanError, match=rf"/{folder}/models\.py:2: `return x @ b\.up\.weight"):
            step(Calls(scope["use"]))


@pytest.mark.world_size(2)
def test_the_first_cure_is_one():
    step(Calls(OUTSIDE["a method"][0], {**POLICY, "forward_methods": ["blocks.1.again"]}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)[0]


@pytest.mark.world_size(2)
def test_a_module_that_reads_the_weights_of_one_inside():
    model = TinyLM()
    model.blocks[1] = Attention()
    policy = {"wrap_policy": {"classes": ["NonDynamicallyQuantizableLinear"]}}
    prepare_fully_shard(model, None, policy)
    with explained(r"computed with this rank's shard .* self\.attention\(x, x, x\)"):
        step(model)


@pytest.mark.world_size(2)
def test_the_trainers_own_frames_explain_too():
    class Regularized(TinyComposer):
        def loss(self, outputs: Any, batch: Any, *args: Any) -> torch.Tensor:
            weight = self.net.blocks[0].up.weight
            return super().loss(outputs, batch) + F.linear(torch.ones(1, WIDTH), weight).sum()

    model = Regularized()
    settings = {"wrap_policy": {"classes": ["Block"]}}
    with installed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_for(model, optimizer, samples_of(1, 8), settings)
        with explained(r"computed with this rank's shard of .*ones\(1, WIDTH\)"):
            trainer.fit()
    trainer.close()


class Casts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()).float()


class ToFloat(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@pytest.mark.world_size(2)
def test_a_module_that_casts_its_inputs():
    model = TinyLM()
    model.blocks[1] = ToFloat()
    precision = {"mixed_precision": {"param_dtype": "bf16"}}
    prepare_fully_shard(model, None, {**POLICY, **precision})
    with explained(r"computes in another dtype .* unit 'blocks\.1' .*self\.norm\(x\)"):
        step(model)


class TakesObject(Block):
    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return super().forward(batch.x)


def given_an_object() -> None:
    model = TakesObject()
    precision = {"param_dtype": "bf16", "cast_forward_inputs": True}
    prepare_fully_shard(model, None, {"mixed_precision": precision})
    model(SimpleNamespace(x=torch.ones(2, WIDTH)))


@pytest.mark.world_size(2)
def test_tensors_in_an_object_that_nobody_casts():
    with explained(r"given tensors in a SimpleNamespace, .* give the model a dictionary"):
        given_an_object()


@pytest.mark.world_size(2)
def test_a_model_that_is_cast_after_its_first_forward():
    model, ids = TinyLM(), batches(1, 2)[0][0]
    prepare_fully_shard(model, None, {})
    with torch.no_grad():
        model(ids)
        model.double()
        refused = r"was torch.float32 in the first forward and is torch.float64 .* mixed_precision"
        with pytest.raises(PlanError, match=refused):
            model(ids)


@pytest.mark.world_size(2)
def test_an_error_that_sharding_has_no_part_in_is_left_alone():
    model = TinyLM()
    model.blocks[1] = Casts()
    prepare_fully_shard(model, None, POLICY)
    with pytest.raises(RuntimeError, match=r"same dtype|scalar type|mixed dtype"):
        step(model)


class DoublesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return super().forward(x)


class DoublesAPart(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].mul_(2.0)
        return super().forward(x)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [DoublesItsInput, DoublesAPart])
def test_an_input_changed_in_place(kind: type[nn.Module]):
    model = TinyLM()
    model.blocks[1] = kind()
    prepare_fully_shard(model, None, POLICY)
    match = r"changes an input or output of a unit in place .*mul_\(2\.0\).* last is 'blocks\.1'"
    with explained(match):
        step(model)


class ReturnsView(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:]


class AddsInPlace(TinyLM):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.head(self.norm(x))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("view", [True, False])
def test_an_output_changed_in_place(view: bool):
    torch.manual_seed(0)
    model = AddsInPlace()
    if view:
        model.blocks[1] = ReturnsView()
    plain = copy.deepcopy(model)
    prepare_fully_shard(model, None, POLICY)
    if view:
        with explained(r"changes an input or output of .* in place .*x \+= 1"):
            step(model)
        return
    for one in (plain, model):
        step(one)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad.full_tensor(), atol=1e-6)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(2)
def test_a_view_that_nobody_changes_is_right():
    torch.manual_seed(0)
    model = TinyLM()
    model.blocks[1] = ReturnsView()
    plain = copy.deepcopy(model)
    prepare_fully_shard(model, None, POLICY)
    for one in (plain, model):
        step(one)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad.full_tensor(), atol=1e-6)


class Penalized(TinyComposer):
    """Adds a penalty over all parameters to its loss."""

    penalty: Any = None

    def loss(self, outputs: Any, batch: Any, *args: Any) -> torch.Tensor:
        return super().loss(outputs, batch) + type(self).penalty(self)


class SquaresPenalized(Penalized):
    penalty = staticmethod(lambda model: 1e-3 * sum(p.square().sum() for p in model.parameters()))


class AbsolutesPenalized(Penalized):
    penalty = staticmethod(lambda model: 1e-3 * sum(p.abs().sum() for p in model.parameters()))


class WholePenalized(Penalized):
    """As the sentence says."""

    @staticmethod
    def penalty(model: nn.Module) -> torch.Tensor:
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
        return 1e-2 * sum((p.square().sum() for p in whole), start=torch.zeros(()))


def fitted(make: type[Penalized]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    settings = {"wrap_policy": {"classes": ["Block"], "min_unit_bytes": 1}}
    with installed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_for(model, optimizer, samples_of(3, 8), settings)
        try:
            trainer.fit()
        finally:
            trainer.close()
    return model


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1")  # torch 2.7
@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [SquaresPenalized, AbsolutesPenalized])
def test_a_penalty_over_all_parameters(make: type[Penalized]):
    said = r"A penalty over all parameters is the optimizer's weight_decay, or .*full_tensor\(\)"
    with explained(said, cause=Exception):
        fitted(make)


@pytest.mark.world_size(2)
def test_a_penalty_as_the_error_says():
    torch.manual_seed(0)
    oracle = WholePenalized()
    train_alone(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1), samples_of(3, 8), 8)
    assert largest_difference(fitted(WholePenalized), oracle) < 1e-5


@pytest.mark.table("shards")
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1")  # torch 2.7
@pytest.mark.world_size(2)
@pytest.mark.parametrize("config", [{}, {"tensor_parallel": 2}], ids=["shards", "tensor parallel"])
def test_a_penalty_and_a_clip_in_a_loop_of_ones_own(config: dict[str, Any]):
    torch.manual_seed(0)
    oracle = LlamaPenalized(llama_config(False, num_key_value_heads=2))
    model = copy.deepcopy(oracle)
    prepare_fully_shard(model, None, config)
    ids = torch.arange(6).view(2, 3)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    with pytest.raises(ShardReadError, match=r"penalty is the .*param\.full_tensor\(\)"):
        (loss_of(model) + model.penalty()).backward()
    model.zero_grad()
    for one in (oracle, model):
        (loss_of(one) + 0.1 * WholePenalized.penalty(one)).backward()
    for name, param in oracle.named_parameters():
        assert torch.allclose(full_tensor(model, name, gradient=True), param.grad, atol=1e-6), name
    norm = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
    if config:
        with pytest.raises(ShardReadError, match=r"Clip with composer_fsdp2\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.allclose(clip_grad_norm_(model.parameters(), 1.0), norm)


def past_the_model() -> None:
    model = LlamaForCausalLM(llama_config(False))
    prepare_fully_shard(model, None, {})
    model.model(torch.ones(2, 3, dtype=torch.long), use_cache=False)


def loss_outside() -> None:
    model = LlamaForCausalLM(llama_config(False))
    prepare_fully_shard(model, None, {"reshard_after_forward": True})
    ids = torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad():
        states = model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    model.reshard()
    F.cross_entropy(F.linear(states, model.lm_head.weight)[:, -1], ids[:, 0])


def clipped(clip: Any, **kwargs: Any) -> None:
    """Over parameters that are sharded and one that is not."""
    model, other = TinyLM(), nn.Linear(2, 2)
    prepare_fully_shard(model, None, POLICY)
    step(model)
    other(torch.ones(1, 2)).sum().backward()
    clip([*model.parameters(), *other.parameters()], 0.1, **kwargs)


COMBINED: dict[str, tuple[Any, str]] = {
    "past the model": (past_the_model, r"outside of the forward.*Call the model itself"),
    "a loss": (loss_outside, r"outside of the forward.*compute the loss in its forward"),
    "norm": (
        lambda: clipped(nn.utils.clip_grad_norm_),
        r"all gradients together\. Clip with composer_fsdp2\.clip_grad_norm_",
    ),
    "value": (
        lambda: clipped(nn.utils.clip_grad_value_),
        r"all gradients together\..*clip_grad_value_\(\.\.\., foreach=False\)",
    ),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", COMBINED)
def test_each_computation_outside_has_its_own_cause(name: str):
    deed, said = COMBINED[name]
    # Newer torch refuses plain tensors before it calls Python.
    if hasattr(DTensor._op_dispatcher, "_propagate_op_sharding_dispatch_slow_path"):
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            deed()
    else:
        with pytest.raises(ShardReadError, match=said) as caught:
            deed()
        assert "penalty" not in str(caught.value)
    clipped(nn.utils.clip_grad_value_, foreach=False)


COPIES: dict[str, Any] = {
    "the model": copy.deepcopy,
    "a list of units": lambda model: copy.deepcopy(model.blocks),
    "averages": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("what", COPIES)
def test_a_copy_of_a_sharded_model(what: str):
    model = TinyLM()
    prepare_fully_shard(model, None, POLICY)
    with explained("that FSDP2 shards was to be copied, .* Copy the model before", cause=None):
        COPIES[what](model)
    step(model)


class LlamaPenalized(LlamaForCausalLM):
    def penalty(self) -> Any:
        return sum(param.square().sum() for param in self.parameters())


@pytest.mark.world_size(4)
def test_parameters_that_are_divided_differently():
    """Torch itself cannot add up norms of both kinds."""
    model = LlamaPenalized(llama_config(False, num_attention_heads=2, num_key_value_heads=2))
    prepare_fully_shard(model, None, {"tensor_parallel": 2})
    model(torch.ones(2, 3, dtype=torch.long), use_cache=False).logits.sum().backward()
    with (
        pytest.raises(ShardReadError, match=r"(?i:clip with) composer_fsdp2\.clip_grad_norm_"),
        explained_reading(),
    ):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_(model.parameters(), 1.0)
    run = run_of(model)
    assert run is not None
    with (
        pytest.raises(PlanError, match=r"computed with this rank.* A penalty over all parameters"),
        explaining(run),
    ):
        model.penalty()
