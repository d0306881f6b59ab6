"""Degrees of parallelism: the arithmetic, and the device mesh it describes."""

from __future__ import annotations

from dataclasses import dataclass

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.text import divisors

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
    """How many replicas of the model there are and how many ranks share each."""

    shard: int
    replicate: int | None = None
    """`None`: a 1-D mesh; 1: a 2-D mesh with one replica"""
    tensor: int = 1
    """consecutive ranks that split each layer; the other axes are outside"""

    @classmethod
    def resolve(cls, config: FSDP2Config, world_size: int) -> MeshShape:
        """Fills in a degree of -1 and checks both against the number of ranks.

        Raises:
            ConfigError: when the degrees do not multiply to `world_size`, or other settings need
                copies and there is one.
        """
        shard, replicate = config.data_parallel_shard_degree, config.data_parallel_replicate_degree
        tensor = 1 if config.tensor_parallel is None else config.tensor_parallel.degree
        sequence = 1 if config.sequence_parallel is None else config.sequence_parallel.degree
        ranks, world = world_size, f"the world size {world_size}"
        if world_size % tensor:
            raise _indivisible("tensor_parallel", tensor, ranks, world)
        if tensor > 1:
            ranks = world_size // tensor
            world = f"{ranks}, {world} by the tensor_parallel.degree {tensor}"
        if ranks % sequence:
            raise _indivisible("sequence_parallel", sequence, ranks, world)
        replicas, mesh_size = replicate or 1, ""
        written = f"data_parallel_shard_degree {shard} x data_parallel_replicate_degree {replicas}"
        if tensor > 1 and -1 not in (shard, replicate):
            drawn = cls(shard=shard, replicate=replicate, tensor=tensor).describe()
            mesh_size = f", and the mesh {drawn} has {shard * replicas * tensor} places"
        if shard == -1:
            shard = ranks // replicas
        elif replicate == -1:
            replicate = ranks // shard
        if shard * (replicate or 1) != ranks:
            raise ConfigError(
                f"{written} does not multiply to {world}. Every rank must hold exactly "
                f"one shard of one replica{mesh_size}. Set degrees whose product is {ranks}, or "
                "leave one of them at -1 to have it filled in."
            )
        if config.gradient_sync == "reduce_scatter_only" and (replicate or 1) == 1:
            raise ConfigError(
                f"gradient_sync is reduce_scatter_only, and {ranks} ranks hold one replica of "
                "the model. There are no replicas to average over later, so it would have no "
                "effect. Write gradient_sync: last or every, or a data_parallel_replicate_degree."
            )
        experts = 1 if config.expert_parallel is None else config.expert_parallel.degree
        if shard * tensor % experts:
            raise ConfigError(
                f"expert_parallel.degree is {experts}, which does not divide the {shard * tensor} "
                "ranks that share a replica of the model. They hold the experts between them, and "
                f"no rank may be left over. Use one of {divisors(shard * tensor, step=tensor)}."
            )
        return cls(shard=shard, replicate=replicate, tensor=tensor)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of all axes of the run's mesh by name, outermost first."""
        sizes = {REPLICATE_AXIS: self.replicate, SHARD_AXIS: self.shard, TENSOR_AXIS: self.tensor}
        if self.tensor == 1:
            del sizes[TENSOR_AXIS]
        return {name: size for name, size in sizes.items() if size is not None}

    def describe(self) -> str:
        """Returns the axes and their sizes, outermost first: `dp_shard 4 x tp 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.axes.items())

    def check_reshard(self, reshard: bool | int | str | None, where: str) -> None:
        """Checks an int `reshard_after_forward` against the shard degree.

        Raises:
            ConfigError: when it does not divide the shard degree.
        """
        if type(reshard) is int and self.shard % reshard != 0:
            raise ConfigError(
                f"reshard_after_forward of {where} is {reshard}, which does not divide the shard "
                f"degree {self.shard}. The groups that hold the parameters between forward and "
                f"backward must be of equal size. Use one of {divisors(self.shard)}, true or "
                "false."
            )


def _indivisible(key: str, degree: int, ranks: int, world: str) -> ConfigError:
    divided = "layer" if key == "tensor_parallel" else "sequence"
    return ConfigError(
        f"{key}.degree is {degree}, which does not divide {world}. Each {divided} is divided "
        "between that many ranks, and no rank may be left over. Use one of "
        f"{divisors(ranks)}."
    )
