"""Which parameters are hidden matrices, for Muon, and which are not, for AdamW.

[Note: hidden matrices] Muon is for matrices that multiply what one layer hands to the next. That a
parameter has two dimensions does not say it: tables of embeddings have two, and so have heads and
routers. The tree of modules says it: layers that multiply by their weight, without embeddings,
heads, routers and whatever is tied. A parameter of a module that nothing is known of goes to AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.muon_iteration import Layout
from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef, canonical_param_ids
from composer_fsdp2.plan.patterns import matcher
from composer_fsdp2.plan.rules import output_heads

__all__ = ["ALGORITHMS", "Algorithm", "Blocks", "Choice", "Overrides", "choose", "choose_by_names"]

Algorithm = Literal["muon", "adamw"]
ALGORITHMS: tuple[Algorithm, ...] = ("muon", "adamw")

Blocks = int | Sequence[int] | Mapping[str, Any] | None
"""matrices joined in a parameter: their number, where they are alike, the outputs of each, or how
many turns they take and the outputs of each in one turn"""

_TABLES = ("embed", "embedding", "embeddings", "wte", "wpe", "emb", "pos_emb", "tok_embeddings")
_HEADS = ("lm_head", "head", "score", "classifier", "qa_outputs", "cls", "output_projection")
_ROUTERS = ("router", "wg", "gate_network")
_GATE = "gate"
"""a router where it has fewer outputs than inputs; else a part of a feed-forward network"""
_QKV = ("Wqkv", "qkv_proj", "qkv", "c_attn", "in_proj_weight")
_AFTER_ATTENTION = ("out_proj", "o_proj", "c_proj", "dense", "Wo", "wo", "proj")
_GATE_UP = ("gate_up_proj", "gate_up", "gate_and_up_proj", "w12", "Wi")
_DOWN = ("down_proj", "Wo", "w3", "down")
_COLUMN_BY_COLUMN = "gptoss"
"""in its experts, columns belong to gate and up by turns"""
_BY_TURNS: Mapping[str, tuple[str, str | int]] = {
    "BloomAttention": ("query_key_value", "num_heads"),
    "CodeGenAttention": ("qkv_proj", 4),
    "DisentangledSelfAttention": ("in_proj", "num_attention_heads"),
    "FalconAttention": ("query_key_value", "num_kv_heads"),
    "GPTBigCodeAttention": ("c_attn", "kv_heads"),
    "GPTNeoXAttention": ("query_key_value", "head_size"),
    "GPTNeoXJapaneseAttention": ("query_key_value", "head_size"),
    "PersimmonAttention": ("query_key_value", "num_heads"),
}
"""attention of Hugging Face that has query, key and value by turns, one turn for each head of keys:
the joined layer, and the number of turns or who has it"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm of one parameter, and why."""

    algorithm: Algorithm
    reason: str
    layout: Layout = field(default_factory=Layout)


@dataclass(frozen=True, slots=True)
class Overrides:
    """Globs over parameter names, as a user writes them."""

    muon: tuple[str, ...] = ()
    adamw: tuple[str, ...] = ()
    blocks: Mapping[str, Blocks] = field(default_factory=dict[str, "Blocks"])

    def check(self, names: Sequence[str]) -> None:
        """Refuses globs without an effect.

        Raises:
            PlanError: with the nearest name.
        """
        given = {"muon": self.muon, "adamw": self.adamw, "blocks": tuple(self.blocks)}
        problems = [
            f"{where} holds '{glob}', which matches no parameter of the model. It would have no "
            f"effect.{nearest(glob, names)} Names in this model: {', '.join(names[:20])}"
            f"{' ...' if len(names) > 20 else ''}."
            for where, globs in given.items()
            for glob in globs
            if not any(map(matcher(glob), names))
        ]
        if problems:
            raise PlanError("\n".join(problems))

    def algorithm(self, names: Iterable[str]) -> Algorithm | None:
        """Returns what they say of a parameter with these names.

        Raises:
            PlanError: both at once.
        """
        names = list(names)
        found: list[Algorithm] = [
            algorithm
            for algorithm in ALGORITHMS
            if any(matcher(glob)(name) for glob in getattr(self, algorithm) for name in names)
        ]
        if len(found) > 1:
            raise PlanError(
                f"'{names[0]}' matches globs of muon and of adamw. A parameter has one algorithm. "
                "Narrow one of them."
            )
        return found[0] if found else None

    def blocks_of(self, names: Iterable[str], shape: Sequence[int], layout: Layout) -> Layout:
        """Returns the layout of a matrix with these names.

        Raises:
            PlanError: blocks that do not add up to the matrix.
        """
        for glob, blocks in self.blocks.items():
            for name in filter(matcher(glob), names):
                return with_blocks(name, shape, layout, blocks)
        return layout


def with_blocks(name: str, shape: Sequence[int], layout: Layout, blocks: Blocks) -> Layout:
    """Returns a layout with blocks as a user writes them.

    Raises:
        PlanError: blocks that do not add up to the matrix.
    """
    if blocks is None:
        return Layout(None, layout.transposed)
    outputs, turns = shape[layout.axis], 1
    if isinstance(blocks, Mapping):
        turns, given = _turns_of(name, blocks)
    elif isinstance(blocks, int):
        given = (outputs // blocks,) * blocks if blocks > 0 else ()
    else:
        given = blocks
    sizes = tuple(size * turns for size in given)
    if sum(sizes) != outputs or min(sizes, default=0) < 1:
        raise PlanError(
            f"The blocks {list(sizes)} of '{name}' add up to {sum(sizes)}, but it has {outputs} "
            f"outputs (shape {tuple(shape)}). Each block is a matrix of its own for Muon. Write "
            "the outputs of every block, or the number of blocks if they are alike."
        )
    return Layout(sizes, layout.transposed, turns)


def _turns_of(name: str, blocks: Mapping[str, Any]) -> tuple[int, Sequence[int]]:
    turns, outputs = blocks.get("turns"), blocks.get("outputs", ())
    listed = isinstance(outputs, Sequence) and not isinstance(outputs, str)
    if not (set(blocks) == {"turns", "outputs"} and type(turns) is int and turns > 0 and listed):
        raise PlanError(
            f"The blocks of '{name}' are {dict(blocks)}. Blocks that take turns need the number of "
            "turns and the outputs of each block in one turn. Write, for 12 heads of 64 outputs, "
            "{turns: 12, outputs: [64, 64, 64]}."
        )
    return turns, [int(size) for size in outputs]


def choose(tree: ModuleTree, overrides: Overrides) -> dict[int, Choice]:
    """Decides for every parameter of a model; see [Note: hidden matrices].

    Collective: no. The model may be sharded already.

    Args:
        tree: the model.
        overrides: what the user decides.

    Returns:
        The choice by id of the parameter.

    Raises:
        PlanError: for globs that match nothing, and for a vector that is to be a matrix.
    """
    refs = tree.params
    overrides.check([ref.name for ref in refs])
    facts = _Facts(tree)
    names: dict[int, list[str]] = defaultdict(list)
    for ref in refs:
        names[id(ref.param)].append(ref.name)
    found: dict[int, Choice] = {}
    for ref in refs:
        if id(ref.param) not in found:
            found[id(ref.param)] = _choose_one(ref, names[id(ref.param)], facts, overrides)
    return found


def choose_by_names(named: Iterable[tuple[str, Tensor]], overrides: Overrides) -> dict[int, Choice]:
    """Decides without the model, by names and shapes: a module's class says more.

    Raises:
        PlanError: as `choose`.
    """
    named = list(named)
    overrides.check([name for name, _ in named])
    return {id(param): _by_name(name, param, overrides) for name, param in named}


def _by_name(name: str, param: Tensor, overrides: Overrides) -> Choice:
    asked = overrides.algorithm([name])
    reason = _excluded_by_name(name.split("."), param)
    if param.ndim == 2 and not _is_vector(param) and asked != "adamw" and (asked or not reason):
        return Choice("muon", "a matrix", overrides.blocks_of([name], param.shape, Layout()))
    if asked == "muon":
        return _asked_muon([name], param, Layout(), overrides)
    return Choice("adamw", reason or "no matrix")


class _Facts:
    """Facts that are asked of the whole model once."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.heads = {id(param) for head in output_heads(tree) for param in head.parameters()}
        self.tied = _tied(tree)

    def modules(self, ref: ParamRef) -> tuple[nn.Module, nn.Module | None]:
        """The module that holds a parameter, and the one around it."""
        entry = self.tree.paths[ref.path_index]
        return entry.module, self.tree.paths[entry.parent].module if entry.parent >= 0 else None


def _tied(tree: ModuleTree) -> set[int]:
    """Parameters in several places; a module that is registered twice is one place."""
    memory = canonical_param_ids(tree.params)
    places: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for ref in tree.params:
        module = tree.paths[ref.path_index].module
        places[memory[id(ref.param)]].add((id(module), ref.name.rpartition(".")[2]))
    return {key for key, same in memory.items() if len(places[same]) > 1}


def _choose_one(ref: ParamRef, names: Sequence[str], facts: _Facts, overrides: Overrides) -> Choice:
    param = ref.param
    module, around = facts.modules(ref)
    asked = overrides.algorithm(names)
    reason = _excluded(ref, module, facts)
    if asked == "adamw" or (asked is None and reason):
        return Choice("adamw", "asked for" if asked else reason)
    layout = _layout(ref.name, param, module, around) if param.ndim > 1 else Layout()
    if asked == "muon":
        return _asked_muon(names, param, layout, overrides)
    return Choice("muon", "hidden matrix", overrides.blocks_of(names, param.shape, layout))


def _asked_muon(
    names: Sequence[str], param: Tensor, layout: Layout, overrides: Overrides
) -> Choice:
    if param.ndim not in (2, 3):
        raise PlanError(
            f"'{names[0]}' matches a glob of muon, but its shape is {tuple(param.shape)}. Muon "
            "orthogonalises matrices, or a list of them. Leave it to AdamW: take it out of muon."
        )
    return Choice("muon", "asked for", overrides.blocks_of(names, param.shape, layout))


def _excluded(ref: ParamRef, module: nn.Module, facts: _Facts) -> str:
    """Why a parameter is no hidden matrix; empty if it is one."""
    param, kind = ref.param, _classes(module)
    path = ref.name.split(".")
    if reason := _shape_excluded(param):
        return reason
    if id(param) in facts.tied:
        return "tied"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embedding" in kind:
        return "embedding"
    if id(param) in facts.heads:
        return "head"
    if "router" in kind:
        return "router"
    if "norm" in kind:
        return "norm"
    if reason := _excluded_by_name(path, param):
        return reason
    return "" if _multiplies(path, param, module, kind) else "no layer that is known to multiply"


def _shape_excluded(param: Tensor) -> str:
    if param.ndim < 2:
        return "vector"
    if _is_vector(param):
        return "vector in the shape of a matrix"
    return "" if param.ndim < 4 else "no matrix"


def _is_vector(param: Tensor) -> bool:
    return param.ndim < 2 or min(param.shape[-2:]) < 2


def _excluded_by_name(path: Sequence[str], param: Tensor) -> str:
    parts = path[:-1] or path
    if any(part in _TABLES or part.startswith("embed_") for part in path):
        return "embedding"
    if any(part in _HEADS for part in path):
        return "head"
    if any(part in _ROUTERS for part in path):
        return "router"
    if parts[-1] == _GATE and param.ndim == 2 and param.shape[0] < param.shape[1]:
        return "router"
    return "norm" if "norm" in parts[-1].lower() else ""


def _multiplies(path: Sequence[str], param: Tensor, module: nn.Module, kind: str) -> bool:
    """Whether a module is known to multiply by this parameter."""
    leaf = path[-1]
    if param.ndim == 3:
        listed = any(word in kind for word in ("expert", "moe", "mlp", "glu"))
        return "conv" not in kind and (listed or any("expert" in part for part in path))
    if isinstance(module, nn.Linear) or leaf in (*_QKV, *_GATE_UP):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return leaf.endswith("_proj_weight")
    if hasattr(module, "moe_num_experts"):
        return True
    if "conv1d" in kind and not isinstance(module, nn.Conv1d):  # that of GPT-2
        return leaf == "weight"
    return leaf == "weight" and hasattr(module, "in_features") and hasattr(module, "out_features")


def _classes(module: nn.Module) -> str:
    """Names of the classes of a module in small letters; FSDP puts one of its own before them."""
    return " ".join(
        cls.__name__ for cls in type(module).__mro__[:3] if cls is not nn.Module
    ).lower()


def _layout(name: str, param: Tensor, module: nn.Module, around: nn.Module | None) -> Layout:
    """How a matrix is stored, and of which others it is made."""
    *parts, leaf = name.split(".")
    if param.ndim == 3:
        return _layout_of_list(leaf, param, module)
    transposed = "conv1d" in _classes(module)
    outputs = param.shape[-1 if transposed else -2]
    experts = getattr(module, "moe_num_experts", None)
    if isinstance(experts, int) and outputs % experts == 0 and leaf != "weight":
        return Layout((outputs // experts,) * experts)
    raw = leaf in (*_QKV, *_GATE_UP)
    layer = leaf if raw or not parts else parts[-1]
    beside = module if raw else around
    sizes, turns = None, _turns(layer, outputs, beside)
    if layer in _QKV or turns:
        sizes = _attention(outputs, beside)
    elif layer in _GATE_UP and outputs % 2 == 0:
        # `Wi` is joined or not, which the layer after it tells.
        joined = layer != "Wi" or _inputs(beside, _DOWN) == outputs // 2
        sizes = (outputs // 2, outputs // 2) if joined else None
    in_turns = turns and sizes and not any(size % turns for size in sizes)
    return Layout(sizes, transposed, turns if in_turns else 1)


def _turns(layer: str, outputs: int, beside: Any) -> int:
    """How many turns query, key and value take in a joined layer; 0 if that is not known."""
    kinds = [cls.__name__ for cls in type(beside).__mro__ if cls.__name__ in _BY_TURNS]
    joined, of = _BY_TURNS[kinds[0]] if kinds else ("", 1)
    if layer != joined or beside is None:
        return 0
    if of == "head_size":
        return outputs // (3 * beside.head_size)
    if of == "num_kv_heads" and not (beside.new_decoder_architecture or beside.multi_query):
        of = "num_heads"
    return of if isinstance(of, int) else int(getattr(beside, of, 1))


def _attention(outputs: int, beside: nn.Module | None) -> tuple[int, ...] | None:
    """Outputs of query, key and value: those of the query are inputs of the layer after it."""
    if any(hasattr(beside, name) for name in ("q_attn", "q_proj")):  # keys and values alone
        return (outputs // 2, outputs // 2) if outputs % 2 == 0 else None
    query = _inputs(beside, _AFTER_ATTENTION)
    if query is not None and outputs > query and (outputs - query) % 2 == 0:
        other = (outputs - query) // 2
        return query, other, other
    return (outputs // 3,) * 3 if outputs % 3 == 0 else None


def _inputs(around: nn.Module | None, names: Iterable[str]) -> int | None:
    """Inputs of the first layer of these names."""
    for name in names:
        layer = getattr(around, name, None)
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2:
            return weight.shape[0 if "conv1d" in _classes(layer) else 1]
    return None


def _layout_of_list(leaf: str, param: Tensor, module: nn.Module) -> Layout:
    """Experts are `(experts, out, in)` or `(experts, in, out)`; the shapes of two tell which."""
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.ndim != 3:
        return Layout()
    transposed = up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]
    if leaf != "gate_up_proj":
        return Layout(None, transposed)
    half = param.shape[2 if transposed else 1] // 2
    by_turns = _COLUMN_BY_COLUMN in _classes(module)
    return Layout((half, half), transposed, half if by_turns else 1)
