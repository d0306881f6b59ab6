"""Forms groups of Muon: checks their values, and finds the parameters that are hidden matrices.

[Note: hidden matrices] Muon is for matrices that multiply activations between layers. Two
dimensions are not enough: tables of embeddings have two, and so have heads and routers. The tree of
modules tells: layers that multiply by their weight, without embeddings, heads, routers and tied
weights. A parameter of an unknown module goes to AdamW.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.muon.newton_schulz import ADJUSTMENTS, MatrixLayout
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.patterns import matcher
from composer_fsdp2.plan.rules import output_heads
from composer_fsdp2.text import listed

__all__ = [
    "ITERATION_DTYPES",
    "Blocks",
    "MatrixChoice",
    "Overrides",
    "PlannedGroups",
    "check_matrices",
    "check_values",
    "choose",
    "choose_by_names",
    "entries_of",
    "globs",
    "with_blocks",
    "with_entries",
]

ITERATION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""`iteration_dtype` -> dtype of Newton-Schulz"""

Blocks = int | Sequence[int] | Mapping[str, Any] | None
"""matrices joined in a parameter: their number, where they are alike, the outputs of each, or how
many turns they take and the outputs of each in one turn"""

_NOT_HIDDEN = {
    "embedding": re.compile("emb|embed|embed_.*|embeddings?|pos_emb|tok_embeddings|wpe|wte"),
    "head": re.compile("classifier|cls|head|lm_head|output_projection|qa_outputs|score"),
    "router": re.compile("gate_network|router|wg"),
}
"""parts of names by which a parameter is no hidden matrix"""
_QKV = ("Wqkv", "qkv_proj", "qkv", "c_attn", "in_proj_weight")
_AFTER_ATTENTION = ("out_proj", "o_proj", "c_proj", "dense", "Wo", "wo", "proj")
_GATE_UP = ("gate_up_proj", "gate_up", "gate_and_up_proj", "w12", "Wi")
_DOWN = ("down_proj", "Wo", "w3", "down")
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
the joined layer, and the number of turns or the attribute that has it"""


@dataclass(slots=True, eq=False)
class PlannedGroups:
    """The groups of an optimizer, each of one algorithm."""

    groups: list[dict[str, Any]]
    layouts: list[list[MatrixLayout]]
    """for each group the layouts of its parameters, in their order"""
    text: str
    """settings and parameters of each group, for ranks to compare"""


@dataclass(frozen=True, slots=True)
class MatrixChoice:
    """The algorithm of one parameter, and why."""

    algorithm: str
    reason: str
    layout: MatrixLayout


@dataclass(frozen=True, slots=True)
class Overrides:
    """Globs over parameter names, as a user writes them."""

    muon: tuple[str, ...] = ()
    adamw: tuple[str, ...] = ()
    blocks: Mapping[str, Blocks] = field(default_factory=dict[str, "Blocks"])

    def check(self, names: Sequence[str]) -> None:
        """Refuses globs that match no parameter of a model.

        Raises:
            PlanError: with the nearest name.
        """
        patterns_of = {"muon": self.muon, "adamw": self.adamw, "blocks": tuple(self.blocks)}
        problems = [
            f"{argument} holds '{glob}', which matches no parameter of the model. It would have no "
            f"effect.{nearest(glob, names)} Names in this model: {', '.join(names[:20])}"
            f"{' ...' if len(names) > 20 else ''}."
            for argument, patterns in patterns_of.items()
            for glob in patterns
            if not any(map(matcher(glob), names))
        ]
        if problems:
            raise PlanError("\n".join(problems))

    def choice(
        self, names: Sequence[str], param: Tensor, reason: str, layout: Callable[[], MatrixLayout]
    ) -> MatrixChoice:
        """Returns the algorithm of a parameter.

        Args:
            names: all names of the parameter, if it is tied.
            param: sharded or not.
            reason: why the parameter is no hidden matrix; empty if it is one.
            layout: finds the layout of a matrix, which a glob of `blocks` may change.

        Raises:
            PlanError: a parameter matches globs of both algorithms, matches a glob of muon and is
                no matrix, or has blocks that do not add up to its outputs.
        """
        algorithms = [
            algorithm
            for algorithm, globs in (("muon", self.muon), ("adamw", self.adamw))
            if any(any(map(matcher(glob), names)) for glob in globs)
        ]
        if len(algorithms) > 1:
            raise PlanError(
                f"'{names[0]}' matches globs of muon and of adamw. A parameter has one algorithm. "
                "Narrow one of them."
            )
        if algorithms == ["adamw"] or (reason and not algorithms):
            return MatrixChoice("adamw", reason or "asked for", MatrixLayout())
        if param.ndim not in (2, 3):
            raise PlanError(
                f"'{names[0]}' matches a glob of muon, but its shape is {tuple(param.shape)}. Muon "
                "orthogonalises matrices, or a list of them. Leave it to AdamW: take it out of "
                "muon."
            )
        default = layout()
        for glob, blocks in self.blocks.items():
            for name in filter(matcher(glob), names):
                return MatrixChoice("muon", "", with_blocks(name, param.shape, default, blocks))
        return MatrixChoice("muon", "", default)


def with_blocks(
    name: str, shape: Sequence[int], layout: MatrixLayout, blocks: Blocks
) -> MatrixLayout:
    """Returns a layout with blocks as a user writes them.

    Raises:
        PlanError: blocks that do not add up to the matrix.
    """
    if blocks is None:
        return MatrixLayout(None, layout.transposed)
    outputs, turns = shape[layout.axis], 1
    if isinstance(blocks, Mapping):
        turns, per_turn = blocks.get("turns"), blocks.get("outputs", ())
        is_row = isinstance(per_turn, Sequence) and not isinstance(per_turn, str)
        if set(blocks) != {"turns", "outputs"} or type(turns) is not int or turns < 1 or not is_row:
            raise PlanError(
                f"The blocks of '{name}' are {dict(blocks)}. Blocks that take turns need the "
                "number of turns and the outputs of each block in one turn. Write, for 12 heads of "
                "64 outputs, {turns: 12, outputs: [64, 64, 64]}."
            )
    elif isinstance(blocks, int):
        per_turn = (outputs // blocks,) * blocks if blocks > 0 else ()
    else:
        per_turn = blocks
    sizes = tuple(int(size) * turns for size in per_turn)
    if sum(sizes) != outputs or min(sizes, default=0) < 1:
        raise PlanError(
            f"The blocks {list(sizes)} of '{name}' add up to {sum(sizes)}, but it has {outputs} "
            f"outputs (shape {tuple(shape)}). Each block is a matrix of its own for Muon. Write "
            "the outputs of every block, or the number of blocks if they are alike."
        )
    return MatrixLayout(sizes, layout.transposed, turns)


def choose(tree: ModuleTree, overrides: Overrides) -> dict[int, MatrixChoice]:
    """Decides the algorithm of every parameter of a model; see [Note: hidden matrices].

    Collective: no.

    Args:
        tree: a model, sharded or not.
        overrides: globs of the user, which come first.

    Returns:
        The choice by id of the parameter.

    Raises:
        PlanError: for globs that match nothing, and as `Overrides.choice`.
    """
    overrides.check([ref.name for ref in tree.params])
    heads = {id(param) for head in output_heads(tree) for param in head.parameters()}
    memory = tree.weight_of
    names: dict[int, list[str]] = defaultdict(list)
    # A module that is registered twice has one slot.
    slots: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for ref in tree.params:
        names[id(ref.param)].append(ref.name)
        module = tree.paths[ref.path_index].module
        slots[memory[id(ref.param)]].add((id(module), ref.name.rpartition(".")[2]))
    choices: dict[int, MatrixChoice] = {}
    for ref in tree.params:
        key, param, node = id(ref.param), ref.param, tree.paths[ref.path_index]
        if key in choices:
            continue
        path, classes = ref.name.split("."), _classes(node.module)
        reasons = {
            "vector": param.ndim < 2,
            "vector in the shape of a matrix": _is_vector(param),
            "no matrix": param.ndim > 3,
            "tied": len(slots[memory[key]]) > 1,
            "embedding": isinstance(node.module, nn.Embedding | nn.EmbeddingBag)
            or "embedding" in classes,
            "head": key in heads,
            "router": "router" in classes,
            "norm": "norm" in classes,
        }
        first = next((reason for reason, holds in reasons.items() if holds), "")
        reason = first or _excluded_by_name(path, param)
        if not reason and not _multiplies(path, param, node.module, classes):
            reason = "no layer that is known to multiply"
        parent = tree.paths[node.parent].module if node.parent >= 0 else None
        layout = functools.partial(_layout, path, param, node.module, parent)
        choices[key] = overrides.choice(names[key], param, reason, layout)
    return choices


def choose_by_names(
    named: Iterable[tuple[str, Tensor]], overrides: Overrides
) -> dict[int, MatrixChoice]:
    """Decides the algorithm of parameters by names and shapes alone, without their modules.

    Raises:
        PlanError: as `choose`.
    """
    named = list(named)
    overrides.check([name for name, _ in named])
    choices: dict[int, MatrixChoice] = {}
    for name, param in named:
        is_matrix = param.ndim == 2 and not _is_vector(param)
        reason = _excluded_by_name(name.split("."), param) if is_matrix else "no matrix"
        choices[id(param)] = overrides.choice([name], param, reason, MatrixLayout)
    return choices


def _is_vector(param: Tensor) -> bool:
    return min(param.shape[-2:], default=0) < 2


def _excluded_by_name(path: Sequence[str], param: Tensor) -> str:
    """Returns why a parameter's name says that it is no hidden matrix; empty if it does not."""
    for reason, words in _NOT_HIDDEN.items():
        if any(map(words.fullmatch, path)):
            return reason
    layer = path[-2] if len(path) > 1 else path[-1]
    # Other gates are a part of a feed-forward network.
    if layer == "gate" and param.ndim == 2 and param.shape[0] < param.shape[1]:
        return "router"
    return "norm" if "norm" in layer.lower() else ""


def _multiplies(path: Sequence[str], param: Tensor, module: nn.Module, kind: str) -> bool:
    """Says whether a module is known to multiply by this parameter."""
    leaf = path[-1]
    if param.ndim == 3:
        in_layer = any(word in kind for word in ("expert", "moe", "mlp", "glu"))
        return "conv" not in kind and (in_layer or any("expert" in part for part in path))
    has_experts = hasattr(module, "moe_num_experts")
    if has_experts or isinstance(module, nn.Linear) or leaf in (*_QKV, *_GATE_UP):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return leaf.endswith("_proj_weight")
    of_gpt2 = "conv1d" in kind and not isinstance(module, nn.Conv1d)
    has_sizes = hasattr(module, "in_features") and hasattr(module, "out_features")
    return leaf == "weight" and (of_gpt2 or has_sizes)


def _classes(module: nn.Module) -> str:
    """Returns names of a module's classes in small letters; the first may be FSDP's."""
    kinds = [kind for kind in type(module).__mro__[:3] if kind is not nn.Module]
    return " ".join(kind.__name__ for kind in kinds).lower()


def _layout(path: Sequence[str], param: Tensor, module: nn.Module, parent: Any) -> MatrixLayout:
    """Returns how a parameter stores its matrices."""
    *parts, leaf = path
    if param.ndim == 3:  # experts, (experts, out, in) or (experts, in, out): two shapes tell which
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.ndim != 3:
            return MatrixLayout()
        transposed = up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]
        if leaf != "gate_up_proj":
            return MatrixLayout(None, transposed)
        half = param.shape[2 if transposed else 1] // 2
        # In the experts of GPT-OSS, columns belong to gate and up by turns.
        return MatrixLayout((half, half), transposed, half if "gptoss" in _classes(module) else 1)
    transposed = "conv1d" in _classes(module)
    outputs = param.shape[-1 if transposed else -2]
    experts = getattr(module, "moe_num_experts", None)
    if isinstance(experts, int) and outputs % experts == 0 and leaf != "weight":
        return MatrixLayout((outputs // experts,) * experts)
    raw = leaf in (*_QKV, *_GATE_UP)
    layer = leaf if raw or not parts else parts[-1]
    beside = module if raw else parent
    sizes, turns = None, _turns(layer, outputs, beside)
    if layer in _QKV or turns:
        sizes = _attention(outputs, beside)
    elif layer in _GATE_UP and outputs % 2 == 0:
        # `Wi` is joined or not, which the layer after it tells.
        joined = layer != "Wi" or _inputs(beside, _DOWN) == outputs // 2
        sizes = (outputs // 2, outputs // 2) if joined else None
    in_turns = turns and sizes and not any(size % turns for size in sizes)
    return MatrixLayout(sizes, transposed, turns if in_turns else 1)


def _turns(layer: str, outputs: int, beside: Any) -> int:
    """Returns the turns of query, key and value in a joined layer; 0 if they are not known."""
    kinds = [cls.__name__ for cls in type(beside).__mro__ if cls.__name__ in _BY_TURNS]
    joined, of = _BY_TURNS[kinds[0]] if kinds else ("", 1)
    if layer != joined:
        return 0
    if of == "head_size":
        return outputs // (3 * beside.head_size)
    if of == "num_kv_heads" and not (beside.new_decoder_architecture or beside.multi_query):
        of = "num_heads"
    return of if isinstance(of, int) else int(getattr(beside, of, 1))


def _attention(outputs: int, beside: Any) -> tuple[int, ...] | None:
    """Returns outputs of query, key and value: the layer after takes those of the query."""
    if any(hasattr(beside, name) for name in ("q_attn", "q_proj")):  # keys and values alone
        return (outputs // 2, outputs // 2) if outputs % 2 == 0 else None
    query = _inputs(beside, _AFTER_ATTENTION)
    if query is not None and outputs > query and (outputs - query) % 2 == 0:
        other = (outputs - query) // 2
        return query, other, other
    return (outputs // 3,) * 3 if outputs % 3 == 0 else None


def _inputs(module: Any, names: Iterable[str]) -> int | None:
    """Returns the number of inputs of the first layer with one of these names."""
    for name in names:
        layer = getattr(module, name, None)
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2:
            return weight.shape[0 if "conv1d" in _classes(layer) else 1]
    return None


# --- Values of groups. ---


def globs(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a list of globs; a single one may be written without a list."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def entries_of(group: Mapping[str, Any]) -> list[tuple[Tensor, str]]:
    """Returns (parameter, name) of a group; names are empty if the group has none."""
    names = group.get("param_names") or [""] * len(group["params"])
    return list(zip(group["params"], names, strict=True))


def with_entries(group: Mapping[str, Any], entries: Iterable[tuple[Tensor, str]]) -> dict[str, Any]:
    """Returns a group with the same settings and other parameters."""
    params, names = zip(*entries, strict=True) if entries else ((), ())
    named = {"param_names": list(names)} if "param_names" in group else {}
    return {**group, **named, "params": list(params)}


def check_values(group: Mapping[str, Any]) -> None:
    """Refuses wrong values of settings, all at once.

    Raises:
        ConfigError: naming each setting.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)

    problems = [
        f"{key}: {group[key]!r} is invalid. Write a number of 0 or more."
        for key in ("lr", "weight_decay", "momentum", "eps", "adamw_eps", "ns_steps")
        if not is_number(group[key]) or group[key] < 0
    ]
    problems += [
        f"{key}: {group[key]!r} is invalid. Write {count} numbers."
        for key, count in (("ns_coefficients", 3), ("adamw_betas", 2))
        if len(group[key]) != count or not all(map(is_number, group[key]))
    ]
    words = {
        "adjust_lr_fn": ADJUSTMENTS,
        "iteration_dtype": tuple(ITERATION_DTYPES),
        "algorithm": ("muon", "adamw"),
    }
    problems += [
        f"{key}: {group[key]!r} is invalid. Expected {', '.join(expected)}."
        f"{nearest(str(group[key]), expected)}"
        for key, expected in words.items()
        if group[key] not in expected and not (key == "algorithm" and group[key] is None)
    ]
    if problems:
        raise ConfigError("Muon cannot step with these settings:\n" + "\n".join(problems))


def check_matrices(entries: Sequence[tuple[Tensor, str]], number: int) -> None:
    """Refuses vectors in a group of Muon.

    Args:
        entries: (parameter, name) of the group.
        number: index of the group in the optimizer.

    Raises:
        PlanError: naming the vectors.
    """
    wrong = [
        f"{name!r} {tuple(param.shape)}" if name else f"parameter {index} {tuple(param.shape)}"
        for index, (param, name) in enumerate(entries)
        if param.ndim not in (2, 3)
    ]
    if not wrong:
        return
    shown = listed(wrong, 10, "")
    problem = (
        f"Group {number} mixes both algorithms: it says algorithm: muon and holds, beside matrices,"
        if len(wrong) < len(entries)
        else f"Group {number} gives to Muon what is no matrix:"
    )
    raise PlanError(
        f"{problem} {shown}. Muon orthogonalises matrices, or a list of them in three dimensions. "
        "Move them to a group with algorithm: adamw, or leave `algorithm` out to have the group "
        "divided."
    )
