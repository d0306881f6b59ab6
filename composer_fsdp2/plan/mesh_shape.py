"""Degrees of parallelism: the arithmetic, and the device mesh it describes."""

from __future__ import annotations

from dataclasses import dataclass

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError

__all__ = [
    "REPLICATE_AXIS",
    "SHARD_AXIS",
    "TENSOR_AXIS",
    "MeshShape",
]

# For meshes that are built here. The axes of Composer's own mesh have other names.
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
TENSOR_AXIS = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many copies of the model there are and how many ranks share each."""

    shard: int
    replicate: int | None = None
    """`None` is a 1-D mesh; 1 is a 2-D mesh with one copy"""
    tensor: int = 1
    """ranks that divide each layer, next to each other; the axes of the others are outside"""

    @classmethod
    def resolve(cls, config: FSDP2Config, world_size: int) -> MeshShape:
        """Fills in a degree of -1 and checks both against the number of ranks.

        Raises:
            ConfigError: when the degrees do not multiply to `world_size`, or other settings need
                copies and there is one.
        """
        shard, replicate = config.data_parallel_shard_degree, config.data_parallel_replicate_degree
        tensor = 1 if config.tensor_parallel is None else config.tensor_parallel.degree
        if world_size % tensor:
            raise ConfigError(_tensor_error(tensor, world_size))
        sequence = 1 if config.sequence_parallel is None else config.sequence_parallel.degree
        world_size //= tensor
        if world_size % sequence:
            raise ConfigError(_sequence_error(sequence, world_size, tensor))
        if shard == -1:
            shard = world_size // (replicate or 1)
        elif replicate == -1:
            replicate = world_size // shard
        if shard * (replicate or 1) != world_size:
            raise ConfigError(_degrees_error(config, world_size, tensor))
        if config.gradient_sync == "reduce_scatter_only" and (replicate or 1) == 1:
            raise ConfigError(
                f"gradient_sync is reduce_scatter_only, and {world_size} ranks hold one copy of "
                "the model. There are no copies to average over later, so it would have no effect. "
                "Write gradient_sync: last or every, or a data_parallel_replicate_degree."
            )
        return cls(shard=shard, replicate=replicate, tensor=tensor)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes that FSDP2 shards over, outermost first."""
        return (SHARD_AXIS,) if self.replicate is None else (REPLICATE_AXIS, SHARD_AXIS)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sizes of these axes, outermost first."""
        return (self.shard,) if self.replicate is None else (self.replicate, self.shard)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of all axes of the run's mesh by name, outermost first."""
        axes = dict(zip(self.axis_names, self.degrees, strict=True))
        return axes if self.tensor == 1 else {**axes, TENSOR_AXIS: self.tensor}

    def describe(self) -> str:
        """Returns the axes and their sizes, outermost first: `dp_shard 4 x tp 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.axes.items())

    def check_reshard(self, reshard: bool | int | str | None, where: str) -> None:
        """Checks an int `reshard_after_forward` against the shard degree.

        Raises:
            ConfigError: when it does not divide the shard degree.
        """
        if isinstance(reshard, bool) or not isinstance(reshard, int):
            return
        if self.shard % reshard != 0:
            divisors = [str(n) for n in range(1, self.shard + 1) if self.shard % n == 0]
            raise ConfigError(
                f"reshard_after_forward of {where} is {reshard}, which does not divide the shard "
                f"degree {self.shard}. The groups that hold the parameters between forward and "
                f"backward must be of equal size. Use one of {', '.join(divisors)}, true or false."
            )


def _tensor_error(tensor: int, world_size: int) -> str:
    divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
    return (
        f"tensor_parallel.degree is {tensor}, which does not divide the world size {world_size}. "
        "Each layer is divided between that many ranks, and no rank may be left over. Use one of "
        f"{divisors}."
    )


def _sequence_error(sequence: int, ranks: int, tensor: int) -> str:
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    world = f"the world size {ranks * tensor}"
    if tensor > 1:
        world = f"{ranks}, {world} by the tensor_parallel.degree {tensor}"
    return (
        f"sequence_parallel.degree is {sequence}, which does not divide {world}. Each "
        "sequence is divided between that many ranks, and no rank may be left over. Use one of "
        f"{divisors}."
    )


def _degrees_error(config: FSDP2Config, ranks: int, tensor: int) -> str:
    world = f"the world size {ranks * tensor}"
    if tensor > 1:
        world = f"{ranks}, {world} by the tensor_parallel.degree {tensor}"
    shard = config.data_parallel_shard_degree
    replicate = config.data_parallel_replicate_degree
    copies = 1 if replicate is None else replicate
    written = f"data_parallel_shard_degree {shard} x data_parallel_replicate_degree {copies}"
    return (
        f"{written} does not multiply to {world}. Every rank must hold exactly "
        f"one shard of one copy{_drawn(config, tensor)}. Set degrees whose product is {ranks}, or "
        "leave one of them at -1 to have it filled in."
    )


def _drawn(config: FSDP2Config, tensor: int) -> str:
    """The mesh that was asked for, where it has an axis that is not among the two degrees."""
    shard, replicate = config.data_parallel_shard_degree, config.data_parallel_replicate_degree
    if tensor == 1 or -1 in (shard, replicate):
        return ""
    asked = MeshShape(shard=shard, replicate=replicate, tensor=tensor)
    return f", and the mesh {asked.describe()} has {shard * (replicate or 1) * tensor} places"
