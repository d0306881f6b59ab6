"""Degrees of parallelism: the arithmetic, and the device mesh it describes."""

from __future__ import annotations

from dataclasses import dataclass

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError

__all__ = [
    "REPLICATE_AXIS",
    "SHARD_AXIS",
    "MeshShape",
]

# For meshes that are built here. The axes of Composer's own mesh have other names.
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many copies of the model there are and how many ranks share each."""

    shard: int
    replicate: int | None = None
    """`None` is a 1-D mesh; 1 is a 2-D mesh with one copy"""

    @classmethod
    def resolve(cls, config: FSDP2Config, world_size: int) -> MeshShape:
        """Fills in a degree of -1 and checks both against the number of ranks.

        Raises:
            ConfigError: when the degrees do not multiply to `world_size`, or other settings need
                copies and there is one.
        """
        shard, replicate = config.data_parallel_shard_degree, config.data_parallel_replicate_degree
        if shard == -1:
            shard = world_size // (replicate or 1)
        elif replicate == -1:
            replicate = world_size // shard
        if shard * (replicate or 1) != world_size:
            raise ConfigError(_degrees_error(config, world_size))
        if config.gradient_sync == "reduce_scatter_only" and (replicate or 1) == 1:
            raise ConfigError(
                f"gradient_sync is reduce_scatter_only, and {world_size} ranks hold one copy of "
                "the model. There are no copies to average over later, so it would have no effect. "
                "Write gradient_sync: last or every, or a data_parallel_replicate_degree."
            )
        return cls(shard=shard, replicate=replicate)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return (SHARD_AXIS,) if self.replicate is None else (REPLICATE_AXIS, SHARD_AXIS)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sizes of the mesh axes, outermost first."""
        return (self.shard,) if self.replicate is None else (self.replicate, self.shard)

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


def _degrees_error(config: FSDP2Config, world_size: int) -> str:
    shard = config.data_parallel_shard_degree
    replicate = config.data_parallel_replicate_degree
    copies = 1 if replicate is None else replicate
    written = f"data_parallel_shard_degree {shard} x data_parallel_replicate_degree {copies}"
    return (
        f"{written} does not multiply to the world size {world_size}. Every rank must hold exactly "
        f"one shard of one copy. Set degrees whose product is {world_size}, or leave one of them "
        "at -1 to have it filled in."
    )
