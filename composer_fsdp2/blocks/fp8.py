"""Linear layers that multiply in fp8, by torchao; knows nothing of the trainer.

[Note: fp8] The weights stay what they are: parameters, names, optimizer and checkpoints are those
of a run without it. A layer casts its input, weight and incoming gradient on their way into the
matrix products. With `all_gather` the shards are cast before they are sent, with the scale of the
whole weight, which takes the largest value on any rank: before each gather a reduction of one
number a weight. torchao would put a tensor of its own in each shard's place; here it stands beside
them, so that whatever looks at the shards sees plain ones, and no scale is from before a change.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import outer_names, select_modules
from composer_fsdp2.plan.wrap_plan import ShardUnit
from composer_fsdp2.torch_private.units import (
    init_all_gather_extensions,
    local_shard,
    param_groups,
    params_of,
    sharded_param,
)

__all__ = [
    "Float8Linear",
    "Float8Plan",
    "check_float8",
    "torchao_module",
    "without_float8",
]

_ORIGIN = (8, 9)
"""the first CUDA capability that multiplies fp8"""
_STEP = 16
"""sizes of fp8 matrix products have to be a multiple of this"""
_WORTHWHILE = 128
"""smaller layers, such as adapters, lose more by the casts than they gain"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Plan:
    """Which linear layers multiply in fp8. Names and numbers only."""

    modules: tuple[str, ...]
    gathered: tuple[str, ...]
    """layers whose weight is cast before the all-gather"""
    settings: Float8Spec

    def __str__(self) -> str:
        gathered = f", {len(self.gathered)} gathered in it" if self.gathered else ""
        return f"in fp8 ({self.settings.recipe}{gathered}): {', '.join(self.modules)}"


def check_float8(settings: Float8Spec, device_type: str) -> None:
    """Refuses fp8 products where this machine has none. Collective: no.

    Raises:
        ConfigError: without torchao, or a device that multiplies fp8.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "'fp8' is set, and torchao is not installed. The layers that multiply in fp8 are its. "
            "Install composer-fsdp2[fp8], or take fp8 out."
        )
    try:
        torchao_module("float8")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"'fp8' is set, and torchao cannot be imported: {error}. Each version is for some "
            "versions of torch. Install the one for this torch, or take fp8 out."
        ) from error
    if not settings.emulate and (
        device_type != "cuda" or torch.cuda.get_device_capability() < _ORIGIN
    ):
        raise ConfigError(
            f"'fp8' is set in a run on {device_type} that cannot multiply fp8. That takes a GPU of "
            "CUDA capability 8.9 or higher. Take it out, or write fp8: {emulate: true} to see what "
            "it does to the loss."
        )


def torchao_module(name: str) -> Any:
    """Imports a module of torchao, which is no dependency of the package."""
    return importlib.import_module(f"torchao.{name}")


class Float8Linear(Transformation[Float8Plan]):
    """Multiplies in fp8 in linear layers: `fp8`."""

    def plan(self, facts: ModelFacts) -> Float8Plan | None:
        """Returns the linear layers to convert."""
        spec = facts.settings.fp8
        if spec is False:
            return None
        spec = Float8Spec() if spec is True else spec
        # Before the model is asked: without torchao nothing else about fp8 is worth a word.
        check_float8(spec, facts.device_type)
        linears = {n: m for n, m in facts.tree.modules() if isinstance(m, nn.Linear)}
        unit_of = facts.units.owner_of()
        tied = {name for names in facts.units.tied for name in names}
        reasons = {name: _reason_against(name, m, unit_of, tied) for name, m in linears.items()}
        if spec.names:
            named = select_modules(facts.tree, "fp8.names", spec.names)
            chosen = [name for name in linears if name in named]
            for name in chosen:
                if reasons[name] is not None:
                    raise PlanError(
                        f"'{name}' was chosen by fp8.names, but {reasons[name]}. It cannot "
                        "multiply in fp8 without harm to the model. Choose others, or leave the "
                        "names out."
                    )
        else:
            blocks = set(facts.units.blocks())
            chosen = [
                name
                for name, layer in linears.items()
                if not blocks.isdisjoint(outer_names(name))
                and layer.weight.requires_grad
                and min(layer.weight.shape) >= _WORTHWHILE
                and reasons[name] is None
            ]
        if not chosen:
            raise PlanError(
                "fp8 is on, but no linear layer was chosen. Nothing would multiply in it. Write "
                "names of linear layers in fp8.names; without, they are those of the blocks with "
                f"trainable weights, whose sizes are multiples of {_STEP} and at least "
                f"{_WORTHWHILE}."
            )
        # Torch pads uneven shards before it sends them, but not those that cast themselves.
        ranks = facts.shard_ranks if spec.all_gather else 0
        gathered = [name for name in chosen if ranks and linears[name].out_features % ranks == 0]
        for name, unit in ((name, unit_of[f"{name}.weight"]) for name in gathered):
            if not isinstance(unit.reshard_after_forward, bool):
                raise PlanError(
                    f"'{name}' is to be gathered in fp8, and its unit '{unit.module}' reshards "
                    f"to groups of {unit.reshard_after_forward} ranks. Torch has no second, "
                    "smaller gather of cast weights. Write reshard_after_forward: true, or "
                    "all_gather: false."
                )
        return Float8Plan(modules=tuple(chosen), gathered=tuple(gathered), settings=spec)

    def apply(self, tree: ModuleTree, plan: Float8Plan) -> None:
        """Gives the layers of the plan torchao's forward, in place; see [Note: fp8].

        Collective: no. Before activation checkpointing, compilation and sharding. The modules stay
        the same objects, with the hooks and attributes they have.
        """
        float8 = torchao_module("float8")
        recipe = float8.Float8LinearConfig.from_recipe_name(plan.settings.recipe)
        config = replace(recipe, emulate=plan.settings.emulate)
        for name in plan.modules:
            layer = tree.root.get_submodule(name)
            converted = float8.convert_to_float8_training(layer, config=config)
            for attribute, value in vars(converted).items():
                vars(layer).setdefault(attribute, value)
            layer.__class__ = type(converted)

    def after_sharding(
        self, tree: ModuleTree, plan: Float8Plan, units: Mapping[str, FSDPModule]
    ) -> None:
        """Has the all-gather of each unit send weights of the plan in fp8."""
        layers = {layer.weight: layer for layer in map(tree.root.get_submodule, plan.gathered)}
        for group in (group for unit in units.values() for group in param_groups(unit)):
            cast_params = [param for param in params_of(group) if sharded_param(param) in layers]
            cast = _CastForGather([local_shard(param) for param in cast_params])
            for index, param in enumerate(cast_params):
                cast.attach(index, layers[sharded_param(param)])
                init_all_gather_extensions(param)


def _reason_against(
    name: str, layer: nn.Linear, unit_of: Mapping[str, ShardUnit], tied: Collection[str]
) -> str | None:
    """Returns why a layer cannot be converted."""
    weight = f"{name}.weight"
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, which computes something of its own"
    if any(size % _STEP for size in layer.weight.shape):
        shape = tuple(layer.weight.shape)
        return f"its weight is {shape}, where both have to be multiples of {_STEP}"
    if weight in tied:
        return "its weight is also used elsewhere"
    if weight not in unit_of:
        return "its weight is no part of any unit (ignored_params, frozen: replicate)"
    role = unit_of[weight].role
    return None if role is None else f"it lies in a unit of its own kind ({role})"


@contextlib.contextmanager
def without_float8(model: nn.Module) -> Generator[None]:
    """Has linear layers multiply in the dtype of the run meanwhile. Collective: no.

    Scales are those of a whole input, so that parts of it are rounded otherwise.
    """

    def multiply(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        # One that was gathered in fp8 is a tensor of torchao's.
        uncast = getattr(layer.weight, "to_original_precision", None)
        weight = layer.weight if uncast is None else uncast()
        return nn.functional.linear(inputs, weight, layer.bias)

    layers = [module for module in model.modules() if hasattr(module, "linear_mm_config")]
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = functools.partial(multiply, layer)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


class _CastForGather:
    """Casts the weights that one collective gathers in fp8, with scales found for each gather.

    Whether they have changed cannot be told: in-place operations on a DTensor do not count up the
    version of the shard inside.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = shards
        self._scales: dict[int, torch.Tensor] = {}

    def attach(self, index: int, layer: Any) -> None:
        """Gives a shard the methods that FSDP2 looks for around its gather. Collective: no.

        Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L687
        """
        kind = torchao_module("float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        shard, dtype = self._shards[index], layer.config.cast_config_weight.target_dtype
        cast = kind(shard.detach(), layer.linear_mm_config, dtype)

        # Torch counts the parameters of this method: with a single one, it gives the mesh alone.
        def before(mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
            cast._precomputed_scale = self._scale_of(index, dtype, mesh)
            return cast.fsdp_pre_all_gather(mesh)

        shard.fsdp_pre_all_gather = before
        shard.fsdp_post_all_gather = cast.fsdp_post_all_gather

    @torch.no_grad()
    def _scale_of(self, index: int, dtype: torch.dtype, mesh: DeviceMesh) -> torch.Tensor:
        """Collective: yes, for the first weight of each gather, even if the last was dropped."""
        if index not in self._scales:
            largest = torch.stack(
                [torch.linalg.vector_norm(shard, float("inf")) for shard in self._shards]
            )
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scales = torchao_module("float8.float8_utils").amax_to_scale(largest, dtype)
            self._scales = dict(enumerate(scales.unbind()))
        return self._scales.pop(index)
