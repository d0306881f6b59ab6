"""Loss and metrics of Composer's models where ranks have parts of each sequence.

[Note: parts of logits] In training a rank has the logits of its positions, and batches have the
labels of whole sequences. The loss of a Hugging Face model is computed inside of it. MPT's is not,
nor are metrics: both get the labels of the rank's positions. A metric adds up over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.models import ComposerModel, HuggingFaceModel
from torch import nn

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.sequence.group import SequenceGroup, sequence_group_of

__all__ = ["check_own_loss", "connect_model"]

_MPT = "ComposerMPTCausalLM"


def check_own_loss(model: nn.Module, settings: FSDP2Config) -> None:
    """Refuses a model whose loss reads logits of whole sequences. Collective: no.

    Raises:
        PlanError: for such a model.
    """
    spec = settings.sequence_parallel
    if spec is None or spec.degree == 1 or not isinstance(model, ComposerModel):
        return
    if _takes_loss_of_output(type(model).loss) or _is_mpt(model):
        return
    raise PlanError(
        f"sequence_parallel has degree {spec.degree}, and {type(model).__name__} computes its loss "
        "from logits by itself. A rank has those of its part of each sequence. Use a "
        "HuggingFaceModel, whose model computes the loss, or leave sequence_parallel out."
    )


def _takes_loss_of_output(function: Any) -> bool:
    """Whether a method reads the loss that the model has computed, and no logits."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    words = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
    return "loss" in words and "logits" not in words


def connect_model(model: nn.Module) -> None:
    """Divides what a sharded model is given; see [Note: parts of logits].

    Its loss and metrics of training get the labels they need. Collective: no.
    """
    group = sequence_group_of(model)
    if group is not None:
        group.watch()
    if group is None or not isinstance(model, HuggingFaceModel):
        return
    changed: Any = model
    changed.eval_forward = functools.partial(_eval_forward, group, model, model.eval_forward)
    if _is_mpt(model):
        changed.loss = functools.partial(_loss_of_mpt, group, model, model.loss)


def _is_mpt(model: nn.Module) -> bool:
    return any(kind.__name__ == _MPT for kind in type(model).__mro__)


def _eval_forward(
    group: SequenceGroup,
    model: Any,
    original: Callable[..., Any],
    batch: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    logits = original(batch, *args, **kw)
    labels = model.labels
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor) and labels.ndim == 2:
        own = group.own_labels(labels)
        if logits.shape[:2] == own.shape and own.shape != labels.shape:
            model.labels = own
    return logits


def _loss_of_mpt(
    group: SequenceGroup, model: Any, original: Callable[..., Any], outputs: Any, batch: Any
) -> torch.Tensor:
    labels = batch["labels"]
    if outputs.logits.shape[:2] == labels.shape:
        return original(outputs, batch)  # of an evaluation, which has them whole

    def mean(own: torch.Tensor) -> torch.Tensor:
        shifts, model.shift_labels = model.shift_labels, False
        try:
            found = original(outputs, {**batch, "labels": own})
        finally:
            model.shift_labels = shifts
        if isinstance(found, Mapping):
            raise PlanError(
                "The model adds a loss of its experts, and sequence_parallel is asked for. Their "
                "balance is no mean over tokens. Leave one of them out."
            )
        return found

    return group.loss_of_mean(mean, labels)
