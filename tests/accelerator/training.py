"""A sharded model on the pretend accelerator beside an unsharded copy on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from composer.devices import Device
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import prepare_fully_shard
from tests.accelerator.device import BACKEND, NAME, held
from tests.support.models import TinyLM, lm_loss
from tests.support.parity import OPTIMIZERS, Batch, Recipe, model_loss, train_together


class Pretend(Device):
    """The device as Composer's Trainer is given it."""

    dist_backend = BACKEND
    name = NAME

    def module_to_device(self, module: Any) -> Any:
        return module.to(self.name)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.name, non_blocking=True)


class Peak(TorchDispatchMode):
    """The most memory after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, held())
        return result


def loss_on_the_host(
    model: nn.Module, batch: Batch, place: str = NAME, precision: str = "fp32"
) -> torch.Tensor:
    """The loss of a model on either device.

    In bf16 the parameters of a copy on the CPU are moved too: autocast is not the same everywhere.
    """
    is_sharded, in_bf16 = isinstance(model, FSDPModule), precision == "amp_bf16"
    ids, targets = (part.to(place if is_sharded or in_bf16 else "cpu") for part in batch)
    with torch.autocast(place, torch.bfloat16, enabled=in_bf16):
        if is_sharded or not in_bf16:
            return model_loss(model, (ids, targets)).to("cpu")
        moved = {name: param.to(place) for name, param in model.named_parameters()}
        return lm_loss(functional_call(model, moved, (ids,)), targets).to("cpu")


def trained_beside_a_copy(
    settings: Mapping[str, Any],
    optimizer: str = "adamw",
    microbatches: int = 2,
    device: Device | None = None,
    precision: str = "fp32",
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Trains both and compares them; returns the copy, the sharded model and its optimizer."""
    device = device or Pretend()
    torch.manual_seed(0)
    model = TinyLM("two modules")
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS[optimizer](m.parameters()) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], settings, precision=precision, device=device)
    home = "cpu" if settings.get("cpu_offload") else device.name
    assert {param.device.type for param in model.parameters()} == {home}
    recipe = Recipe(steps=4, microbatches=microbatches, clip_norm=0.5, precision=precision)
    loss = functools.partial(loss_on_the_host, place=device.name, precision=precision)
    train_together(oracle, pair[0], model, pair[1], recipe, loss)
    return oracle, model, pair[1]
