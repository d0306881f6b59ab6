"""The one oracle for numerics: an unsharded copy, trained on the same global batches.

Losses are compared at every step, gradients at the first one, where both have the same weights, and
parameters, buffers and optimizer state at the end. All ranks call these functions together.

Under autocast the copy rounds its parameters as they are gathered and computes what each rank
computes, so that the first step is the same. Later ones are only close: a parameter that differs in
its last bit may be rounded to the next number of bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from composer.devices import Device
from composer.models import ComposerModel
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard
from tests.support.models import batches, lm_loss

TOLERANCE = 1e-6
"""of parameters; of losses and gradients too, relative to their size where it is above one"""
AUTOCAST_TOLERANCE = 1e-4
"""of all of them under autocast, after the first step"""
STATE_TOLERANCE = 1e-5
"""State sums up gradients and is multiplied by a learning rate <= 0.02 before it is a parameter."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Larger steps take a tiny Llama to where rounding grows with every step, on some CPUs to 1e-6.
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    # A gradient that is zero but for rounding would be blown up to a full step by a smaller eps.
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-5),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What happens in each step besides forward and backward."""

    steps: int = 20
    batch_size: int = 8
    microbatches: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    evaluate: bool = False
    precision: str = "fp32"


class AutocastCPU(Device):
    """A CPU that takes amp_bf16; on its own `DeviceCPU`, Composer takes fp32 alone."""

    dist_backend = "gloo"
    name = "cpu"

    def module_to_device(self, module: Any) -> Any:
        return module.cpu()

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


def device_for(precision: str) -> str | Device:
    """The CPU on which Composer takes the precision."""
    return "cpu" if precision == "fp32" else AutocastCPU()


def autocast(precision: str) -> torch.autocast:
    """Around what a run of this precision computes."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16")


@contextlib.contextmanager
def rounded(model: nn.Module) -> Generator[None]:
    """Lets an unsharded model compute with parameters of bf16, as FSDP2 gathers them."""
    places = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    low = {id(param): param.to(torch.bfloat16) for _, _, param in places}  # a tie stays one
    for params, name, param in places:
        params[name] = low[id(param)]  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for params, name, param in places:
            params[name] = param


Batch = tuple[torch.Tensor, ...]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


def model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a `TinyLM`, a ComposerModel, or a Hugging Face language model."""
    if isinstance(model, ComposerModel):
        return model.loss(model(batch), batch)
    outputs = model(batch[0])
    return lm_loss(getattr(outputs, "logits", outputs), batch[1])


_ROUNDS_OTHERWISE = {"mixed_precision", "keep_fp32", "chunked_loss", "tiled_mlp"}
"""settings with which an unsharded copy in bf16 gets other last bits"""


def check_parity(
    make: Callable[[], nn.Module],
    config: Mapping[str, Any],
    optimizer: str = "sgd",
    recipe: Recipe | None = None,
    *,
    make_oracle: Callable[[], nn.Module] | None = None,
) -> nn.Module:
    """Builds a model twice, shards one of them and trains both; returns the sharded one.

    In fp32, and some steps under autocast before.
    """
    recipe = recipe or Recipe()
    if not (isinstance(config, Mapping) and _ROUNDS_OTHERWISE & config.keys()):
        low = replace(recipe, precision="amp_bf16", steps=min(recipe.steps, 4))
        _check_parity(make, config, optimizer, low, make_oracle or make)
    return _check_parity(make, config, optimizer, recipe, make_oracle or make)


def _check_parity(
    make: Callable[[], nn.Module],
    config: Mapping[str, Any],
    optimizer: str,
    recipe: Recipe,
    make_oracle: Callable[[], nn.Module],
) -> nn.Module:
    torch.manual_seed(0)
    oracle = make_oracle()
    torch.manual_seed(0)
    model = make()
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    prepare_fully_shard(
        model, pair[1], config, precision=recipe.precision, device=device_for(recipe.precision)
    )
    train_together(oracle, pair[0], model, pair[1], recipe)
    return model


def check_parity_from_here(model: nn.Module, oracle: nn.Module, optimizer: str = "sgd") -> None:
    """Trains a sharded model against an oracle that is given its present values."""
    copy_values(model, oracle)
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    train_together(oracle, pair[0], model, pair[1], Recipe())


def train_together(
    oracle: nn.Module,
    oracle_optimizer: torch.optim.Optimizer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    loss: Loss = model_loss,
) -> None:
    """Trains both and asserts at every step that they agree."""
    exact = recipe.precision == "fp32"
    later = TOLERANCE if exact else AUTOCAST_TOLERANCE
    for number, batch in enumerate(batches(recipe.steps, recipe.batch_size)):
        tolerance = later if number else TOLERANCE
        if recipe.evaluate:
            both = _evaluate_both(oracle, model, batch, loss, recipe.precision)
            assert_close("eval loss", *both, tolerance)
        with contextlib.nullcontext() if exact else rounded(oracle):
            expected = _backward(oracle, _alone(batch, recipe), loss, recipe.precision)
        own = _microbatches(_of_this_rank(batch), recipe.microbatches)
        got = _mean_over_ranks(_backward(model, own, loss, recipe.precision))
        assert_close(f"loss of step {number}", expected, got, tolerance)
        if number == 0:
            assert_same_gradients(oracle, model)
        assert_close("norm", _clip(oracle, recipe), _clip(model, recipe), tolerance)
        for trained, stepped in ((oracle, oracle_optimizer), (model, optimizer)):
            stepped.step()
            trained.zero_grad()  # an optimizer clears no more than what it steps
    assert_same_values(oracle, model, later)
    assert_same_state(oracle_optimizer, optimizer, STATE_TOLERANCE if exact else later)


def _alone(batch: Batch, recipe: Recipe) -> list[Batch]:
    """What one process computes together: in bf16, sums of other parts round to others."""
    if recipe.precision == "fp32":
        return [batch]
    ranks = _microbatches(batch, dist.get_world_size())
    return [one for own in ranks for one in _microbatches(own, recipe.microbatches)]


def _backward(
    model: nn.Module, microbatches: list[Batch], loss: Loss, precision: str
) -> torch.Tensor:
    total = torch.zeros(())
    for microbatch in microbatches:
        with autocast(precision):
            value = loss(model, microbatch) / len(microbatches)
        value.backward()
        total += value.detach()
    return total


def _evaluate_both(
    oracle: nn.Module, model: nn.Module, batch: Batch, loss: Loss, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    for one in (oracle, model):
        one.eval()
    with torch.no_grad(), autocast(precision):
        with contextlib.nullcontext() if precision == "fp32" else rounded(oracle):
            expected = loss(oracle, batch)
        got = loss(model, _of_this_rank(batch))
    for one in (oracle, model):
        one.train()
    return expected, _mean_over_ranks(got)


def _of_this_rank(batch: Batch) -> Batch:
    return tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)


def _microbatches(batch: Batch, count: int) -> list[Batch]:
    return list(zip(*(part.chunk(count) for part in batch), strict=True))


def _mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _clip(model: nn.Module, recipe: Recipe) -> torch.Tensor:
    if recipe.clip_value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), recipe.clip_value)
    if recipe.clip_norm is None:
        return torch.zeros(())
    return full(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm))


# --- Comparing: names are those of `state_dict()`, whatever wraps the modules. ---


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on the CPU. Collective: yes, for a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, also those `state_dict()` leaves out, as whole tensors."""
    tensors = dict(model.state_dict()) | dict(model.named_buffers(remove_duplicate=False))
    return {_plain(name): full(tensor).clone() for name, tensor in tensors.items()}


def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Gives an unsharded model the values of a sharded one, buffers included."""
    values = gathered(source)
    own = dict(target.state_dict(keep_vars=True)) | dict(target.named_buffers())
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(values[name])


def assert_close(
    what: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float = TOLERANCE
) -> None:
    """Within the tolerance, relative to the size of what is larger than one."""
    size = expected.abs().max().item() if expected.numel() else 0.0
    _assert_within(tolerance * max(1.0, size), what, expected, got)


def _assert_within(tolerance: float, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype), what
    if expected.numel():
        difference = (expected.double() - got.double()).abs().max().item()
        assert difference <= tolerance, f"{what} differs by {difference:.2e}"  # NaN is not <=


def assert_same_values(oracle: nn.Module, model: nn.Module, tolerance: float = TOLERANCE) -> None:
    expected, got = gathered(oracle), gathered(model)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        _assert_within(tolerance, name, tensor, got[name])


def assert_same_gradients(oracle: nn.Module, model: nn.Module) -> None:
    expected, got = _gradients(oracle), _gradients(model)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert_close(f"gradient of {name}", tensor, got[name])


def assert_same_state(
    expected: torch.optim.Optimizer,
    got: torch.optim.Optimizer,
    tolerance: float = STATE_TOLERANCE,
) -> None:
    """Compares groups and the state of each parameter in them, in order."""
    for expected_group, group in zip(expected.param_groups, got.param_groups, strict=True):
        assert expected_group.keys() == group.keys()
        pairs = zip(expected_group["params"], group["params"], strict=True)
        for number, (expected_param, param) in enumerate(pairs):
            states = expected.state.get(expected_param, {}), got.state.get(param, {})
            _assert_same_entries(str(number), *states, tolerance)


def _assert_same_entries(
    where: str, expected: Mapping[str, Any], got: Mapping[str, Any], tolerance: float
) -> None:
    assert expected.keys() == got.keys(), where
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            what = f"optimizer state {key} of parameter {where}"
            size = max(1.0, value.abs().max().item())
            _assert_within(tolerance * size, what, value, full(got[key]))
        else:
            assert value == got[key], f"{key} of parameter {where}"


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    params = model.named_parameters()
    return {_plain(name): full(p.grad) for name, p in params if p.grad is not None}


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")
