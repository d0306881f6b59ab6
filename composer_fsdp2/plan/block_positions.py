"""The blocks of a model: members of its outermost lists of equal modules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward, is_wrapper
from composer_fsdp2.text import child_name

__all__ = ["block_ids", "block_positions", "outer_names"]


def block_positions(tree: ModuleTree) -> dict[str, tuple[int, int]]:
    """Finds the blocks: members of one class, with parts of their own, in a list in no block.

    Lists inside blocks are experts, heads or projections.

    Returns:
        By the name of each block: its index in its list, and how many blocks the list has.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, module in tree.modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if not is_list or any(outer in found for outer in outer_names(name)):
            continue
        # `children()` would leave out a block that is registered a second time.
        members = {key: _inside(child) for key, child in module._modules.items()}
        kinds = {type(member) for member in members.values()}
        parted = [m for m in members.values() if m is not None and m._modules and has_forward(m)]
        if len(kinds) == 1 and len(parted) == len(members):
            for index, key in enumerate(members):
                found[child_name(name, key)] = index, len(members)
    return found


def _inside(module: nn.Module | None) -> nn.Module | None:
    while module is not None and is_wrapper(module):
        module = next(iter(module._modules.values()))
    return module


def outer_names(name: str) -> Iterator[str]:
    """Yields the name itself, then those of the modules around it, without the root's."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def block_ids(target: int | str | tuple[int | str, ...], count: int) -> set[int]:
    """Which of `count` blocks a target means; see `ActivationSpec.target`.

    The words are those of LLM Foundry's `activation_checkpointing_target`, which takes more blocks
    than there are for all of them.

    Raises:
        PlanError: for the id of a block that is not there.
    """
    if isinstance(target, int):
        return set(range(min(target, count)))
    words = target if isinstance(target, str) else ",".join(map(str, target))
    found: set[int] = set()
    for kind, first, last in _WORDS.findall(words.replace(" ", "")):
        number = int(first)
        if number >= count and not kind and not last:
            raise PlanError(
                f"target names block {number}, but the list has {count} blocks, from 0 to "
                f"{count - 1}. It would have no effect. Correct the number."
            )
        starts = {"first": 0, "middle": (count - 1) // 2 - number // 2, "last": count - number}
        start = max(starts.get(kind, number), 0)
        end = start + number if kind else number + 1
        found.update(range(start, min(int(last) if last else end, count)))
    return found


_WORDS = re.compile(r"(?:([a-z]+)-)?(\d+)(?:-(\d+))?")
"""of a target: `first-2`, `range-1-3`, `1-3` or `1`"""
