"""Linear layers that multiply in fp8, by torchao; knows nothing of the trainer.

[Note: fp8] The weights stay what they are: parameters, names, optimizer and checkpoints are those
of a run without it. A layer casts its input, weight and incoming gradient on their way into the
matrix products. With `all_gather` the shards are cast before they are sent, with the scale of the
whole weight, which takes the largest value on any rank: before each gather a reduction of one
number a weight. torchao would put a tensor of its own in each shard's place; here it stands beside
them, so that whatever looks at the shards sees plain ones, and no scale is from before a change.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.block_positions import outer_names
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import matcher, unmatched_names
from composer_fsdp2.plan.planner import WrapPlan
from composer_fsdp2.shard.torch_private.units import (
    init_all_gather_extensions,
    local_shard,
    param_groups,
    params_of,
    sharded_param,
)

__all__ = ["Float8Plan", "apply_float8", "check_float8", "gather_in_float8", "plan_float8"]

_ORIGIN = (8, 9)
"""the first CUDA capability that multiplies fp8"""
_STEP = 16
"""what fp8 matrix products need sizes to be a multiple of"""
_WORTHWHILE = 128
"""smaller layers, such as adapters, lose more by the casts than they gain"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Plan:
    """Which linear layers multiply in fp8. Names and numbers only."""

    modules: tuple[str, ...]
    gathered: tuple[str, ...]
    """those of them whose weight is cast before it is sent"""
    settings: Float8Spec

    def __str__(self) -> str:
        gathered = f", {len(self.gathered)} gathered in it" if self.gathered else ""
        return f"in fp8 ({self.settings.recipe}{gathered}): {', '.join(self.modules)}"


def check_float8(settings: Float8Spec, device_type: str) -> None:
    """Refuses what this machine cannot do. Collective: no.

    Raises:
        ConfigError: without torchao, or a device that multiplies fp8.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "'fp8' is set, and torchao is not installed. The layers that multiply in fp8 are its. "
            "Install composer-fsdp2[fp8], or take fp8 out."
        )
    try:
        _torchao("float8")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"'fp8' is set, and torchao cannot be imported: {error}. Each version is for some "
            "versions of torch. Install the one for this torch, or take fp8 out."
        ) from error
    if settings.emulate:
        return
    if device_type != "cuda" or torch.cuda.get_device_capability() < _ORIGIN:
        raise ConfigError(
            f"'fp8' is set in a run on {device_type} that cannot multiply fp8. That takes a GPU of "
            "CUDA capability 8.9 or higher. Take it out, or write fp8: {emulate: true} to see what "
            "it does to the loss."
        )


def _torchao(name: str) -> Any:
    return importlib.import_module(f"torchao.{name}")


def plan_float8(
    tree: ModuleTree,
    plan: WrapPlan,
    settings: Float8Spec,
    *,
    blocks: Collection[str],
    shard_ranks: int,
) -> Float8Plan:
    """Decides which layers multiply in fp8.

    Collective: no.

    Args:
        tree: the model, before anything is wrapped.
        plan: its units.
        settings: `fp8`.
        blocks: names of the units that are blocks.
        shard_ranks: how many ranks share a weight.

    Raises:
        PlanError: when nothing is chosen, or something that cannot.
    """
    if problems := list(unmatched_names(tree, settings.names, "fp8.names")):
        raise PlanError("\n".join(problems))
    linears = {n: m for n, m in tree.modules() if isinstance(m, nn.Linear)}
    obstacles = _Obstacles(plan)
    if settings.names:
        matches = [matcher(pattern) for pattern in settings.names]
        chosen = [name for name in linears if any(match(name) for match in matches)]
        for name in chosen:
            if reason := obstacles.of(name, linears[name]):
                raise PlanError(_refusal(name, reason))
    else:
        inside = [name for name in linears if not set(outer_names(name)).isdisjoint(blocks)]
        chosen = [n for n in inside if _pays(linears[n]) and not obstacles.of(n, linears[n])]
    if not chosen:
        raise PlanError(
            "fp8 is on, but no linear layer was chosen. Nothing would multiply in it. Write names "
            "of linear layers in fp8.names; without, they are those of the blocks with trainable "
            f"weights, whose sizes are multiples of {_STEP} and at least {_WORTHWHILE}."
        )
    divisible = [name for name in chosen if linears[name].out_features % shard_ranks == 0]
    gathered = divisible if settings.all_gather else []
    for name in gathered:
        obstacles.check_reshard(name)
    return Float8Plan(modules=tuple(chosen), gathered=tuple(gathered), settings=settings)


def _pays(layer: nn.Linear) -> bool:
    return layer.weight.requires_grad and min(layer.weight.shape) >= _WORTHWHILE


def _refusal(name: str, reason: str) -> str:
    return (
        f"'{name}' was chosen by fp8.names, but {reason}. It cannot multiply in fp8 without "
        "harm to the model. Choose others, or leave the names out."
    )


class _Obstacles:
    """Why a layer cannot be converted."""

    def __init__(self, plan: WrapPlan) -> None:
        self._unit_of = plan.owner_of()
        self._tied = {name for names in plan.tied for name in names}

    def of(self, name: str, layer: nn.Linear) -> str | None:
        weight = f"{name}.weight"
        if type(layer) is not nn.Linear:
            return f"it is a {type(layer).__name__}, which computes something of its own"
        if any(size % _STEP for size in layer.weight.shape):
            shape = tuple(layer.weight.shape)
            return f"its weight is {shape}, where both have to be multiples of {_STEP}"
        if weight in self._tied:
            return "its weight is also used elsewhere"
        if weight not in self._unit_of:
            return "its weight is no part of any unit (ignored_params)"
        role = self._unit_of[weight].role
        return None if role is None else f"it lies in a unit of its own kind ({role})"

    def check_reshard(self, name: str) -> None:
        unit = self._unit_of[f"{name}.weight"]
        if not isinstance(unit.reshard_after_forward, bool):
            raise PlanError(
                f"'{name}' is to be gathered in fp8, and its unit '{unit.modules[0]}' reshards to "
                f"groups of {unit.reshard_after_forward} ranks. Torch has no second, smaller "
                "gather of cast weights. Write reshard_after_forward: true, or all_gather: false."
            )


def apply_float8(model: nn.Module, plan: Float8Plan) -> None:
    """Gives the layers of the plan torchao's forward, in place; see [Note: fp8].

    Collective: no. Before activation checkpointing, compilation and sharding. The modules stay the
    same objects, with the hooks and attributes they have.
    """
    float8 = _torchao("float8")
    recipe = float8.Float8LinearConfig.from_recipe_name(plan.settings.recipe)
    config = dataclasses.replace(recipe, emulate=plan.settings.emulate)
    for name in plan.modules:
        layer = model.get_submodule(name)
        converted = float8.convert_to_float8_training(layer, config=config)
        for attribute, value in vars(converted).items():
            vars(layer).setdefault(attribute, value)
        layer.__class__ = type(converted)


def gather_in_float8(model: nn.Module, units: Iterable[FSDPModule], plan: Float8Plan) -> None:
    """Has weights of the plan cast before they are sent. Collective: no; after sharding."""
    layers = {model.get_submodule(name).weight: name for name in plan.gathered}
    for group in (group for unit in units for group in param_groups(unit)):
        held = [param for param in params_of(group) if sharded_param(param) in layers]
        shards = [local_shard(param) for param in held]
        scales = _Scales(shards)
        for index, (param, shard) in enumerate(zip(held, shards, strict=True)):
            layer = model.get_submodule(layers[sharded_param(param)])
            _CastForGather(layer, shard, scales, index).take_place()
            init_all_gather_extensions(param)


class _Scales:
    """Of the weights that one collective gathers in fp8, found anew for each gather.

    Whether they have changed cannot be told: in-place operations on a DTensor do not count up the
    version of the shard inside.
    """

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self._shards = shards
        self._found: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, index: int, dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
        """Collective: yes, for the first of each gather, whatever became of the one before."""
        if index not in self._found:
            largest = torch.stack(
                [torch.linalg.vector_norm(shard, float("inf")) for shard in self._shards]
            )
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scales = _torchao("float8.float8_utils").amax_to_scale(largest, dtype)
            self._found = dict(enumerate(scales.unbind()))
        return self._found.pop(index)


class _CastForGather:
    """What FSDP2 asks a shard for around its gather."""

    def __init__(self, layer: Any, shard: torch.Tensor, scales: _Scales, index: int) -> None:
        kind = _torchao("float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        self._shard, self._scales, self._index = shard, scales, index
        self._dtype = layer.config.cast_config_weight.target_dtype
        self._cast = kind(shard.detach(), layer.linear_mm_config, self._dtype)

    def take_place(self) -> None:
        """Torch looks for methods of these names on the shard itself."""
        shard: Any = self._shard
        shard.fsdp_pre_all_gather = self._before
        shard.fsdp_post_all_gather = self._cast.fsdp_post_all_gather

    def _before(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        self._cast._precomputed_scale = self._scales.of(self._index, self._dtype, mesh)
        return self._cast.fsdp_pre_all_gather(mesh)
