"""Cross entropy on one part of the tokens after the other; knows nothing of FSDP.

[Note: chunked logits] Logits are as wide as the vocabulary, and a loss in fp32 keeps them several
times. In training, a head in the plan returns `ChunkedLogits`: what it was called with, and what is
done to its result up to `cross_entropy`, which then runs head and loss together, chunk by chunk,
each computed again in backward, so that one chunk's logits exist at a time. The unit that owns the
head keeps its weights from the head to the loss; they are gathered once, and autograd adds the
gradients of the chunks before FSDP sees them. A gradient is a sum of sums, which rounds otherwise.
A head that tensor parallelism divides by the vocabulary computes its part of a chunk's logits, and
the ranks tell each other what the loss needs: see [Note: divided vocabulary] in
`blocks.vocabulary_loss`. One chunk is then computed once.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.blocks.vocabulary_loss import (
    Statistics,
    VocabularyPart,
    parallel_cross_entropy,
)
from composer_fsdp2.config.blocks import ChunkingSpec
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import select_modules
from composer_fsdp2.plan.rules import output_heads
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.torch_private.tensors import (
    TENSOR_FACTS,
    TORCH_FUNCTION_OFF,
    make_wrapper_subclass,
    tree_leaves,
)

__all__ = [
    "ChunkedHead",
    "ChunkedLogits",
    "ChunkedLoss",
    "ChunkingPlan",
    "plan_chunking",
]


# --- Logits that are computed a few tokens at a time, inside the loss. ---


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
            raise PlanError(
                f"The head '{self.name}' (chunked_loss) is not called with the hidden states as "
                "its first argument. It is not known where the tokens are. Write the name of the "
                "output head in chunked_loss.names, or leave chunked_loss out."
            )
        self.called, mesh = True, None
        if isinstance(hidden, DTensor):
            # As the hook of a divided layer leaves it: whole, on each rank of the tensor group.
            mesh, hidden = hidden.device_mesh, hidden.to_local(grad_placements=[Replicate()])
        kind = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def run(part: Tensor) -> Tensor:
            # The loss may be computed outside of the autocast in which the head was called. Weights
            # cast for the first chunk and kept would be missed when it is computed again.
            with torch.autocast(kind, dtype, enabled, cache_enabled=False):
                if mesh is not None:
                    part = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
                return self.whole(part, *args[1:], **kwargs)

        with torch.no_grad():
            nothing = run(hidden.reshape(-1, hidden.size(-1))[:0])
        token = torch.zeros((), device=hidden.device, requires_grad=True)
        call = HeadCall(self.name, run, self.chunks, token, nothing.size(-1), nothing.dtype)
        # In one piece, so that rows are found again by where they are.
        return ChunkedLogits(call, hidden.contiguous())


class Change(NamedTuple):
    """A function of the logits between head and loss, of each token alone."""

    func: Any
    values: tuple[Any, ...]
    """its arguments; `None` is the logits"""
    kwargs: dict[str, Any]

    def __call__(self, part: Tensor) -> Tensor:
        # Not in place, where the function before may need its result in backward.
        arguments = (part if value is None else value for value in self.values)
        return _IN_PLACE.get(self.func, self.func)(*arguments, **self.kwargs)


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
    known: tuple[Tensor, tuple[Change, ...], Tensor, int, Tensor, Tensor] | None = field(
        default=None, repr=False
    )
    """rows, changes, targets, ignored target, losses and likeliest classes of the loss that was
    computed last"""

    def losses_of(
        self, rows: Tensor, changes: Sequence[Change], targets: Tensor, ignored: int
    ) -> Tensor:
        """Returns the loss of each token, `(tokens,)`, computed again only for new ones."""
        result = None if torch.is_grad_enabled() else self.result_of(rows, changes)
        if result is not None and result[1] == ignored and torch.equal(result[0], targets):
            return result[2]
        if self.done:
            raise PlanError(
                f"Another loss of the logits of '{self.head}' was asked for after backward. With "
                "chunked_loss they are gone by then, and so are the weights. Compute it before, or "
                "take chunked_loss out."
            )
        predicted: list[Tensor] = []

        def loss(part: Tensor, targets: Tensor, statistics: list[Statistics]) -> Tensor:
            logits, vocabulary = self.run(part), None
            if isinstance(logits, DTensor):
                vocabulary = VocabularyPart.of(logits)
                logits = logits.to_local() if vocabulary is not None else logits.full_tensor()
            for change in changes:
                logits = change(logits)
            if vocabulary is not None:
                if not statistics:  # ranks do not ask each other again in backward
                    statistics.append(Statistics.of(logits, targets, ignored, vocabulary))
                    predicted.append(statistics[0].predicted)
                return parallel_cross_entropy(logits, targets, ignored, vocabulary, statistics[0])
            losses = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")
            # The last thing, which backward has no need to do again.
            predicted.append(logits.detach().argmax(-1))
            return losses

        chunks = max(1, min(self.chunks, len(rows)))  # an empty one costs a whole head
        # The head of a chunk is computed again in backward, unless there is one chunk alone.
        call = functools.partial(checkpoint, loss, use_reentrant=False) if self.chunks > 1 else loss
        pairs = zip(rows.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        losses = torch.cat([call(part, target, []) for part, target in pairs])  # pyright: ignore
        likeliest = torch.cat(predicted[:chunks])
        self.known = rows.detach(), (*changes,), targets, ignored, losses.detach(), likeliest
        return PrependZeroGrad.apply(self.token, losses, self)  # pyright: ignore[reportReturnType]

    def result_of(
        self, rows: Tensor, changes: Sequence[Change]
    ) -> tuple[Tensor, int, Tensor, Tensor] | None:
        """Returns the rest of `known`, if the last loss had these rows and changes."""
        if self.known is None or _identity(rows, changes) != _identity(*self.known[:2]):
            return None
        return self.known[2:]


def _identity(rows: Tensor, changes: Sequence[Change]) -> tuple[Any, ...]:
    # A metric reads logits that the loss has cast for itself.
    changed = [change for change in changes if change.func not in _CASTS]
    return rows.data_ptr(), rows.shape, rows.stride(), changed


class PrependZeroGrad(torch.autograd.Function):
    """Gives a token a gradient of zero before all else that follows from the losses."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, losses: Tensor, call: HeadCall) -> Tensor:
        ctx.call = call
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.call.done = True
        return torch.zeros_like(ctx.call.token), grads[0], None


class ChunkedLogits(Tensor):
    """Logits `(..., vocabulary)` that are not there: see [Note: chunked logits].

    They have a shape and a dtype, can be cast, scaled, capped by tanh, and cut or viewed in all
    dimensions but the last, and given to `cross_entropy`; after it, `argmax` over the last
    dimension is known too. Anything else is a `PlanError`.
    """

    _call: HeadCall
    _hidden: Tensor
    _changes: tuple[Change, ...]
    _has_views: bool

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
        logits._has_views = False
        return logits

    def __repr__(self, **_kwargs: Any) -> str:
        return f"ChunkedLogits({tuple(self.shape)}, head={self._call.head!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, result = kwargs or {}, NotImplemented
        if func in _FACTS:
            with TORCH_FUNCTION_OFF():
                return func(*args, **named)
        if func in _OF_EACH:
            result = _changed(func, args, named)
        elif func in _KNOWN:
            result = _KNOWN[func](*args, **named)
        if result is NotImplemented:
            raise _not_there(func, (args, named))
        return result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise _not_there(func, (args, kwargs))

    def _with(self, hidden: Tensor) -> ChunkedLogits:
        view = ChunkedLogits(self._call, hidden, self._changes, self.dtype)
        self._has_views = view._has_views = True
        return view

    def _rows(self) -> Tensor:
        return self._hidden.reshape(-1, self._hidden.size(-1))


def _not_there(func: Any, args: Any) -> PlanError:
    head = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, ChunkedLogits))._call.head
    name = getattr(func, "__qualname__", None) or str(func)
    if name.endswith("__get__"):
        name = f"Tensor.{func.__self__.__name__}"
    return PlanError(
        f"{name} was asked of the logits of '{head}'. With chunked_loss they are only there a few "
        "tokens at a time, inside torch.nn.functional.cross_entropy, and whatever else reads them "
        "would have nothing to read. Take out what reads them (another loss, a metric, a "
        "callback), or chunked_loss."
    )


_IN_PLACE: dict[Any, Any] = {Tensor.mul_: torch.mul, Tensor.div_: torch.div}
_CASTS = {Tensor.float, Tensor.to}
_OF_EACH = {
    *(*_CASTS, Tensor.tanh, torch.tanh),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul),
    *(Tensor.__truediv__, Tensor.div, torch.div, *_IN_PLACE),
}
"""functions of each logit alone, which the chunks go through later"""


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns logits to which a function of numbers and dtypes is applied."""
    values = [None if isinstance(value, ChunkedLogits) else value for value in args]
    others = [value for value in (*values, *kwargs.values()) if value is not None]
    if len(others) != len(args) + len(kwargs) - 1 or not all(
        isinstance(value, int | float | torch.dtype) for value in others
    ):
        return NotImplemented
    logits = args[values.index(None)]
    change = Change(func, (*values,), kwargs)
    changes = (*logits._changes, change)
    if func in _IN_PLACE:
        if logits._has_views:
            return NotImplemented  # a view may be a part of them, and shares the change in torch
        logits._changes = changes
        return logits
    dtype = change(torch.empty(0, dtype=logits.dtype)).dtype
    if func in _CASTS and {*others} <= {dtype} == {logits.dtype}:
        return logits  # as torch does
    return ChunkedLogits(logits._call, logits._hidden, changes, dtype)


def _same(logits: ChunkedLogits) -> ChunkedLogits:
    return logits


def _viewed(logits: ChunkedLogits, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(sizes, Sequence) or not sizes:
        return NotImplemented
    product = math.prod(size for size in sizes if size != -1)
    new = [logits.numel() // product if size == -1 else size for size in sizes]
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
    result = logits._call.result_of(logits._rows(), logits._changes)
    if result is None or keepdim or dim not in (-1, logits.dim() - 1):
        return NotImplemented
    return result[3].view(logits.shape[:-1])


def _watched(logits: ChunkedLogits, hook: Any) -> Any:
    return logits._call.token.register_hook(hook)


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
_FACTS = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    *(torch.is_floating_point, *TENSOR_FACTS),
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
}
"""attributes that are known without the values"""

_KNOWN: dict[Any, Callable[..., Any]] = {
    Tensor.contiguous: _same,
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
"""functions of torch that take logits without values"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingPlan:
    """Which heads compute with the loss. Names and numbers only."""

    heads: tuple[str, ...]
    chunks: int

    def __str__(self) -> str:
        return f"loss in {self.chunks} chunks: {', '.join(self.heads)}"


def plan_chunking(tree: ModuleTree, settings: ChunkingSpec) -> ChunkingPlan:
    """Decides which heads leave their logits to the loss.

    Collective: no.

    Args:
        tree: of the whole model, before anything is wrapped.
        settings: `chunked_loss`.

    Raises:
        PlanError: when there is no head.
    """
    if settings.names:
        heads = list(select_modules(tree, "chunked_loss.names", settings.names))
    else:
        head_ids = {id(head) for head in output_heads(tree)}
        heads = [name for name, module in tree.modules() if id(module) in head_ids]
    if not heads:
        raise PlanError(
            "chunked_loss is on, but the model names no output head, and no module is called "
            "lm_head. Nothing would be cut. Write the name of the head in chunked_loss.names."
        )
    return ChunkingPlan(heads=tuple(heads), chunks=settings.chunks)


class ChunkedLoss(Transformation[ChunkingPlan]):
    """Runs head and loss on one chunk of tokens after the other: `chunked_loss`."""

    def plan(self, facts: ModelFacts) -> ChunkingPlan | None:
        """Returns the heads that leave their logits to the loss."""
        spec, tensor = facts.settings.chunked_loss, facts.settings.tensor_parallel
        if spec is not None and spec.chunks == 1 and (tensor is None or tensor.degree == 1):
            raise ConfigError(
                "chunked_loss.chunks is 1. One part is the whole, unless tensor_parallel divides "
                "it by the vocabulary. Write a number of parts >= 2, or leave chunked_loss out."
            )
        return None if spec is None else plan_chunking(facts.tree, spec)

    def adjust_units(self, plan: ChunkingPlan, units: WrapPlan) -> WrapPlan:
        """Returns the units, with `reshard_after_forward=False` for those that own a head.

        Raises:
            PlanError: for a unit inside a head.
        """
        prefixes = tuple(f"{head}." for head in plan.heads)
        for name in (unit.module for unit in units.units):
            if name.startswith(prefixes):
                head = min(head for head in plan.heads if name.startswith(f"{head}."))
                raise PlanError(
                    f"'{name}' inside the head '{head}' is an FSDP unit. With chunked_loss it "
                    "would be gathered once for each chunk. Take it out of wrap_policy, or "
                    "chunked_loss out."
                )
        adjusted = [
            replace(unit, reshard_after_forward=False)
            if any(name.startswith(prefixes) for name in unit.params)
            else unit
            for unit in units.units
        ]
        return replace(units, units=tuple(adjusted))

    def apply(self, tree: ModuleTree, plan: ChunkingPlan) -> None:
        """Lets the heads of the plan leave their logits to the loss, in place.

        Collective: no. See [Note: chunked logits]. Only in training, with gradients: an evaluation
        gets the logits themselves. An embedding that is the head as well goes on looking up tokens.
        """
        divided: list[nn.Parameter] = []
        for name in plan.heads:
            module = tree.root.get_submodule(name)
            module.forward = ChunkedHead(name, module, module.forward, plan.chunks)
            divided += [param for param in module.parameters() if isinstance(param, DTensor)]
        if plan.chunks == 1 and not divided:
            warnings.warn(
                f"chunked_loss: {{chunks: 1}} has no effect: {', '.join(plan.heads)} is whole on "
                "each rank of a tensor group, and so are the logits. Write more chunks.",
                stacklevel=2,
            )
