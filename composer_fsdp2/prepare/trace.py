"""Prepares a model for a step on fake tensors, by the code that prepares it for training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Precision
from torch import nn

from composer_fsdp2.config.placement import Communication
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.prepare.model import TRANSFORMATIONS, apply_to_model
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.shard.device_mesh import build_mesh
from composer_fsdp2.shard.initial_weights import MetaDeviceReport
from composer_fsdp2.shard.precision import compute_dtype
from composer_fsdp2.step.run import Run

__all__ = ["LEFT_OUT", "compute_loss", "preparing", "traced_settings"]

LEFT_OUT: Mapping[str, tuple[Any, str]] = {
    "cpu_offload": (False, ""),
    "communication": (Communication(), ""),
    "pretrained_weights": (None, ""),
    "order_check": ("never", ""),
    "verbose": (False, ""),
    "compile": (False, "compiled blocks may keep less for backward than is shown"),
    "fp8": (False, "fp8 is left out: gathers and products are counted in the precision of the run"),
    "activation_cpu_offload": (
        False,
        "activation_cpu_offload is left out: what blocks keep is counted on the GPU",
    ),
}
"""settings without an effect on a fake CPU -> the value there, and the note about the difference"""


def traced_settings(settings: FSDP2Config) -> tuple[FSDP2Config, list[str]]:
    """Returns settings for fake tensors on the CPU, and notes about what they leave out."""
    changed = {
        name: value
        for name, (value, _) in LEFT_OUT.items()
        if getattr(settings, name) and getattr(settings, name) != value
    }
    notes = [LEFT_OUT[name][1] for name in changed if LEFT_OUT[name][1]]
    return dataclasses.replace(settings, **changed), notes


def preparing(
    settings: FSDP2Config, precision: str, *, steps_together: bool = False
) -> Callable[[nn.Module, torch.optim.Optimizer], Run]:
    """Returns a function that shards a model of fake tensors.

    Args:
        settings: what `traced_settings` returned.
        precision: a name of Composer, as on GPUs; Composer would refuse some on a CPU.
        steps_together: step all tensors of a group at once, which is the default of torch's
            optimizers on GPUs, and takes temporary tensors as large as the shards.
    """

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
        for group in optimizer.param_groups if steps_together else ():
            # Where the user has left `foreach` to torch, and nothing in the group excludes it.
            excluded = group.get("fused") or group.get("differentiable")
            undecided = group.get("foreach", False) is None
            if undecided and not excluded and not isinstance(group["lr"], torch.Tensor):
                group["foreach"] = True
        plan = PreparePlan(
            model,
            optimizer,
            settings,
            precision,
            None,  # a device, for which the precision would be checked
            mesh=build_mesh(MeshShape.resolve(settings, dist.get_world_size()), "cpu"),
            transformations=TRANSFORMATIONS,
        )
        return apply_to_model(model, plan, [MetaDeviceReport("none", "", "")], seed=0)

    return prepare


def compute_loss(precision: str) -> Callable[[Any, Any], tuple[Any, torch.Tensor]]:
    """Returns the forward and the loss of a microbatch as the Trainer computes them.

    Source: https://github.com/mosaicml/composer/blob/v0.32.1/composer/trainer/trainer.py#L2870
    """
    dtype = compute_dtype(precision)
    autocast = Precision(precision) in (Precision.AMP_BF16, Precision.AMP_FP16, Precision.AMP_FP8)

    def compute(model: Any, batch: Any) -> tuple[Any, torch.Tensor]:
        context = torch.autocast("cpu", dtype) if autocast else contextlib.nullcontext()
        with context:
            outputs = model(batch)
        if not hasattr(model, "loss"):
            return None, outputs
        with context:
            loss = model.loss(outputs, batch)
        if isinstance(loss, Mapping):
            loss = loss["total"] if "total" in loss else list(loss.values())
        return outputs, torch.stack(list(loss)).sum() if isinstance(loss, list | tuple) else loss

    return compute
