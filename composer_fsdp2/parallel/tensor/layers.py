"""Decides which layers are divided between the ranks of a tensor group. Changes nothing.

[Note: which plan] A layer is divided as the user writes. Otherwise as its attention or MLP is, if
that is known, then as Hugging Face's plan for the model says, then, for a head called `lm_head`, by
the vocabulary. A plan says how outputs add up, so modules between two divided layers must be known
as well: they see one rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from composer_fsdp2.config.parallel import TensorSpec
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.tensor.known import (
    Cut,
    KnownBlock,
    adapter_cuts,
    block_with,
    has_weight,
    is_adapted,
    is_conv1d,
    is_linear,
    known_layers,
    sizes_of_linear,
)
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of, tied_groups
from composer_fsdp2.plan.patterns import matcher, unmatched_names
from composer_fsdp2.text import child_name, divisors

__all__ = ["LayerPlan", "plan_layers"]

_STYLES: Mapping[str, Cut | None] = {
    "colwise": Cut(kind="columns"),
    "colwise_rep": Cut(kind="columns", gathers=True),
    "rowwise": Cut(kind="rows"),
    "whole": None,
}
_RENAMED = {"colwise_gather_output": "colwise_rep", "embedding_rowwise": "whole"}
"""styles of newer transformers; an embedding is divided with a head tied to it, or not at all"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """How each divided layer is divided."""

    degree: int
    cuts: Mapping[str, Cut]
    """cut of each layer, by name, in the order of the model"""
    padding: Mapping[str, int]
    """name of a layer -> rows that are added to each rank's part; see [Note: padding]"""
    counts: Mapping[str, Mapping[str, int]]
    """name of a module -> attributes that are divided by the degree -> their value in the model"""
    whole: tuple[str, ...] = ()
    """layers that would be divided, if their sizes allowed it"""

    def __str__(self) -> str:
        added = {name: f", {rows} rows of padding" for name, rows in self.padding.items()}
        layers = ", ".join(
            f"{name} ({cut}{added.get(name, '')})" for name, cut in self.cuts.items()
        )
        kept = f"; whole: {', '.join(self.whole)}" if self.whole else ""
        return f"tensor parallelism of {self.degree} ranks: {layers}{kept}"


@dataclass(slots=True, eq=False)
class _Search:
    tree: ModuleTree
    spec: TensorSpec
    modules: dict[str, nn.Module]
    styles: dict[str, str]
    blocks: dict[str, KnownBlock] = field(default_factory=dict[str, KnownBlock])
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])
    whole: list[str] = field(default_factory=list[str])
    adapter_parts: set[str] = field(default_factory=set[str])
    """parts of adapters that are replicated"""


def plan_layers(
    tree: ModuleTree, spec: TensorSpec, shard: int, expert_modules: Sequence[str] = ()
) -> LayerPlan:
    """Decides which layers are divided; see [Note: which plan].

    Collective: no.

    Args:
        tree: the model, before anything is changed.
        spec: `tensor_parallel`.
        shard: ranks over which FSDP2 shards each tensor rank's part.
        expert_modules: names of modules whose experts ranks share, which are not divided.

    Raises:
        PlanError: for a model in which nothing is known, sizes that do not divide, and layers
            whose neighbours are not known.
    """
    inside = tuple(f"{name}." for name in expert_modules)
    modules = {n: module for n, module in tree.modules() if not f"{n}.".startswith(inside)}
    search = _Search(tree, spec, modules, _written_styles(tree, spec))
    for name, style in search.styles.items():
        if name not in modules and style != "whole":
            raise PlanError(
                f"tensor_parallel.layer_plan gives '{name}' the style {style}, and it belongs to "
                "an expert beside expert_parallel, where each expert is whole on its ranks. It "
                "would have no effect. Take experts out of the layer_plan."
            )
    _find_cuts(search)
    _leave_heads_whole(search)
    if not search.cuts:
        kinds = sorted({type(module).__name__ for module in search.modules.values()})
        raise PlanError(
            f"tensor_parallel has degree {spec.degree}, and nothing in the model is known to be "
            "divisible. Every rank of a group would compute the same. Write the layers in "
            "tensor_parallel.layer_plan ({'*.up': colwise, '*.down': rowwise}), or leave it out. "
            f"Classes in this model: {', '.join(kinds)}."
        )
    # Blocks of which the user keeps every layer whole are no blocks any more.
    search.blocks = {
        name: block
        for name, block in search.blocks.items()
        if any(child_name(name, child) in search.cuts for child in block.cuts)
    }
    _check_blocks(search)
    # Layers with adapters make way for the layers in them; see [Note: adapters].
    for name in [name for name in search.cuts if is_adapted(search.modules[name])]:
        for child, cut in adapter_cuts(search.modules[name], search.cuts.pop(name)):
            if cut is None:
                search.adapter_parts.add(child_name(name, child))
            else:
                search.cuts[child_name(name, child)] = cut
    _check_cuts(search)
    return LayerPlan(
        degree=spec.degree,
        cuts={name: search.cuts[name] for name in search.modules if name in search.cuts},
        padding={
            name: padding
            for name, cut in search.cuts.items()
            if (padding := -_shared_rows(search.modules[name], cut) // spec.degree % shard)
        },
        counts={name: block.counts for name, block in search.blocks.items() if block.counts},
        whole=tuple(search.whole),
    )


def _written_styles(tree: ModuleTree, spec: TensorSpec) -> dict[str, str]:
    """Returns the user's style for each layer; the last pattern that matches counts."""
    patterns = [pattern for pattern, _ in spec.layer_plan]
    if problems := list(unmatched_names(tree, patterns, "tensor_parallel.layer_plan")):
        raise PlanError("\n".join(problems))
    styles: dict[str, str] = {}
    for pattern, style in spec.layer_plan:
        matches = matcher(pattern)
        named = [name for name, module in tree.modules() if matches(name) and is_linear(module)]
        if not named and style != "whole":
            raise PlanError(
                f"tensor_parallel.layer_plan holds '{pattern}': {style}, which matches no linear "
                "layer. It is not known how another module is divided. Write the names of layers."
            )
        styles.update(dict.fromkeys(named, style))
    return styles


def _find_cuts(search: _Search) -> None:
    """Fills in the cuts, in the order of [Note: which plan], the weakest first."""
    linear = [name for name, module in search.modules.items() if is_linear(module)]
    for name in linear:
        if search.styles.get(name) != "whole" and not has_weight(search.modules[name]):
            raise PlanError(
                f"The weight of '{name}' is computed from other parameters in every forward, as "
                "weight_norm and spectral_norm do. Tensor parallelism divides a weight once, and "
                "what is computed anew would be whole. Keep it, and the layers it works with, "
                f"whole in tensor_parallel.layer_plan ({{'{name}': whole}}), or leave one of the "
                "two out."
            )
    # Norms and the like have styles too, which a rank computes whole.
    styled = ((name, _STYLES[style]) for name, style in _styles_of_model(search).items())
    search.cuts.update(
        (name, cut) for name, cut in styled if cut is not None and is_linear(search.modules[name])
    )
    for name, module in search.modules.items():
        start = f"{name}."
        inside = [n for n in linear if n.startswith(start)] if search.styles else []
        kept_whole = inside and all(search.styles.get(layer) == "whole" for layer in inside)
        if not kept_whole and (block := known_layers(name, module)) is not None:
            search.blocks[name] = block
            search.cuts.update({child_name(name, child): cut for child, cut in block.cuts.items()})
            # Norms of single heads: weights are replicated, gradients those of the rank's heads.
            norms = (
                child
                for child, part in module._modules.items()
                if part is not None and child not in block.cuts and block.head_size is not None
                if (params := list(part.parameters())) and not part._modules
                if all(param.shape == (block.head_size,) for param in params)
            )
            search.cuts.update((child_name(name, child), Cut(kind="norm")) for child in norms)
        elif name.rpartition(".")[2] == "lm_head" and name in linear:
            search.cuts.setdefault(name, Cut(kind="columns", gathers=True))
    for name, style in search.styles.items():
        cut, current = _STYLES[style], search.cuts.get(name)
        if cut is None:
            search.cuts.pop(name, None)
        elif current is None or (current.kind, current.gathers) != (cut.kind, cut.gathers):
            search.cuts[name] = cut  # without the blocks that a known cut has


def _styles_of_model(search: _Search) -> dict[str, str]:
    """Returns styles of Hugging Face's plans by full names.

    Raises:
        PlanError: for a style that is not known here.
    """
    styles: dict[str, str] = {}
    for name, module in search.modules.items():
        for pattern, written in _plan_of(name, module):
            style, matches = _RENAMED.get(written, written), matcher(pattern)
            named = [n for n in search.modules if matches(n)]
            if style in _STYLES:
                styles.update(dict.fromkeys(named, style))
                continue
            parents = {n.rpartition(".")[0] for n in named}
            if not all(known_layers(parent, search.modules[parent]) for parent in parents):
                raise PlanError(
                    f"The tensor plan of {type(module).__name__} gives '{pattern}' the style "
                    f"'{written}', which keeps plain tensors with a division of its own. Their "
                    "checkpoints and gradients would be those of one rank. Leave tensor "
                    "parallelism out for this model, or have ranks hold whole experts between "
                    "them: write ep: {degree: 2} beside tp."
                )
    return styles


def _plan_of(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields patterns with full names.

    The plan of a class is for the model, that of its configuration for the base model in it.

    Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L1917
    """
    prefix = attribute_of(module, "base_model_prefix")
    if not isinstance(prefix, str):
        return
    # `vars`, because models inherit the attribute, and get one of their own in `post_init`.
    class_plan: Any = vars(type(module)).get("_tp_plan") or {}
    yield from ((child_name(name, key), style) for key, style in class_plan.items())
    base: Any = getattr(attribute_of(module, "config"), "base_model_tp_plan", None) or {}
    if module._modules.get(prefix) is not None:
        name = child_name(name, prefix)
    elif not any(key.partition(".")[0] in module._modules for key in base):
        return
    yield from ((child_name(name, key), style) for key, style in base.items())


# --- What the sizes allow ---


def _leave_heads_whole(search: _Search) -> None:
    """Leaves heads undivided whose size does not allow it; divides embeddings tied to others."""
    # A head that shares its weight with the embedding is divided only together with it.
    # Names of a module that is registered twice are those of its first place.
    ties = [
        [name for name in group if name.rpartition(".")[0] in search.modules]
        for group in tied_groups(search.tree)
    ]
    tied = {name: group for group in ties for name in group}
    for name in [n for n, cut in search.cuts.items() if cut.gathers and n not in search.styles]:
        module = search.modules[name]
        partners = [n.rpartition(".")[0] for n in tied.get(f"{name}.weight", ())]
        others = [partner for partner in partners if partner != name]
        fits = (
            not is_conv1d(module)
            and not is_adapted(module)
            and sizes_of_linear(module)[1] % search.spec.degree == 0
        )
        # The lookup of a rank's own words knows plain ones alone: see `_look_up_own_rows`.
        if fits and all(
            type(embedding) is nn.Embedding
            and not (embedding.scale_grad_by_freq or embedding.sparse)
            and (embedding.padding_idx, embedding.max_norm) == (None, None)
            for embedding in map(search.modules.__getitem__, others)
        ):
            search.cuts.update(dict.fromkeys(others, Cut(kind="embedding")))
        else:
            del search.cuts[name]
            search.whole.append(name)
    kinds: dict[str, str] = {}
    for name, cut in search.cuts.items():
        # Adapters make way later, so the layer still has its name from outside.
        layer = child_name(name, "base_layer") if is_adapted(search.modules[name]) else name
        kinds[child_name(layer, "weight")] = cut.kind
    for group in ties:
        kinds_of_group = {kinds.get(name, "") for name in group}
        # A head by columns and an embedding by words have the same rows on each rank.
        if len(kinds_of_group) > 1 and kinds_of_group != {"columns", "embedding"}:
            raise PlanError(
                f"{', '.join(repr(name) for name in group)} are one weight, and tensor parallelism "
                "would divide it differently in each place. That would untie them. Keep their "
                "layers whole in tensor_parallel.layer_plan."
            )


def _check_blocks(search: _Search) -> None:
    """Refuses blocks of which a part is not divided, and heads that ranks cannot share."""
    degree = search.spec.degree
    for name, block in search.blocks.items():
        missing = [child for child in block.cuts if child_name(name, child) not in search.cuts]
        if missing:
            raise PlanError(
                f"tensor_parallel.layer_plan keeps {', '.join(missing)} of '{name}' whole and "
                "divides the rest. The parts would not fit together. Divide all of them, or none."
            )
        for kind, count in block.heads.items():
            if count % degree:
                raise PlanError(
                    f"'{name}' has {count} {kind}, which {degree} ranks cannot share: "
                    f"tensor_parallel.degree must divide them. Use one of "
                    f"{divisors(count)}, or keep it whole with "
                    f"tensor_parallel.layer_plan: {{'{name}.*': whole}}."
                )
    # In some models, layers use keys and values of an earlier one, with its heads.
    sharing = [
        name
        for name, module in search.modules.items()
        if attribute_of(module, "is_kv_shared_layer") is not None
    ]
    kept = [name for name in sharing if name not in search.blocks]
    if (
        kept
        and len(kept) < len(sharing)
        and any(attribute_of(search.modules[name], "is_kv_shared_layer") for name in sharing)
    ):
        raise PlanError(
            f"tensor_parallel.layer_plan keeps '{kept[0]}' whole and divides attention of other "
            "layers, and in this model some layers use keys and values of others. They would have "
            "other heads. Keep the attention of all layers whole, or of none."
        )


def _check_cuts(search: _Search) -> None:
    """Refuses unknown parts between divided layers, and sizes that ranks cannot share."""
    kinds_of: dict[str, set[str]] = {}
    for name, cut in search.cuts.items():
        if cut.kind in ("columns", "rows") and not cut.gathers:
            block, is_adapter = block_with(name, search.modules)
            kinds_of.setdefault(block, set()).update(() if is_adapter else (cut.kind,))
    covered = search.cuts.keys() | search.adapter_parts
    uncovered = [
        ref.name for ref in search.tree.params if ref.name.rpartition(".")[0] not in covered
    ]
    for parent, kinds in kinds_of.items():
        if kinds != {"columns", "rows"}:
            raise PlanError(
                f"tensor_parallel.layer_plan divides layers of '{parent}' by {kinds.pop()} alone. "
                "Nothing would put the parts together. Write colwise for the layers that go in "
                "and rowwise for the one that comes out."
            )
        inside = f"{parent}." if parent else ""
        unknown = next((name for name in uncovered if name.startswith(inside)), None)
        if unknown is not None:
            raise PlanError(
                f"'{unknown}' lies in '{parent}' beside layers that are divided between ranks. "
                "It is not known whether it sees the whole input or one rank's part, and its "
                "gradient might be a part as well. Put the divided layers into a module of their "
                "own, or keep them whole in tensor_parallel.layer_plan."
            )
    degree = search.spec.degree
    for name, cut in search.cuts.items():
        if cut.kind in ("norm", "embedding"):
            continue
        size_in, size_out = sizes_of_linear(search.modules[name])
        for size in cut.blocks or (size_in if cut.kind == "rows" else size_out,):
            if size % degree:
                raise PlanError(
                    f"'{name}' is divided by {cut.kind}, and its size {size} is not divisible by "
                    f"the degree {degree}. Ranks would compute parts of different sizes, which do "
                    "not fit together. Choose another degree, or keep it whole in "
                    "tensor_parallel.layer_plan."
                )


def _shared_rows(module: nn.Module, cut: Cut) -> int:
    """Returns the rows that both the tensor group and FSDP2 divide, 0 where there are none.

    Source: torch shards such rows evenly alone,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L331
    """
    params = ((name, param) for name, param in module._parameters.items() if param is not None)
    return next((len(param) for name, param in params if cut.dim_of(name, module) == 0), 0)
