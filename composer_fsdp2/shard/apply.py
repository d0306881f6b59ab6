"""Applies a plan: a loop of `fully_shard`, and the proof that nothing was untied."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from composer_fsdp2.config.placement import CPUOffload
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import placement_of
from composer_fsdp2.parallel.parallelism import experts_of
from composer_fsdp2.plan.module_tree import (
    ModuleTree,
    attribute_of,
    canonical_param_ids,
)
from composer_fsdp2.plan.shard_dims import shard_dim
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.ranks import of_rank0
from composer_fsdp2.shard.averaging import MakeHook, probe_reduction
from composer_fsdp2.shard.initial_weights import InitialWeights, shared_seed
from composer_fsdp2.shard.layout import Layout, slot_of
from composer_fsdp2.shard.packed_weights import prepare_packed_weights
from composer_fsdp2.shard.unit_hooks import InputCast, UnitHooks
from composer_fsdp2.shard.units import collector_paused
from composer_fsdp2.shard.weight_source import WeightSource
from composer_fsdp2.torch_private.members import check_private_members
from composer_fsdp2.torch_private.reading import guard_reading
from composer_fsdp2.torch_private.tensors import (
    post_accumulate_hooks,
    tensor_hooks,
)

__all__ = [
    "apply_plan",
    "check_forward_methods",
    "check_hooks",
    "merge_aliases",
]


def check_hooks(tree: ModuleTree) -> None:
    """Refuses tensor hooks that would never be called.

    Collective: no.

    Raises:
        PlanError: naming the parameters.
    """
    hooked = [ref.name for ref in tree.params if tensor_hooks(ref.param)]
    if hooked:
        raise PlanError(
            f"{', '.join(repr(name) for name in hooked[:10])} have tensor hooks "
            "(`register_hook`). Autograd computes the gradient of the gathered copy, so they would "
            "never be called. Use `register_post_accumulate_grad_hook`, which gets the sharded "
            "gradient, or change the gradients in a callback."
        )


def check_forward_methods(
    tree: ModuleTree, patterns: Iterable[str], plan: WrapPlan
) -> list[tuple[str, str]]:
    """Finds the methods besides `forward` that compute with parameters.

    Collective: no.

    Args:
        tree: the model, not sharded yet.
        patterns: `path.to.module.method`, where the path may be a glob; modules add their own
            with an attribute `fsdp_forward_methods`, a list of method names.
        plan: says which modules will be units.

    Returns:
        Pairs of module name and method name.

    Raises:
        PlanError: for a pattern that matches nothing, a method that does not exist, and a module
            that is no unit.
    """
    methods: dict[tuple[str, str], None] = {}
    modules = list(tree.modules())
    for pattern in patterns:
        path, _, method = pattern.rpartition(".")
        named = [(name, module) for name, module in modules if fnmatch.fnmatchcase(name, path)]
        matched = [(n, method) for n, module in named if callable(getattr(module, method, None))]
        if not matched:
            raise PlanError(
                f"'{pattern}' of forward_methods matches no method. Calling it would compute with "
                "shards instead of weights. Write `path.to.module.method`; the path is a module "
                "name or a glob, and empty for the model itself."
            )
        methods.update(dict.fromkeys(matched))
    for name, module in modules:
        for method in attribute_of(module, "fsdp_forward_methods", ()):
            if not callable(getattr(module, method, None)):
                raise PlanError(
                    f"fsdp_forward_methods of '{name}' names '{method}', which is no method of it. "
                    "It would have no effect. Correct the name."
                )
            methods[name, method] = None
    units = {unit.module for unit in plan.units}
    for path, method in methods:
        if path not in units:
            raise PlanError(
                f"'{method}' of '{path}' is listed as a forward method, but '{path}' is not a "
                "unit. Only a unit can gather parameters when one of its methods is called. Make "
                f"it a unit with wrap_policy.names: ['{path}']."
            )
    return list(methods)


def merge_aliases(tree: ModuleTree) -> ModuleTree:
    """Makes one parameter of several that share their memory; returns the tree of the new model.

    Collective: no. See [Note: two kinds of ties].
    """
    representative = canonical_param_ids(tree.params)
    params = {id(ref.param): ref.param for ref in tree.params}
    aliases = [ref for ref in tree.params if representative[id(ref.param)] != id(ref.param)]
    if not aliases:
        return tree
    for ref in aliases:
        module, attribute = slot_of(tree, ref)
        module._parameters[attribute] = params[representative[id(ref.param)]]
    tree.params.clear()  # the caller may keep the tree
    return ModuleTree.read(tree.root)


@collector_paused()
def apply_plan(
    model: nn.Module,
    plan: WrapPlan,
    mesh: DeviceMesh,
    *,
    precision_of: Callable[[ShardUnit], MixedPrecisionPolicy] | None = None,
    forward_methods: Iterable[tuple[str, str]] = (),
    rank0_has_values: bool = True,
    some_on_meta: bool = True,
    seed: int | None = None,
    source: WeightSource | None = None,
    offload: CPUOffload | None = None,
    tree: ModuleTree | None = None,
) -> dict[str, FSDPModule]:
    """Shards a model in place, unit by unit, children before parents.

    Collective: yes. Every rank must hold the same plan. Weights start from rank 0's, or from the
    model's initialisers where rank 0 is on meta (see [Note: initial weights]). The plan's names are
    those of the model before activation checkpointing.

    Args:
        model: the model the plan was made for.
        plan: units of the model, from `plan_wrapping`.
        mesh: 1-D, or 2-D with (replicate, shard); its device type is where the shards live.
        precision_of: mixed precision of a unit; none by default.
        forward_methods: (module, method), from `check_forward_methods`.
        rank0_has_values: false when rank 0 is on meta, wholly or in part.
        some_on_meta: false when every rank holds all values; tensors that are neither parameter
            nor buffer then stay what each rank has.
        seed: of weights that are created; the same on every rank. Drawn by rank 0 when left out.
        source: has the values of all parameters, and of the buffers it knows, on every rank (see
            [Note: weights from a source]); the two flags above are then about the rest.
        offload: keeps the shards in CPU memory; the groups of the mesh then reduce there too.
        tree: the model as `ModuleTree.read` gave it, when the caller has it. Its parameters are
            dropped, so that no full one outlives the sharding of its unit.

    Returns:
        The units by name.

    Raises:
        PlanError: for weights nothing initialises.
        CheckpointError: when a source cannot be read.
        PatchError: when this torch lacks a private member of FSDP2, before anything is changed.

    Source: `fully_shard` takes children before parents, for a unit manages what is left over:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_init.py#L123

    Example:
        >>> from torch import nn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from composer_fsdp2 import apply_plan, plan_wrapping
        >>> from composer_fsdp2.plan.rules import by_class, root_rule
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> plan = plan_wrapping(model, [by_class("Linear"), root_rule])
        >>> sorted(apply_plan(model, plan, init_device_mesh("cpu", (1,))))
        ['', '0', '1']
    """
    check_private_members()
    tree = merge_aliases(tree or ModuleTree.read(model))
    device = torch.empty(0, device=mesh.device_type).device  # with its index
    tree = prepare_packed_weights(tree, plan.units, device)
    probe = functools.cache(probe_reduction)  # every layer of experts has the same ranks
    probe(mesh)
    layout = Layout(tree, plan)
    weights = InitialWeights(
        tree,
        device,
        of_rank0(shared_seed()) if seed is None else seed,
        rank0_has_values=rank0_has_values,
        some_on_meta=some_on_meta,
        source=source,
        shards_on=None if offload is None else torch.device("cpu"),
    )
    offloading = CPUOffloadPolicy(pin_memory=offload.pin_memory) if offload else OffloadPolicy()
    hooks: dict[nn.Module, UnitHooks] = {}
    with _carrying_attributes(tree), weights.seeded(), weights.sourced.shown():
        tree.params.clear()  # or every full parameter would live until the last unit is sharded
        if source is not None:
            # While parameters are on meta: an initialiser may reach into modules below its own.
            weights.fill(tree.modules())
        # Children first: `fully_shard` gives a unit the parameters that no unit below it has taken.
        for unit in layout.order:
            weights.fill(layout.modules_of(unit))
            policy = precision_of(unit) if precision_of else MixedPrecisionPolicy()
            module = layout.modules[unit.module]
            experts = experts_of(module)
            ranks = (mesh,) if experts is None else (experts.mesh.shards, experts.mesh.sources)
            hooks[module] = _shard_unit(module, unit, layout, *probe(*ranks), policy, offloading)
            weights.sourced.read_parameters(unit.params)
        weights.fill(tree.modules())
        weights.sourced.read_parameters(plan.ignored)
    units = {unit.module: layout.modules[unit.module] for unit in plan.units}
    for module, hook in hooks.items():
        hook.units = tuple(reversed(units.values()))
        if (experts := experts_of(module)) is not None:
            experts.show_remote()
    weights.agree_on_failure()
    for names in plan.tied:
        params = {id(layout.param_of(name)) for name in names}
        assert len(params) == 1, f"sharding untied {names}"
    guard_reading(model)
    for path, method in forward_methods:
        hooks[layout.modules[path]].hook_method(method)
    return units


def _shard_unit(
    module: nn.Module,
    unit: ShardUnit,
    layout: Layout,
    mesh: DeviceMesh,
    make_hook: MakeHook,
    policy: MixedPrecisionPolicy,
    offloading: OffloadPolicy,
) -> UnitHooks:
    """Shards one unit; returns its hooks, which other methods need as well.

    Torch is kept from gathering a unit in backward that does not compute with it there. The
    gradient of an embedding is made of rows of the output's; a subclass may do more, such as
    multiply with the weight to get logits. A frozen unit is not part of backward until a gradient
    passes through it, but torch would prefetch the last one of a frozen beginning (an image tower,
    the lower layers of a fine-tuned model).

    Source: the prefetch goes by the order of the forward, whether a unit is in backward or not:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L491
    """
    # `fully_shard` compares Parameter objects, and units sharded before have exchanged theirs.
    ignored = {getattr(owner, name) for owner, name in layout.foreign.get(unit.module, ())}
    experts = experts_of(module)
    if experts is not None:
        experts.drop_remote()
    # Before it is sharded, which gives the module another class.
    is_embedding = unit.role == "embedding" or type(module) is nn.Embedding
    trained = [layout.param_of(name).requires_grad for name in unit.params]
    frozen = bool(trained) and not any(trained)
    offloaded = mesh.device_type if isinstance(offloading, CPUOffloadPolicy) else None
    # Inputs of experts are not those of a unit without them: a router's weights stay as they are.
    casts = policy.cast_forward_inputs and experts is None
    hooks = UnitHooks(module, InputCast(policy.param_dtype if casts else None, offloaded))
    sharded: Any = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=lambda param: (
            placement_of(param)
            if experts is not None
            else Shard(shard_dim(param, unit, mesh.size(-1)))
        ),
        # With this field set, FSDP2 would cast in a pre-hook of its own, before ours.
        mp_policy=dataclasses.replace(policy, cast_forward_inputs=False),
        offload_policy=offloading,
        ignored_params=ignored or None,
    )
    fp32_device = mesh.device_type if unit.role == "fp32" else None
    members = [member for _, member in layout.members[unit.module]]
    if experts is not None:  # not those of other ranks
        here = set(module.modules())
        members = [member for member in members if member in here]
    hooks.attach(members, fp32_device, frozen and not is_embedding)
    # Torch refuses as well, in an assertion that says nothing of averages and names no cure.
    type(module).__deepcopy__ = _refuse_copy  # pyright: ignore[reportAttributeAccessIssue]
    if (hook := make_hook()) is not None:
        sharded.set_all_reduce_hook(hook)
    if is_embedding or frozen:
        sharded.set_unshard_in_backward(False)
    return hooks


def _refuse_copy(module: nn.Module, _memo: object) -> None:
    raise PlanError(
        f"A {type(module).__name__.removeprefix('FSDP')} that FSDP2 shards was to be copied, by "
        "copy.deepcopy or by something that calls it, such as torch's AveragedModel. The copy "
        "would gather and reduce the parameters of the original. Copy the model before it is "
        "prepared, and prepare the copy too; for averages of weights use Composer's EMA or SWA, "
        "or keep `param.detach().clone()` of each parameter, which is the average's shard."
    )


@contextlib.contextmanager
def _carrying_attributes(tree: ModuleTree) -> Generator[None]:
    """Gives shards the attributes and post-accumulate hooks that users attached to parameters."""
    # `fully_shard` makes a new Parameter of the shard, with neither attributes nor hooks.
    carried = [
        (slot_of(tree, ref), dict(vars(ref.param)), post_accumulate_hooks(ref.param))
        for ref in tree.params
    ]
    yield
    for (module, attribute), attributes, hooks in carried:
        param = getattr(module, attribute)
        vars(param).update(attributes)
        # Those of a parameter that is tied, or not sharded, are there by now.
        for hook in () if post_accumulate_hooks(param) else hooks:
            param.register_post_accumulate_grad_hook(hook)
