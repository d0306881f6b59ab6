"""Finds what the names of a Python file stand for, without importing anything.

[Note: not libcst] libcst's `QualifiedNameProvider` answers the same question and was tried in the
place of this file (1.9.0). It does not follow `fsdp = torch.distributed.fsdp`, resolves nothing
after `from ... import *`, takes a name bound by a `case` pattern for the import of that name, and
gives `FSDP(m).module` the name of an attribute of the class. Its time grows with the square of the
number of places of a name: 36 s against 0.2 s for a file that assigns and reads one name 8,000
times, and 1.9 s against 0.06 s for Composer's `trainer.py`. The code to make up for that would be
longer than this.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["Meaning", "Scope", "ScopedVisitor", "arguments", "dotted", "read_scopes"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEPTH = 8
"""of aliases of aliases, so that two that name each other come to an end"""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A full name something may stand for."""

    name: str
    certain: bool = True


@dataclass(slots=True)
class _Bindings:
    """All that a name is bound to in one scope."""

    imported: list[str] = field(default_factory=list)
    aliases: list[ast.expr] = field(default_factory=list)
    other: bool = False


@dataclass(slots=True, eq=False)
class Scope:
    """Names of a module, class, function or comprehension."""

    parent: Scope | None = None
    is_class: bool = False
    names: dict[str, _Bindings] = field(default_factory=dict)
    outer: dict[str, Scope] = field(default_factory=dict)
    """names declared `global` or `nonlocal`, and whose they are"""
    wildcards: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    """expressions that are known to hold an object of interest"""
    checked: set[str] = field(default_factory=set)
    """expressions that are asked somewhere whether they do"""

    def chain(self) -> Iterator[Scope]:
        """The scopes a name is looked up in, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            if scope is self or not scope.is_class:
                yield scope
            scope = scope.parent

    def binding(self, name: str) -> _Bindings:
        """Where a name bound in this scope is kept."""
        owner = self.outer.get(name, self)
        return owner.names.setdefault(name, _Bindings())

    def meanings(self, node: ast.AST, depth: int = _DEPTH) -> list[Meaning]:
        """The full names a name or a chain of attributes may stand for."""
        if isinstance(node, ast.Attribute):
            return [
                Meaning(f"{base.name}.{node.attr}", base.certain)
                for base in self.meanings(node.value, depth)
            ]
        return self._look_up(node.id, depth) if isinstance(node, ast.Name) and depth else []

    def _look_up(self, name: str, depth: int) -> list[Meaning]:
        for scope in self.chain():
            found = scope.outer.get(name, scope).names.get(name)
            if found is not None:
                certain = not found.other
                aliases = [m for a in found.aliases for m in scope.meanings(a, depth - 1)]
                return [Meaning(full, certain) for full in found.imported] + [
                    Meaning(m.name, certain and m.certain) for m in aliases
                ]
        return [Meaning(f"{module}.{name}", False) for s in self.chain() for module in s.wildcards]

    def knows(self, node: ast.expr) -> bool:
        """Whether an expression is known to hold an object of interest."""
        scope = self._home(node)
        return scope is not None and dotted(node) in scope.known

    def suspects(self, node: ast.expr) -> bool:
        """Whether it is asked somewhere if it does."""
        scope = self._home(node)
        return scope is not None and dotted(node) in scope.checked

    def _home(self, node: ast.expr) -> Scope | None:
        """The scope of a name; what is known of `a.b` is kept with the module."""
        text = dotted(node)
        for scope in self.chain():
            if text in scope.known or text in scope.checked or text in scope.names:
                return scope
        return None


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text, or None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def read_scopes(tree: ast.Module) -> dict[ast.AST, Scope]:
    """The scope that each module, class, function and comprehension of a file opens."""
    reader = _Reader(tree)
    reader.visit(tree)
    return reader.scopes


class _Reader(ast.NodeVisitor):
    """Collects bindings; what a scope's header evaluates belongs to the scope around it."""

    def __init__(self, tree: ast.Module) -> None:
        self.scope = Scope()
        self.scopes: dict[ast.AST, Scope] = {tree: self.scope}

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _FUNCTIONS):
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self.scope.binding(node.name).other = True
            self._each([*node.decorator_list, *node.bases, *node.keywords])
            self._within(node, node.body, is_class=True)
        elif isinstance(node, _COMPREHENSIONS):
            self._within(node, list(ast.iter_child_nodes(node)))
        else:
            super().visit(node)

    def _each(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _within(self, node: ast.AST, body: Iterable[ast.AST], *, is_class: bool = False) -> None:
        around = self.scope
        self.scope = self.scopes[node] = Scope(around, is_class)
        self._each(body)
        self.scope = around

    def _function(self, node: _Function) -> None:
        if not isinstance(node, ast.Lambda):
            self.scope.binding(node.name).other = True
        self._each(_header(node))
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        around = self.scope
        self.scope = self.scopes[node] = Scope(around)
        for argument in arguments(node):
            self.scope.binding(argument.arg).other = True
        self._each(body)
        self.scope = around

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.scope.binding(node.id).other = True

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.scope.binding(node.target.id).other = True
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.visit(target)
            elif isinstance(node.value, (ast.Name, ast.Attribute)):
                self.scope.binding(target.id).aliases.append(node.value)
            elif not _is_none(node.value):  # `FSDP = None` where an import failed
                self.scope.binding(target.id).other = True
            else:
                self.scope.binding(target.id)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.split(".")[0]
            bound, full = (alias.asname, alias.name) if alias.asname else (first, first)
            self.scope.binding(bound).imported.append(full)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                self.scope.wildcards.append(module)
            else:
                bound = self.scope.binding(alias.asname or alias.name)
                bound.imported.append(f"{module}.{alias.name}")

    def visit_Global(self, node: ast.Global) -> None:
        *_, module = self.scope.chain()
        self.scope.outer.update(dict.fromkeys(node.names, module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            for scope in list(self.scope.chain())[1:]:
                if name in scope.names:
                    self.scope.outer[name] = scope
                    break

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._bind(node.rest)
        self.generic_visit(node)

    def _bind(self, name: str | None) -> None:
        if name is not None:
            self.scope.binding(name).other = True


class ScopedVisitor(ast.NodeVisitor):
    """Visits a file with `scope` being the one that each expression is evaluated in."""

    def __init__(self, scopes: dict[ast.AST, Scope], tree: ast.Module) -> None:
        self.scopes = scopes
        self.scope = self.module = scopes[tree]

    def visit(self, node: ast.AST) -> None:
        """Visits a node; the header of a function or class belongs to the scope around it."""
        inner = self.scopes.get(node)
        if inner is None or isinstance(node, ast.Module):
            super().visit(node)
            return
        outside: list[ast.AST] = []
        if isinstance(node, _FUNCTIONS):
            outside += _header(node)
        elif isinstance(node, ast.ClassDef):
            outside += [*node.decorator_list, *node.bases, *node.keywords]
        for child in outside:
            self.visit(child)
        around, self.scope = self.scope, inner
        self.enter(node)
        for child in _inside(node):
            self.visit(child)
        self.scope = around

    def enter(self, node: ast.AST) -> None:
        """Called where a scope begins."""


def _inside(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return list(node.body)
    return [node.body] if isinstance(node, ast.Lambda) else list(ast.iter_child_nodes(node))


def _header(node: _Function) -> list[ast.expr]:
    """Returns the parts of a function that are evaluated where it is written."""
    found: list[ast.expr | None] = [*node.args.defaults, *node.args.kw_defaults]
    found += [argument.annotation for argument in arguments(node)]
    if not isinstance(node, ast.Lambda):
        found += [*node.decorator_list, node.returns]
    return [expression for expression in found if expression is not None]


def arguments(node: _Function) -> list[ast.arg]:
    """All arguments of a function."""
    a = node.args
    rest = [argument for argument in (a.vararg, a.kwarg) if argument is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *rest]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
