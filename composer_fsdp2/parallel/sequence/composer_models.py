"""Loss and metrics of Composer's models where ranks have parts of each sequence.

[Note: parts of logits] In training a rank has the logits of its positions, and batches have the
labels of whole sequences. The loss of a Hugging Face model is computed inside of the model. MPT's
loss is not, nor are metrics: both get the labels of the rank's positions. A metric adds up over
ranks. Classes are known by their names, so that nothing is imported for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.errors import PlanError

__all__ = ["connect_composer_model", "own_loss"]


def _is_a(model: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(model).__mro__)


def own_loss(model: Any) -> str | None:
    """Returns the class of a model of Composer's whose loss reads logits, `None` of another one."""
    if not _is_a(model, "ComposerModel") or _is_a(model, "ComposerMPTCausalLM"):
        return None
    code = getattr(type(model).loss, "__code__", None)
    if code is not None:
        words = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
        if "loss" in words and "logits" not in words:
            return None  # it returns the loss that the model inside has computed
    return type(model).__name__


def connect_composer_model(
    model: Any, own_labels: Callable[..., torch.Tensor], loss_of_mean: Callable[..., torch.Tensor]
) -> None:
    """Gives loss and metrics of training the labels they need; see [Note: parts of logits].

    Collective: no.

    Args:
        model: the root, of Composer's or another class.
        own_labels: as of `SequenceGroup`.
        loss_of_mean: likewise.
    """
    if _is_a(model, "HuggingFaceModel"):
        model.eval_forward = functools.partial(_eval_forward, own_labels, model, model.eval_forward)
        if _is_a(model, "ComposerMPTCausalLM"):
            model.loss = functools.partial(_loss_of_mpt, loss_of_mean, model, model.loss)


def _eval_forward(
    own_labels: Callable[..., torch.Tensor],
    model: Any,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    logits = original(*args, **kwargs)
    labels = model.labels
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor) and labels.ndim == 2:
        own = own_labels(labels)  # `HuggingFaceModel` has shifted them
        if logits.shape[:2] == own.shape != labels.shape:
            model.labels = own
    return logits


def _loss_of_mpt(
    loss_of_mean: Callable[..., torch.Tensor],
    model: Any,
    original: Callable[..., Any],
    outputs: Any,
    batch: Any,
) -> torch.Tensor:
    labels = batch["labels"]
    if outputs.logits.shape[:2] == labels.shape:
        return original(outputs, batch)  # of an evaluation, which has them whole

    def mean(own: torch.Tensor) -> torch.Tensor:
        # The labels are shifted already, of whole sequences.
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

    return loss_of_mean(mean, labels)
