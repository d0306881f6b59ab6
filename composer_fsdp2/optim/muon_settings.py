"""Groups of Muon: their values, and how one without an algorithm is divided.

[Note: undecided groups] `model.parameters()` does not say which matrices are hidden ones. A group
of it is divided by shape at once, into what may be a matrix and what cannot, and when the model is
known, embeddings and the like move from the first to the second. So the number of groups stays, one
of which may be empty: Composer builds learning rate schedules, which go by it, in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.muon_groups import ALGORITHMS, Choice
from composer_fsdp2.optim.muon_iteration import ADJUSTMENTS, Layout
from composer_fsdp2.text import listed

__all__ = [
    "ITERATION_DTYPES",
    "PlannedGroups",
    "by_shape",
    "check_algorithm",
    "check_values",
    "divide_group",
    "dtype_name",
    "follow_parameters",
    "globs",
    "group_entries",
    "make_state",
    "mark_of",
    "overwrite",
]

ITERATION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MARK = "undecided"
"""key of a group that is not decided yet: a number that parts of one group share, and the settings
that were given for it alone"""


@dataclass(slots=True, eq=False)
class PlannedGroups:
    """The groups of an optimizer, each of one algorithm."""

    groups: list[dict[str, Any]]
    layouts: list[list[Layout]]
    """of the parameters of each group, in their order"""
    text: str = ""

    def without_empty(self) -> PlannedGroups:
        """Returns those with parameters; there must be no schedule yet."""
        kept = [number for number, group in enumerate(self.groups) if group["params"]]
        groups = [self.groups[number] for number in kept]
        return PlannedGroups(groups, [self.layouts[number] for number in kept], self.text)

    def describe(self, names: Mapping[int, str]) -> str:
        """Returns settings and parameters of each group; `names` are by id."""
        lines: list[str] = []
        for group, layouts in zip(self.groups, self.layouts, strict=True):
            lines.append(
                str({k: v for k, v in group.items() if k not in ("params", "param_names")})
            )
            for param, layout in zip(group["params"], layouts, strict=True):
                joined = f" in blocks {layout.blocks}" if layout.blocks else ""
                joined += f" by {layout.turns} turns" if layout.turns > 1 else ""
                lines.append(f"  {names.get(id(param), tuple(param.shape))}{joined}")
        return "\n".join(lines)


def dtype_name(dtype: str | torch.dtype) -> str:
    """Returns the name of a dtype of the iteration as it stands in a group."""
    names = {value: name for name, value in ITERATION_DTYPES.items()}
    return names.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype


def globs(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a list of globs; one may be written without a list."""
    return (given,) if isinstance(given, str) else tuple(given)


def check_values(group: Mapping[str, Any]) -> None:
    """Refuses values that cannot be computed with, all at once.

    Raises:
        ConfigError: with what to write.
    """
    problems = [
        f"{key}: {group[key]!r} is invalid. Write a number of 0 or more."
        for key in ("lr", "weight_decay", "momentum", "eps", "adamw_eps", "ns_steps")
        if not _is_number(group[key]) or group[key] < 0
    ]
    for key, count in (("ns_coefficients", 3), ("adamw_betas", 2)):
        if len(group[key]) != count or not all(map(_is_number, group[key])):
            problems.append(f"{key}: {group[key]!r} is invalid. Write {count} numbers.")
    for key, known in (
        ("adjust_lr_fn", ADJUSTMENTS),
        ("iteration_dtype", tuple(ITERATION_DTYPES)),
        ("algorithm", (None, *ALGORITHMS)),
    ):
        if group[key] not in known:
            names = [name for name in known if name is not None]
            problems.append(
                f"{key}: {group[key]!r} is invalid. Expected {', '.join(names)}."
                f"{nearest(str(group[key]), names)}"
            )
    if problems:
        raise ConfigError("Muon cannot step with these settings:\n" + "\n".join(problems))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def check_algorithm(group: Mapping[str, Any], number: int) -> None:
    """Refuses vectors in a group of Muon.

    Raises:
        PlanError: with what to write.
    """
    if group["algorithm"] != "muon":
        return
    entries = group_entries(group)
    wrong = [
        f"{name!r} {tuple(param.shape)}" if name else f"parameter {index} {tuple(param.shape)}"
        for index, (param, name) in enumerate(entries)
        if param.ndim not in (2, 3)
    ]
    if not wrong:
        return
    shown = listed(wrong, 10, "")
    what = (
        f"Group {number} mixes both algorithms: it says algorithm: muon and holds, beside matrices,"
        if len(wrong) < len(entries)
        else f"Group {number} gives to Muon what is no matrix:"
    )
    raise PlanError(
        f"{what} {shown}. Muon orthogonalises matrices, or a list of them in three dimensions. "
        "Move them to a group with algorithm: adamw, or leave `algorithm` out to have the group "
        "divided."
    )


def group_entries(group: Mapping[str, Any]) -> list[tuple[Tensor, str]]:
    """Returns parameters with their names, empty where there are none."""
    names = group.get("param_names") or [""] * len(group["params"])
    return list(zip(group["params"], names, strict=True))


def mark_of(group: Mapping[str, Any]) -> int | None:
    """Returns a number that the parts of one undecided group share; None for a decided group."""
    return group[_MARK][0] if _MARK in group else None


def overwrite(group: dict[str, Any], values: Mapping[str, Any], own: Collection[str]) -> None:
    """Gives a group of AdamW its own settings, where it has none that were given for it."""
    group.update({k: value for k, value in values.items() if value is not None and k not in own})


def by_shape(
    group: dict[str, Any], own: Collection[str], for_adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Divides a group that has no algorithm; see [Note: undecided groups]."""
    entries = group_entries(group)
    mark = (id(entries[0][0]) if entries else 0, tuple(sorted(own)))
    matrices = _part(group, [entry for entry in entries if entry[0].ndim > 1])
    vectors = _part(group, [entry for entry in entries if entry[0].ndim < 2])
    vectors["algorithm"] = "adamw"
    overwrite(vectors, for_adamw, own)
    parts = (matrices, vectors) if matrices["params"] else (vectors,)
    return [{**part, _MARK: mark} for part in parts] if entries else []


def divide_group(
    parts: Sequence[dict[str, Any]], choices: Mapping[int, Choice]
) -> list[dict[str, Any]]:
    """Returns the groups of each algorithm that the parts of one undecided group become."""
    entries = [entry for part in parts for entry in group_entries(part)]
    found: list[dict[str, Any]] = []
    for algorithm in ALGORITHMS:
        kept = [entry for entry in entries if _algorithm(entry[0], choices) == algorithm]
        if not kept and len(parts) == 1:
            continue
        like = parts[-1 if algorithm == "adamw" else 0]
        group = _part(like, kept)
        group["algorithm"] = algorithm
        del group[_MARK]
        found.append(group)
    return found


def _part(group: Mapping[str, Any], entries: Sequence[tuple[Tensor, str]]) -> dict[str, Any]:
    part = {**group, "params": [param for param, _ in entries]}
    if "param_names" in group:
        part["param_names"] = [name for _, name in entries]
    return part


def _algorithm(param: Tensor, choices: Mapping[int, Choice]) -> str:
    return choices[id(param)].algorithm if id(param) in choices else "adamw"


def follow_parameters(
    groups: Sequence[Mapping[str, Any]],
    stepped: list[list[Tensor]],
    layouts: list[list[Layout]],
) -> None:
    """Keeps blocks with their parameters when some have left a group, as `LayerFreezing` has it.

    `stepped` holds the parameters of each group in the last step; both lists are brought up to
    date.

    Raises:
        PlanError: a group that lost parameters before the first step, or got some.
    """
    held = [group["params"] for group in groups]
    if [list(map(id, params)) for params in held] == [list(map(id, params)) for params in stepped]:
        return
    known = {
        id(param): layout
        for params, given in zip(stepped, layouts, strict=False)
        for param, layout in zip(params, given, strict=True)
    }
    for number, params in enumerate(held):
        if known and all(id(param) in known for param in params):
            layouts[number] = [known[id(param)] for param in params]
        elif len(layouts[number]) != len(params):
            raise PlanError(
                f"Group {number} of Muon has {len(params)} parameters and was given "
                f"{len(layouts[number])}. Two share memory and became one, or the group was "
                "changed, and their blocks are not known any more. Tie parameters by assignment "
                "(`b.weight = a.weight`), and give new ones to `add_param_group`."
            )
    stepped[:] = [list(params) for params in held]


def make_state(group: Mapping[str, Any], state: Any) -> None:
    """Makes the state of all at once: a checkpoint asks every rank for the same keys."""
    for param in group["params"]:
        if state.get(param) or not (param.requires_grad or param.grad is not None):
            continue
        if group["algorithm"] == "muon":
            state[param] = {"momentum_buffer": torch.zeros_like(param)}
            continue
        state[param] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
