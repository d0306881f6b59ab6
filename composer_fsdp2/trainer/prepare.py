"""`prepare_fully_shard`: what FSDP1 users call, done with FSDP2.

[Note: order of transformations] Decide on names, let the ranks agree, cut MLPs, convert layers to
fp8, wrap activations, compile blocks, shard with children before parents (making each unit's
weights real just before, or reading the shards just after), move the optimizer. Nothing is changed
before every rank has agreed that it can be.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.core import Precision
from composer.core.precision import _validate_precision
from composer.devices import Device, DeviceGPU
from composer.models import ComposerModel
from composer.utils import ensure_tuple, get_device
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from composer_fsdp2.blocks.activation import ActivationPlan, apply_activation, plan_activation
from composer_fsdp2.blocks.chunked_loss import (
    ChunkingPlan,
    apply_chunking,
    kept_for_loss,
    plan_chunking,
)
from composer_fsdp2.blocks.compile import CompilePlan, apply_compile, plan_compile
from composer_fsdp2.blocks.fp8 import (
    Float8Plan,
    apply_float8,
    check_float8,
    gather_in_float8,
    plan_float8,
)
from composer_fsdp2.blocks.tiled_mlp import TilingPlan, apply_tiling, plan_tiling
from composer_fsdp2.checkpoint.pretrained import PretrainedWeights, open_pretrained
from composer_fsdp2.config.blocks import ActivationSpec, CompileSpec, Float8Spec
from composer_fsdp2.config.describe import describe_values
from composer_fsdp2.config.placement import CPUOffload
from composer_fsdp2.config.precision import PrecisionSpec
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.conditional_modules import optional_modules
from composer_fsdp2.plan.mesh_shape import MeshShape, build_mesh, with_cpu_backend
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward
from composer_fsdp2.plan.planner import ShardUnit, WrapPlan, plan_wrapping
from composer_fsdp2.plan.unit_size import UnitSizes
from composer_fsdp2.ranks import agree, installation
from composer_fsdp2.runtime.accumulation import Accumulation
from composer_fsdp2.runtime.events import Progress
from composer_fsdp2.runtime.oom import Guard
from composer_fsdp2.runtime.order_check import apply_order_check, check_order_check
from composer_fsdp2.runtime.prefetch import apply_prefetch
from composer_fsdp2.runtime.unused_parameters import pass_gradients, reduce_unused
from composer_fsdp2.runtime.watchdog import lookout_of
from composer_fsdp2.shard.apply import (
    apply_plan,
    check_forward_methods,
    check_hooks,
    collector_paused,
)
from composer_fsdp2.shard.communication import apply_communication, check_communication
from composer_fsdp2.shard.initial_weights import Origins, check_origins, shared_seed
from composer_fsdp2.shard.optimizer import (
    check_optimizer,
    describe_optimizer,
    detach_optimizer,
    reattach_optimizer,
    reshard_before_steps,
)
from composer_fsdp2.shard.precision import cast_buffers, compute_dtype, resolve_precision
from composer_fsdp2.shard.torch_private.members import check_private_members
from composer_fsdp2.shard.torch_private.tensors import fast_chunking
from composer_fsdp2.trainer.config import resolve_settings
from composer_fsdp2.trainer.rules import activation_choice, block_units, trainer_rules
from composer_fsdp2.trainer.sharding import Sharding, note_sharding

__all__ = ["prepare_fully_shard"]

_ENCODE = "_prepare_encoder_decoder_kwargs_for_generation"
"""what transformers' `generate` calls the encoder in"""

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "mosaicml", "composer-fsdp2", "transformers", "llm-foundry", "peft")


@collector_paused()
def prepare_fully_shard(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    fsdp2_config: Any,
    precision: str | Precision | None = None,
    device: str | Device | None = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
) -> tuple[list[Any], dict[str, FSDPModule]]:
    """Shards a model with FSDP2 and moves its optimizer to the shards, both in place.

    Collective: yes. `torch.distributed` must be initialised. The signature is that of Composer's
    FSDP1 `prepare_fsdp_module`. A ComposerModel is wrapped by Composer's conventions, any other
    module as root with its own `fsdp_wrap_fn`. Every rank starts from rank 0's weights, or from
    those of the folder `pretrained_weights`.

    Args:
        model: on cpu or the device on every rank; on meta on ranks above 0; or on meta everywhere.
        optimizers: at most one, with or without state; or `None` to build it afterwards.
        fsdp2_config: a mapping, our config, Composer's `FSDP2Config`, or FSDP1's `FSDPConfig`.
        precision: the training precision, for `mixed_precision: DEFAULT` and `PURE`. Defaults to
            amp_fp16 on GPU and fp32 on CPU, as in FSDP1.
        device: where the shards live; the current accelerator, else the CPU, by default.
        auto_microbatching: has ranks agree before each of the units' collectives, so that all leave
            a step in which one runs out of memory.
        te_rng_seed: kept for the signature; only TransformerEngine's FSDP1 wrapper used it.

    Returns:
        Handles with a `remove()` that end what `auto_microbatching` began, and the FSDP units by
        name.

    Raises:
        ConfigError: for wrong settings, on every rank.
        PlanError: when the model or optimizer cannot be sharded as asked, or ranks differ; on
            every rank.
        CheckpointError: when `pretrained_weights` cannot be read or does not fit; on every rank.
        PatchError: when a private member of torch is missing that the settings need; on every rank.
    """
    if not distributed.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised. FSDP2 shards over its ranks. Call "
            "composer.utils.dist.initialize_dist() first, or train through the Trainer."
        )
    error, decided = None, None
    facts: dict[str, Any] = {}
    try:
        _check_arguments(te_rng_seed)
        settings = resolve_settings(fsdp2_config)
        check_private_members(_features(settings, auto_microbatching))
        decided = _decide(model, optimizers, settings, fsdp2_config, precision, device)
        facts = decided.facts()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    everyone = agree(facts, error)
    assert decided is not None
    origins = [Origins(*fact["~origins"]) for fact in everyone]
    check_origins(origins)
    units = _carry_out(model, decided, origins, seed=everyone[0]["~seed"])
    return [Guard(units.values())] if auto_microbatching else [], units


@dataclass(slots=True, eq=False)
class _Decided:
    """Everything settled before the model is touched."""

    tree: ModuleTree
    settings: FSDP2Config
    shape: MeshShape
    mesh: DeviceMesh | None
    device_type: str
    compute: torch.dtype
    plan: WrapPlan
    optional: list[str]
    activation: ActivationPlan | None
    compiled: CompilePlan | None
    tiled: TilingPlan | None
    chunked: ChunkingPlan | None
    fp8: Float8Plan | None
    forward_methods: list[tuple[str, str]]
    optimizer: torch.optim.Optimizer | None
    weights: PretrainedWeights | None

    def precision_of(self, unit: ShardUnit) -> MixedPrecisionPolicy:
        """The policy of one unit; the run's output dtype is that of what leaves the model."""
        own = unit.mixed_precision
        policy = resolve_precision(own or self.settings.mixed_precision, self.compute)
        if own is None and not unit.top_level:
            policy = dataclasses.replace(policy, output_dtype=None)
        return policy

    def facts(self) -> dict[str, Any]:
        """What the ranks must have in common, and what each of them has to tell."""
        return {
            **installation(_PACKAGES),
            "configuration": describe_values(self.settings),
            "precision and device": f"{self.compute} {self.device_type}",
            "plan": str(self.plan),
            "set of modules that may be left out": "\n".join(self.optional),
            "set of parameters and buffers": _describe_tensors(self.tree),
            "activation plan": str(self.activation),
            "plan of compiled blocks": str(self.compiled),
            "plan of tiles": str(self.tiled),
            "plan of the loss in chunks": str(self.chunked),
            "plan of fp8 layers": str(self.fp8),
            "optimizer": describe_optimizer(self.optimizer) if self.optimizer else "none",
            "plan of pretrained weights": str(self.weights.plan) if self.weights else "none",
            "~origins": dataclasses.astuple(Origins.read(self.tree, self.weights or ())),
            "~seed": shared_seed(),
        }


def _describe_tensors(tree: ModuleTree) -> str:
    lines = [
        f"{use.name} {use.param.shape} {use.param.dtype} {use.param.requires_grad}"
        for use in tree.uses
    ]
    for path, module in tree.modules():
        lines += [
            f"{path}.{name} {buffer.shape} {buffer.dtype}"
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
    return "\n".join(lines)


def _check_arguments(te_rng_seed: int) -> None:
    if te_rng_seed != 1234:
        warnings.warn(
            "te_rng_seed has no effect: activation checkpointing is torch's own here.", stacklevel=3
        )


def _features(settings: FSDP2Config, auto_microbatching: bool) -> list[str]:
    """Features of the run for which private members of torch are needed."""
    asked = {
        "activation_checkpointing": settings.activation_checkpointing
        or settings.activation_cpu_offload,
        "chunked_loss": settings.chunked_loss,
        "compile": settings.compile,
        "device_train_microbatch_size: auto": auto_microbatching,
        "eval_reshard_after_forward": settings.eval_reshard_after_forward is not None,
        "fp8": settings.fp8,
        "gradient_sync": settings.gradient_sync != "every",
        "unused_parameters": settings.unused_parameters is not False,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _decide(
    model: nn.Module,
    optimizers: Any,
    settings: FSDP2Config,
    fsdp2_config: Any,
    precision: Any,
    device: Any,
) -> _Decided:
    """Settles everything that can be settled without touching the model. Collective: no."""
    mesh = _given_mesh(fsdp2_config)
    if device is None and mesh is not None:
        device = "gpu" if mesh.device_type == "cuda" else mesh.device_type
    place = get_device(device)
    device_type = "cuda" if isinstance(place, DeviceGPU) else place.name
    _check_offload(settings, device_type)
    check_communication(settings.communication, device_type)
    check_order_check(settings.order_check)
    optimizer = _single_optimizer(optimizers)
    tree = ModuleTree.read(model)
    check_hooks(tree)
    shape = MeshShape.resolve(settings, distributed.get_world_size())
    compute = _compute_dtype(precision, place)
    optional = _optional(tree, settings)
    plan = _plan(model, tree, settings, shape, compute, optional)
    chunked = _plan_chunking(model, settings)
    if chunked is not None:
        plan = kept_for_loss(plan, chunked)
    blocks = plan
    if optional and (settings.activation_checkpointing or settings.compile):
        # A block of a tower is one, whatever unit its parameters are in.
        blocks = _plan(model, tree, settings, shape, compute, [])
    _check_reshards(shape, settings, plan)
    methods = check_forward_methods(tree, settings.forward_methods, plan)
    methods += _eval_methods(model, plan)
    if optimizer is not None:
        check_optimizer(optimizer, tree, gives_values=distributed.get_rank() == 0)
    return _Decided(
        tree=tree,
        settings=settings,
        shape=shape,
        mesh=mesh,
        device_type=device_type,
        compute=compute,
        plan=plan,
        optional=optional,
        activation=_plan_activation(model, settings, blocks),
        compiled=_plan_compile(settings, blocks),
        tiled=_plan_tiling(model, settings, plan),
        chunked=chunked,
        fp8=_plan_float8(tree, settings, plan, shape, device_type),
        forward_methods=methods,
        optimizer=optimizer,
        weights=_open_weights(settings.pretrained_weights, tree),
    )


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
    weights = open_pretrained(path, tree)
    if weights.plan.skipped and distributed.get_rank() == 0:
        warnings.warn(
            f"'{path}' was saved with a head that this model has not: its "
            f"{', '.join(weights.plan.skipped[:20])} will not be read.",
            stacklevel=5,
        )
    return weights


def _optional(tree: ModuleTree, settings: FSDP2Config) -> list[str]:
    named = settings.unused_parameters
    if named is False:
        return []
    return optional_modules(tree, named if isinstance(named, tuple) else ())


def _plan(
    model: nn.Module,
    tree: ModuleTree,
    settings: FSDP2Config,
    shape: MeshShape,
    compute: torch.dtype,
    optional: list[str],
) -> WrapPlan:
    policy = settings.wrap_policy
    gathered_in = resolve_precision(settings.mixed_precision, compute).param_dtype
    rules = trainer_rules(
        model, policy, shape, keep_fp32=settings.keep_fp32, gathered_in=gathered_in
    )
    return plan_wrapping(
        model,
        rules,
        reshard_after_forward=settings.reshard_after_forward,
        tied_weights=settings.tied_weights,
        ignored_params=settings.ignored_params,
        sizes=UnitSizes(
            least=policy.min_unit_bytes, most=policy.max_unit_bytes, gathered_in=gathered_in
        ),
        optional=optional,
        tree=tree,
    )


def _plan_activation(
    model: nn.Module, settings: FSDP2Config, plan: WrapPlan
) -> ActivationPlan | None:
    recompute = settings.activation_checkpointing
    if _memory_budget(settings) is not None:
        recompute = False  # the compiler does it
    if recompute is False and not settings.activation_cpu_offload:
        return None
    return plan_activation(
        model,
        recompute,
        choose=activation_choice(model, plan),
        offload=settings.activation_cpu_offload,
    )


def _memory_budget(settings: FSDP2Config) -> float | None:
    recompute = settings.activation_checkpointing
    return recompute.memory_budget if isinstance(recompute, ActivationSpec) else None


def _plan_compile(settings: FSDP2Config, plan: WrapPlan) -> CompilePlan | None:
    spec = settings.compile
    if spec is False:
        return None
    spec = CompileSpec() if spec is True else spec
    return plan_compile(block_units(plan), spec, memory_budget=_memory_budget(settings))


def _plan_tiling(model: nn.Module, settings: FSDP2Config, plan: WrapPlan) -> TilingPlan | None:
    if settings.tiled_mlp is None:
        return None
    units = [name for unit in plan.units for name in unit.modules if name]
    return plan_tiling(model, settings.tiled_mlp, units=units)


def _plan_chunking(model: nn.Module, settings: FSDP2Config) -> ChunkingPlan | None:
    return settings.chunked_loss and plan_chunking(model, settings.chunked_loss)


def _plan_float8(
    tree: ModuleTree, settings: FSDP2Config, plan: WrapPlan, shape: MeshShape, device_type: str
) -> Float8Plan | None:
    if settings.fp8 is False:
        return None
    spec = Float8Spec() if settings.fp8 is True else settings.fp8
    check_float8(spec, device_type)
    return plan_float8(tree, plan, spec, blocks=block_units(plan), shard_ranks=shape.shard)


def _single_optimizer(optimizers: Any) -> torch.optim.Optimizer | None:
    given = ensure_tuple(optimizers)
    if len(given) > 1:
        raise ConfigError(
            f"{len(given)} optimizers were given. The Trainer steps one. Give one optimizer with "
            "several parameter groups."
        )
    return given[0] if given else None


def _compute_dtype(precision: str | Precision | None, device: Device) -> torch.dtype:
    if precision is None:
        precision = Precision.AMP_FP16 if isinstance(device, DeviceGPU) else Precision.FP32
    name = precision.value if isinstance(precision, Precision) else str(precision)
    dtype = compute_dtype(name)
    _validate_precision(Precision(name), device)
    return dtype


def _check_reshards(shape: MeshShape, settings: FSDP2Config, plan: WrapPlan) -> None:
    shape.check_reshard(settings.reshard_after_forward, "the run")
    for unit in plan.units:
        shape.check_reshard(unit.reshard_after_forward, f"'{unit.modules[0]}'")


def _eval_methods(model: nn.Module, plan: WrapPlan) -> list[tuple[str, str]]:
    """The Trainer evaluates through `eval_forward`, which bypasses `forward`'s hooks.

    So do `generate` of a PEFT model, which calls that of the model inside, and that of a model with
    an encoder, which calls the encoder.
    """
    units = {name: model.get_submodule(name) for unit in plan.units for name in unit.modules}
    methods = [(name, "generate") for name, m in units.items() if hasattr(m, "get_base_model")]
    methods += [(name, _ENCODE) for name in units]
    if "" in units and isinstance(model, ComposerModel):
        methods.append(("", "eval_forward"))
    return [(name, method) for name, method in methods if hasattr(units[name], method)]


def _given_mesh(config: Any) -> DeviceMesh | None:
    """The mesh Composer's State built, or the user put into Composer's config."""
    return config.device_mesh if isinstance(config, ComposerFSDP2Config) else None


def _carry_out(
    model: nn.Module, decided: _Decided, origins: Sequence[Origins], seed: int
) -> dict[str, FSDPModule]:
    """Changes the model and its optimizer as decided. Collective: yes."""
    if decided.settings.verbose and distributed.get_rank() == 0:
        activation = decided.activation or "activations: kept"
        inside = (activation, decided.tiled, decided.chunked, decided.fp8, decided.compiled)
        _show("\n".join(str(part) for part in (decided.plan, *inside) if part is not None))
    detached = None
    if decided.optimizer is not None:
        detached = detach_optimizer(decided.optimizer, decided.tree)
    # Nothing may hold the full parameters while the units are sharded one after another.
    decided.tree = ModuleTree()
    _change_modules(model, decided)
    mesh = decided.mesh or build_mesh(decided.shape, decided.device_type)
    offload = decided.settings.cpu_offload
    with fast_chunking():
        units = apply_plan(
            model,
            decided.plan,
            with_cpu_backend(mesh) if offload else mesh,
            precision_of=decided.precision_of,
            forward_methods=decided.forward_methods,
            rank0_has_values=origins[0].on_meta == "none",
            some_on_meta=any(origin.on_meta != "none" for origin in origins),
            seed=seed,
            source=decided.weights,
            offload=(CPUOffload() if offload is True else offload) or None,
        )
    if decided.fp8 is not None:
        gather_in_float8(model, units.values(), decided.fp8)
    _cast_buffers(model, decided)
    tops = [units[u.modules[0]] for u in decided.plan.units if u.top_level]
    apply_communication(tops, units.values(), decided.settings.communication)
    if detached is not None:
        reattach_optimizer(detached)
        reshard_before_steps(detached.optimizer, units.values())
    _follow(model, decided, units)
    if decided.settings.unused_parameters is not False:
        reduce_unused(units, _with_unused(decided.plan, decided.settings, decided.optional))
    pass_gradients(units[name] for name in _beside_towers(model, decided))
    sharding = Sharding(
        plan=decided.plan,
        shape=decided.shape,
        accumulation=_accumulation(decided, units),
        units=units,
        eval_reshard=decided.settings.eval_reshard_after_forward,
    )
    note_sharding(model, sharding)
    return units


def _change_modules(model: nn.Module, decided: _Decided) -> None:
    """What comes before sharding, in the order in which it must be."""
    if decided.tiled is not None:
        apply_tiling(model, decided.tiled)
    if decided.chunked is not None:
        apply_chunking(model, decided.chunked)
    if decided.fp8 is not None:
        apply_float8(model, decided.fp8)
    if decided.activation is not None:
        apply_activation(model, decided.activation)
    if decided.compiled is not None:
        apply_compile(model, decided.compiled)


def _with_unused(plan: WrapPlan, settings: FSDP2Config, optional: list[str]) -> list[str]:
    """Units in which a parameter may get no gradient on some rank."""
    everywhere = settings.unused_parameters is True
    inside = tuple(f"{name}." for name in optional)
    return [
        unit.modules[0]
        for unit in plan.units
        if everywhere or any(name.startswith(inside) for name in unit.params)
    ]


def _beside_towers(model: nn.Module, decided: _Decided) -> list[str]:
    """Units that lie in one unit with a tower; a list of experts has no `forward` of its own."""
    towers = [name for name in decided.optional if has_forward(model.get_submodule(name))]
    around = _with_unused(decided.plan, FSDP2Config(), towers)
    beside = tuple(f"{name}." if name else "" for name in around)
    names = [name for unit in decided.plan.units for name in unit.modules]
    return [name for name in names if name not in around and name.startswith(beside)]


def _follow(model: nn.Module, decided: _Decided, units: dict[str, FSDPModule]) -> None:
    """Sets what depends on the order in which units run. Collective: yes."""
    names = [unit.modules[0] for unit in decided.plan.units if unit.params]
    gathered = {name: units[name] for name in names}
    device = torch.device(decided.device_type)
    progress = Progress(model, gathered, lookout_of(device))
    apply_order_check(progress, decided.settings.order_check, device)
    forward, backward = decided.settings.forward_prefetch, decided.settings.backward_prefetch
    if forward or backward:
        apply_prefetch(model, gathered, progress, forward=forward, backward=backward)


def _accumulation(decided: _Decided, units: dict[str, FSDPModule]) -> Accumulation:
    """Units that keep their parameters until backward keep them for the microbatches to come."""
    sync = decided.settings.gradient_sync
    kept = [u.modules[0] for u in decided.plan.units if u.reshard_after_forward is False]
    return Accumulation(units, sync, kept if sync == "last" else ())


def _cast_buffers(model: nn.Module, decided: _Decided) -> None:
    """Gives every buffer the dtype that its unit, else the run asks for. Collective: no."""
    asked = {decided.settings.mixed_precision, *(u.mixed_precision for u in decided.plan.units)}
    if not any(isinstance(one, PrecisionSpec) and one.buffer_dtype for one in asked):
        return
    unit_of = {name: unit for unit in decided.plan.units for name in unit.modules}
    for path, module in ModuleTree.read(model).modules():
        parts = path.split(".") if path else []
        above = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        unit = next((unit_of[name] for name in above if name in unit_of), None)
        own = unit.mixed_precision if unit is not None else None
        cast_buffers(module, own or decided.settings.mixed_precision)


def _show(text: str) -> None:
    """`verbose` was asked for, so it is shown even where nobody set up logging."""
    if log.isEnabledFor(logging.INFO):
        log.info("FSDP2 plan:\n%s", text)
    else:
        print(f"FSDP2 plan:\n{text}", file=sys.stderr, flush=True)
