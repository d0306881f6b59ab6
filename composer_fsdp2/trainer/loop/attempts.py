"""Attempts at a step: a batch that did not fit in memory is tried again with smaller microbatches.

[Note: attempts] `device_train_microbatch_size: auto` halves the size and tries the batch again when
memory runs out. A `JointExit` brings all ranks out of the attempt, and what the attempt has changed
is put back, so that the next attempt computes what a run of that size would have.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from composer.trainer import trainer as composers

from composer_fsdp2.guards.leaving.out_of_memory import OOMGuard
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.run import Run
from composer_fsdp2.step.snapshot import Snapshot
from composer_fsdp2.torch_private.tensors import tree_leaves

if TYPE_CHECKING:
    from composer_fsdp2.guards.leaving.joint_exit import JointExit

__all__ = ["Attempt", "exit_of", "leaving_together", "lower_size_that_thrashes", "tensors_of"]

_THRASHES = 2
"""batches in a row with retried allocations, at which Composer lowers the size"""


def exit_of(run: Run) -> JointExit | None:
    """Returns the exit of this process, `None` where no other rank could wait. Collective: no."""
    # Imported on demand: only runs with `auto` need the exit.
    from composer_fsdp2.guards.leaving.joint_exit import joint_exit_of

    return joint_exit_of(run.device)


def leaving_together(run: Run, auto: bool) -> contextlib.AbstractContextManager[None]:
    """Counts collectives where a smaller microbatch may be tried. Collective: yes, at the end."""
    exit_ = exit_of(run) if auto else None
    return contextlib.nullcontext() if exit_ is None else exit_.watching()


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, in any nesting; other leaves may only look like them."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


class Attempt:
    """Computes a step, and can undo it; see [Note: attempts].

    Args:
        trainer: whose step it is, and whose state an undo restores.
        run: the prepared model of that trainer, likewise.
        searching: keeps all that the step changes. Otherwise it keeps what costs little, and says
            when that was not enough.
    """

    def __init__(self, trainer: Any, run: Run, searching: bool) -> None:
        self._trainer, self._run, self._searching = trainer, run, searching
        self._exit = exit_of(run)
        self._stepped = False
        self._snapshot = Snapshot(run.device)
        self._snapshot.keep_buffers(run.model)
        for metric in (trainer.state.train_metrics or {}).values():
            metric.reset()
            self._snapshot.keep_metric(metric)
        # A microbatch is a view of its batch, which a transform may change in place.
        tensors = tensors_of(trainer.state.batch)
        # torch counts the changes of a tensor in place in its `_version`.
        self._versions = [] if searching else [(tensor, tensor._version) for tensor in tensors]
        if searching:
            self._snapshot.keep(tensors)

    def compute(self, batch: Any, use_grad_scaling: bool) -> dict[str, torch.Tensor]:
        """Takes a step as `Trainer._train_batch` does, and returns its losses. Collective: yes.

        Raises:
            torch.OutOfMemoryError: on every rank, when memory ran out on one.
        """
        trainer, state, exit_ = self._trainer, self._trainer.state, self._exit
        losses = {"loss/train/total": state.device.tensor_to_device(torch.zeros(1))}

        def closure(**settings: Any) -> Any:
            loss = trainer._train_microbatches(microbatches, losses, **settings)
            # Forward and backward have fitted on this rank, and no weight has changed.
            if exit_ is not None and exit_.attempting:
                exit_.meet()
            for optimizer in state.optimizers if self._searching else ():
                self._snapshot.keep_optimizer(optimizer)
            self._stepped = True
            return loss if use_grad_scaling else loss.item()

        # Not in the stack: an error that leaves an ExitStack refers to itself, so the attempt would
        # stay in memory until Python's collector runs.
        together = contextlib.nullcontext() if exit_ is None else exit_.attempt(self._let_go)
        with contextlib.ExitStack() as stack, together:
            if self._searching:
                stack.callback(OOMGuard(self._run, agree=False).remove)
            if exit_ is not None:
                exit_.begin()
            size = state.device_train_microbatch_size
            microbatches = trainer._train_data_spec.split_batch(batch, size)
            closures = {"closure": closure} if trainer._use_closures() else {}
            if not closures:
                closure()
            for optimizer in state.optimizers:
                if use_grad_scaling:
                    state.scaler.step(optimizer, **closures)
                else:
                    optimizer.step(**closures)
            if exit_ is not None:
                exit_.end()
        return losses

    def _let_go(self) -> None:
        """Frees the graph of a microbatch that did not fit. Collective: no."""
        self._trainer.state.outputs, self._trainer.state.loss = [], torch.Tensor()

    def undo(self) -> None:
        """Restores the model and its optimizer. Collective: yes.

        Raises:
            RuntimeError: on every rank, when something was changed that nobody had kept.
        """
        changed = any(tensor._version != version for tensor, version in self._versions)
        lost = (self._stepped and not self._searching, changed)
        stepped, changed = agreement_of(self._run.device).maximum([*map(int, lost)])
        if stepped:
            raise RuntimeError(
                "Memory ran out in the optimizer's step, long after the microbatch size had been "
                "found. Part of the weights may be stepped and part not. Resume from the last "
                "checkpoint with a smaller device_train_microbatch_size."
            )
        if changed:
            raise RuntimeError(
                "Memory ran out long after the microbatch size had been found, in a batch that was "
                "changed in place until then (microbatch_transforms, an algorithm). Resume from "
                "the last checkpoint with a smaller device_train_microbatch_size."
            )
        self._run.abort()
        self._snapshot.restore()
        _begin_scaling_again(self._trainer.state.scaler)
        if self._run.batch_group is not None:
            self._run.batch_group.begin()  # some ranks may have compared the batch of their group
        self._run.accumulation.again()


def _begin_scaling_again(scaler: Any) -> None:
    """Lets gradients of the batch be unscaled once more, with the same scale. Collective: no."""
    if scaler is not None and scaler.is_enabled():
        # It has no scale before the first loss, and torch asserts that there is one.
        with contextlib.suppress(AssertionError):
            scaler.update(scaler.get_scale())


def lower_size_that_thrashes(trainer: Any) -> None:
    """Lowers the size for the next batch after two with retried allocations. Collective: yes.

    Composer trains on the second of them once more, though its step is done.
    """
    state, size = trainer.state, trainer.state.device_train_microbatch_size
    trainer.num_consecutive_thrashes = composers._update_num_consecutive_thrashes(
        state, trainer.num_consecutive_thrashes, trainer.cumulative_alloc_retries
    )
    if trainer.num_consecutive_thrashes >= _THRASHES:
        trainer.num_consecutive_thrashes = 0
        if size > 1:
            state.device_train_microbatch_size = size // 2
            warnings.warn(
                "CUDA out of memory or excessive memory allocation retries detected. Train "
                f"microbatch size will be decreased from {size} -> {size // 2} in the next batch.",
                RuntimeWarning,
                stacklevel=2,
            )
