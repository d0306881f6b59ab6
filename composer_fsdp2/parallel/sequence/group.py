"""A model that computes its part of each sequence: batches in, loss and logits out.

[Note: one batch, many ranks] The ranks of a group are given the same batch. Each computes its
positions of every sequence, padded to equal parts. Labels are shifted before they are cut, and the
loss is the sum over the group's real tokens, divided by their number: that of one process.

[Note: recomputation] A block that runs again in backward must see the sequence of its own forward,
and another forward may lie between. Position ids go through the whole model, so they tell which.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.sequence.attention import (
    IMPLEMENTATION,
    SharedSequence,
    attend,
)
from composer_fsdp2.parallel.sequence.exchange import gather_sequence, whole_loss
from composer_fsdp2.parallel.sequence.positions import Division

__all__ = ["SequenceGroup", "sequence_group_of"]

_GROUP = "_fsdp2_sequence_group"
"""attribute of a model and of its attention modules, for `sequence_group_of`"""

_IGNORED = -100
"""label of a token that has no part in the loss, as transformers has it"""

_CUT = ("input_ids", "inputs_embeds", "token_type_ids")
_REBUILT = ("attention_mask", "position_ids", "labels")


class SequenceGroup:
    """Divides what a model is given, and what its attention sees; see [Note: one batch, many ranks]."""

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, tuple[nn.Module, Callable[..., Any], bool]],
        group: dist.ProcessGroup,
        method: str,
    ) -> None:
        """Connects a model that is prepared. Collective: no.

        Args:
            model: of transformers, with a head.
            attention: name -> module, its own function, and whether that adds masks to scores.
            group: ranks that share each sequence.
            method: `ulysses` or `gather_kv`.
        """
        self.group, self.method = group, method
        self.rank = dist.get_rank(group)
        self._functions = {id(m): (f, adds) for m, f, adds in attention.values()}
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]
        self._current: SharedSequence | None = None
        self._of_positions: Any = WeakIdKeyDictionary()
        self._labels: torch.Tensor | None = None
        self._is_idle = False
        for module, _, _ in attention.values():
            module.register_forward_pre_hook(self._enter_attention, with_kwargs=True)
            setattr(module, _GROUP, self)
        self._loss: Any = model.loss_function
        model.loss_function = self._loss_of  # type: ignore[assignment]
        model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._leave)
        setattr(model, _GROUP, self)

    @property
    def size(self) -> int:
        """Ranks that share each sequence."""
        return self.group.size()

    # --- Into the model ---

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        self._current = None
        if self._is_idle or given.get("past_key_values") is not None or self._generates(module, given):
            return None
        return (), self.divide(given)

    def _generates(self, module: nn.Module, given: Mapping[str, Any]) -> bool:
        return not module.training and bool(given.get("use_cache"))

    def divide(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns what this rank computes, and remembers what its attention must know."""
        ids = given.get("input_ids")
        inputs = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(inputs, torch.Tensor):
            raise PlanError(
                "The model was called without input_ids and inputs_embeds. Sequence parallelism "
                "would have nothing to divide. Give it one of them by name."
            )
        self._refuse_unknown(given, inputs.shape[1])
        division = Division(
            length=inputs.shape[1], degree=self.size, is_balanced=self.method == "gather_kv"
        )
        cut = dict(given)
        for name in _CUT:
            if isinstance(given.get(name), torch.Tensor):
                cut[name] = self._own(given[name], division, 0)
        positions = given.get("position_ids")
        documents = None if positions is None else _documents(positions)
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        cut["position_ids"] = self._own(positions, division, 0)
        mask = cut.pop("attention_mask", None)
        self._current = SharedSequence(
            division=division,
            rank=self.rank,
            group=self.group,
            documents=None if documents is None else _padded(documents, division, -1),
            is_real=_padded(mask != 0, division, False) if _has_padding(mask) else None,
            mask=_padded_mask(mask, division) if mask is not None and mask.ndim == 4 else None,
        )
        self._of_positions[cut["position_ids"]] = self._current
        if given.get("labels") is not None:
            shifted = nn.functional.pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]
            self._labels = shifted
            cut["labels"] = self._own(shifted, division, _IGNORED)
        cut["use_cache"] = False
        return cut

    def _own(self, whole: torch.Tensor, division: Division, filler: float) -> torch.Tensor:
        return division.cut(_padded(whole, division, filler), self.rank).contiguous()

    def _refuse_unknown(self, given: Mapping[str, Any], length: int) -> None:
        for name, value in given.items():
            if name in (*_CUT, *_REBUILT) or not isinstance(value, torch.Tensor) or value.ndim < 2:
                continue
            if length in value.shape[1:]:
                raise PlanError(
                    f"The model was given '{name}' of shape {tuple(value.shape)}, and sequences of "
                    f"{length} tokens are divided between {self.size} ranks. It is not known how "
                    f"it is divided. Leave it out, or take sequence_parallel out."
                )

    # --- Inside ---

    def _enter_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See [Note: recomputation]."""
        positions = kwargs.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions in self._of_positions:
            self._current = self._of_positions[positions]

    def attend(self, module: nn.Module, *tensors: Any, **kwargs: Any) -> Any:
        """Computes the attention of one module, for transformers' interface."""
        function, adds_masks = self._functions[id(module)]
        if self._current is None:
            return function(module, *tensors, **kwargs)
        query, key, value = tensors[:3]
        return attend(
            self._current,
            self.method,
            function,
            module,
            query,
            key,
            value,
            adds_masks=adds_masks,
            **kwargs,
        )

    # --- Out of the model ---

    def _loss_of(self, logits: Any, labels: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._current is None or self._labels is None:
            return self._loss(logits, labels, *args, **kwargs)
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = (self._labels != _IGNORED).sum()
        # Labels are shifted already.
        term = self._loss(logits, None, *args, **{**kwargs, "shift_labels": labels})
        return whole_loss(term, self.group)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        """Gives evaluation the whole logits. In training a rank keeps its own."""
        shared, self._labels = self._current, None
        logits = getattr(output, "logits", None)
        if shared is None or module.training or not isinstance(logits, torch.Tensor):
            return
        whole = gather_sequence(logits.unsqueeze(1), self.group).squeeze(1)
        whole = shared.division.put_together(whole, 1)[:, : shared.division.length]
        output["logits"] = whole


def sequence_group_of(model: nn.Module) -> SequenceGroup | None:
    """Returns what divides the sequences of a model, `None` where nothing does."""
    found = (getattr(module, _GROUP, None) for module in model.modules())
    return next((group for group in found if group is not None), None)


def interface(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Computes attention for transformers' interface, under the name `IMPLEMENTATION`."""
    return getattr(module, _GROUP).attend(module, *args, **kwargs)


def register_interface() -> None:
    """Makes `IMPLEMENTATION` known to transformers. Collective: no."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, interface)


# --- Padding and documents ---


def _padded(whole: torch.Tensor, division: Division, filler: Any) -> torch.Tensor:
    missing = division.padded - division.length
    if not missing:
        return whole
    rest = whole.new_full((whole.shape[0], missing, *whole.shape[2:]), filler)
    return torch.cat([whole, rest], 1)


def _padded_mask(mask: torch.Tensor, division: Division) -> torch.Tensor:
    missing = division.padded - division.length
    if mask.shape[1] != 1 or mask.shape[2:] != (division.length, division.length):
        raise PlanError(
            f"The attention mask has the shape {tuple(mask.shape)}. Sequence parallelism cuts "
            f"masks of (batch, 1, {division.length}, {division.length}). Give one of that shape, "
            f"or of (batch, {division.length})."
        )
    unseen = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    mask = nn.functional.pad(mask, (0, missing, 0, missing), value=unseen)
    if missing:  # a padded query sees itself: a row without any key would be NaN
        own = torch.arange(division.length, division.padded, device=mask.device)
        mask[:, :, own, own] = True if mask.dtype == torch.bool else 0
    return mask


def _has_padding(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool((mask != 0).all())


def _documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Numbers of the documents in each row, which begin where positions do not go on by one."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.long().cumsum(1), (1, 0))
