"""Decides in which microbatches of a batch gradients are reduced, and leaves an aborted batch.

[Note: gradients that wait] Until they are reduced, gradients are as large as the gathered
parameters, in the dtype of the reduction, on every rank. That memory is the price of fewer bytes on
the wire. Averages are linear, so summing before or after the reduction gives the same numbers.
Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L639
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Mapping

from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.schema import GradientSync
from composer_fsdp2.errors import PlanError
from composer_fsdp2.shard.unit_hooks import AverageOverReplicas
from composer_fsdp2.torch_private.units import (
    all_reduce_hook,
    drop_unreduced,
    has_run,
    is_root,
    param_groups,
    params_of,
    partial_reduction,
    reset_iteration,
)

__all__ = ["Accumulation", "reset"]


class Accumulation:
    """Reduces the gradients of a batch of microbatches once, or each time.

    Works on any module `fully_shard` was applied to:

        with accumulation.batch():
            for index, microbatch in enumerate(microbatches):
                with accumulation.microbatch(last=index + 1 == len(microbatches)):
                    model(microbatch).backward()

    Args:
        units: name in the plan -> sharded module.
        sync: `every` microbatch; the `last` one only; or `reduce_scatter_only` on every microbatch
            and the all-reduce of HSDP on the last one.
        kept: names of units whose parameters stay gathered from the first microbatch to the last.
        abort: leaves a batch in the middle; by default resets the units, and nothing beside them.
    """

    def __init__(
        self,
        units: Mapping[str, FSDPModule],
        sync: GradientSync = "last",
        unsharded: Collection[str] = (),
        abort: Callable[[], object] | None = None,
    ) -> None:
        self._units, self._sync = dict(units), sync
        self._abort = abort or functools.partial(reset, units.values())
        self._kept = [units[name] for name in unsharded]
        self._new = dict(units) if sync == "last" else {}
        self._before: dict[str, FSDPModule] = {}
        self._again: dict[str, FSDPModule] = {}
        """`_new` at the start of a batch that was aborted"""
        self.inside = False
        """whether a microbatch runs"""

    @contextlib.contextmanager
    def batch(self) -> Generator[None]:
        """Surrounds all microbatches of a batch: an error leaves no gradients for the next batch.

        Collective: no.
        """
        self._before = self._not_run()
        try:
            yield
            self._again = {}
        except BaseException:
            # The user has to see the first error.
            with contextlib.suppress(Exception):
                self._abort()
            raise

    def again(self) -> None:
        """Lets the batch run again, with the reductions of a first attempt."""
        self._again = self._before

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Generator[None]:
        """Surrounds forward and backward of one microbatch.

        Collective: no.

        Raises:
            PlanError: when the all-reduce would lose the gradients of a unit.
        """
        # Everything is due between batches, so that a loop that knows nothing of this reduces.
        if not last:
            self._set_due(False)
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            if not last:
                self._set_due(True)
        ends = last and self._sync == "reduce_scatter_only"
        for name, unit in self._units.items() if ends else ():
            by_torch = any(partial_reduction(group) is not None for group in param_groups(unit))
            if by_torch or any(average.waiting is not None for average in _averages(unit)):
                raise PlanError(
                    f"'{name}' got gradients in an earlier microbatch and none in the last one. "
                    "gradient_sync: reduce_scatter_only averages over the copies with the last, so "
                    "those gradients would be lost. Call it in every microbatch, or write "
                    "gradient_sync: last."
                )

    def _not_run(self) -> dict[str, FSDPModule]:
        """Returns units that have not run yet, or had not before the batch that runs again."""
        for name, unit in list(self._new.items()):
            if all(has_run(param) for group in param_groups(unit) for param in params_of(group)):
                del self._new[name]
        return {**self._new, **self._again}

    def _set_due(self, due: bool) -> None:
        new = self._not_run()
        if due:
            self._again = {}
        for name, unit in self._units.items():
            if self._sync == "reduce_scatter_only":
                unit.set_requires_all_reduce(due, recurse=False)
                for average in _averages(unit):
                    average.due = due
            # Torch fails over a unit that has never run and need not reduce: it does so once.
            elif self._sync == "last" and (due or name not in new):
                unit.set_requires_gradient_sync(due, recurse=False)
        for unit in self._kept:
            # Independent of the reduction in torch, which frees a unit after backward either way.
            unit.set_reshard_after_backward(due, recurse=False)


def _averages(unit: FSDPModule) -> list[AverageOverReplicas]:
    """Returns the hooks that average over copies on a mesh of shards alone.

    Torch calls them after every reduce-scatter, and knows nothing of the copies.
    """
    hooks = map(all_reduce_hook, param_groups(unit))
    return [hook for hook in hooks if isinstance(hook, AverageOverReplicas)]


def reset(units: Collection[FSDPModule]) -> None:
    """Resets units after an aborted forward, so that the next one starts afresh.

    Collective: no. All parameters are shards again. Gradients that were not reduced yet are
    dropped; those of the shards are worth nothing any more, and newer torch drops them too.
    """
    # All units first: the root's state is what torch looks at in those below it.
    reset_iteration(units)
    for unit in units:
        if is_root(unit) is None:
            continue  # has not run
        for group in param_groups(unit):
            drop_unreduced(group)
        for average in _averages(unit):
            average.due, average.waiting = True, None
        # Now that no state is that of a forward, in which some units would stay gathered.
        unit.reshard()
