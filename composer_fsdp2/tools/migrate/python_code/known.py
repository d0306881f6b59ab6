"""Finds which objects in a file are FSDP1 modules or configurations."""

from __future__ import annotations

import ast

from composer_fsdp2.tools.migrate.python_code.names import Scope, ScopedVisitor, arguments, dotted
from composer_fsdp2.tools.migrate.python_code.row import Found
from composer_fsdp2.tools.migrate.python_code.table import CODE_ROWS

__all__ = ["CONFIG_CALLEES", "CONFIG_NAMES", "checked_objects", "last_name", "learn"]

_CLASSES = frozenset(home for row in CODE_ROWS if row.found is Found.MEMBER for home in row.homes)
CONFIG_CALLEES = frozenset(
    home for row in CODE_ROWS if row.found is Found.KEY for home in row.homes
)
"""what takes a configuration whose keys are looked at"""
CONFIG_NAMES = frozenset(n for row in CODE_ROWS if row.found is Found.KEY for n in row.owners)
"""the arguments it is given in"""


def last_name(node: ast.AST) -> str:
    """The name after the last dot, or an empty text."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_class(scope: Scope, node: ast.AST) -> bool:
    return any(meaning.name in _CLASSES for meaning in scope.meanings(node))


def _checked(scope: Scope, node: ast.AST) -> str | None:
    """`x` of `isinstance(x, FSDP)`."""
    if isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and len(node.args) == 2:
        return dotted(node.args[0]) if _is_class(scope, node.args[1]) else None
    return None


def checked_objects(scope: Scope, test: ast.AST) -> set[str]:
    """The expressions that are FSDP1 modules where a condition holds."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return {text for value in test.values for text in checked_objects(scope, value)}
    checked = _checked(scope, test)
    return {checked} if checked is not None else set()


def learn(scopes: dict[ast.AST, Scope], tree: ast.Module) -> set[str]:
    """Notes in the scopes which expressions hold FSDP1 modules.

    Returns:
        The expressions that a Trainer takes its configuration from.
    """
    learner = _Learner(scopes, tree)
    learner.visit(tree)
    return learner.configs


class _Learner(ScopedVisitor):
    """Which expressions hold FSDP1 modules, and which a Trainer's configuration."""

    def __init__(self, scopes: dict[ast.AST, Scope], tree: ast.Module) -> None:
        super().__init__(scopes, tree)
        self.configs: set[str] = set()

    def enter(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for argument in arguments(node):
                if argument.annotation and _is_class(self.scope, argument.annotation):
                    self.scope.known.add(argument.arg)

    def _learn(self, target: ast.AST) -> None:
        text = dotted(target)
        if text is not None:
            # An attribute set in one method is read in others.
            (self.module if "." in text else self.scope).known.add(text)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Call) and _is_class(self.scope, node.value.func):
            for target in node.targets:
                self._learn(target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if _is_class(self.scope, node.annotation):
            self._learn(node.target)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        checked = _checked(self.scope, node)
        if checked is not None:
            # Of FSDP1 where the check holds; the finder knows those places.
            (self.module if "." in checked else self.scope).checked.add(checked)
        elif any(m.name in CONFIG_CALLEES for m in self.scope.meanings(node.func)):
            texts = (dotted(k.value) for k in node.keywords if k.arg in CONFIG_NAMES)
            self.configs.update(text for text in texts if text is not None)
        self.generic_visit(node)
