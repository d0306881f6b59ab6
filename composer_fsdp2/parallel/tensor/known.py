"""Says how single layers and known blocks of attention and MLP are divided, by names and numbers.

[Note: adapters] An adapter adds `up(down(x))` to the output of a layer. Beside a layer divided by
columns, `down` is replicated and `up` is divided by columns, as the layer is. Beside a layer
divided by rows, `down` is divided by rows and `up` is replicated. So the added term is divided like
the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of

__all__ = [
    "Cut",
    "KnownBlock",
    "adapter_cuts",
    "block_with",
    "has_weight",
    "is_adapted",
    "is_conv1d",
    "is_linear",
    "known_layers",
    "sizes_of_linear",
    "unknown_adapter",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one layer is divided between the ranks of a tensor group."""

    kind: Literal["columns", "rows", "embedding", "norm"]
    """`columns`: each rank computes a part of the output. `rows`: each rank has a part of the
    input, and outputs are added up. `embedding`: each rank has a part of the vocabulary. `norm`:
    whole on each rank, which gives it its own heads; gradients are added up."""
    gathers: bool = False
    """whether the ranks exchange their parts of the output"""
    blocks: tuple[int, ...] = ()
    """sizes of the blocks of a fused projection, one after the other; each is cut by itself"""

    def dim_of(self, attribute: str, module: nn.Module) -> int | None:
        """Returns the dimension of a parameter that is divided; `None` if it is replicated.

        Args:
            attribute: the name of the parameter in the layer.
            module: the layer, which says how its weight is stored.
        """
        if self.kind == "norm" or (self.kind == "rows" and attribute == "bias"):
            return None
        if self.kind == "embedding" or attribute == "bias":
            return 0
        # The weight of a linear layer is (output, input), but for Conv1D.
        output, inside = (1, 0) if is_conv1d(module) else (0, 1)
        return output if self.kind == "columns" else inside

    def __str__(self) -> str:
        fused = f" of {' + '.join(map(str, self.blocks))}" if self.blocks else ""
        return f"{self.kind}{fused}{', gathered' if self.gathers else ''}"


_COLUMNS, _ROWS = Cut(kind="columns"), Cut(kind="rows")


# --- One layer ---


def is_adapted(module: nn.Module) -> bool:
    """Says whether a module is PEFT's linear layer with low-rank adapters, without importing it."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def _layer_of(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module


def is_conv1d(module: nn.Module) -> bool:
    """Says whether a module is transformers' linear layer, whose weight is (input, output)."""
    module = _layer_of(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Says whether a module is a linear layer with torch's forward; it may have adapters."""
    module = _layer_of(module)
    # A class with a forward of its own may do more than multiply, as quantised layers do.
    is_plain = type(module).forward is nn.Linear.forward and isinstance(module, nn.Linear)
    return is_plain or is_conv1d(module)


def has_weight(module: nn.Module) -> bool:
    """Says whether the matrix of a linear layer is a parameter, and not computed from others."""
    return _layer_of(module)._parameters.get("weight") is not None


def sizes_of_linear(module: nn.Module) -> tuple[int, int]:
    """Returns the sizes of the input and the output of a linear layer."""
    first, second = _layer_of(module).get_parameter("weight").shape
    return (first, second) if is_conv1d(module) else (second, first)


# --- Adapters ---


def adapter_cuts(module: nn.Module, cut: Cut) -> Iterator[tuple[str, Cut | None]]:
    """Yields cuts of a layer and its adapters, `None` if replicated; see [Note: adapters]."""
    yield "base_layer", cut
    columns = cut.kind == "columns"
    up = Cut(kind="columns", gathers=cut.gathers, blocks=cut.blocks)
    for name in module.get_submodule("lora_A")._modules:
        yield f"lora_A.{name}", None if columns else _ROWS
    for name in module.get_submodule("lora_B")._modules:
        yield f"lora_B.{name}", up if columns else None


def block_with(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, bool]:
    """Returns the attention or MLP that a layer is in, and whether it belongs to an adapter."""
    parent, _, child = name.rpartition(".")
    outer = parent.rpartition(".")[0]
    if parent and is_adapted(modules[parent]):
        return outer, child != "base_layer"
    if outer and is_adapted(modules[outer]):
        return outer.rpartition(".")[0], True
    return parent, False


def unknown_adapter(tree: ModuleTree) -> str | None:
    """Returns why an adapter of a model does not go with divided layers; `None` if all do."""
    adapted = {name: module for name, module in tree.modules() if is_adapted(module)}
    for ref in tree.params:
        if "lora_" in ref.name:
            layer = ref.name.partition(".lora_")[0]
            if layer not in adapted or ".lora_magnitude" in ref.name:
                return f"'{ref.name}' is of an adapter that is not a plain LoRA of a linear layer"
    for name, module in adapted.items():
        if any(part.p > 0 for part in module.modules() if isinstance(part, nn.Dropout)):
            return f"adapters of '{name}' have dropout, whose numbers ranks would not draw alike"
    return None


# --- Attention and MLP ---


@dataclass(slots=True, kw_only=True)
class KnownBlock:
    """One attention or MLP."""

    cuts: dict[str, Cut]
    """cut of each layer, by the name of the child"""
    heads: dict[str, int] = field(default_factory=dict[str, int])
    """kind of heads -> number of heads, which the degree has to divide"""
    head_size: int | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """attributes that are divided by the degree; `config.` before a name is the module's own copy
    of its configuration"""


_MPT = ("Wqkv", "out_proj", "n_heads", "kv_n_heads", ("d_model", "n_heads", "kv_n_heads"))
_FUSED: Mapping[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    # Splits by `split_size`, the width of the model:
    # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/gpt2/modeling_gpt2.py#L293
    "GPT2Attention": ("c_attn", "c_proj", "num_heads", "num_heads", ("num_heads", "split_size")),
    "GroupedQueryAttention": _MPT,
    "MultiheadAttention": _MPT,
    "MultiQueryAttention": _MPT,
    # Splits by the numbers of its configuration:
    # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/phi3/modeling_phi3.py#L188
    "Phi3Attention": (
        *("qkv_proj", "o_proj", "config.num_attention_heads", "num_key_value_heads"),
        ("config.num_attention_heads", "num_key_value_heads"),
    ),
}
"""class of an attention with one projection for query, key and value -> the names of the
projection, of the output, of the numbers of heads, and the attributes that its forward splits by"""
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
"""attributes by which an attention shapes the output of its heads"""


def known_layers(name: str, module: nn.Module) -> KnownBlock | None:
    """Returns how a known attention or MLP is divided; `None` for another module.

    Raises:
        PlanError: a known module has a part that is not known.
    """
    children = {child: part for child, part in module._modules.items() if part is not None}
    linear = {child for child, part in children.items() if is_linear(part)}
    if type(module).__name__ in _FUSED and _FUSED[type(module).__name__][0] in children:
        return _fused_attention(name, module)
    for names in _SEPARATE:
        # Gemma 4 and 3n have layers whose values are their keys, or both those of an earlier layer:
        # https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gemma4/modeling_gemma4.py#L1171
        if attribute_of(module, "is_kv_shared_layer") is True:
            names = (names[0], names[-1])
        elif attribute_of(module, "use_alternative_attention") is True:
            names = (*names[:2], names[-1])
        if linear.issuperset(names) and isinstance(attribute_of(module, "head_dim"), int):
            return _separate_attention(name, module, names)
    if type(module).__name__ in _FUSED_MLPS and linear.issuperset(_FUSED_MLP):
        fused, output = _FUSED_MLP
        half = sizes_of_linear(children[fused])[1] // 2
        return KnownBlock(cuts={fused: Cut(kind="columns", blocks=(half, half)), output: _ROWS})
    for names in _MLPS:
        others = (part for child, part in children.items() if child not in names)
        if linear.issuperset(names) and not any(any(part.parameters()) for part in others):
            if attribute_of(module, "activation_sparsity"):  # Gemma 3n's first layers
                raise PlanError(_unusual(name, "its activation_sparsity looks at all columns"))
            return KnownBlock(cuts=dict.fromkeys(names[:-1], _COLUMNS) | {names[-1]: _ROWS})
    return None


def _fused_attention(name: str, module: nn.Module) -> KnownBlock:
    projection, output, query_heads, key_heads, counts = _FUSED[type(module).__name__]
    for key in (projection, output):
        layer = module._modules[key]
        if layer is None or not is_linear(layer):
            raise PlanError(_unusual(name, f"its {key} is a {type(layer).__name__}"))
    # Attentions of these names may compute with more than their own heads.
    if attribute_of(module, "is_cross_attention") is True:
        raise PlanError(_unusual(name, "it attends to another sequence"))
    if attribute_of(module, "reuse_kv_layer_idx") is not None:
        raise PlanError(_unusual(name, "it uses keys and values of another layer"))
    if attribute_of(module, "qk_ln") is True:
        raise PlanError(_unusual(name, "its qk_ln computes with all heads at once"))
    numbers: dict[str, int] = {}
    for path in (query_heads, key_heads, "head_dim", *counts):
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if type(value) is not int:  # another class may have the name
            raise PlanError(_unusual(name, f"its '{path}' is {value!r}, not a number"))
        numbers[path] = value
    heads, kv_heads, size = (numbers[key] for key in (query_heads, key_heads, "head_dim"))
    blocks = (heads * size, kv_heads * size, kv_heads * size)
    width = sizes_of_linear(module.get_submodule(projection))[1]
    if width != sum(blocks):
        raise PlanError(_unusual(name, f"its {projection} is {width} wide, not {blocks}"))
    return KnownBlock(
        cuts={projection: Cut(kind="columns", blocks=blocks), output: _ROWS},
        heads={"query heads": heads, "key and value heads": kv_heads},
        head_size=size,
        counts={key: numbers[key] for key in counts},
    )


def _separate_attention(name: str, module: nn.Module, names: Sequence[str]) -> KnownBlock:
    *projections, output = names
    size = attribute_of(module, "head_dim")
    if attribute_of(module, "reuse_kv_x_layer_idx") is not None:
        raise PlanError(_unusual(name, "it uses the input of another layer"))
    widths = [sizes_of_linear(module.get_submodule(child))[1] for child in projections]
    for child, width in zip(projections, widths, strict=True):
        if width % size:
            raise PlanError(_unusual(name, f"its {child} is {width} wide, and a head {size}"))
    query, *others = widths
    if len({*others}) > 1:
        raise PlanError(_unusual(name, "its keys and values have different sizes"))
    heads = {"query heads": query // size}
    if others:
        heads["key and value heads"] = others[0] // size
    # Classes have some of these attributes, and shape by them. An attribute with another value does
    # not count these heads.
    counted = dict.fromkeys(_COUNTS, (*heads.values(),)) | dict.fromkeys(_WIDTHS, (query,))
    return KnownBlock(
        cuts=dict.fromkeys(projections, _COLUMNS) | {output: _ROWS},
        heads=heads,
        head_size=size,
        counts={
            attribute: vars(module)[attribute]
            for attribute, numbers in counted.items()
            if vars(module).get(attribute) in numbers
        },
    )


def _unusual(name: str, why: str) -> str:
    return (
        f"'{name}' cannot be divided between ranks: {why}. Its parts would compute another "
        "model. Keep it whole with tensor_parallel.layer_plan: "
        f"{{'{name}.*': whole}}, or leave tensor parallelism out."
    )
