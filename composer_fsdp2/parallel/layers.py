"""Deciding which layers are divided between the ranks of a tensor group. Changes nothing.

[Note: which plan] A layer is divided as the user writes. Otherwise as is known for its attention or
MLP, then as the plan says that Hugging Face has for the model, then, for a head called `lm_head`,
by the vocabulary. A plan says how outputs add up, so what lies between two divided layers must be
known as well: it sees one rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from composer_fsdp2.config.parallel import TensorSpec
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.adapters import adapter_cuts, home_of
from composer_fsdp2.parallel.cuts import (
    Cut,
    has_weight,
    is_adapted,
    is_conv1d,
    is_linear,
    rows_and_columns,
)
from composer_fsdp2.parallel.known import KnownBlock, known_block
from composer_fsdp2.plan.module_tree import ModuleTree, attribute_of, tied_groups
from composer_fsdp2.plan.patterns import matcher, unmatched_names
from composer_fsdp2.text import child_name

__all__ = ["LayerPlan", "plan_layers"]

_STYLES: Mapping[str, Cut | None] = {
    "colwise": Cut(kind="columns"),
    "colwise_rep": Cut(kind="columns", gathers=True),
    "rowwise": Cut(kind="rows"),
    "whole": None,
}
_RENAMED = {"colwise_gather_output": "colwise_rep"}
"""styles of newer transformers"""
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """How each divided layer is divided."""

    degree: int
    cuts: Mapping[str, Cut]
    """by name, in the order of the model"""
    padding: Mapping[str, int]
    """name of a layer -> rows that are added to each rank's part; see [Note: padding]"""
    counts: Mapping[str, Mapping[str, int]]
    """name of a module -> attributes that are divided by the degree, and what they were"""
    whole: tuple[str, ...] = ()
    """layers that would be divided, if their sizes allowed it"""

    def __str__(self) -> str:
        layers = ", ".join(f"{name} ({self._how(name)})" for name in self.cuts)
        whole = f"; whole: {', '.join(self.whole)}" if self.whole else ""
        return f"tensor parallelism of {self.degree} ranks: {layers}{whole}"

    def _how(self, name: str) -> str:
        added = self.padding.get(name, 0)
        return f"{self.cuts[name]}{f', {added} rows of padding' if added else ''}"


@dataclass(slots=True, eq=False)
class _Search:
    tree: ModuleTree
    spec: TensorSpec
    shard: int
    modules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    known: dict[str, KnownBlock] = field(default_factory=dict[str, KnownBlock])
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])
    asked: dict[str, str] = field(default_factory=dict[str, str])
    whole: list[str] = field(default_factory=list[str])
    beside: set[str] = field(default_factory=set[str])
    """parts of adapters that are whole on each rank"""


def plan_layers(tree: ModuleTree, spec: TensorSpec, shard: int) -> LayerPlan:
    """Decides which layers are divided; see [Note: which plan].

    Collective: no.

    Args:
        tree: the model, before anything is changed.
        spec: `tensor_parallel`.
        shard: ranks over which FSDP2 shards what a tensor group holds.

    Raises:
        PlanError: for a model in which nothing is known, sizes that do not divide, and layers
            whose neighbours are not known.
    """
    search = _Search(tree, spec, shard, dict(tree.modules()))
    search.asked = _asked(tree, spec)
    _check_weights(search)
    _find_cuts(search)
    _leave_heads_whole(search)
    if not search.cuts:
        raise PlanError(_nothing_known(search))
    _check_blocks(search)
    counts = {
        name: block.counts
        for name, block in search.known.items()
        if block.counts and _is_cut(search, name, block)
    }
    _divide_adapters(search)
    _check_between(search)
    _check_sizes(search)
    return LayerPlan(
        degree=spec.degree,
        cuts={name: search.cuts[name] for name in search.modules if name in search.cuts},
        padding={
            name: padding
            for name, cut in search.cuts.items()
            if (padding := -_shared_rows(search.modules[name], cut) // spec.degree % shard)
        },
        counts=counts,
        whole=tuple(search.whole),
    )


def _asked(tree: ModuleTree, spec: TensorSpec) -> dict[str, str]:
    """The style that the user writes for each layer; the last pattern that matches counts."""
    patterns = [pattern for pattern, _ in spec.layer_plan]
    if problems := list(unmatched_names(tree, patterns, "tensor_parallel.layer_plan")):
        raise PlanError("\n".join(problems))
    found: dict[str, str] = {}
    for pattern, style in spec.layer_plan:
        matches = matcher(pattern)
        named = [name for name, module in tree.modules() if matches(name) and is_linear(module)]
        if not named and style != "whole":
            raise PlanError(
                f"tensor_parallel.layer_plan holds '{pattern}': {style}, which matches no linear "
                "layer. It is not known how another module is divided. Write the names of layers."
            )
        found.update(dict.fromkeys(named, style))
    return found


def _check_weights(search: _Search) -> None:
    for name, module in search.modules.items():
        if is_linear(module) and search.asked.get(name) != "whole" and not has_weight(module):
            raise PlanError(
                f"The weight of '{name}' is computed from other parameters in every forward, as "
                "weight_norm and spectral_norm do. Tensor parallelism divides a weight once, and "
                "what is computed anew would be whole. Keep it, and the layers it works with, "
                f"whole in tensor_parallel.layer_plan ({{'{name}': whole}}), or leave one of the "
                "two out."
            )


def _find_cuts(search: _Search) -> None:
    for name, style in _styles_of_model(search).items():
        if (cut := _STYLES[style]) is not None and is_linear(search.modules[name]):
            search.cuts[name] = cut
    for name, module in search.modules.items():
        if not _is_whole(search, name) and (block := known_block(name, module)) is not None:
            search.known[name] = block
            search.cuts.update({child_name(name, child): cut for child, cut in block.cuts.items()})
            _add_norms(search, name, module, block)
        elif name.rpartition(".")[2] == _HEAD and is_linear(module):
            search.cuts.setdefault(name, Cut(kind="columns", gathers=True))
    for name, style in search.asked.items():
        _follow_user(search.cuts, name, _STYLES[style])


def _follow_user(cuts: dict[str, Cut], name: str, cut: Cut | None) -> None:
    known = cuts.get(name)
    if cut is None:
        cuts.pop(name, None)
    elif known is None or (known.kind, known.gathers) != (cut.kind, cut.gathers):
        cuts[name] = cut


def _divide_adapters(search: _Search) -> None:
    """Layers with adapters make way for what is in them; see [Note: adapters]."""
    for name in [name for name in search.cuts if is_adapted(search.modules[name])]:
        for child, cut in adapter_cuts(search.modules[name], search.cuts.pop(name)):
            if cut is None:
                search.beside.add(child_name(name, child))
            else:
                search.cuts[child_name(name, child)] = cut


def _is_whole(search: _Search, name: str) -> bool:
    """Whether the user keeps all layers of a module whole."""
    below = [style for layer, style in search.asked.items() if layer.startswith(f"{name}.")]
    linear = [n for n, m in search.modules.items() if n.startswith(f"{name}.") and is_linear(m)]
    return bool(below) and len(below) == len(linear) and set(below) == {"whole"}


def _add_norms(search: _Search, name: str, module: nn.Module, block: KnownBlock) -> None:
    """Norms of single heads have a whole weight on each rank, and a gradient of its heads."""
    for child, part in module._modules.items():
        if part is None or child in block.cuts or block.head_size is None:
            continue
        params = list(part.parameters())
        if params and not part._modules and all(p.shape == (block.head_size,) for p in params):
            search.cuts[child_name(name, child)] = Cut(kind="norm")


def _styles_of_model(search: _Search) -> dict[str, str]:
    """Styles of Hugging Face's plans, by full names.

    Collective: no.

    Raises:
        PlanError: for a style that is not known here.
    """
    found: dict[str, str] = {}
    for name, module in search.modules.items():
        for pattern, written in _plan_of(name, module):
            style, matches = _RENAMED.get(written, written), matcher(pattern)
            named = [n for n in search.modules if matches(n)]
            if named and style not in _STYLES and not _all_known(search, named):
                raise PlanError(
                    f"The tensor plan of {type(module).__name__} gives '{pattern}' the style "
                    f"'{written}', which keeps plain tensors with a division of its own. Their "
                    "checkpoints and gradients would be those of one rank. Leave tensor "
                    "parallelism out for this model."
                )
            if style in _STYLES:
                found.update(dict.fromkeys(named, style))
    return found


def _all_known(search: _Search, names: Sequence[str]) -> bool:
    parents = {name.rpartition(".")[0] for name in names}
    return all(known_block(name, search.modules[name]) is not None for name in parents)


def _plan_of(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Patterns with full names: the class's own are of the model, the configuration's of its base.

    Source: https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_utils.py#L1917
    """
    prefix = attribute_of(module, "base_model_prefix")
    if not isinstance(prefix, str):
        return
    own: Any = vars(type(module)).get("_tp_plan")
    yield from ((child_name(name, key), style) for key, style in (own or {}).items())
    base: Any = getattr(attribute_of(module, "config"), "base_model_tp_plan", None)
    if not base or module._modules.get(prefix) is None:
        if any(key in module._modules for key in {k.partition(".")[0] for k in base or {}}):
            yield from ((child_name(name, key), style) for key, style in base.items())
        return
    yield from ((child_name(name, f"{prefix}.{key}"), style) for key, style in base.items())


def _nothing_known(search: _Search) -> str:
    kinds = sorted({type(module).__name__ for module in search.modules.values()})
    return (
        f"tensor_parallel has degree {search.spec.degree}, and nothing in the model is known to be "
        "divisible. Every rank of a group would compute the same. Write the layers in "
        "tensor_parallel.layer_plan ({'*.up': colwise, '*.down': rowwise}), or leave it out. "
        f"Classes in this model: {', '.join(kinds)}."
    )


# --- What the sizes allow ---


def _leave_heads_whole(search: _Search) -> None:
    """Divides a vocabulary only where its size allows it, and with it the embedding tied to it."""
    degree = search.spec.degree
    tied = {name: group for group in tied_groups(search.tree.root) for name in group}
    for name in [n for n, cut in search.cuts.items() if cut.gathers and n not in search.asked]:
        module = search.modules[name]
        partners = [n.rpartition(".")[0] for n in tied.get(f"{name}.weight", ())]
        others = [partner for partner in partners if partner != name]
        fits = (
            not is_conv1d(module)
            and not is_adapted(module)
            and rows_and_columns(module)[1] % degree == 0
        )
        if fits and all(_is_plain_embedding(search.modules[other]) for other in others):
            search.cuts.update(dict.fromkeys(others, Cut(kind="embedding")))
        else:
            del search.cuts[name]
            search.whole.append(name)
    weights = {
        child_name(_weight_of(search, name), "weight"): cut for name, cut in search.cuts.items()
    }
    for group in tied_groups(search.tree.root):
        kinds = {weights[name].kind for name in group if name in weights}
        if kinds and (len(kinds) > 1 or not weights.keys() >= {*group}):
            if kinds == {"columns", "embedding"} and weights.keys() >= {*group}:
                continue
            raise PlanError(
                f"{', '.join(repr(name) for name in group)} are one weight, and tensor parallelism "
                "would divide it differently in each place. That would untie them. Keep their "
                "layers whole in tensor_parallel.layer_plan."
            )


def _weight_of(search: _Search, name: str) -> str:
    return child_name(name, "base_layer") if is_adapted(search.modules[name]) else name


def _is_plain_embedding(module: nn.Module) -> bool:
    if type(module) is not nn.Embedding or module.scale_grad_by_freq or module.sparse:
        return False
    return module.padding_idx is None and module.max_norm is None


def _is_cut(search: _Search, name: str, block: KnownBlock) -> bool:
    return any(child_name(name, child) in search.cuts for child in block.cuts)


def _check_blocks(search: _Search) -> None:
    """Blocks are divided as a whole, and into whole heads."""
    degree = search.spec.degree
    for name, block in search.known.items():
        if not _is_cut(search, name, block):
            continue
        missing = [child for child in block.cuts if child_name(name, child) not in search.cuts]
        if missing:
            raise PlanError(
                f"tensor_parallel.layer_plan keeps {', '.join(missing)} of '{name}' whole and "
                "divides the rest. The parts would not fit together. Divide all of them, or none."
            )
        for what, count in block.heads.items():
            if count % degree:
                divisors = [n for n in range(1, count + 1) if count % n == 0]
                raise PlanError(
                    f"'{name}' has {count} {what}, which {degree} ranks cannot share: "
                    f"tensor_parallel.degree must divide them. Use one of "
                    f"{', '.join(map(str, divisors))}, or keep it whole with "
                    f"tensor_parallel.layer_plan: {{'{name}.*': whole}}."
                )


def _check_between(search: _Search) -> None:
    """Refuses unknown parts between divided layers, which see one rank's part."""
    kinds: dict[str, set[str]] = {}
    for name, cut in search.cuts.items():
        if cut.kind in ("columns", "rows") and not cut.gathers:
            home, is_adapter = home_of(name, search.modules)
            kinds.setdefault(home, set()).update(() if is_adapter else (cut.kind,))
    for parent, found in kinds.items():
        if found != {"columns", "rows"}:
            raise PlanError(
                f"tensor_parallel.layer_plan divides layers of '{parent}' by {found.pop()} alone. "
                "Nothing would put the parts together. Write colwise for the layers that go in "
                "and rowwise for the one that comes out."
            )
        inside = f"{parent}." if parent else ""
        unknown = [
            ref.name
            for ref in search.tree.params
            if ref.name.startswith(inside)
            and ref.name.rpartition(".")[0] not in search.cuts.keys() | search.beside
        ]
        if unknown:
            raise PlanError(
                f"'{unknown[0]}' lies in '{parent}' beside layers that are divided between ranks. "
                "It is not known whether it sees the whole input or one rank's part, and its "
                "gradient might be a part as well. Put the divided layers into a module of their "
                "own, or keep them whole in tensor_parallel.layer_plan."
            )


def _check_sizes(search: _Search) -> None:
    degree = search.spec.degree
    for name, cut in search.cuts.items():
        module = search.modules[name]
        if cut.kind == "norm":
            continue
        inside, outside = (0, 0) if cut.kind == "embedding" else rows_and_columns(module)
        size = inside if cut.kind == "rows" else outside
        for part in cut.blocks or (size,):
            if part % degree:
                raise PlanError(_uneven(name, cut, part, f"the degree {degree}"))


def _shared_rows(module: nn.Module, cut: Cut) -> int:
    """Rows that both the tensor group and FSDP2 divide, 0 where there are none.

    Source: torch shards them evenly alone,
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L331
    """
    if cut.kind == "norm":
        return 0
    if cut.kind == "embedding":
        return int(module.get_parameter("weight").shape[0])
    inside, outside = rows_and_columns(module)
    has_bias = module._parameters.get("bias") is not None
    if cut.kind == "columns":
        return outside if has_bias or not is_conv1d(module) else 0
    return inside if is_conv1d(module) else 0


def _uneven(name: str, cut: Cut, size: int, divisor: str) -> str:
    return (
        f"'{name}' is divided by {cut.kind}, and its size {size} is not divisible by {divisor}. "
        "Ranks would compute parts of different sizes, which do not fit together. Choose "
        "another degree, or keep it whole in tensor_parallel.layer_plan."
    )
