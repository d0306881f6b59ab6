"""Choosing modules by what a configuration writes: class names, globs, regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.text import listed

__all__ = ["matcher", "select_modules", "unmatched_classes", "unmatched_names"]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Tells which names match a glob, or `re:` and a regular expression, as a whole."""
    if pattern.startswith("re:"):
        compiled = re.compile(pattern[3:])
        return lambda name: compiled.fullmatch(name) is not None
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda name: compiled.match(name) is not None


def select_modules(
    tree: ModuleTree, key: str, names: Sequence[str], classes: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Returns the modules of patterns of names and of classes, by name.

    Args:
        tree: of the model.
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
    """A sentence for each class that no module has; `where` is the key they are written under."""
    existing = sorted({type(module).__name__ for _, module in tree.modules()})
    for name in classes:
        if name not in existing:
            yield (
                f"{where} names '{name}', but the model has no module of that class. It would "
                f"have no effect.{nearest(name, existing)} "
                f"Classes in this model: {', '.join(existing)}."
            )


def unmatched_names(tree: ModuleTree, patterns: Iterable[str], where: str) -> Iterable[str]:
    """A sentence for each pattern that no module name matches."""
    names = [name for name, _ in tree.modules() if name]
    for pattern in patterns:
        if not any(map(matcher(pattern), names)):
            yield (
                f"{where} holds '{pattern}', which matches no module name. It would have no "
                f"effect.{nearest(pattern, names)} Names in this model: {listed(names, 20, '')}."
            )
