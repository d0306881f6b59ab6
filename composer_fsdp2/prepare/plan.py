"""Decides names and numbers before a model is sharded; all ranks must agree on them."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from composer.core import Precision
from composer.core.precision import _validate_precision
from composer.devices import Device, DeviceGPU
from composer.utils import dist, ensure_tuple, get_device
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.blocks.transformation import (
    ModelFacts,
    Transformation,
    plan_transformations,
)
from composer_fsdp2.config.schema import FSDP2Config, describe_values
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.optim.elementwise import check_optimizer_state, known_as
from composer_fsdp2.optim.local import MatrixOptimizer
from composer_fsdp2.plan.checks import refuse_gradients, refuse_unreadable
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree, packing_text
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.shard_dims import uneven_shards
from composer_fsdp2.plan.unit_size import UnitSizes
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.prepare.conventions import activation_choice, eval_methods, trainer_rules
from composer_fsdp2.ranks import installation
from composer_fsdp2.shard.apply import check_forward_methods, check_hooks
from composer_fsdp2.shard.communication import check_communication
from composer_fsdp2.shard.initial_weights import MetaDeviceReport, shared_seed
from composer_fsdp2.shard.optimizer import check_optimizers, describe_optimizer
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision

if TYPE_CHECKING:
    from composer_fsdp2.checkpoint.pretrained import PretrainedWeights

__all__ = ["PreparePlan"]

log = logging.getLogger(__name__)


_PACKAGES = ("torch", "mosaicml", "composer-fsdp2", "transformers", "llm-foundry", "peft")


class PreparePlan:
    """Settles everything that can be settled without touching the model. Collective: no.

    Without a process group the environment says how many ranks there are, as Composer reads it.

    Args:
        model: a ComposerModel or any module, on any device, not sharded yet.
        optimizers: an optimizer of the model's parameters, or several; or `None`.
        settings: what `resolve_settings` returned.
        precision: a name of Composer or its `Precision`; `None` is fp32.
        device: where the shards live, as Composer names it; `None` is the best there is.
        mesh: the mesh of the run, where the caller has built it.
        transformations: in the order in which they are applied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        settings: FSDP2Config,
        precision: Any,
        device: Any,
        *,
        mesh: DeviceMesh | None,
        transformations: Sequence[Transformation[Any]],
    ) -> None:
        self.settings, self.mesh = settings, mesh
        composer_device, self.device_type = _device_of(device, mesh)
        _check_offload(settings, self.device_type)
        check_communication(settings.communication, self.device_type)
        optimizers = ensure_tuple(optimizers)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = optimizers
        muon = next((o for o in optimizers if isinstance(o, MatrixOptimizer)), None)
        if muon is not None and len(optimizers) > 1:
            raise ConfigError(
                f"{len(optimizers)} optimizers were given, and one is Muon, which steps all "
                "parameters of the model. The others would step them once more. Give Muon alone: "
                "it steps by AdamW what it does not orthogonalise."
            )
        self.tree = tree = ModuleTree.read(model)
        refuse_unreadable(tree)
        refuse_gradients(tree)
        check_hooks(tree)
        self.shape = shape = MeshShape.resolve(settings, dist.get_world_size())
        self.compute = _compute_dtype(precision, composer_device)
        optional = settings.unused_parameters
        named = optional if isinstance(optional, tuple) else ()
        self.conditional = [] if optional is False else [*conditional_modules(tree, named)]
        units = self._plan_units(self.conditional)
        blocks = units.blocks()
        if self.conditional and (settings.activation_checkpointing or settings.compile):
            # A block of a tower is one, whatever unit its parameters are in.
            blocks = self._plan_units([]).blocks()
        odd = [o for o in optimizers if not isinstance(o, MatrixOptimizer) and not known_as(o)]
        facts = ModelFacts(
            tree=tree,
            settings=settings,
            units=units,
            blocks=blocks,
            shard_ranks=shape.shard,
            device_type=self.device_type,
            compute=self.compute,
            odd_optimizer=type(odd[0]).__name__ if odd else "",
            conditional=tuple(self.conditional),
            is_checkpointed=activation_choice(tree, frozenset(blocks)),
        )
        self.transformations, facts = plan_transformations(transformations, facts)
        self.units = facts.units
        shape.check_reshard(settings.reshard_after_forward, "the run")
        for unit in self.units.units:
            shape.check_reshard(unit.reshard_after_forward, f"'{unit.module}'")
        self.forward_methods = check_forward_methods(tree, settings.forward_methods, self.units)
        self.forward_methods += eval_methods(tree, self.units)
        check_optimizers(optimizers, tree, gives_values=dist.get_global_rank() == 0)
        for optimizer in optimizers:
            check_optimizer_state(optimizer, settings.optimizer_state)
        self.groups = None if muon is None else muon.plan_groups(tree)
        folder = settings.pretrained_weights
        self.weights = None if folder is None else _open_weights(folder, tree)
        self._linear = {name for name, module in tree.modules() if isinstance(module, nn.Linear)}

    def _plan_units(self, conditional: list[str]) -> WrapPlan:
        settings, policy = self.settings, self.settings.wrap_policy
        gathered_in = resolve_precision(settings.mixed_precision, self.compute).param_dtype
        rules = trainer_rules(
            self.tree, policy, self.shape, keep_fp32=settings.keep_fp32, gathered_in=gathered_in
        )
        return plan_wrapping(
            self.tree,
            rules,
            reshard_after_forward=settings.reshard_after_forward,
            tied_weights=settings.tied_weights,
            ignored_params=settings.ignored_params,
            frozen=settings.frozen,
            sizes=UnitSizes(
                least=policy.min_unit_bytes, most=policy.max_unit_bytes, gathered_in=gathered_in
            ),
            optional=conditional,
        )

    @property
    def uneven_shards(self) -> tuple[str, str] | None:
        """Returns a problem and advice where ranks cannot share rows evenly."""
        if self.settings.expert_parallel is not None:
            return None  # experts over ranks are sharded on a mesh of their own
        return uneven_shards(self.tree, self.units.units, self.shape.shard)

    def precision_of(self, unit: ShardUnit) -> MixedPrecisionPolicy:
        """Returns the policy of a unit; the run's output dtype is for the model's output alone."""
        of_unit = unit.mixed_precision
        inner = of_unit is None and not unit.top_level
        is_linear = unit.module in self._linear
        mixed_precision = of_unit or self.settings.mixed_precision
        return resolve_precision(mixed_precision, self.compute, inner, is_linear)

    def describe(self) -> str:
        """Returns the text of `verbose`: the units, then every transformation."""
        return f"{self.units}\n{self.describe_transformations()}".rstrip()

    def describe_transformations(self) -> str:
        """Returns a line for each transformation of this run, in order."""
        return "\n".join(str(planned) for planned in self.transformations)

    def plan_of(self, kind: type[Transformation[Any]]) -> Any:
        """Returns the plan of a transformation, `None` if the run has none."""
        return next((p.plan for p in self.transformations if isinstance(p.step, kind)), None)

    def facts(self) -> dict[str, Any]:
        """Returns the facts that ranks must have in common, and those that each rank reports."""
        params = (
            f"{ref.name} {ref.param.shape} {ref.param.dtype} {ref.param.requires_grad} "
            f"{packing_text(ref.param)}".rstrip()
            for ref in self.tree.params
        )
        buffers = (
            f"{path}.{name} {buffer.shape} {buffer.dtype}"
            for path, module in self.tree.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        )
        return {
            **installation(_PACKAGES),
            "configuration": describe_values(self.settings),
            "precision and device": f"{self.compute} {self.device_type}",
            "plan": str(self.units),
            "set of modules that may be left out": "\n".join(self.conditional),
            "set of parameters and buffers": "\n".join([*params, *buffers]),
            "plan of transformations": self.describe_transformations(),
            "optimizer": "\n".join(map(describe_optimizer, self.optimizers)) or "none",
            "groups of the optimizer": self.groups.text if self.groups else "",
            "plan of pretrained weights": str(self.weights) if self.weights else "none",
            "~meta": dataclasses.astuple(MetaDeviceReport.read(self.tree, self.weights or ())),
            "~seed": shared_seed(),
        }


def _device_of(device: str | Device | None, mesh: DeviceMesh | None) -> tuple[Device | None, str]:
    """Returns Composer's device and its type; no device for a Trainer, which checks precision."""
    if device is None and mesh is not None:
        return None, mesh.device_type
    composer_device = get_device(device)
    return composer_device, "cuda" if isinstance(
        composer_device, DeviceGPU
    ) else composer_device.name


def _check_offload(settings: FSDP2Config, device_type: str) -> None:
    if not settings.cpu_offload:
        return
    if device_type == "cpu":
        raise ConfigError(
            "'cpu_offload' is set in a run on the CPU. Everything is in CPU memory already, so it "
            "would have no effect. Take it out, or train on a GPU."
        )
    if not distributed.is_gloo_available():
        raise ConfigError(
            "'cpu_offload' is set, and this torch has no gloo. Norms of what lives in CPU memory "
            "are reduced there, which other backends cannot. Install a torch with gloo."
        )
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.get_num_threads() == 1 < cores and dist.get_global_rank() == 0:
        # Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/run.py#L764
        log.warning(
            "With cpu_offload the optimizer steps on the CPU, where each rank has %d cores and "
            "uses one thread. torchrun gives a rank one thread unless OMP_NUM_THREADS is set. Set "
            "OMP_NUM_THREADS=%d before torchrun starts.",
            cores,
            cores,
        )


def _open_weights(path: str, tree: ModuleTree) -> PretrainedWeights:
    # Imported on demand: only runs with `pretrained_weights` need the class.
    from composer_fsdp2.checkpoint.pretrained import PretrainedWeights

    weights = PretrainedWeights(path, tree)
    if weights.skipped and dist.get_global_rank() == 0:
        warnings.warn(
            f"'{path}' was saved with a head that this model does not have: its "
            f"{', '.join(weights.skipped[:20])} will not be read.",
            stacklevel=5,
        )
    return weights


def _compute_dtype(
    precision: str | Precision | None, composer_device: Device | None
) -> torch.dtype:
    precision = precision or Precision.FP32
    name = precision.value if isinstance(precision, Precision) else str(precision)
    dtype = compute_dtype(name)
    if composer_device is not None:
        _validate_precision(Precision(name), composer_device)
    return dtype
