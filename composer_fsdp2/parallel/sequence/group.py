"""A model that computes its part of each sequence: batches in, loss and logits out.

[Note: one batch, many ranks] The ranks of a group are given the same batch. Each computes its
positions of every sequence, padded to equal parts. Labels are shifted before they are cut, and the
loss is the sum over the group's real tokens, divided by their number: that of one process.

[Note: images] A model with a tower for images or sound runs as it is, on the whole batch, up to its
decoder of text, whose inputs are cut. Every rank computes the whole tower. Its gradient on a rank
comes from the rank's positions alone, so it adds up over ranks as that of any weight.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.blocks.fp8 import without_float8
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.parallelism import SameBatchGroup, are_whole
from composer_fsdp2.parallel.sequence.attention import attend, gather_sequence, whole_loss
from composer_fsdp2.parallel.sequence.kinds import (
    calls_loss_function,
    connect_composer_model,
    next_word_loss,
)
from composer_fsdp2.parallel.sequence.masks import (
    AttentionCall,
    MaskRules,
    SequenceParts,
    SharedSequence,
)
from composer_fsdp2.plan.module_tree import attribute_of
from composer_fsdp2.ranks import on_all_ranks, raise_on_all_ranks

__all__ = ["SequenceGroup"]

log = logging.getLogger(__name__)

_IGNORED = -100
"""label of a token that has no part in the loss, as transformers has it"""

_CUT: Mapping[str, float] = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "token_type_ids": 0,
    "sequence_id": -1,
}
"""inputs of a model that have a value for each position -> the value of padding"""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""dtype -> relative error of an attention in parallel, in its norm; 0.1 for narrower dtypes"""

_DOCUMENTS = {
    True: "Rows hold several documents (position_ids begin again). Each token sees its own alone.",
    False: "Rows hold several documents (position_ids begin again), and this model sees earlier "
    "documents of a row, as it does in one process. Write sequence_parallel: {documents: apart} "
    "beside its degree to keep them apart.",
}

_IMAGES, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""inputs of a decoder: positions of images, and a row for each of these positions in each layer"""
_REBUILT = ("attention_mask", "position_ids", "labels")


class SequenceGroup(SameBatchGroup):
    """Divides the inputs of a model, and gives its attention the full sequence.

    See [Note: one batch, many ranks]. Collective: yes, over the group, in each forward and
    backward.
    """

    why = "in one group of sequence parallelism", "see tokens of different samples"

    def __init__(
        self,
        model: nn.Module,
        attention: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        method: str,
        *,
        frees: bool,
        outermost: nn.Module,
        decoder: nn.Module | None = None,
        learned: tuple[str, int] | None = None,
        heads: Mapping[str, nn.Module],
        rules: MaskRules,
    ) -> None:
        """Prepares to divide the inputs of a model of transformers' kind. Collective: no.

        Args:
            model: takes batches by names, and computes the loss.
            attention: its attention modules, by name.
            group: ranks that share each sequence.
            method: `ulysses` or `gather_kv`.
            frees: gathers keys and values again in backward, see `attend`.
            outermost: the module that is called with batches: the model, or the wrapper of adapters
                that hands them on past the model's hooks.
            decoder: the module whose inputs are cut, where that is not the entry; see
                [Note: images].
            learned: the embedding of positions, and how many there are.
            heads: modules that make logits, by name.
            rules: how the model makes its masks.
        """
        super().__init__(group)
        self.method, self._frees = method, frees
        self._learned, self._rules = learned, rules
        self.rank = dist.get_rank(group)
        # Batches may come by position, and are divided by name.
        self._names = list(inspect.signature(type(outermost).forward).parameters)[1:]
        self._caches = "use_cache" in inspect.signature(type(model).forward).parameters
        self._current: SharedSequence | None = None
        self._labels: torch.Tensor | None = None
        self._loss: Any = None
        if calls_loss_function(model):
            self._loss = model.loss_function
            model.loss_function = torch.compiler.disable(self._loss_of)  # type: ignore[assignment]
        self._outermost, self._attention, self._heads = outermost, attention, heads
        self._decoder = decoder
        if decoder is not None:
            self._decoder_names = list(inspect.signature(type(decoder).forward).parameters)[1:]
            # Tokens that stand for something else than a word.
            self._special: set[int] = {
                value
                for name, value in vars(model.config).items()
                if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
            }
            self._loss_ignores_padding = bool(next_word_loss(model))
        self._divides = self._begins = False
        self._is_idle = self._is_inside = self._is_tried = self._has_told = False

    def connect(self, model: nn.Module) -> None:
        """Divides the inputs of the model from here on. Collective: no.

        The first batch runs through the model before FSDP2 begins with that batch: the model is
        sharded, and these hooks come before those of FSDP2.
        """
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        self._outermost.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        self._outermost.register_forward_hook(leave, always_call=True)
        if self._decoder is not None:
            enter = torch.compiler.disable(self._enter_decoder)
            self._decoder.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        for module in (self._decoder or self._outermost).modules():
            if re.search("dynamic|longrope", str(attribute_of(module, "rope_type"))):
                append = torch.compiler.disable(self._append_last_position)
                module.register_forward_pre_hook(append, with_kwargs=True)
                module.register_forward_hook(torch.compiler.disable(self._drop_last_position))
        connect_composer_model(model, self.own_labels, self.loss_of_mean)

    def attend(
        self, module: nn.Module, call: AttentionCall, query: Any, key: Any, value: Any
    ) -> torch.Tensor | None:
        """Computes an attention of the model, `None` where the sequence is not divided.

        Raises:
            PlanError: the model trains without having been called.
        """
        if self._current is None:
            if module.training and not self._is_inside:
                raise PlanError(
                    f"An attention of {type(self._outermost).__name__} was computed in training "
                    "without a call of it, so no rank knows which part of the sequence it has. "
                    "Ranks would compute whole sequences each, without a word. Call the model "
                    "itself, `model(**batch)`, not `model.forward` or a module inside of it."
                )
            return None
        frees = self._frees and torch.is_grad_enabled()
        return attend(self._current, self.method, call, query, key, value, frees=frees)

    def _append_last_position(
        self, _embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Gives a rotary embedding whose frequencies depend on the last position that position.

        Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_rope_utils.py#L45
        """
        if self._current is None or self._current.last_position is None:
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = self._current.last_position.to(positions).expand(*positions.shape[:-1], 1)
        positions = torch.cat([positions, last], -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def _drop_last_position(self, _embedding: nn.Module, _args: Any, output: Any) -> Any:
        if self._current is None or self._current.last_position is None:
            return output
        if isinstance(output, torch.Tensor):
            return output[..., :-1, :]
        return tuple(tensor[..., :-1, :] for tensor in output)

    def recalling(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that gives a block that runs again in backward the sequence of now."""
        return self._with(self._current)

    @contextlib.contextmanager
    def _with(self, shared: SharedSequence | None) -> Generator[None]:
        before, self._current = self._current, shared
        try:
            yield
        finally:
            self._current = before

    # --- Into the model ---

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        batch = dict(zip(self._names, args, strict=False)) | kwargs
        self._current = self._labels = None
        self._is_inside, self._divides = True, False
        # Each rank has all keys of earlier words, and a word alone cannot be divided.
        generates = are_whole() or (not module.training and batch.get("use_cache"))
        if self._is_idle or generates or batch.get("past_key_values") is not None:
            return None
        if not self._is_tried and self.compare(batch, module.training):
            if self._decoder is None:
                on_all_ranks(lambda: self._divided(batch))  # one group may refuse its batch
            if module.training:
                self._try_attention(batch)
            self._begins = True
        self._divides = self._is_inside = True
        if self._decoder is None:
            return (), self._divided(batch)
        # The whole batch, with labels of this rank's positions; see [Note: images].
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if labels is not None:
            if self._loss_ignores_padding and isinstance(mask, torch.Tensor):
                labels = labels.masked_fill(mask == 0, _IGNORED)
            self._labels = labels
            del batch["labels"]
            if self._loss is not None:
                batch["labels"] = self.own_labels(_shifted(labels))
        if self._caches:
            batch["use_cache"] = False
        return (), batch

    def _enter_decoder(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._divides:
            return None
        batch = dict(zip(self._decoder_names, args, strict=False)) | kwargs
        if self._begins and not self._is_tried:
            self._begins = False
            on_all_ranks(lambda: self._divided(batch))  # one group may refuse its batch
        return (), self._divided(batch)

    def _divided(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a batch; notes the sequence for the attention modules."""
        inputs = batch[_inputs_of(batch)]
        length = inputs.shape[1]
        self._refuse_inputs(batch, length)
        parts = self._parts_of(length)
        cut = dict(batch)
        for name, filler in _CUT.items():
            if isinstance(batch.get(name), torch.Tensor):
                cut[name] = self._local_part(batch[name], parts, filler)
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=inputs.device)[None]
        # Always given: a model would count from the first of each rank's positions.
        by_row = self._local_part(positions.flatten(0, -2), parts, 0)
        cut["position_ids"] = by_row.unflatten(0, positions.shape[:-1])
        self._current = self._shared(batch, cut.pop("attention_mask", None), parts, positions)
        if self._decoder is not None:
            mask, features = batch.get(_IMAGES), batch.get(_FEATURES)
            if mask is not None and features is not None:
                # A decoder adds these to its own positions, layer by layer:
                # https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py
                cut[_IMAGES] = local_mask = self._local_part(mask, parts, False)
                numbers = mask.flatten().cumsum(0).view_as(mask) - 1
                rows = self._local_part(numbers, parts, 0)[local_mask]
                cut[_FEATURES] = [layer[rows] for layer in features]
            return cut
        self._labels = batch.get("labels")
        if self._labels is not None:
            # Shifted while the next token is at hand: a rank's last label is another rank's token.
            del cut["labels"]
            if self._loss is not None:
                cut["labels"] = self.own_labels(_shifted(self._labels))
        if self._caches:
            cut["use_cache"] = False  # it would hold keys of this rank's positions alone
        return cut

    def _refuse_inputs(self, batch: Mapping[str, Any], length: int) -> None:
        for name, value in batch.items():
            is_known = name in (*_CUT, *_REBUILT, _IMAGES) or not isinstance(value, torch.Tensor)
            if not is_known and length in value.shape[1:]:
                raise PlanError(
                    f"The model was given '{name}' of shape {tuple(value.shape)}, and sequences of "
                    f"{length} tokens are divided between {self.size} ranks. It is not known how "
                    "it is divided. Leave it out, or take sequence_parallel out."
                )
        if self._learned is not None:
            name, count = self._learned
            positions = batch.get("position_ids")
            last = length - 1 if positions is None else int(positions.max())
            # Before one rank finds no embedding of its last position, and others wait for it.
            if last >= count:
                raise PlanError(
                    f"The model was given position {last}, and '{name}' has {count}, from 0 on. "
                    "The rank with the end of the sequence would find none. Cut sequences to "
                    f"{count} tokens, or take a model with rotary embeddings."
                )

    def _shared(
        self, batch: Mapping[str, Any], mask: Any, parts: SequenceParts, positions: torch.Tensor
    ) -> SharedSequence:
        is_tensor = isinstance(mask, torch.Tensor)
        if isinstance(mask, Mapping) or (self._decoder is not None and is_tensor and mask.ndim > 2):
            raise PlanError(
                "The model makes masks of its own for its decoder, and sequences are divided. It "
                "is not known which tokens see each other there, as those of an image may. Leave "
                "sequence_parallel out for this model."
            )
        rules, is_real, own_mask = self._rules, None, None
        has_padding = begins_later = goes_on = False
        if isinstance(mask, torch.Tensor) and mask.ndim == 4:
            own_mask = _padded_mask(mask, parts, rules)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
            is_real = mask != 0
            after_padding = (is_real[:, 1:] > is_real[:, :-1]).any()
            # Is there padding, in front of a row, and in front of some token? One wait for all.
            answers = torch.stack([~is_real.all(), ~is_real[:, 0].all(), after_padding])
            has_padding, begins_later, goes_on = answers.tolist()
            is_real = _padded(is_real, parts, False) if has_padding else None
        if begins_later and rules.unseeing == "unknown":
            raise PlanError(
                "Sequences are padded on the left, and it is not known what this model makes of a "
                "query that sees no key. The first label of a sequence depends on it. Pad on the "
                "right, or write attn_implementation: sdpa."
            )
        skips = rules.skips_padding == "always" or (
            rules.skips_padding == "without positions" and batch.get("position_ids") is None
        )
        if is_real is not None and skips:
            if goes_on:
                raise PlanError(
                    "Tokens come after padding (attention_mask), and this model counts positions "
                    "by the mask, without padding. Each rank would count padding as well. Pad on "
                    "the right, or take sequence_parallel out."
                )
            positions = positions * is_real[:, : parts.length]
        labels = batch.get("labels") if self._outermost.training else None
        if is_real is not None and not goes_on and isinstance(labels, torch.Tensor):
            # Tokens do not see padding after all of them. Masks of padded rows take up to half of
            # positions x positions, and kernels are slower with them.
            is_read = bool(((labels != _IGNORED) & ~is_real[:, : labels.shape[1]]).any())
            is_real = is_real if is_read else None
        # Of time, height and width; newer transformers puts those of text in front.
        positions = positions[-3:] if positions.ndim == 3 else positions
        sees_later = begins_later and rules.unseeing in ("average", "all")
        return SharedSequence(
            parts=parts,
            rank=self.rank,
            group=self.group,
            rules=rules,
            documents=self._documents(batch, mask is not None, has_padding, parts),
            is_real=is_real,
            mask=own_mask,
            sees_later=own_mask is not None or sees_later,
            last_position=positions.max(),
        )

    def _documents(
        self, batch: Mapping[str, Any], has_mask: bool, has_padding: bool, parts: SequenceParts
    ) -> torch.Tensor | None:
        """Returns the document of each position, (batch, positions); `None` if all see all."""
        document_ids, positions = batch.get("sequence_id"), batch.get("position_ids")
        if positions is not None and positions.ndim == 3:
            # Of time, height and width; newer transformers puts those of text in front.
            positions = positions[0] if len(positions) == 4 else None
        if isinstance(document_ids, torch.Tensor) and self._rules.takes_sequence_id:
            return _padded(document_ids, parts, -1)
        if positions is None:
            return None
        # Documents of a packed row count their positions from zero again.
        begins = positions[:, 1:] != positions[:, :-1] + 1
        if not bool(begins.any()):
            return None
        apart = {"always": True, "without mask": not has_mask, "without padding": not has_padding}
        keeps = apart.get(self._rules.documents, False)
        if not self._has_told and dist.get_rank() == 0:
            self._has_told = True
            log.log(logging.INFO if keeps else logging.WARNING, _DOCUMENTS[keeps])
        documents = nn.functional.pad(begins.long().cumsum(1), (1, 0))
        return _padded(documents, parts, -1) if keeps else None

    def own_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of labels that are shifted. Collective: no."""
        return self._local_part(labels, self._parts_of(labels.shape[1]), _IGNORED)

    def _local_part(
        self, tensor: torch.Tensor, parts: SequenceParts, filler: float
    ) -> torch.Tensor:
        return parts.cut(_padded(tensor, parts, filler), self.rank).contiguous()

    def _parts_of(self, length: int) -> SequenceParts:
        balanced = self.method == "gather_kv"
        return SequenceParts(length=length, degree=self.size, is_balanced=balanced)

    # --- The first batch ---

    @torch.no_grad()
    def _try_attention(self, batch: Mapping[str, Any]) -> None:
        """Compares each attention with that of one process, on the first tokens of one sequence.

        The inputs of heads, which depend on all other layers, are compared too. No logits are made:
        they may be larger than all that a step with `chunked_loss` holds.

        Collective: yes, over the default group. As many tokens as a rank computes in a step.

        Raises:
            PlanError: the same on every rank, if any of them differs.
        """
        name = _inputs_of(batch)
        local = self._parts_of(batch[name].shape[1]).padded // self.size
        inputs = batch[name][:1, : max(local, self.size)]
        if self._decoder is not None and name == "input_ids":
            # Without images: tokens that stand for them become another word.
            word = next(n for n in range(len(self._special) + 1) if n not in self._special)
            is_special = torch.isin(inputs, torch.tensor([*self._special], device=inputs.device))
            inputs = inputs.masked_fill(is_special, word)
        modes = [(module, module.training) for module in self._outermost.modules()]
        self._outermost.eval()
        try:
            # Neither what fp8 rounds in parts nor a graph for two short forwards.
            with without_float8(self._outermost), torch.compiler.set_stance("force_eager"):
                self._is_idle = self._is_tried = True
                undivided = self._outputs({name: inputs})
                self._is_idle = False
                divided = self._outputs({name: inputs})
        finally:
            self._is_idle = self._is_tried = False
            for module, mode in modes:
                module.training = mode
        parts, error = self._parts_of(inputs.shape[1]), None
        real = self._local_part(
            torch.ones_like(inputs[..., 0] if inputs.ndim > 2 else inputs), parts, 0
        )
        for quantity, expected in undivided.items():
            expected = self._local_part(expected, parts, 0)[:, real[0] > 0]
            got = divided[quantity][:, real[0] > 0]
            off = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
            if not off <= _TOLERANCE.get(got.dtype, 0.1):
                error = error or PlanError(
                    f"The {quantity} of the first {inputs.shape[1]} tokens, divided between ranks, "
                    f"is {100 * off:.2g} % off what it is in one process. The model sees tokens in "
                    "a way that is not known here, and the run would train another one. Leave "
                    "sequence_parallel out for this model."
                )
        raise_on_all_ranks({}, error)

    def _outputs(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the output of each attention in a forward, and the input of each head."""
        tensors: dict[str, torch.Tensor] = {}

        def keep(path: str, _module: Any, _args: Any, output: Any) -> None:
            output = output if isinstance(output, torch.Tensor) else output[0]
            tensors[f"attention '{path}'"] = output.detach()

        def cut(path: str, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            first = args[0] if args else None
            # An embedding that is the head as well is given tokens.
            if not isinstance(first, torch.Tensor) or not first.is_floating_point():
                return None
            tensors[f"input of '{path}'"] = first.detach()
            return first[:, :1], *args[1:]

        # For two forwards of the first batch; an error must not leave them.
        with contextlib.ExitStack() as hooks:
            for path, module in self._attention.items():
                hook = functools.partial(keep, path)
                hooks.enter_context(module.register_forward_hook(hook))
            for path, module in self._heads.items():
                hook = functools.partial(cut, path)
                hooks.enter_context(module.register_forward_pre_hook(hook, prepend=True))
            self._outermost(**inputs, **({"use_cache": False} if self._caches else {}))
        return tensors

    # --- Out of the model ---

    def _loss_of(self, logits: Any, labels: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the model's `loss_function`, whose labels are shifted already."""
        if self._current is None or self._labels is None:
            return self._loss(logits, labels, *args, **kwargs)
        # With this number transformers divides the sum by it, so that the ranks' terms add up:
        # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/loss/loss_utils.py#L34
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = (_shifted(self._labels) != _IGNORED).sum()
        term = self._loss(logits, None, *args, **{**kwargs, "shift_labels": labels})
        return whole_loss(term, self.group)

    def loss_of_mean(
        self, mean: Callable[[torch.Tensor], torch.Tensor], labels: torch.Tensor
    ) -> torch.Tensor:
        """Returns the loss of the group from a function that averages over this rank's tokens.

        Collective: yes, over the group.

        Args:
            mean: returns the mean loss for this rank's shifted labels; zero where none counts.
            labels: (batch, positions) of the full sequences, not shifted.
        """
        shifted = _shifted(labels)
        local_labels = self.own_labels(shifted)
        count, local_count = (shifted != _IGNORED).sum(), (local_labels != _IGNORED).sum()
        return whole_loss(mean(local_labels) * (local_count / count.clamp(min=1)), self.group)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        """Gives evaluation the logits of the full sequence. In training a rank keeps its part."""
        shared, labels, logits = self._current, self._labels, getattr(output, "logits", None)
        # A model inside of adapters generates without a call of the wrapper.
        self._is_inside, self._current, self._labels = False, None, None
        self._divides = self._begins = False
        if shared is None or self._is_tried or not isinstance(logits, torch.Tensor):
            return
        if self._loss is None and labels is not None:

            def mean(local_labels: torch.Tensor) -> torch.Tensor:
                rows = logits.flatten(0, 1)
                rows = rows if self._decoder is None else rows.float()  # as most of them do
                total = nn.functional.cross_entropy(rows, local_labels.flatten(), reduction="sum")
                return total / (local_labels != _IGNORED).sum().clamp(min=1)

            output["loss"] = self.loss_of_mean(mean, labels)
        if not module.training:
            full_logits = gather_sequence(logits.unsqueeze(1), self.group).squeeze(1)
            full_logits = shared.parts.put_together(full_logits, 1)
            # Contiguous, as a model's own logits: metrics view them in other shapes.
            output["logits"] = full_logits[:, : shared.parts.length].contiguous()


def _inputs_of(batch: Mapping[str, Any]) -> str:
    """Returns the name of the inputs that are divided."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), torch.Tensor):
            return name
    raise PlanError(
        "The model was called without input_ids and inputs_embeds. Sequence parallelism would "
        "have nothing to divide. Give it one of them by name."
    )


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Returns the label of each position: the next token; none for the last position."""
    return nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]


def _padded(tensor: torch.Tensor, parts: SequenceParts, filler: Any) -> torch.Tensor:
    missing = parts.padded - parts.length
    if not missing:
        return tensor
    rest = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), filler)
    return torch.cat([tensor, rest], 1)


def _padded_mask(mask: torch.Tensor, parts: SequenceParts, rules: MaskRules) -> torch.Tensor:
    length = parts.length
    if not rules.takes_masks or (rules.adds_masks and mask.dtype == torch.bool):
        raise PlanError(
            f"The attention mask has the shape {tuple(mask.shape)} and the dtype {mask.dtype}, and "
            "it is not known what this model makes of it. Ranks would see other tokens than one "
            f"process. Give a mask of (batch, {length}), or write attn_implementation: sdpa."
        )
    if mask.shape[1] != 1 or mask.shape[2:] != (length, length):
        raise PlanError(
            f"The attention mask has the shape {tuple(mask.shape)}. Sequence parallelism cuts "
            f"masks of (batch, 1, {length}, {length}). Give one of that shape, or of (batch, "
            f"{length})."
        )
    is_bool = mask.dtype == torch.bool
    if not is_bool and not mask.is_floating_point():
        raise PlanError(
            f"The attention mask of four dimensions has the dtype {mask.dtype}. What is added to "
            "scores has a floating point dtype, and what is seen is bool. Give one of these."
        )
    missing, unseen = parts.padded - length, False if is_bool else torch.finfo(mask.dtype).min
    mask = nn.functional.pad(mask, (0, missing, 0, missing), value=unseen)
    if missing:  # a padded query sees the first: a row without any key might be NaN
        mask[:, :, length:, 0] = True if is_bool else 0
    return mask
