"""The blocks of a model: members of its outermost lists of equal modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward, is_wrapper

__all__ = ["BlockPosition", "block_ids", "block_positions", "outer_names", "position_of"]


@dataclass(frozen=True, slots=True)
class BlockPosition:
    """Where a block is in its list."""

    index: int
    count: int
    """blocks of the list"""


def block_positions(tree: ModuleTree) -> dict[str, BlockPosition]:
    """Finds the blocks: members of one class, with parts of their own, in a list in no block.

    Lists inside blocks are experts, heads or projections.
    """
    found: dict[str, BlockPosition] = {}
    for name, module in tree.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(outer in found for outer in outer_names(name)):
            continue
        # `children()` would leave out a block that is registered a second time.
        members = {key: _inside(child) for key, child in module._modules.items()}
        if _are_blocks(list(members.values())):
            prefix = f"{name}." if name else ""
            for index, key in enumerate(members):
                found[prefix + key] = BlockPosition(index, len(members))
    return found


def _inside(module: nn.Module | None) -> nn.Module | None:
    while module is not None and is_wrapper(module):
        module = next(iter(module._modules.values()))
    return module


def _are_blocks(members: list[nn.Module | None]) -> bool:
    return len({type(member) for member in members}) == 1 and all(
        member is not None and member._modules and has_forward(member) for member in members
    )


def outer_names(name: str) -> Iterator[str]:
    """The name itself, then those of the modules around it, without the root's."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def position_of(name: str, positions: Mapping[str, BlockPosition]) -> BlockPosition | None:
    """Where the block is that a module lies in, or is."""
    return next((positions[outer] for outer in outer_names(name) if outer in positions), None)


def block_ids(target: int | str | tuple[int | str, ...], count: int) -> set[int]:
    """Which of `count` blocks a target means; see `ActivationSpec.target`.

    The words are those of LLM Foundry's `activation_checkpointing_target`, which takes more blocks
    than there are for all of them.

    Raises:
        PlanError: for the id of a block that is not there.
    """
    if isinstance(target, int):
        return set(range(min(target, count)))
    parts = target.replace(" ", "").split(",") if isinstance(target, str) else target
    found: set[int] = set()
    for part in parts:
        found |= {part} if isinstance(part, int) else _ids_of_words(part, count)
    if beyond := [block for block in found if block >= count]:
        raise PlanError(
            f"target names block {min(beyond)}, but the list has {count} blocks, from 0 to "
            f"{count - 1}. It would have no effect. Correct the number."
        )
    return found


def _ids_of_words(words: str, count: int) -> set[int]:
    if "," in words:
        return block_ids(words, count)
    kind, _, rest = words.rpartition("-") if words[0].isalpha() else ("range", "", words)
    if kind == "first":
        return set(range(min(int(rest), count)))
    if kind == "last":
        return set(range(max(count - int(rest), 0), count))
    if kind == "middle":
        start = max((count - 1) // 2 - int(rest) // 2, 0)
        return set(range(start, min(start + int(rest), count)))
    start, _, end = words.removeprefix("range-").partition("-")
    return set(range(int(start), min(int(end), count)))
