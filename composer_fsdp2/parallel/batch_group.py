"""The ranks that read the same batch as this one."""

from __future__ import annotations

from torch import nn

from composer_fsdp2.parallel.sequence.group import SequenceGroup, sequence_group_of
from composer_fsdp2.parallel.tensor_group import TensorGroup, tensor_group_of

__all__ = ["batch_group_of"]


def batch_group_of(model: nn.Module) -> TensorGroup | SequenceGroup | None:
    """Returns the ranks that compute one batch together, `None` where each has its own."""
    return tensor_group_of(model) or sequence_group_of(model)
