"""Decides names and numbers before a model is sharded; all ranks must agree on them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.core import Precision
from composer.core.precision import _validate_precision
from composer.devices import Device, DeviceGPU
from composer.models import ComposerModel
from composer.utils import dist, ensure_tuple, get_device
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.blocks.transformation import (
    ModelFacts,
    PlannedTransformation,
    Transformation,
    plan_transformations,
)
from composer_fsdp2.checkpoint.pretrained import PretrainedWeights
from composer_fsdp2.config.describe import describe_values
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.guards.order_check import check_order_check
from composer_fsdp2.optim.muon import Muon
from composer_fsdp2.optim.muon_settings import PlannedGroups
from composer_fsdp2.optim.state.step import check_optimizer_state
from composer_fsdp2.plan.conditional_modules import conditional_modules
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_checks import refuse_gradients, refuse_unreadable
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.unit_size import UnitSizes
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.ranks import installation
from composer_fsdp2.shard.apply import check_forward_methods, check_hooks
from composer_fsdp2.shard.communication import check_communication
from composer_fsdp2.shard.initial_weights import MetaDeviceReport, shared_seed
from composer_fsdp2.shard.optimizer import check_optimizer, describe_optimizer
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from composer_fsdp2.trainer.parallelism.refused import check_known, check_scale
from composer_fsdp2.trainer.rules import activation_choice, trainer_rules

__all__ = ["PreparePlan", "make_plan"]

_ENCODE = "_prepare_encoder_decoder_kwargs_for_generation"
"""what transformers' `generate` calls the encoder in"""

_PACKAGES = ("torch", "mosaicml", "composer-fsdp2", "transformers", "llm-foundry", "peft")


@dataclass(slots=True, eq=False, kw_only=True)
class PreparePlan:
    """Everything settled before the model is touched."""

    tree: ModuleTree
    settings: FSDP2Config
    shape: MeshShape
    mesh: DeviceMesh | None
    device_type: str
    compute: torch.dtype
    units: WrapPlan
    linear: frozenset[str]
    """names of linear layers"""
    conditional: list[str]
    transformations: tuple[PlannedTransformation, ...]
    forward_methods: list[tuple[str, str]]
    optimizer: torch.optim.Optimizer | None
    groups: PlannedGroups | None
    """of Muon"""
    weights: PretrainedWeights | None

    def precision_of(self, unit: ShardUnit) -> MixedPrecisionPolicy:
        """The policy of one unit; the run's output dtype is that of what leaves the model."""
        own = unit.mixed_precision
        inner = own is None and not unit.top_level
        is_linear = unit.modules[0] in self.linear
        mixed_precision = own or self.settings.mixed_precision
        return resolve_precision(mixed_precision, self.compute, inner, is_linear)

    def describe(self) -> str:
        """Returns the text of `verbose`: the units, then every transformation."""
        return f"{self.units}\n{self.describe_transformations()}".rstrip()

    def describe_transformations(self) -> str:
        """Returns a line for each transformation of this run, in order."""
        return "\n".join(str(planned) for planned in self.transformations)

    def plan_of(self, kind: type[Transformation[Any]]) -> Any:
        """Returns the plan of a transformation, `None` where this run does not ask for it."""
        return next((p.plan for p in self.transformations if isinstance(p.step, kind)), None)

    def facts(self) -> dict[str, Any]:
        """Returns the facts that ranks must have in common, and those that each rank reports."""
        return {
            **installation(_PACKAGES),
            "configuration": describe_values(self.settings),
            "precision and device": f"{self.compute} {self.device_type}",
            "plan": str(self.units),
            "set of modules that may be left out": "\n".join(self.conditional),
            "set of parameters and buffers": _describe_tensors(self.tree),
            "plan of transformations": self.describe_transformations(),
            "optimizer": describe_optimizer(self.optimizer) if self.optimizer else "none",
            "groups of the optimizer": self.groups.text if self.groups else "",
            "plan of pretrained weights": str(self.weights) if self.weights else "none",
            "~meta": dataclasses.astuple(MetaDeviceReport.read(self.tree, self.weights or ())),
            "~seed": shared_seed(),
        }


def _describe_tensors(tree: ModuleTree) -> str:
    lines = [
        f"{ref.name} {ref.param.shape} {ref.param.dtype} {ref.param.requires_grad}"
        for ref in tree.params
    ]
    for path, module in tree.modules():
        lines += [
            f"{path}.{name} {buffer.shape} {buffer.dtype}"
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
    return "\n".join(lines)


def make_plan(
    model: nn.Module,
    optimizers: Any,
    settings: FSDP2Config,
    precision: Any,
    device: Any,
    *,
    mesh: DeviceMesh | None,
    transformations: Sequence[Transformation[Any]],
) -> PreparePlan:
    """Settles everything that can be settled without touching the model. Collective: no.

    Without a process group the environment says how many ranks there are, as Composer reads it.

    Args:
        model: as for `prepare_fully_shard`, like the next four.
        optimizers: at most one.
        settings: of FSDP2.
        precision: of the run.
        device: where the shards live.
        mesh: the mesh of the run, where the caller has built it.
        transformations: in the order in which they are applied.
    """
    place, device_type = _place_of(device, mesh)
    _check_offload(settings, device_type)
    check_communication(settings.communication, device_type)
    check_order_check(settings.order_check)
    optimizer = _single_optimizer(optimizers, settings)
    tree = _read_model(model)
    shape = MeshShape.resolve(settings, dist.get_world_size())
    compute = check_scale(settings, _compute_dtype(precision, device_type, place))
    conditional = _conditional(tree, settings)
    units = _plan_units(tree, settings, shape, compute, conditional)
    blocks = units.blocks()
    if conditional and (settings.activation_checkpointing or settings.compile):
        # A block of a tower is one, whatever unit its parameters are in.
        blocks = _plan_units(tree, settings, shape, compute, []).blocks()
    facts = ModelFacts(
        tree=tree,
        settings=settings,
        units=units,
        blocks=blocks,
        shard_ranks=shape.shard,
        device_type=device_type,
        is_checkpointed=activation_choice(tree, frozenset(blocks)),
    )
    planned, facts = plan_transformations(transformations, facts)
    _check_reshards(shape, settings, facts.units)
    methods = check_forward_methods(tree, settings.forward_methods, facts.units)
    methods += _eval_methods(tree, facts.units)
    if optimizer is not None:
        _check_optimizer(optimizer, tree, settings)
    groups = optimizer.plan_groups(tree) if isinstance(optimizer, Muon) else None
    return PreparePlan(
        tree=tree,
        settings=settings,
        shape=shape,
        mesh=mesh,
        device_type=device_type,
        compute=compute,
        units=facts.units,
        linear=frozenset(n for n, module in tree.modules() if isinstance(module, nn.Linear)),
        conditional=conditional,
        transformations=planned,
        forward_methods=methods,
        optimizer=optimizer,
        groups=groups,
        weights=_open_weights(settings.pretrained_weights, tree),
    )


def _place_of(device: str | Device | None, mesh: DeviceMesh | None) -> tuple[Device | None, str]:
    """Returns the device, `None` for that of a Trainer, which checks the precision itself."""
    if device is None and mesh is not None:
        return None, mesh.device_type
    place = get_device(device)
    return place, "cuda" if isinstance(place, DeviceGPU) else place.name


def _read_model(model: nn.Module) -> ModuleTree:
    """Reads a model, and refuses what sharding would lose or cannot decide about."""
    tree = ModuleTree.read(model)
    refuse_unreadable(tree)
    refuse_gradients(tree)
    check_hooks(tree)
    return tree


def _check_optimizer(
    optimizer: torch.optim.Optimizer, tree: ModuleTree, settings: FSDP2Config
) -> None:
    check_optimizer(optimizer, tree, gives_values=dist.get_global_rank() == 0)
    check_optimizer_state(optimizer, settings.optimizer_state)


def _check_offload(settings: FSDP2Config, device_type: str) -> None:
    if settings.cpu_offload and device_type == "cpu":
        raise ConfigError(
            "'cpu_offload' is set in a run on the CPU. Everything is in CPU memory already, so it "
            "would have no effect. Take it out, or train on a GPU."
        )
    if settings.cpu_offload and not distributed.is_gloo_available():
        raise ConfigError(
            "'cpu_offload' is set, and this torch has no gloo. Norms of what lives in CPU memory "
            "are reduced there, which other backends cannot. Install a torch with gloo."
        )


def _open_weights(path: str | None, tree: ModuleTree) -> PretrainedWeights | None:
    if path is None:
        return None
    weights = PretrainedWeights(path, tree)
    if weights.skipped and dist.get_global_rank() == 0:
        warnings.warn(
            f"'{path}' was saved with a head that this model has not: its "
            f"{', '.join(weights.skipped[:20])} will not be read.",
            stacklevel=5,
        )
    return weights


def _conditional(tree: ModuleTree, settings: FSDP2Config) -> list[str]:
    named = settings.unused_parameters
    if named is False:
        return []
    return conditional_modules(tree, named if isinstance(named, tuple) else ())


def _plan_units(
    tree: ModuleTree,
    settings: FSDP2Config,
    shape: MeshShape,
    compute: torch.dtype,
    conditional: list[str],
) -> WrapPlan:
    policy = settings.wrap_policy
    gathered_in = resolve_precision(settings.mixed_precision, compute).param_dtype
    rules = trainer_rules(
        tree, policy, shape, keep_fp32=settings.keep_fp32, gathered_in=gathered_in
    )
    return plan_wrapping(
        tree,
        rules,
        reshard_after_forward=settings.reshard_after_forward,
        tied_weights=settings.tied_weights,
        ignored_params=settings.ignored_params,
        sizes=UnitSizes(
            least=policy.min_unit_bytes, most=policy.max_unit_bytes, gathered_in=gathered_in
        ),
        optional=conditional,
    )


def _single_optimizer(optimizers: Any, settings: FSDP2Config) -> torch.optim.Optimizer | None:
    given = ensure_tuple(optimizers)
    if len(given) > 1:
        raise ConfigError(
            f"{len(given)} optimizers were given. The Trainer steps one. Give one optimizer with "
            "several parameter groups."
        )
    optimizer = given[0] if given else None
    check_known(settings, optimizer)
    return optimizer


def _compute_dtype(
    precision: str | Precision | None, device_type: str, place: Device | None
) -> torch.dtype:
    if precision is None:
        precision = Precision.AMP_FP16 if device_type == "cuda" else Precision.FP32
    name = precision.value if isinstance(precision, Precision) else str(precision)
    dtype = compute_dtype(name)
    if place is not None:
        _validate_precision(Precision(name), place)
    return dtype


def _check_reshards(shape: MeshShape, settings: FSDP2Config, plan: WrapPlan) -> None:
    shape.check_reshard(settings.reshard_after_forward, "the run")
    for unit in plan.units:
        shape.check_reshard(unit.reshard_after_forward, f"'{unit.modules[0]}'")


def _eval_methods(tree: ModuleTree, plan: WrapPlan) -> list[tuple[str, str]]:
    """The Trainer evaluates through `eval_forward`, which bypasses `forward`'s hooks.

    So do `generate` of a PEFT model, which calls that of the model inside, and that of a model with
    an encoder, which calls the encoder.
    """
    wanted = {name for unit in plan.units for name in unit.modules}
    units = [(name, module) for name, module in tree.modules() if name in wanted]
    adapted = [(n, m) for n, m in units if attribute_of(m, "get_base_model")]
    methods = [(n, "generate") for n, m in adapted if attribute_of(m, "generate") is not None]
    methods += [(n, _ENCODE) for n, m in units if attribute_of(m, _ENCODE) is not None]
    if "" in wanted and isinstance(tree.root, ComposerModel):
        methods.append(("", "eval_forward"))
    return methods
