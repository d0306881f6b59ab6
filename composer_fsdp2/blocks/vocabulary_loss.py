"""Cross entropy of logits of which each rank of a group has a part of the vocabulary.

[Note: divided vocabulary] The loss of a token needs its largest logit, the sum of exponentials and
the logit of its target, of all parts. Each rank finds these three of its own part, and one
all-gather of a few numbers a token tells all of them. The gradient of a part needs no more than
that, so nothing as wide as the vocabulary is ever sent, or held by one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_fsdp2.ranks import all_gather_tensor

__all__ = ["Statistics", "VocabularyPart", "parallel_cross_entropy"]


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The classes whose logits are on this rank."""

    group: dist.ProcessGroup
    start: int
    total: int
    """classes of all ranks together"""

    @classmethod
    def of(cls, logits: DTensor) -> VocabularyPart | None:
        """Returns this rank's range of classes, `None` where logits are not sharded by classes."""
        (placement,) = logits.placements
        if not placement.is_shard(logits.ndim - 1):
            return None
        mesh, total = logits.device_mesh, logits.size(-1)
        step = -(-total // mesh.size())
        return cls(mesh.get_group(), min(mesh.get_local_rank() * step, total), total)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Facts about each token's logits on all ranks together, `(tokens,)` each."""

    log_sum: Tensor
    """logarithm of the sum of exponentials"""
    target: Tensor
    """logit of the target"""
    predicted: Tensor
    """the likeliest class; the first of equally likely classes"""

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, targets: Tensor, ignored: int, part: VocabularyPart) -> Statistics:
        """Computes the statistics over all classes. Collective: yes, one all-gather.

        Args:
            logits: `(tokens, classes of this rank)`.
            targets: `(tokens,)`, the same on all ranks of the group.
            ignored: a target without a loss.
            part: the classes of this rank, the last dim of `logits`.

        Raises:
            IndexError: for a target that is no class, on the CPU. On another device, where looking
                would wait for it, the loss of such a token is NaN.
        """
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        partial = torch.zeros((len(logits), 4), dtype=dtype, device=logits.device)
        lowest = torch.finfo(dtype).min
        if logits.size(-1):
            largest, where = logits.max(-1)
            partial[:, 0] = largest.to(dtype).clamp(min=lowest)
            partial[:, 1] = (logits.to(dtype) - partial[:, :1]).exp_().sum(-1)
            inside, index = _inside(targets, logits, part)
            partial[:, 2] = (
                logits.gather(1, index).squeeze(1).to(dtype).where(inside, partial[:, 2])
            )
            partial[:, 3] = (where + part.start).to(dtype)
        else:
            partial[:, 0] = lowest
        everyone = partial.new_empty((part.group.size(), *partial.shape))
        all_gather_tensor(everyone.view(-1, 4), partial, part.group)
        maxima, sums, target_logits, classes = everyone.unbind(-1)
        largest, first = maxima.max(0)
        log_sum = largest + (sums * (maxima - largest).exp()).sum(0).log()
        wrong = (targets != ignored) & ((targets < 0) | (targets >= part.total))
        if log_sum.device.type != "cpu":
            log_sum.masked_fill_(wrong, float("nan"))
        elif wrong.any():
            raise IndexError(f"Target {targets[wrong][0].item()} is out of bounds.")
        predicted = classes.gather(0, first.unsqueeze(0)).squeeze(0).long()
        return cls(log_sum, target_logits.sum(0), predicted)


def _inside(targets: Tensor, logits: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Returns which targets this rank has, and their index `(tokens, 1)`, 0 for other targets."""
    local = targets - part.start
    inside = (local >= 0) & (local < logits.size(-1))
    return inside, local.where(inside, torch.zeros_like(local)).unsqueeze(1)


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, ignored: int, part: VocabularyPart, statistics: Statistics
) -> Tensor:
    """Returns the loss of each token, `(tokens,)`, in the dtype of the logits.

    Collective: no; see [Note: divided vocabulary]. A gradient is that of this rank's part.

    Args:
        logits: `(tokens, classes of this rank)`.
        targets: `(tokens,)`, the same on all ranks of the group.
        ignored: a target whose loss and gradient are zero.
        part: the classes of this rank, the last dim of `logits`.
        statistics: `Statistics.of` these logits and targets.
    """
    return _CrossEntropy.apply(logits, targets, ignored, part, statistics)  # pyright: ignore[reportReturnType]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: int,
        part: VocabularyPart,
        statistics: Statistics,
    ) -> Tensor:
        ctx.save_for_backward(logits, targets, statistics.log_sum)
        ctx.ignored, ctx.part = ignored, part
        return (
            (statistics.log_sum - statistics.target)
            .masked_fill(targets == ignored, 0)
            .to(logits.dtype)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        if not logits.size(-1):
            return torch.zeros_like(logits), None, None, None, None
        gradient = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        inside, index = _inside(targets, logits, ctx.part)
        gradient.scatter_add_(1, index, -inside.to(gradient.dtype).unsqueeze(1))
        scale = grads[0].to(gradient.dtype).masked_fill(targets == ctx.ignored, 0)
        return gradient.mul_(scale.unsqueeze(1)).to(logits.dtype), None, None, None, None
