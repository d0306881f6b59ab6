"""Attention and MLP blocks that are known: their layers, and what in them counts heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.cuts import Cut, is_linear, rows_and_columns
from composer_fsdp2.plan.module_tree import attribute_of

__all__ = ["KnownBlock", "known_block"]

_COLUMNS, _ROWS = Cut(kind="columns"), Cut(kind="rows")


@dataclass(slots=True, kw_only=True)
class KnownBlock:
    """One attention or MLP."""

    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])
    """by the name of the child"""
    heads: dict[str, int] = field(default_factory=dict[str, int])
    """what is counted -> how many there are; each number must be divisible"""
    head_size: int | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """attributes that are divided by the degree; `config.` before a name is the module's own copy
    of its configuration"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """An attention whose query, key and value are one projection."""

    projection: str
    output: str
    heads: str
    kv_heads: str
    counts: tuple[str, ...]
    """what its forward splits by"""


_MPT = _Fused(
    projection="Wqkv",
    output="out_proj",
    heads="n_heads",
    kv_heads="kv_n_heads",
    counts=("d_model", "n_heads", "kv_n_heads"),
)
_FUSED: Mapping[str, _Fused] = {
    "GPT2Attention": _Fused(
        projection="c_attn",
        output="c_proj",
        heads="num_heads",
        kv_heads="num_heads",
        counts=("num_heads", "split_size"),
    ),
    "GroupedQueryAttention": _MPT,
    "MultiheadAttention": _MPT,
    "MultiQueryAttention": _MPT,
    "Phi3Attention": _Fused(
        projection="qkv_proj",
        output="o_proj",
        heads="config.num_attention_heads",
        kv_heads="num_key_value_heads",
        counts=("config.num_attention_heads", "num_key_value_heads"),
    ),
}
_HEAD_SIZE = "head_dim"
_SEPARATE = (("q_proj", "k_proj", "v_proj", "o_proj"), ("Wq", "Wk", "Wv", "out_proj"))
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("w1", "w3", "w2"),
)
"""names of the layers; the last one is the output"""
_FUSED_MLP = ("gate_up_proj", "down_proj")
_FUSED_MLPS = {"Phi3MLP", "GlmMLP", "Glm4MLP"}
_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "kv_n_heads")
_WIDTHS = ("hidden_size", "embed_dim")
"""by which an attention shapes what its heads give"""


def known_block(name: str, module: nn.Module) -> KnownBlock | None:
    """Returns how a module is divided if it is an attention or MLP that is known.

    Collective: no.

    Raises:
        PlanError: it is known, and something in it is not.
    """
    children = dict(module._modules)
    fused = _FUSED.get(type(module).__name__)
    if fused is not None and children.get(fused.projection) is not None:
        return _fused_attention(name, module, fused)
    for names in _SEPARATE:
        if _all_linear(children, names) and isinstance(attribute_of(module, "head_dim"), int):
            return _separate_attention(name, module, names)
    if type(module).__name__ in _FUSED_MLPS and _all_linear(children, _FUSED_MLP):
        return _fused_mlp(module)
    for names in _MLPS:
        if _all_linear(children, names) and not _other_children(children, names):
            cuts = dict.fromkeys(names[:-1], _COLUMNS) | {names[-1]: _ROWS}
            return KnownBlock(cuts=cuts)
    return None


def _all_linear(children: Mapping[str, nn.Module | None], names: tuple[str, ...]) -> bool:
    found = [children.get(name) for name in names]
    return all(module is not None and is_linear(module) for module in found)


def _other_children(
    children: Mapping[str, nn.Module | None], names: tuple[str, ...]
) -> list[nn.Module]:
    others = (child for name, child in children.items() if name not in names)
    return [child for child in others if child is not None and any(child.parameters())]


def _fused_attention(name: str, module: nn.Module, fused: _Fused) -> KnownBlock:
    layers = {key: module._modules[key] for key in (fused.projection, fused.output)}
    for key, layer in layers.items():
        if layer is None or not is_linear(layer):
            raise PlanError(_unusual(name, f"its {key} is a {type(layer).__name__}"))
    if attribute_of(module, "is_cross_attention") is True:
        raise PlanError(_unusual(name, "it attends to another sequence"))
    if attribute_of(module, "reuse_kv_layer_idx") is not None:
        raise PlanError(_unusual(name, "it uses keys and values of another layer"))
    if attribute_of(module, "qk_ln") is True:
        raise PlanError(_unusual(name, "its qk_ln computes with all heads at once"))
    numbers = _numbers(name, module, (fused.heads, fused.kv_heads, _HEAD_SIZE, *fused.counts))
    heads, kv_heads, size = (numbers[key] for key in (fused.heads, fused.kv_heads, _HEAD_SIZE))
    blocks = (heads * size, kv_heads * size, kv_heads * size)
    block = KnownBlock(
        cuts={fused.projection: Cut(kind="columns", blocks=blocks), fused.output: _ROWS},
        heads={"query heads": heads, "key and value heads": kv_heads},
        head_size=size,
        counts={key: numbers[key] for key in fused.counts},
    )
    width = rows_and_columns(module.get_submodule(fused.projection))[1]
    if width != sum(blocks):
        raise PlanError(_unusual(name, f"its {fused.projection} is {width} wide, not {blocks}"))
    return block


def _separate_attention(name: str, module: nn.Module, names: tuple[str, ...]) -> KnownBlock:
    query, key, value, output = names
    size = attribute_of(module, "head_dim")
    if attribute_of(module, "reuse_kv_x_layer_idx") is not None:
        raise PlanError(_unusual(name, "it uses the input of another layer"))
    widths = {child: rows_and_columns(module.get_submodule(child))[1] for child in names[:3]}
    for child, width in widths.items():
        if width % size:
            raise PlanError(_unusual(name, f"its {child} is {width} wide, and a head {size}"))
    heads, kv_heads = widths[query] // size, widths[key] // size
    if widths[key] != widths[value]:
        raise PlanError(_unusual(name, "its keys and values have different sizes"))
    counted = dict.fromkeys(_COUNTS, (heads, kv_heads)) | dict.fromkeys(_WIDTHS, (heads * size,))
    return KnownBlock(
        cuts={query: _COLUMNS, key: _COLUMNS, value: _COLUMNS, output: _ROWS},
        heads={"query heads": heads, "key and value heads": kv_heads},
        head_size=size,
        counts={
            attribute: vars(module)[attribute]
            for attribute, numbers in counted.items()
            if vars(module).get(attribute) in numbers
        },
    )


def _fused_mlp(module: nn.Module) -> KnownBlock:
    fused, output = _FUSED_MLP
    half = rows_and_columns(module.get_submodule(fused))[1] // 2
    return KnownBlock(cuts={fused: Cut(kind="columns", blocks=(half, half)), output: _ROWS})


def _numbers(name: str, module: nn.Module, paths: Iterable[str]) -> dict[str, int]:
    """Attributes that say how the heads lie. Another class may have the name and not them."""
    found: dict[str, int] = {}
    for path in paths:
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if type(value) is not int:
            raise PlanError(_unusual(name, f"its '{path}' is {value!r}, not a number"))
        found[path] = value
    return found


def _unusual(name: str, why: str) -> str:
    return (
        f"'{name}' cannot be divided between ranks: {why}. Its parts would compute another "
        "model. Keep it whole with tensor_parallel.layer_plan: "
        f"{{'{name}.*': whole}}, or leave tensor parallelism out."
    )
