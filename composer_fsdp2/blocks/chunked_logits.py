"""Logits that are computed a few tokens at a time, inside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.blocks.vocabulary_loss import (
    Statistics,
    VocabularyPart,
    parallel_cross_entropy,
)
from composer_fsdp2.errors import PlanError
from composer_fsdp2.shard.torch_private.tensors import (
    TENSOR_FACTS,
    TORCH_FUNCTION_OFF,
    make_wrapper_subclass,
    tree_leaves,
)

__all__ = ["ChunkedHead", "ChunkedLogits"]


@dataclass(slots=True, eq=False)
class ChunkedHead:
    """The forward of a head, which computes nothing yet when a loss will follow."""

    name: str
    module: nn.Module
    whole: Callable[..., Any]
    chunks: int
    called: bool = False
    """in training"""

    @torch.compiler.disable  # a compiler could not see when the loss comes
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `ChunkedLogits` in training, and the logits themselves otherwise."""
        hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if hidden is None or not (
            self.module.training and torch.is_grad_enabled() and hidden.is_floating_point()
        ):
            return self.whole(*args, **kwargs)
        if not args or args[0] is not hidden:
            raise PlanError(_called_otherwise(self.name))
        self.called = True
        mesh = None
        if isinstance(hidden, DTensor):
            # As the hook of a divided layer leaves it: whole, on each rank of the tensor group.
            mesh, hidden = hidden.device_mesh, hidden.to_local(grad_placements=[Replicate()])
        # In one piece, so that rows are found again by where they are.
        return ChunkedLogits(HeadCall.of(self, hidden, args[1:], kwargs, mesh), hidden.contiguous())


def _called_otherwise(head: str) -> str:
    return (
        f"The head '{head}' (chunked_loss) is not called with the hidden states as its first "
        "argument. It is not known where the tokens are. Write the name of the output head in "
        "chunked_loss.names, or leave chunked_loss out."
    )


Change = Callable[[Tensor], Tensor]
"""what is done to the logits between head and loss, for each token alone"""


@dataclass(slots=True, eq=False)
class HeadCall:
    """One forward of a head, up to its backward."""

    head: str
    run: Callable[[Tensor], Tensor]
    chunks: int
    token: Tensor
    """a leaf that gets its gradient before anything else in backward: what watches for the
    gradient of the logits watches this, and has the weights there before they are needed"""
    vocabulary: int
    dtype: torch.dtype
    done: bool = False
    """backward has begun"""
    rows: Tensor | None = field(default=None, repr=False)
    targets: Tensor | None = field(default=None, repr=False)
    losses: Tensor | None = field(default=None, repr=False)
    predicted: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        head: ChunkedHead,
        hidden: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        mesh: DeviceMesh | None,
    ) -> HeadCall:
        kind = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def run(part: Tensor) -> Tensor:
            # The loss may be computed outside of the autocast in which the head was called. Weights
            # cast for the first chunk and kept would be missed when it is computed again.
            with torch.autocast(kind, dtype, enabled, cache_enabled=False):
                if mesh is not None:
                    part = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
                return head.whole(part, *args, **kwargs)

        with torch.no_grad():
            nothing = run(hidden.reshape(-1, hidden.size(-1))[:0])
        token = torch.zeros((), device=hidden.device, requires_grad=True)
        call = cls(head.name, run, head.chunks, token, nothing.size(-1), nothing.dtype)
        token.register_hook(call._begin_backward)
        return call

    def _begin_backward(self, _grad: Tensor) -> None:
        self.done = True

    def losses_of(
        self, rows: Tensor, changes: Sequence[Change], targets: Tensor, ignored: int
    ) -> Tensor:
        """The loss of each token, `(tokens,)`; those in the loss already are not computed again."""
        if self._knows(rows) and self.targets is not None and torch.equal(self.targets, targets):
            assert self.losses is not None
            if not torch.is_grad_enabled():
                return self.losses
        if self.done:
            raise PlanError(
                f"Another loss of the logits of '{self.head}' was asked for after backward. With "
                "chunked_loss they are gone by then, and so are the weights. Compute it before, or "
                "take chunked_loss out."
            )
        parts: list[Tensor] = []
        predicted: list[Tensor] = []
        chunks = max(1, min(self.chunks, len(rows)))  # an empty one costs a whole head
        for part, target in zip(
            rows.tensor_split(chunks), targets.tensor_split(chunks), strict=True
        ):
            computed = self._computed(part, changes, target, ignored, predicted)
            parts.append(computed)
        losses = torch.cat(parts)
        self.rows, self.targets, self.losses = rows.detach(), targets, losses.detach()
        self.predicted = torch.cat(predicted[:chunks])
        return PrependZeroGrad.apply(self.token, losses)  # pyright: ignore[reportReturnType]

    def _computed(
        self,
        rows: Tensor,
        changes: Sequence[Change],
        targets: Tensor,
        ignored: int,
        predicted: list[Tensor],
    ) -> Tensor:
        """The losses of one chunk, whose head is computed again in backward."""
        known: list[Statistics] = []

        def loss(part: Tensor) -> Tensor:
            logits, own = self._logits(part, changes)
            if own is not None:
                if not known:  # ranks do not ask each other again in backward
                    known.append(Statistics.of(logits, targets, ignored, own))
                    predicted.append(known[0].predicted)
                return parallel_cross_entropy(logits, targets, ignored, own, known[0])
            losses = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")
            # The last thing, which backward has no need to do again.
            predicted.append(logits.detach().argmax(-1))
            return losses

        if self.chunks == 1:
            return loss(rows)
        computed = checkpoint(loss, rows, use_reentrant=False)
        assert isinstance(computed, Tensor)
        return computed

    def _logits(
        self, rows: Tensor, changes: Sequence[Change]
    ) -> tuple[Tensor, VocabularyPart | None]:
        """Logits of some rows, or this rank's part of them."""
        logits, own = self.run(rows), None
        if isinstance(logits, DTensor):
            own = VocabularyPart.of(logits)
            logits = logits.to_local() if own is not None else logits.full_tensor()
        for change in changes:
            logits = change(logits)
        return logits, own

    def _knows(self, rows: Tensor) -> bool:
        return (
            self.rows is not None
            and self.rows.shape == rows.shape
            and self.rows.data_ptr() == rows.data_ptr()
        )

    def predictions(self, rows: Tensor) -> Tensor | None:
        """The likeliest class of each row, if the loss had these rows."""
        return self.predicted if self._knows(rows) else None


class PrependZeroGrad(torch.autograd.Function):
    """The second of two, whose gradient the first gets too, as zero and before all else."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, losses: Tensor) -> Tensor:
        ctx.device = token.device
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros((), device=ctx.device), grads[0]


class ChunkedLogits(Tensor):
    """Logits `(..., vocabulary)` that are not there: see [Note: chunked logits].

    They have a shape and a dtype, can be cast, scaled, capped by tanh, and cut or viewed in all
    dimensions but the last, and given to `cross_entropy`; after it, `argmax` over the last
    dimension is known too. Anything else is a `PlanError`.
    """

    _call: HeadCall
    _hidden: Tensor
    _changes: tuple[Change, ...]

    @staticmethod
    def __new__(  # noqa: D102  (made here alone)
        cls: type[ChunkedLogits],
        call: HeadCall,
        hidden: Tensor,
        changes: tuple[Change, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> ChunkedLogits:
        logits = make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], call.vocabulary),
            dtype=dtype or call.dtype,
            device=hidden.device,
            # FSDP2 puts its hook on outputs that need a gradient: `_watched` gets it.
            requires_grad=True,
        )
        logits._call, logits._hidden, logits._changes = call, hidden, changes
        return logits

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __repr__(self, **_kwargs: Any) -> str:
        return f"ChunkedLogits({tuple(self.shape)}, head='{self._call.head}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _FACTS:
            with TORCH_FUNCTION_OFF():
                return func(*args, **given)
        found = _KNOWN[func](*args, **given) if func in _KNOWN else NotImplemented
        if found is NotImplemented:
            raise PlanError(_not_there(_head_in(cls, (args, given)), func))
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise PlanError(_not_there(_head_in(cls, (args, kwargs)), func))

    def _changed(self, change: Change) -> ChunkedLogits:
        dtype = change(torch.empty(0, dtype=self.dtype)).dtype
        return ChunkedLogits(self._call, self._hidden, (*self._changes, change), dtype)

    def _with(self, hidden: Tensor) -> ChunkedLogits:
        return ChunkedLogits(self._call, hidden, self._changes, self.dtype)

    def _rows(self) -> Tensor:
        return self._hidden.reshape(-1, self._hidden.size(-1))


def _head_in(cls: type[ChunkedLogits], given: Any) -> str:
    return next(leaf._call.head for leaf in tree_leaves(given) if isinstance(leaf, cls))


def _not_there(head: str, func: Any) -> str:
    name = getattr(func, "__qualname__", None) or str(func)
    if name.endswith("__get__"):
        name = f"Tensor.{func.__self__.__name__}"
    return (
        f"{name} was asked of the logits of '{head}'. With chunked_loss they are only there a few "
        "tokens at a time, inside torch.nn.functional.cross_entropy, and whatever else reads them "
        "would have nothing to read. Take out what reads them (another loss, a metric, a "
        "callback), or chunked_loss."
    )


def _same(logits: ChunkedLogits) -> ChunkedLogits:
    return logits


def _float(logits: ChunkedLogits) -> ChunkedLogits:
    return logits._changed(Tensor.float)


def _to(logits: ChunkedLogits, to: Any = None, *rest: Any, dtype: Any = None) -> Any:
    dtype = to if dtype is None else dtype
    if rest or not isinstance(dtype, torch.dtype):
        return NotImplemented
    return logits._changed(lambda part: part.to(dtype))


def _tanh(logits: ChunkedLogits) -> ChunkedLogits:
    return logits._changed(torch.tanh)


def _times(logits: Any, number: Any) -> Any:
    if isinstance(number, ChunkedLogits):
        logits, number = number, logits
    return _scaled(torch.mul, logits, number)


def _over(logits: Any, number: Any) -> Any:
    return _scaled(torch.div, logits, number)


def _scaled(operator: Callable[[Tensor, float], Tensor], logits: Any, number: Any) -> Any:
    if not isinstance(logits, ChunkedLogits) or not isinstance(number, int | float):
        return NotImplemented

    def change(part: Tensor) -> Tensor:
        return operator(part, number)

    return logits._changed(change)


def _in_place(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def changed(logits: Any, number: Any) -> Any:
        made = change(logits, number)
        if made is not NotImplemented:
            logits._changes = made._changes
        return made if made is NotImplemented else logits

    return changed


def _viewed(logits: ChunkedLogits, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(sizes, Sequence) or not sizes:
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    new = [logits.numel() // known if size == -1 else size for size in sizes]
    if new[-1] != logits.size(-1):
        return NotImplemented
    return logits._with(logits._hidden.reshape(*new[:-1], logits._hidden.size(-1)))


def _flattened(logits: ChunkedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim in (-1, logits.dim() - 1):
        return NotImplemented
    return logits._with(logits._hidden.flatten(start_dim, end_dim))


def _cut(logits: ChunkedLogits, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in keys):
        return NotImplemented
    to_the_last = Ellipsis in keys[:-1] or len(keys) == logits.dim()
    if to_the_last and keys[-1] not in (slice(None), Ellipsis):
        return NotImplemented
    return logits._with(logits._hidden[keys])


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    logits = input
    plain = (weight, size_average, reduce) == (None, None, None) and not label_smoothing
    rows_of_classes = isinstance(logits, ChunkedLogits) and logits.dim() == 2
    if not plain or not rows_of_classes or target.is_floating_point():
        return NotImplemented
    losses = logits._call.losses_of(logits._rows(), logits._changes, target, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _argmax(logits: ChunkedLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    predicted = logits._call.predictions(logits._rows())
    if predicted is None or keepdim or dim not in (-1, logits.dim() - 1):
        return NotImplemented
    return predicted.view(logits.shape[:-1])


def _watched(logits: ChunkedLogits, hook: Any) -> Any:
    return logits._call.token.register_hook(hook)


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")


_FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    *TENSOR_FACTS,
    torch.is_floating_point,
    Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
}
"""what is known without the values"""


_KNOWN: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _same,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul), _times),
    **dict.fromkeys((Tensor.__truediv__, Tensor.div, torch.div), _over),
    Tensor.mul_: _in_place(_times),
    Tensor.div_: _in_place(_over),
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _cut,
    Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    Tensor.register_hook: _watched,
    F.cross_entropy: _cross_entropy,
}
"""what can be done with logits that are not there"""
