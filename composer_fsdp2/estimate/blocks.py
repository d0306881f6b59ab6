"""Shortens a model by blocks that are equal, so that a trace of few stands for all.

[Note: equal blocks] A step is traced with three periods of equal blocks and with four, and with one
more for each block after the first that is gathered ahead. What the last of them adds, each further
one adds as well: bytes that are held and sent, FLOPs, and memory at one and the same moment of the
step. A moment belongs to a block counted from the first or from the last one; the most memory is
not between those, for what a block adds does not change between them. Two periods would be too few:
the most memory may be needed by a block with equal blocks on both sides.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from composer_fsdp2.estimate.trace import Trace, Window
from composer_fsdp2.plan.module_tree import ModuleTree, canonical_param_ids
from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["EqualBlocks", "copied", "extended", "find_equal_blocks"]

_PERIODS = 6
"""longest period that is looked for"""
_NUMBER = re.compile("idx|index|number|_id$")
"""attributes in which a block keeps its index"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """Children of a list, each equal to the child one period before."""

    name: str
    """of the list"""
    count: int
    """children of the list"""
    start: int
    """index of the first equal child"""
    equal: int
    """how many there are"""
    period: int
    short: int
    """periods of the shorter trace; the longer trace has one more"""

    def left_out(self, periods: int) -> range:
        """Returns the numbers of children without which so many periods are left."""
        remaining = periods * self.period + self.equal % self.period
        begin = self.start + remaining // 2
        return range(begin, begin + self.equal - remaining)


def find_equal_blocks(
    model: nn.Module, units: WrapPlan, treated: Collection[str] = (), ahead: int = 0
) -> EqualBlocks | None:
    """Finds the list with the most blocks that are equal in shapes, settings and treatment.

    Collective: no.

    Args:
        model: before it is sharded, on meta or not.
        units: the wrap plan of the whole model.
        treated: names of modules that a transformation changes.
        ahead: blocks that are gathered before they are needed.
    """
    short = 2 + max(1, ahead)  # see [Note: equal blocks]
    tied = {name for names in units.tied for name in names}
    inside: dict[str, list[Any]] = defaultdict(list)
    for unit in units.units:
        inside[unit.module].append(
            (unit.reshard_after_forward, str(unit.mixed_precision), unit.role)
        )
    for name in treated:
        inside[name].append("treated")
    best: EqualBlocks | None = None
    for name, module in model.named_modules():
        if type(module) is not nn.ModuleList or len(module) <= short + 1:
            continue
        if f"{name}.0" not in inside and not any(n.startswith(f"{name}.0.") for n in inside):
            continue
        signs = [
            _signature(block, f"{name}.{number}", inside, tied)
            for number, block in enumerate(module)
        ]
        for period in range(1, _PERIODS + 1):
            candidate = _longest(name, signs, period, short)
            # There have to be more of them than would be traced.
            is_worth = candidate.equal // period > short + 2
            if is_worth and (best is None or candidate.equal > best.equal):
                best = candidate
    return best


def _longest(name: str, signs: list[Any], period: int, short: int) -> EqualBlocks:
    """Returns the longest run of children that are equal to the child one period before."""
    start, best = 0, (0, 0)
    for number in range(len(signs)):
        if number - period < start or signs[number] == signs[number - period]:
            best = max(best, (number + 1 - start, -start))
        else:
            start = number - period + 1
    return EqualBlocks(
        name=name,
        count=len(signs),
        start=-best[1],
        equal=best[0],
        period=period,
        short=short,
    )


def _signature(block: nn.Module, name: str, inside: dict[str, list[Any]], tied: set[str]) -> int:
    def parts() -> Iterator[Any]:
        for below, module in block.named_modules():
            full = f"{name}.{below}" if below else name
            plain = {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, bool | float | str | int) and not _NUMBER.search(key)
            }
            yield below, type(module), tuple(sorted(plain.items())), str(inside.get(full))
            for key, param in module._parameters.items():
                if param is not None:
                    shape = tuple(param.shape), param.dtype, param.requires_grad
                    yield key, shape, f"{full}.{key}" if f"{full}.{key}" in tied else ""

    return hash(tuple(parts()))


def copied(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: EqualBlocks | None = None,
    periods: int = 0,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns copies, without blocks beyond so many periods. Collective: no."""
    memo: dict[int, Any] = {}
    # A copy of two parameters on meta that share memory would not share it.
    params = {id(ref.param): ref for ref in ModuleTree.read(model).params}
    same = canonical_param_ids(params.values()).items()
    memo |= {key: copy.deepcopy(params[first].param, memo) for key, first in same if key != first}
    if blocks is not None:
        block_list: Any = model.get_submodule(blocks.name)
        memo[id(block_list)] = nn.ModuleList(
            copy.deepcopy(block, memo)
            for number, block in enumerate(block_list)
            if number not in blocks.left_out(periods)
        )
    new = copy.deepcopy(model, memo)
    # A copy that torch makes of an optimizer has nothing but groups and state.
    other = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        vars(other)[key] = copy.copy(value) if isinstance(value, dict) else value
    other.param_groups = [
        {**group, "params": [*dict.fromkeys(memo[id(p)] for p in group["params"] if id(p) in memo)]}
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    return new, other


def extended(short: Trace, long: Trace, blocks: EqualBlocks, units: WrapPlan) -> Trace | None:
    """Returns the trace with all blocks from two traces with few; `None` if the plans do not fit.

    Collective: no. See [Note: equal blocks].

    Args:
        short: a step of the model with `blocks.short` periods of the blocks.
        long: a step of the model with one period more.
        blocks: the list whose other periods are added.
        units: the wrap plan of the whole model, which the added numbers of units must give.
    """
    times = blocks.equal // blocks.period - blocks.short
    facts = [
        Counter(f"reshard {unit.reshard_after_forward}" for unit in plan.units)
        + Counter(elements=sum(unit.numel for unit in plan.units))
        for plan in (short.plan, long.plan, units)
    ]
    if {k: facts[0][k] + times * (facts[1][k] - facts[0][k]) for k in facts[2]} != dict(facts[2]):
        return None

    def grown(before: Counter[Any], after: Counter[Any]) -> Counter[Any]:
        keys = {*before, *after}
        return Counter({k: before[k] + times * (after[k] - before[k]) for k in keys})

    windows = _by_moment(short, blocks, blocks.short), _by_moment(long, blocks, blocks.short + 1)
    return replace(
        short,
        plan=units,
        held=grown(short.held, long.held),
        kept=grown(short.kept or Counter(), long.kept or Counter()),
        sent=grown(short.sent, long.sent),
        calls=grown(short.calls, long.calls),
        flops=short.flops + times * (long.flops - short.flops),
        windows=[
            Window(window.label, dict(grown(Counter(window.kinds), Counter(windows[1][key].kinds))))
            for key, window in windows[0].items()
            if key in windows[1]
        ],
    )


def _by_moment(trace: Trace, blocks: EqualBlocks, periods: int) -> dict[Any, Window]:
    """Returns windows by microbatch, the block that was reached last, event, unit and how often.

    Blocks are counted from either end, and windows of those between are left out. A root whose
    outputs are as many as the blocks is reached by backward as often, between blocks.
    """
    count, short = (blocks.count - len(blocks.left_out(n)) for n in (periods, blocks.short))
    head = blocks.left_out(blocks.short).start
    seen, windows, start = Counter[Any](), dict[Any, Window](), f"{blocks.name}."
    microbatch, block, middle = "", "", False
    for window in trace.windows:
        event, unit = window.label
        if event == "microbatch":
            microbatch, block, middle = unit, "", False
        if unit.startswith(start):
            number, _, below = unit.removeprefix(start).partition(".")
            index = int(number)
            middle = head <= index < count - (short - head)
            block = unit = f"{index if index < head else index - count}.{below}"
        if not middle:
            key = microbatch, block, event, unit
            seen[key] += 1
            windows[(*key, seen[key])] = window
    return windows
