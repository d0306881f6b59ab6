"""Activation checkpointing and offloading on any module; knows nothing of FSDP.

[Note: what is offloaded] Autograd saves weights as well as activations. Weights stay where they
are: FSDP frees and gathers them itself, and a copy of each would cost more than is saved. On CUDA
the copies run on a stream of their own, so that neither direction stops the computation. Memory
that a copy uses is given away when the copy is over, and a host may be far ahead of that: few
copies are under way at a time. A tensor that is saved several times in a row, as the input of three
projections is, is copied once. What `selective` keeps stays on the device where torch (before 2.15)
has no way to see it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from composer_fsdp2.blocks.transformation import ModelFacts, Transformation
from composer_fsdp2.config.blocks import ActivationSpec
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, Recall, has_forward, is_wrapper
from composer_fsdp2.plan.patterns import block_ids, block_positions, outer_names, select_modules
from composer_fsdp2.torch_private.tensors import (
    PROFILER_MARKS,
    OffloadWrapper,
    base_of,
    checkpoint_wrapper,
    is_plain,
    storage_id,
    wrapped_module,
)

__all__ = [
    "ActivationCheckpointing",
    "ActivationPlan",
    "ActivationSpec",
    "apply_activation",
    "keeping_nothing",
    "plan_activation",
]

log = logging.getLogger(__name__)

Choice = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """Names the modules that free their activations, and says how backward gets them back.

    Example:
        >>> from composer_fsdp2 import ActivationPlan
        >>> print(ActivationPlan(modules=("blocks.0",), recompute=True, offload=False))
        activations (recompute): blocks.0
    """

    modules: tuple[str, ...]
    recompute: bool
    """runs forward again in backward"""
    offload: bool
    """keeps the tensors saved for backward in CPU memory"""
    selective: bool = False
    """recomputes all but matrix products, convolutions and attention"""
    preserve_rng_state: bool = True

    def __str__(self) -> str:
        recompute = "recompute all but products" if self.selective else "recompute"
        treatments = [w for w, on in ((recompute, self.recompute), ("offload", self.offload)) if on]
        return f"activations ({' + '.join(treatments)}): {', '.join(self.modules)}"


def plan_activation(
    model: nn.Module | ModuleTree,
    settings: ActivationSpec | bool = True,
    *,
    choose: Choice | None = None,
    offload: bool = False,
) -> ActivationPlan:
    """Decides which modules are checkpointed.

    Collective: no. The root is never wrapped.

    Args:
        model: the whole model, sharded or not, or its tree.
        settings: `activation_checkpointing`; false to offload alone.
        choose: whether the module of this name is wrapped, where the settings do not say; the
            members of the model's lists of blocks by default.
        offload: `activation_cpu_offload`.

    Returns:
        Names of the modules, and how they get their activations back.

    Raises:
        PlanError: when no module is chosen, one without `forward`, or a part of the settings
            matches nothing; when blocks of a model with a learned prefix are run again.

    Example:
        >>> from torch import nn
        >>> from composer_fsdp2 import plan_activation
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> plan_activation(model, choose=lambda name, module: name == "0").modules
        ('0',)
    """
    spec = settings if isinstance(settings, ActivationSpec) else ActivationSpec()
    tree, key = ModuleTree.read(model), "activation_checkpointing"
    if settings is not False:
        _refuse_learned_prefix(tree)
    selected = select_modules(tree, f"{key}.names", spec.names, spec.classes)
    positions = block_positions(tree)
    by_name, counts = spec.names or spec.classes, (spec.every, spec.target) != (None, None)
    if counts and not positions:
        raise PlanError(
            f"{key}.{'every' if spec.target is None else 'target'} counts blocks, but the model "
            "has no list of blocks of one class. Nothing could be counted. Name the modules in "
            f"{key}.names."
        )

    def is_wanted(name: str, module: nn.Module) -> bool:
        if choose is not None and not by_name and not counts:
            return choose(name, module)
        is_listed = name in (selected if by_name else positions)
        if not is_listed or not counts:
            return is_listed
        block = next((outer for outer in outer_names(name) if outer in positions), None)
        if block is None:
            return False
        index, count = positions[block]
        if spec.target is not None:
            return index in block_ids(spec.target, count)
        return index % (spec.every or 1) == 0

    named = [(n, module) for n, module in tree.modules() if n and not is_wrapper(module)]
    chosen = [(name, module) for name, module in named if is_wanted(name, module)]
    if not chosen:
        raise PlanError(
            "Activation checkpointing is on, but no module was chosen for it. Nothing would be "
            "saved. Give the model an `activation_checkpointing_fn` that returns true for its "
            "blocks, name them in activation_checkpointing.names, or choose FSDP units with "
            "`wrap_policy`."
        )
    empty = [name for name, module in chosen if not has_forward(module)]
    if empty:
        raise PlanError(
            f"'{empty[0]}' was chosen for activation checkpointing but has no forward. There is "
            "nothing to run again. Choose the modules inside it."
        )
    return ActivationPlan(
        modules=tuple(name for name, _ in chosen),
        recompute=settings is not False,
        offload=offload,
        selective=spec.mode == "selective",
        preserve_rng_state=spec.preserve_rng_state,
    )


class ActivationCheckpointing(Transformation[ActivationPlan]):
    """Recomputes or offloads: `activation_checkpointing`, `activation_cpu_offload`."""

    exchanges_modules = True

    def plan(self, facts: ModelFacts) -> ActivationPlan | None:
        """Returns the modules to checkpoint; with `memory_budget` the compiler recomputes."""
        recompute, offload = (
            facts.settings.activation_checkpointing,
            facts.settings.activation_cpu_offload,
        )
        if isinstance(recompute, ActivationSpec) and recompute.memory_budget is not None:
            recompute = False
        if recompute is False and not offload:
            return None
        return plan_activation(facts.tree, recompute, choose=facts.is_checkpointed, offload=offload)

    def apply(self, tree: ModuleTree, plan: ActivationPlan) -> None:
        """Wraps the modules of the plan, and switches key-value caches off."""
        apply_activation(tree, plan)
        switched: list[str] = []
        # A block that runs again in backward would append to the cache of its first run.
        for name, module in tree.modules() if plan.recompute else ():
            config: Any = getattr(module, "config", None)
            # That of MPT's rotary embedding raises a KeyError for all but a few names.
            with contextlib.suppress(Exception):
                for part in (config, *vars(config).values()):  # such as its `text_config`
                    if getattr(part, "use_cache", False) is True:
                        part.use_cache = False
                        switched.append(f"{type(part).__name__} of {name or 'the model'}")
        if switched:
            log.warning(
                "activation_checkpointing: use_cache was true and is now false in %s. A block that "
                "is run again in backward would write into the cache a second time.",
                ", ".join(switched),
            )


def _refuse_learned_prefix(tree: ModuleTree) -> None:
    """Refuses prompts that PEFT learns, as PEFT does beside its own checkpointing."""
    for _, module in tree.modules():
        adapters = getattr(module, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "peft_type", None) in ("PREFIX_TUNING", "CARTRIDGE"):
                raise PlanError(
                    f"The model has an adapter of {type(adapter).__name__}, and "
                    "activation_checkpointing is asked for. Its prefix lies in a key-value cache, "
                    "to which a block that is run again in backward would append once more. Take "
                    "activation_checkpointing out, or use another adapter, as LoraConfig."
                )


def apply_activation(model: nn.Module | ModuleTree, plan: ActivationPlan) -> None:
    """Wraps the modules of the plan in place; a module registered twice is wrapped once.

    A module that has such a wrapper already is left as it is.

    Collective: no. Always non-reentrant. Names in `state_dict()` stay as they are;
    `named_modules()` and `named_parameters()` of outer modules gain `_checkpoint_wrapped_module`.

    Args:
        model: the model of the plan, before it is sharded, or its tree, whose `recall` is entered
            when blocks run again.
        plan: modules to wrap, from `plan_activation`.

    Source:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py

    Example:
        >>> from torch import nn
        >>> from composer_fsdp2 import apply_activation, plan_activation
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> apply_activation(model, plan_activation(model, choose=lambda name, module: name == "0"))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    tree = ModuleTree.read(model)
    kwargs: dict[str, Any] = {"preserve_rng_state": plan.preserve_rng_state}
    if plan.selective:
        # Units inside a module mark what they gather in a profile, which they do in another order
        # when they are run again; newer torch would take that for another computation.
        SAC_IGNORED_OPS.update(PROFILER_MARKS)
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            kwargs["respect_saved_tensors_hooks"] = plan.offload
    if tree.recall is not None:
        base = kwargs.get("context_fn", noop_context_fn)
        kwargs["context_fn"] = functools.partial(_contexts, base, tree.recall)
    unwrapped = set(plan.modules) - {outer.path for outer in tree.paths if is_wrapper(outer.module)}
    wrappers: dict[int, nn.Module] = {}
    for module in (module for name, module in tree.modules() if name in unwrapped):
        # Non-reentrant, which is the default of torch's wrapper.
        inner = checkpoint_wrapper(module, **kwargs) if plan.recompute else module
        wrappers[id(module)] = _Offload(inner) if plan.offload else inner
    for _, parent in tree.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in wrappers:
                parent._modules[name] = wrappers[id(child)]


def _contexts(
    base: Callable[[], tuple[Any, Any]], recall: Recall
) -> tuple[Any, contextlib.AbstractContextManager[None]]:
    """Returns the contexts of a block's forward, and of the time when it runs again."""
    forward, again = base()
    return forward, _both(again, recall())


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Generator[None]:
    with outer, inner:
        yield


_KEEPS = ContextVar("keeps", default=True)


@contextlib.contextmanager
def keeping_nothing() -> Generator[None]:
    """Has `selective` keep no results of operators inside the block. Collective: no.

    For what runs again by itself in backward, or not at all.
    """
    token = _KEEPS.set(False)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def _keep(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    keeps = operator.name() in _EXPENSIVE and _KEEPS.get()
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


_EXPENSIVE = {
    *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution")),
    *(
        f"aten::_scaled_dot_product_{kind}"
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
}
"""operators whose results `selective` keeps"""


class _Offload(OffloadWrapper):
    """Keeps tensors saved for backward in CPU memory; see [Note: what is offloaded]."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        leaving = _Leaving()
        with saved_tensors_hooks(leaving.to_cpu, _from_cpu):
            result = wrapped_module(self)(*args, **kwargs)
        leaving.wait_for_all_but(0)
        return result


_Packed = torch.Tensor | tuple[torch.device, torch.Tensor]
_UNDER_WAY = 3
"""copies in each direction whose memory is taken on the device"""


class _Leaving:
    """Holds the tensors that are being copied to CPU memory in a forward, with their copies."""

    def __init__(self) -> None:
        self._copies: deque[tuple[tuple[Any, ...], Any, torch.Tensor, _Packed]] = deque()

    def to_cpu(self, tensor: torch.Tensor) -> _Packed:
        """Begins to copy a tensor that autograd saves."""
        # A linear layer saves its weight transposed, which is a view of it.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return tensor
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        # torch counts the changes of a tensor in place in its `_version`.
        values = (storage_id(tensor) if is_plain(tensor) else object(), tensor._version, *layout)
        for others, _, _, packed in self._copies:
            if others == values:
                return packed
        if tensor.device.type == "cpu":
            ended, copied = None, tensor.detach().clone()
        else:
            # Strides stay: a product of another layout may be rounded in another way.
            copied = torch.empty_like(tensor, device="cpu", pin_memory=True)
            device = torch.get_device_module(tensor.device)
            stream, _ = _copies(tensor.device)
            stream.wait_stream(device.current_stream(tensor.device))
            with device.stream(stream):
                copied.copy_(tensor.detach(), non_blocking=True)
            ended = stream.record_event()
        self._copies.append((values, ended, tensor, (tensor.device, copied)))
        self.wait_for_all_but(_UNDER_WAY)
        return tensor.device, copied

    def wait_for_all_but(self, number: int) -> None:
        """Gives the memory of tensors away, once the computation has waited for their copies."""
        while len(self._copies) > number:
            _, ended, tensor, _ = self._copies.popleft()
            if ended is not None:
                where = tensor.device
                torch.get_device_module(where).current_stream(where).wait_event(ended)


def _from_cpu(packed: _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    where, copied = packed
    if where.type == "cpu":
        return copied
    device = torch.get_device_module(where)
    (stream, under_way), computing = _copies(where), device.current_stream(where)
    if len(under_way) > _UNDER_WAY:
        # The host has to wait. It takes memory when it asks for a copy, and a stream that waits
        # would only begin the copy later. Copies that were used before are free then.
        under_way.popleft().synchronize()
    under_way.append(computing.record_event())
    with device.stream(stream):
        tensor = copied.to(where, non_blocking=True)
    computing.wait_stream(stream)
    # It is of the copy stream's pool, which could use it again while the computation reads it.
    tensor.record_stream(computing)
    return tensor


@functools.cache
def _copies(where: torch.device) -> tuple[Any, deque[Any]]:
    """Returns the stream of copies, and events: when the computation last asked for tensors.

    One stream for both directions, so that nothing is read before it was written.
    """
    return torch.get_device_module(where).Stream(where), deque()
