"""Chooses modules by what a configuration writes: class names, patterns of names, blocks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree, has_forward, inside_wrappers
from composer_fsdp2.text import child_name, listed

__all__ = [
    "block_ids",
    "block_positions",
    "matcher",
    "outer_names",
    "select_modules",
    "unmatched_classes",
    "unmatched_names",
]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Tells which names match a glob, or `re:` and a regular expression, as a whole."""
    is_expression = pattern.startswith("re:")
    compiled = re.compile(pattern[3:] if is_expression else fnmatch.translate(pattern))
    return lambda name: compiled.fullmatch(name) is not None


def select_modules(
    tree: ModuleTree, key: str, names: Sequence[str], classes: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Returns the modules of patterns of names and of classes, by name.

    Args:
        tree: the model whose modules are matched.
        key: the setting that holds the names; `classes` stands beside it.
        names: globs, or `re:` and a regular expression.
        classes: names of classes.

    Raises:
        PlanError: for a class or a pattern that no module has.
    """
    beside = key.removesuffix("names") + "classes"
    problems = [*unmatched_classes(tree, classes, beside), *unmatched_names(tree, names, key)]
    if problems:
        raise PlanError("\n".join(problems))
    matchers = [matcher(pattern) for pattern in names]
    return {
        name: module
        for name, module in tree.modules()
        if type(module).__name__ in classes or any(match(name) for match in matchers)
    }


def unmatched_classes(tree: ModuleTree, classes: Iterable[str], where: str) -> Iterable[str]:
    """Yields a sentence for each class that no module has; `where` is the key of the classes."""
    existing = sorted({type(module).__name__ for _, module in tree.modules()})
    for name in classes:
        if name not in existing:
            yield (
                f"{where} names '{name}', but the model has no module of that class. It would "
                f"have no effect.{nearest(name, existing)} "
                f"Classes in this model: {', '.join(existing)}."
            )


def unmatched_names(tree: ModuleTree, patterns: Iterable[str], where: str) -> Iterable[str]:
    """Yields a sentence for each pattern that no module name matches."""
    names = [name for name, _ in tree.modules() if name]
    for pattern in patterns:
        if not any(map(matcher(pattern), names)):
            yield (
                f"{where} holds '{pattern}', which matches no module name. It would have no "
                f"effect.{nearest(pattern, names)} Names in this model: {listed(names, 20, '')}."
            )


# --- Blocks: members of the outermost lists of equal modules. ---


def block_positions(tree: ModuleTree) -> dict[str, tuple[int, int]]:
    """Finds the blocks: members of one class, with parts of their own, in a list in no block.

    Lists inside blocks are experts, heads or projections.

    Returns:
        By the name of each block: its index in its list, and how many blocks the list has.
    """
    positions: dict[str, tuple[int, int]] = {}
    for name, module in tree.modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if not is_list or any(outer in positions for outer in outer_names(name)):
            continue
        # `children()` would leave out a block that is registered a second time.
        members = {
            key: None if child is None else inside_wrappers(child)  # pyright: ignore
            for key, child in module._modules.items()
        }
        kinds = {type(member) for member in members.values()}
        parted = [m for m in members.values() if m is not None and m._modules and has_forward(m)]
        if len(kinds) == 1 and len(parted) == len(members):
            for index, key in enumerate(members):
                positions[child_name(name, key)] = index, len(members)
    return positions


def outer_names(name: str) -> Iterator[str]:
    """Yields the name itself, then those of the modules around it, without the root's."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def block_ids(target: int | str | tuple[int | str, ...], count: int) -> set[int]:
    """Returns which of `count` blocks a target means; see `ActivationSpec.target`.

    The words are those of LLM Foundry's `activation_checkpointing_target`, which takes more blocks
    than there are for all of them.

    Raises:
        PlanError: for the id of a block that is not there.
    """
    if isinstance(target, int):
        return set(range(min(target, count)))
    words = target if isinstance(target, str) else ",".join(map(str, target))
    ids: set[int] = set()
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
        ids.update(range(start, min(int(last) if last else end, count)))
    return ids


_WORDS = re.compile(r"(?:([a-z]+)-)?(\d+)(?:-(\d+))?")
"""of a target: `first-2`, `range-1-3`, `1-3` or `1`"""
