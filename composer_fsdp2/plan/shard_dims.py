"""Chooses the dimension along which a parameter is sharded.

FSDP2 gives whole rows to ranks, and a tensor with all experts of a layer has a row for each expert:
of 8 experts on 32 ranks, 8 ranks would have one and 24 none. Such a tensor is sharded along the
first other dimension that the ranks divide evenly, for past the first dimension torch does no
other. That takes a copy in each gather and reduction, so it is done where a rank saves a megabyte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.wrap_plan import ShardUnit
from composer_fsdp2.text import listed, size_text

__all__ = ["gathers_itself", "shard_dim", "uneven_shards"]

_UNEVEN_BYTES = 2**30
"""so much more on one rank than its share is worth a warning"""

_WORTH_A_COPY_BYTES = 2**20
"""so much more of one tensor is worth another dimension"""


def gathers_itself(param: nn.Parameter) -> bool:
    """Returns whether the class of a tensor defines its own gather. Collective: no."""
    return hasattr(param, "fsdp_pre_all_gather") or hasattr(param.data, "fsdp_pre_all_gather")


def _excess_bytes(param: nn.Parameter, ranks: int) -> int:
    """Returns what the first rank has more than its share, where rows are given to ranks."""
    if not param.ndim or not param.numel():
        return 0
    rows = len(param)
    return param.nbytes // rows * -(-rows // ranks) - param.nbytes // ranks


def shard_dim(param: nn.Parameter, unit: ShardUnit, ranks: int) -> int:
    """Returns the dimension along which a parameter is sharded. Collective: no.

    Args:
        param: a full parameter, which no other parallelism has divided.
        unit: the unit that has it.
        ranks: number of ranks that shard the unit.
    """
    # Torch keeps parts of what it has gathered by rows alone; a gather of its own expects rows too.
    by_rows = not isinstance(unit.reshard_after_forward, bool) or gathers_itself(param)
    if by_rows or isinstance(param, DTensor) or _excess_bytes(param, ranks) < _WORTH_A_COPY_BYTES:
        return 0
    even = (dim for dim, size in enumerate(param.shape) if dim and size % ranks == 0)
    return next(even, 0)


def uneven_shards(
    tree: ModuleTree, units: Iterable[ShardUnit], ranks: int
) -> tuple[str, str] | None:
    """Finds tensors of which some ranks keep more than their share. Collective: no.

    Args:
        tree: the model before sharding.
        units: all units of the plan.
        ranks: number of ranks that shard a unit.

    Returns:
        The problem and the advice, or `None` if no rank keeps 1 GiB more than its share.
    """
    unit_of = {name: unit for unit in units for name in unit.params}
    refs = {id(ref.param): ref for ref in tree.params if ref.name in unit_of}
    uneven = {
        ref.name: ref.param
        for ref in refs.values()
        if _excess_bytes(ref.param, ranks) and not shard_dim(ref.param, unit_of[ref.name], ranks)
    }
    excess = sum(_excess_bytes(param, ranks) for param in uneven.values())
    if excess < _UNEVEN_BYTES:
        return None
    names = sorted(uneven, key=lambda name: -_excess_bytes(uneven[name], ranks))
    largest = uneven[names[0]]  # not a gate with one row
    degree = math.gcd(len(largest), ranks)
    cause = (
        "no other dimension is a multiple of them"
        if isinstance(unit_of[names[0]].reshard_after_forward, bool)
        else "with a number in reshard_after_forward torch shards rows alone"
    )
    return (
        f"The rows of {listed(names, 2)} cannot be given evenly to the {ranks} ranks that shard "
        f"them, and {cause}: some ranks keep {size_text(excess)} of weights more than their share, "
        "with gradients and optimizer state to them, and each collective sends as much padding.",
        f"Where these are experts, have ranks hold them between them: ep: {{degree: {degree}}} "
        f"beside fsdp2. Else shard over {degree} ranks (data_parallel_shard_degree), with replicas "
        "(data_parallel_replicate_degree: -1)."
        if degree > 1
        else f"Take a number of ranks that divides one of the sizes {tuple(largest.shape)}.",
    )
