"""The plan of a run as a value: which modules become FSDP units, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from composer_fsdp2.config.wrapping import PrecisionSpec, UnitSettings
from composer_fsdp2.plan.patterns import outer_names
from composer_fsdp2.text import size_text

__all__ = ["LEFT_OUT", "Decision", "Role", "Rule", "ShardUnit", "WrapPlan", "first_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Holds a rule's answer for one module."""

    wrap: bool
    reason: str
    settings: UnitSettings = field(default_factory=UnitSettings)
    role: Role | None = None
    is_block: bool = True
    """whether the module can be a block of the model, and not a part beside or inside blocks"""
    joins: bool = False
    """whether the unit around this unit takes it in, if their settings are the same"""


Role = Literal["embedding", "head", "fp32"]
"""how a unit is special: its backward reads no weight; its backward follows its forward at
once; it computes in fp32 whatever is around it"""


LEFT_OUT = "parts may be left out"
"""reason of units of modules that a rank may leave out of a step"""


Rule = Callable[[str, nn.Module], Decision | None]
"""Name and module in, decision out; `None` leaves it to the next rule. The first answer wins."""


def first_answer(rules: Iterable[Rule], name: str, module: nn.Module) -> Decision | None:
    """Returns the first rule's decision about a module, `None` without one."""
    answers = (rule(name, module) for rule in rules)
    return next((answer for answer in answers if answer is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """Parameters gathered and reduced by one collective.

    Example:
        >>> from composer_fsdp2 import ShardUnit
        >>> unit = ShardUnit(
        ...     module="head",
        ...     params=("head.weight",),
        ...     numel=8,
        ...     reshard_after_forward=True,
        ...     reason="class Linear",
        ... )
        >>> unit.top_level
        False
    """

    module: str
    """name of the module that `fully_shard` gets; '' is the root"""
    params: tuple[str, ...]
    """names owned by this unit and by no other, every name of a tied parameter included"""
    numel: int
    """elements over all ranks"""
    reshard_after_forward: bool | int
    """resolved: frees the parameters after forward, keeps them, or reshards to a number of ranks"""
    reason: str
    mixed_precision: str | PrecisionSpec | None = None
    """`None` follows the run's"""
    top_level: bool = False
    """no other unit contains it"""
    role: Role | None = None
    is_block: bool = True
    """as in its `Decision`; see `WrapPlan.blocks`"""
    holders: int = 1
    """size of the expert mesh: each expert is full on one of these ranks"""


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """Which modules become FSDP units. A value: no tensors, no modules, no process group.

    Example:
        >>> from torch import nn
        >>> from composer_fsdp2 import plan_wrapping
        >>> from composer_fsdp2.plan.rules import root_rule
        >>> print(plan_wrapping(nn.Linear(4, 2), [root_rule]))
        unit    params  elements  reshard  reason
        <root>       2        10  false    root
    """

    units: tuple[ShardUnit, ...]
    """children before parents, the order of application"""
    tied: tuple[tuple[str, ...], ...] = ()
    ignored: tuple[str, ...] = ()
    """names that are owned by no unit: `ignored_params`, and `frozen: replicate`"""
    replicated_bytes: int = 0
    """bytes of `ignored` on every rank, with `frozen: replicate`"""
    ungathered_bytes: int = 0
    """bytes that units would gather of them, were they sharded"""

    def owner_of(self) -> dict[str, ShardUnit]:
        """Returns the unit of every parameter name. Collective: no."""
        return {name: unit for unit in self.units for name in unit.params}

    def blocks(self) -> tuple[str, ...]:
        """Returns the units that are blocks: inside another unit, containing none, no part of one.

        Direct children of the model, embeddings, heads and what was divided are no blocks.
        Collective: no.
        """
        inner = [unit for unit in self.units if not unit.top_level]
        names = {unit.module for unit in inner if unit.is_block}
        parents = {name.rpartition(".")[0] for name in names}
        innermost = names - {outer for name in parents for outer in outer_names(name)}
        return tuple(unit.module for unit in inner if unit.module in innermost)

    def __str__(self) -> str:
        """Returns the plan as a table."""
        rows: list[tuple[str, ...]] = [("unit", "params", "elements", "reshard", "reason")]
        for unit in self.units:
            name, reshard = unit.module or "<root>", str(unit.reshard_after_forward).lower()
            rows.append((name, str(len(unit.params)), f"{unit.numel:,}", reshard, unit.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        line = "  ".join(f"{{:{'>' if n in (1, 2) else '<'}{w}}}" for n, w in enumerate(widths))
        lines = [line.format(*row).rstrip() for row in rows]
        lines += [f"tied: {' = '.join(names)}" for names in self.tied]
        if self.replicated_bytes:
            lines.append(
                f"replicated: {len(self.ignored)} frozen parameters, "
                f"{size_text(self.replicated_bytes)} on every rank; each forward and each backward "
                f"gathers up to {size_text(self.ungathered_bytes)} less"
            )
        elif self.ignored:
            lines.append(f"ignored: {', '.join(self.ignored)}")
        return "\n".join(lines)
