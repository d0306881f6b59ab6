"""Attention of models that call the attention interface of transformers."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.parallel.sequence.attention import fused_attention
from composer_fsdp2.parallel.sequence.masks import AttentionCall, MaskRules
from composer_fsdp2.plan.module_tree import attribute_of

__all__ = [
    "FUSED",
    "calls_loss_function",
    "connect",
    "heads_of",
    "mask_rules",
    "uses_interface",
    "why_not",
]

FUSED = ("sdpa", "flash_attention_2")
"""implementations that torch's own attention takes the place of"""

_NAME = "fsdp2_sequence"
"""of the implementation that divides sequences"""

_IMPLEMENTATION = "_attn_implementation"
"""attribute of a configuration"""

_ATTEND = "_fsdp2_attend"
"""attribute of an attention module: what computes it"""

Attend = Callable[[nn.Module, AttentionCall, Any, Any, Any], torch.Tensor | None]
"""computes a call over the whole sequence; `None` where the sequence is not divided"""


def uses_interface(module: nn.Module) -> bool:
    """Whether a module is an attention that calls what transformers' interface names."""
    code = getattr(_plain_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def calls_loss_function(model: nn.Module) -> bool:
    """Whether a model computes its loss by its attribute `loss_function`."""
    code = getattr(_plain_forward(model), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def heads_of(module: Any) -> tuple[int, int]:
    """Returns the heads of queries, and of keys and values."""
    heads = module.config.num_attention_heads
    return heads, getattr(module.config, "num_key_value_heads", None) or heads


def why_not(name: str, module: Any) -> str | None:
    """Returns why an attention cannot see a divided sequence, `None` where it can."""
    implementation = getattr(module.config, _IMPLEMENTATION)
    if implementation not in (*FUSED, "eager"):
        return f"'{name}' computes with {implementation} (write attn_implementation: sdpa)"
    if attribute_of(module, "is_causal") is False or attribute_of(module, "is_cross_attention"):
        return f"'{name}' sees later tokens, or another sequence"
    if (size := getattr(module.config, "attention_chunk_size", None)) is not None:
        return f"'{name}' sees chunks of {size} tokens alone (attention_chunk_size)"
    return None


def mask_rules(modules: Mapping[str, nn.Module], attention: str, device: torch.device) -> MaskRules:
    """Returns what a model's masks do that its attention is not told. Collective: no.

    Args:
        modules: of the model, by name.
        attention: the name of one that computes attention.
        device: of batches. On some, models take masks otherwise.
    """
    implementation = getattr(modules[attention].config, _IMPLEMENTATION)
    if implementation == "flash_attention_2":
        return MaskRules(unseeing="zero", takes_masks=False, documents="without padding")
    for name, module in modules.items():
        make: Any = getattr(type(module), _MAKES_MASKS, None)
        if make is not None and attention.startswith(f"{name}." if name else ""):
            return _tried_rules(functools.partial(make, module), module, device)
    is_eager = implementation == "eager"
    if importlib.util.find_spec("transformers.masking_utils") is not None:
        masks: Any = importlib.import_module("transformers.masking_utils")
        return MaskRules(
            unseeing="average" if is_eager else "zero",
            adds_masks=is_eager,
            documents="without mask" if hasattr(masks, _FINDS_DOCUMENTS) else "never",
        )
    if is_eager:  # has an order of its own beside the mask
        return MaskRules(unseeing="unknown", takes_masks=False)
    return MaskRules(unseeing="average" if device.type == "cpu" else "all", takes_masks=False)


_MAKES_MASKS = "_update_causal_mask"
"""method of a model that makes its masks, where transformers has no module for them"""


_FINDS_DOCUMENTS = "find_packed_sequence_indices"
"""function of newer transformers, which looks for positions that begin again"""


def _tried_rules(make: Callable[..., Any], model: Any, device: torch.device) -> MaskRules:
    """Asks for the masks of the last queries of a sequence whose first token is padding."""

    def seen_by(query: int, length: int) -> torch.Tensor:
        is_real = torch.ones(1, length, dtype=torch.long, device=device)
        is_real[:, 0] = 0
        like = torch.zeros(1, 1, 1, device=device)
        at = torch.tensor([query], device=device)
        return make(is_real, like, at, None, False)[0, 0, 0] == 0

    window, size = None, getattr(model.config, "sliding_window", None)
    if size is not None:
        length = size + 8
        count = int(seen_by(length - 1, length).sum())
        window = count if count < length - 1 else None
    return MaskRules(
        window=window,
        adds_masks=getattr(model.config, _IMPLEMENTATION) == "eager",
        narrows_masks=window is None,
        unseeing="all" if bool(seen_by(0, 3).all()) else "average",
    )


def connect(module: Any, attend: Attend) -> None:
    """Has a module compute its attention over the whole sequence. Collective: no."""
    implementation = getattr(module.config, _IMPLEMENTATION)
    namespace = vars(sys.modules[_plain_forward(module).__module__])
    known = namespace["ALL_ATTENTION_FUNCTIONS"]
    known.register(_NAME, _interface)
    capped = implementation != "sdpa" and getattr(module.config, "attn_logit_softcapping", None)
    if implementation == "eager" or capped:
        function, is_fused = namespace["eager_attention_forward"], False
    else:
        function, is_fused = known[implementation], True
    setattr(module, _ATTEND, functools.partial(_compute, attend, function, is_fused))
    # The model's own configuration stays: its masks and its checkpoints depend on it.
    module.config = copy.copy(module.config)
    setattr(module.config, _IMPLEMENTATION, _NAME)
    module.config.use_cache = False


def _plain_forward(module: nn.Module) -> Any:
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _interface(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(module, _ATTEND)(module, *args, **kwargs)


def _compute(
    attend: Attend,
    function: Callable[..., Any],
    is_fused: bool,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    if is_fused:
        compute = functools.partial(
            fused_attention, dropout=kwargs.get("dropout", 0.0), scale=kwargs.get("scaling")
        )
    else:
        compute = functools.partial(_eager, function, module, kwargs)
    call = AttentionCall(
        compute=compute, window=kwargs.get("sliding_window"), needs_mask=not is_fused
    )
    out = attend(module, call, query, key, value)
    if out is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    return out, None


def _eager(
    function: Callable[..., Any],
    module: Any,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:
        module = _WithGroups(module, groups)
    return function(module, query, key, value, mask, **kwargs)[0]


class _WithGroups:
    """A module as its function would see one that repeats heads less often."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
