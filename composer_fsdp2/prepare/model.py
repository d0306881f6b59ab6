"""Prepares a model as FSDP1 under Composer does, with FSDP2: `prepare_fully_shard`.

[Note: order of transformations] Plan on names, let the ranks agree, apply `TRANSFORMATIONS` in
their order, shard with children before parents (making each unit's weights real just before, or
reading the shards just after), move the optimizer. Nothing is changed before every rank has agreed
that it can be.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch
from composer.core import Precision
from composer.devices import Device
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.blocks.activation import ActivationCheckpointing
from composer_fsdp2.blocks.chunked_loss import ChunkedLoss
from composer_fsdp2.blocks.compile import CompileBlocks
from composer_fsdp2.blocks.fp8 import Float8Linear
from composer_fsdp2.blocks.tiled_mlp import TiledMLP
from composer_fsdp2.blocks.transformation import Transformation
from composer_fsdp2.config.placement import CPUOffload
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.config.wrapping import PrecisionSpec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.guards.explain import ExplainErrors
from composer_fsdp2.guards.leaving.out_of_memory import OOMGuard
from composer_fsdp2.guards.order_check import OrderCheck, Watchdog
from composer_fsdp2.guards.parameters import AddedParameters, GatheredParameters
from composer_fsdp2.guards.unused_head import UnusedHead
from composer_fsdp2.guards.watchdog import is_broken
from composer_fsdp2.optim.elementwise import LaterOptimizers, apply_local_step
from composer_fsdp2.optim.lion_state import LionTrackerFix
from composer_fsdp2.optim.local import MatrixOptimizer
from composer_fsdp2.parallel.expert.transformation import ExpertParallel
from composer_fsdp2.parallel.parallelism import AppliedParallelism, BatchGroup, SameBatchGroup
from composer_fsdp2.parallel.sequence.transformation import SequenceParallel
from composer_fsdp2.parallel.tensor.transformation import TensorParallel
from composer_fsdp2.patches import install_for_models
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.prepare.conventions import count_flops_once
from composer_fsdp2.prepare.measured_step import MONITOR as MONITOR
from composer_fsdp2.prepare.measured_step import StepComparison, show
from composer_fsdp2.prepare.plan import PreparePlan
from composer_fsdp2.prepare.settings import resolve_settings
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.shard.apply import apply_plan
from composer_fsdp2.shard.communication import apply_communication
from composer_fsdp2.shard.device_mesh import build_mesh, with_cpu_backend
from composer_fsdp2.shard.initial_weights import MetaDeviceReport, check_meta_device_reports
from composer_fsdp2.shard.optimizer import (
    detach_optimizer,
    reattach_optimizer,
)
from composer_fsdp2.shard.precision import cast_buffers
from composer_fsdp2.shard.unit_hooks import force_backward_through
from composer_fsdp2.shard.units import collector_paused
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.listeners import (
    ParallelForwards,
    SecondBackward,
    StaleGathers,
    UnannouncedMicrobatches,
)
from composer_fsdp2.step.prefetch import Prefetch
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.step.unused_parameters import UnusedParameters
from composer_fsdp2.torch_private.members import check_private_members

__all__ = ["STEP", "TRANSFORMATIONS", "parallelize_composer_model", "prepare_fully_shard"]

TRANSFORMATIONS: tuple[Transformation[Any], ...] = (
    ExpertParallel(),
    TensorParallel(),  # divides nothing in a unit of experts that ranks share
    SequenceParallel(),
    TiledMLP(),
    ChunkedLoss(),
    Float8Linear(),
    ActivationCheckpointing(),
    CompileBlocks(),
)
"""changes of a model before it is sharded, in the order in which they must be made; see
[Note: transformations] in `blocks.transformation`"""

STEP: tuple[type[StepListener], ...] = (
    # The numbers depend on these.
    SecondBackward,  # first: gradients that wait are neither filled in nor reduced
    ParallelForwards,
    StaleGathers,
    UnannouncedMicrobatches,
    Prefetch,
    UnusedParameters,
    LionTrackerFix,
    LaterOptimizers,
    # Guards, without which every number stays. An `OOMGuard` comes before all of them.
    OrderCheck,
    Watchdog,  # after the order: a rank is in a collective that all have come to
    GatheredParameters,
    UnusedHead,
    AddedParameters,
    ExplainErrors,
    StepComparison,
)
"""listeners of a step of a prepared model, in the order in which they are called"""


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
        optimizers: with or without state; or `None` to build them afterwards. A Trainer has one.
            Parameters of other modules in it stay as they are.
        fsdp2_config: a mapping, our config, Composer's `FSDP2Config`, or FSDP1's `FSDPConfig`.
        precision: the training precision, for `mixed_precision: DEFAULT` and `PURE`; fp32 by
            default, in which a model of any dtype computes. A Trainer gives its own.
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
        PatchError: when a private member of torch is missing that the settings need; on every rank.
        CheckpointError: when `pretrained_weights` cannot be read or does not fit; on every rank.

    Source: signature of Composer's `prepare_fsdp_module`,
    https://github.com/mosaicml/composer/blob/v0.32.1/composer/distributed/dist_strategy.py

    Example:
        >>> import torch
        >>> from composer_fsdp2 import prepare_fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> policy = {"wrap_policy": {"classes": ["Linear"]}}
        >>> _, units = prepare_fully_shard(model, optimizer, policy, device="cpu")
        >>> sorted(units)
        ['', '0', '1']
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """
    if not distributed.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised. FSDP2 shards over its ranks. Call "
            "composer.utils.dist.initialize_dist() first, or train through the Trainer."
        )
    error, plan = None, None
    facts: dict[str, Any] = {}
    try:
        if te_rng_seed != 1234:
            warnings.warn(
                "te_rng_seed has no effect: activation checkpointing is torch's own here.",
                stacklevel=2,
            )
        settings = resolve_settings(fsdp2_config)
        check_private_members(_features(settings, auto_microbatching))
        for step in TRANSFORMATIONS:
            step.check_items(settings, (), "auto" if auto_microbatching else None)
        plan = PreparePlan(
            model,
            optimizers,
            settings,
            precision,
            device,
            # Composer's State built it, or the user put it into Composer's config.
            mesh=fsdp2_config.device_mesh
            if isinstance(fsdp2_config, ComposerFSDP2Config)
            else None,
            transformations=TRANSFORMATIONS,
        )
        facts = plan.facts()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    with _explained_group():
        everyone = raise_on_all_ranks(facts, error)
    assert plan is not None
    if distributed.get_rank() == 0 and (uneven := plan.uneven_shards) is not None:
        warnings.warn(" ".join(uneven), stacklevel=2)
    reports = [MetaDeviceReport(*fact["~meta"]) for fact in everyone]
    check_meta_device_reports(reports)
    run = apply_to_model(model, plan, reports, seed=everyone[0]["~seed"])
    install_for_models()
    return [OOMGuard(run)] if auto_microbatching else [], dict(run.units)


def parallelize_composer_model(
    _original: Any, composer_model: Any, optimizer: Any, config: Any, precision: Any = None
) -> None:
    """Replaces Composer's function of this name. Collective: yes."""
    prepare_fully_shard(composer_model, optimizer, config, precision)


@contextlib.contextmanager
def _explained_group() -> Generator[None]:
    """Explains errors of a process group that has timed out. Collective: no."""
    try:
        yield
    except RuntimeError as error:
        if not is_broken(error):
            raise
        raise PlanError(
            "The process group gave up waiting, here or in an earlier collective, because a rank "
            "did not come in time. Gloo raises that again in every later collective of the group, "
            "so nothing can be prepared with it. Start the processes anew, or call "
            "torch.distributed.destroy_process_group() and init_process_group on every rank."
        ) from error


def _features(settings: FSDP2Config, auto_microbatching: bool) -> list[str]:
    """Returns the features of the run that need private members of torch."""
    features = {
        "activation_checkpointing": settings.activation_checkpointing
        or settings.activation_cpu_offload,
        "chunked_loss": settings.chunked_loss,
        "compile": settings.compile,
        "device_train_microbatch_size: auto": auto_microbatching,
        "eval_reshard_after_forward": settings.eval_reshard_after_forward is not None,
        "fp8": settings.fp8,
        "gradient_sync": settings.gradient_sync != "every",
        "tensor_parallel": settings.tensor_parallel,
        "unused_parameters": settings.unused_parameters is not False,
        MONITOR: settings.verbose,
    }
    return [name for name, is_on in features.items() if is_on]


def apply_to_model(
    model: nn.Module, plan: PreparePlan, reports: Sequence[MetaDeviceReport], seed: int
) -> Run:
    """Changes the model and its optimizer as planned. Collective: yes."""
    if plan.settings.verbose and distributed.get_rank() == 0:
        show(f"FSDP2 plan:\n{plan.describe()}")
    settings = plan.settings
    for optimizer in plan.optimizers:
        if isinstance(optimizer, MatrixOptimizer) and plan.groups is not None:
            optimizer.assign_groups(plan.groups)
    detached_optimizers = [detach_optimizer(optimizer, plan.tree) for optimizer in plan.optimizers]
    # A plan with a tree would keep full parameters in memory until all units are sharded.
    tree, plan.tree = plan.tree, ModuleTree()
    mesh = plan.mesh or build_mesh(plan.shape, plan.device_type)
    changed = [planned.step.apply_on(tree, planned.plan, mesh) for planned in plan.transformations]
    parallelisms: list[AppliedParallelism] = [applied for applied in changed if applied is not None]
    if any(planned.step.exchanges_modules for planned in plan.transformations):
        tree = ModuleTree.read(model)
    offload = settings.cpu_offload
    units = apply_plan(
        model,
        plan.units,
        with_cpu_backend(mesh) if offload else mesh,
        precision_of=plan.precision_of,
        forward_methods=plan.forward_methods,
        rank0_has_values=reports[0].on_meta == "none",
        some_on_meta=any(report.on_meta != "none" for report in reports),
        seed=seed,
        source=plan.weights,
        offload=(CPUOffload() if offload is True else offload) or None,
        tree=tree,
    )
    for parallelism in parallelisms:
        parallelism.connect(model)
    for planned in plan.transformations:
        planned.step.after_sharding(tree, planned.plan, units)
    _cast_buffers(tree, plan)
    tops = [units[u.module] for u in plan.units.units if u.top_level]
    apply_communication(tops, units.values(), settings.communication)
    for detached in detached_optimizers:
        reattach_optimizer(detached)
        for parallelism in parallelisms:
            parallelism.connect_optimizer(detached.optimizer)
    run = start_run(tree, plan, units, parallelisms)
    count_flops_once(model, run.batch_group)
    for optimizer in plan.optimizers:
        apply_local_step(optimizer, settings.local_step, run.device, settings.optimizer_state)
    return run


def _with_unused(plan: WrapPlan, conditional: list[str]) -> list[str]:
    """Returns units in which a parameter may get no gradient on some rank."""
    inside = tuple(f"{name}." for name in conditional)
    return [
        unit.module for unit in plan.units if any(name.startswith(inside) for name in unit.params)
    ]


def start_run(
    tree: ModuleTree,
    plan: PreparePlan,
    units: dict[str, FSDPModule],
    parallelisms: Sequence[AppliedParallelism],
) -> Run:
    """Begins to call the listeners of `STEP`. Collective: yes."""
    device = torch.empty(0, device=plan.device_type).device  # with its index
    agreement_of(device)  # made here, where all ranks are
    # Units in one unit with a tower; a list of experts has no `forward` of its own.
    towers = [name for name in plan.conditional if has_forward(tree.root.get_submodule(name))]
    around = _with_unused(plan.units, towers)
    beside = tuple(f"{name}." if name else "" for name in around)
    names = [unit.module for unit in plan.units.units]
    inside = [name for name in names if name not in around and name.startswith(beside)]
    force_backward_through(units[name] for name in inside)
    same_batch = tuple(group for group in parallelisms if isinstance(group, SameBatchGroup))
    run = Run(
        model=tree.root,
        tree=tree,
        plan=plan.units,
        shape=plan.shape,
        settings=plan.settings,
        device=device,
        optimizers=plan.optimizers,
        parallelisms=parallelisms,
        batch_group=BatchGroup(same_batch) if same_batch else None,
        units=units,
        conditional=_with_unused(plan.units, plan.conditional),
    )
    run.start(STEP)
    return run


def _cast_buffers(tree: ModuleTree, plan: PreparePlan) -> None:
    """Gives every buffer the dtype of its unit's setting, else of the run's. Collective: no."""
    run = plan.settings.mixed_precision
    units = plan.units.units
    of_unit = {unit.module: unit.mixed_precision or run for unit in units}
    dtypes: dict[str, str | PrecisionSpec] = {}
    for path, module in tree.modules():  # parents come before children
        around = dtypes.get(path.rpartition(".")[0], run)
        dtypes[path] = of_unit.get(path, around)
        cast_buffers(module, dtypes[path])
