"""Finds uses of FSDP1 in Python code; imports and executes nothing of it.

[Note: one file, one scope] Names are collected for the whole file. A name that is imported and
bound to something else as well, in whatever function, is not certain. Reads of shards are not
looked for: they raise `ShardReadError` in the run.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from composer_fsdp2.tools.migrate.python_code.table import (
    CODE_ROWS,
    CodeRow,
    Found,
    Kind,
)

__all__ = ["Source", "Unreadable", "Use", "find_uses"]


class Unreadable(Exception):
    """Says why a file is not Python."""


@dataclass(frozen=True, slots=True)
class Source:
    """Holds the code of a file."""

    text: str
    tree: ast.Module
    lines: tuple[str, ...]

    @staticmethod
    def read(raw: bytes) -> Source:
        """Decodes as the file declares, and parses.

        Raises:
            Unreadable: Python itself could not read the file.
            RecursionError: the file is nested too deeply; a MemoryError says the same.
        """
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the file's own style
                tree = ast.parse(text)
        except SyntaxError as error:
            where = f"line {error.lineno}: " if error.lineno else ""
            raise Unreadable(f"{where}{error.msg}") from None
        except (LookupError, ValueError) as error:
            raise Unreadable(str(error)) from None
        return Source(text, tree, tuple(text.split("\n")))


@dataclass(frozen=True, slots=True)
class Use:
    """Names one place that a row of the table speaks of."""

    row: CodeRow
    line: int
    column: int
    """both count from 1, in characters"""
    certain: bool
    """false where imports do not tell whose name it is"""
    code: str
    """the line it is in"""
    replacement: str | None = None
    """the new line, where only another function has to be named"""


def find_uses(source: Source) -> list[Use]:
    """Returns all uses of FSDP1 in a file, in order of place.

    Raises:
        RecursionError: the file is nested too deeply.
    """
    finder = _Finder(source)
    finder.visit(source.tree)
    return sorted(finder.uses.values(), key=lambda use: (use.line, use.column))


# --- The table, by kind of place. ---


def _index(*kinds: Found, bare: bool = False, distinctive: bool = False) -> dict[str, CodeRow]:
    """Returns rows by their full names, or by the bare ones; of a name the first row."""
    rows = [r for r in CODE_ROWS if r.found in kinds and (r.distinctive or not distinctive)]
    return {n: row for row in reversed(rows) for n in (row.names if bare else row.qualified())}


_NAMED = _index(Found.NAME, Found.MEMBER)
_CHECKED = _index(Found.CHECK)
_ARGUMENTS = _index(Found.ARGUMENT)
_TEXTS = _index(Found.TEXT)
_VARIABLES = _index(Found.VARIABLE)
_ATTRIBUTES = _index(Found.ATTRIBUTE)
_KEYS = _index(Found.KEY, bare=True)
_MEMBERS = _index(Found.MEMBER, bare=True)
_LOOSE_NAMES = _index(Found.NAME, bare=True, distinctive=True)
_LOOSE_ARGUMENTS = _index(Found.ARGUMENT, bare=True, distinctive=True)
"""names that nothing else is called"""
_CLASSES = frozenset(home for row in _MEMBERS.values() for home in row.homes)
_CALLEES = frozenset(name.rpartition(".")[0] for name in _ARGUMENTS)
_POSITIONAL = [(row, row.position) for row in CODE_ROWS if row.position is not None]
_CONFIG_CALLEES = frozenset(home for row in _KEYS.values() for home in row.homes)
"""functions that take a configuration whose keys are looked at"""
_CONFIG_NAMES = frozenset(name for row in _KEYS.values() for name in row.owners)
"""arguments that hold such a configuration"""


# --- The origin of names. ---


def _dotted(node: ast.AST) -> str:
    """Returns `a.b.c` as text, or an empty text for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _last_name(node: ast.AST) -> str:
    """Returns the name after the last dot, or an empty text."""
    return getattr(node, "attr", getattr(node, "id", ""))


class _Names:
    """Holds the origins of a file's names; see [Note: one file, one scope]."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported = defaultdict[str, list[str]](list)
        self.aliases = defaultdict[str, list[str]](list)
        self.bound: set[str] = set()
        """names that something else than an import or alias is bound to"""
        self.wildcards: list[str] = []
        self.modules: dict[str, bool] = {}
        """expressions that hold FSDP1 modules; False where `isinstance` asks whether they do"""
        self.configs: set[str] = set()
        """expressions that a Trainer takes its configuration from"""
        self.checks: set[ast.AST] = set()
        """parts of the classes of `isinstance`"""
        self._cached_names = functools.cache(self._full_names)
        nodes = list(ast.walk(tree))
        self._read_bindings(nodes)
        for node in nodes:
            match node:
                case ast.Assign(value=ast.Call(func=called)) if self._is_class(called):
                    self.modules |= dict.fromkeys(map(_dotted, node.targets), True)
                case ast.AnnAssign() if self._is_class(node.annotation):
                    self.modules[_dotted(node.target)] = True
                case ast.arg() if node.annotation and self._is_class(node.annotation):
                    self.modules[node.arg] = True
                case ast.Call(
                    func=ast.Name(id="isinstance" | "issubclass" as check), args=[asked, classes]
                ):
                    self.checks.update(ast.walk(classes))
                    if check == "isinstance" and self._is_class(classes):
                        self.modules.setdefault(_dotted(asked), False)
                case ast.Call() if _CONFIG_CALLEES & self.meanings(node.func).keys():
                    values = [k.value for k in node.keywords if k.arg in _CONFIG_NAMES]
                    self.configs.update(_dotted(part) for v in values for part in _parts_of(v))
                case _:
                    pass
        self.configs.discard("")
        self.modules.pop("", None)

    def meanings(self, node: ast.AST) -> dict[str, bool]:
        """Returns the full names that an expression may stand for, and whether that is certain."""
        return self._cached_names(_dotted(node), ())

    def _full_names(self, name: str, seen: tuple[str, ...]) -> dict[str, bool]:
        """Follows a name through assignments to imports; `seen` are names that were followed."""
        head, dot, rest = name.partition(".")
        certain = head not in self.bound
        full_names = {f"{full}{dot}{rest}": certain for full in self.imported.get(head, ())}
        for other in () if head in seen else self.aliases.get(head, ()):
            inner = self._full_names(f"{other}{dot}{rest}", (*seen, head))
            full_names |= {full: certain and is_certain for full, is_certain in inner.items()}
        if head not in self.imported and head not in self.aliases and certain:
            full_names |= {f"{module}.{name}": False for module in self.wildcards}
        return full_names

    def _read_bindings(self, nodes: list[ast.AST]) -> None:
        """Reads imports, aliases and all other bindings."""
        passed_over: set[ast.AST] = set()
        for node in nodes:
            match node:
                case ast.Import():
                    for alias in node.names:
                        first = alias.name.partition(".")[0]
                        self.imported[alias.asname or first].append(
                            alias.name if alias.asname else first
                        )
                case ast.ImportFrom():
                    module = "." * node.level + (node.module or "")
                    self.wildcards += [module for alias in node.names if alias.name == "*"]
                    for alias in node.names:
                        self.imported[alias.asname or alias.name].append(f"{module}.{alias.name}")
                case ast.Assign(targets=[ast.Name() as target], value=ast.Name() | ast.Attribute()):
                    self.aliases[target.id].append(_dotted(node.value))
                    passed_over.add(target)
                case ast.Assign(targets=[ast.Name() as target], value=ast.Constant(value=None)):
                    passed_over.add(target)  # `FSDP = None` where an import failed
                case ast.Name(ctx=ast.Store()) if node not in passed_over:
                    self.bound.add(node.id)
                case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.bound.add(name)
                case _:
                    pass

    def _is_class(self, node: ast.AST) -> bool:
        return bool(_CLASSES & self.meanings(node).keys())


def _parts_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the expressions of which a mapping is chosen or put together."""
    match node:
        case ast.IfExp(body=first, orelse=second) | ast.BinOp(left=first, right=second):
            inner = [first, second]
        case ast.BoolOp(values=inner):
            pass
        case ast.NamedExpr(value=value):
            inner = [value]
        case ast.Dict(keys=keys, values=values):
            yield node
            inner = [value for key, value in zip(keys, values, strict=True) if key is None]
        case _:
            yield node
            return
    for part in inner:
        yield from _parts_of(part)


class _Finder(ast.NodeVisitor):
    """Compares names, calls and strings with the table."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names = _Names(source.tree)
        self.uses: dict[tuple[int, int, str], Use] = {}
        self.calls: dict[ast.AST, ast.Call] = {}
        """the call of each function that is called"""
        self.format: ast.JoinedStr | None = None

    def _report(self, row: CodeRow | None, node: ast.AST, certain: bool = True) -> bool:
        """Adds a use, and returns whether there is a row for it."""
        if row is None:
            return False
        # Places inside f-strings are right only from Python 3.12 on.
        located = self.format or node
        line, utf8 = located.lineno, located.col_offset  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(located, ast.Attribute) and row.found is not Found.NAME:
            line = located.end_lineno or line
            utf8 = (located.end_col_offset or 0) - len(located.attr.encode())
        code = self.source.lines[line - 1]
        # `ast` counts the bytes of UTF-8 before a place.
        column = len(code.encode()[:utf8].decode(errors="ignore")) + 1
        can_replace = certain and row.kind is Kind.REPLACE and self.format is None
        replacement = self._new_line(row, node) if can_replace else None
        self.uses.setdefault(
            (line, column, row.title),
            Use(row, line, column, certain, code.strip(), replacement),
        )
        return True

    def _new_line(self, row: CodeRow, node: ast.AST) -> str | None:
        """Returns the line, of a call all its lines, with the other function and arguments."""
        module, _, new = row.replacement.rpartition(".")
        if isinstance(node, ast.alias):
            return f"from {module} import {new}" + (f" as {node.asname}" if node.asname else "")
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        call = self.calls.get(node, node)
        end = call.end_lineno or call.lineno
        text = " ".join(line.strip() for line in self.source.lines[call.lineno - 1 : end])
        for old in row.names:
            text = re.sub(rf"\b[\w.]+\.{old}\b", row.replacement, text)
            text = re.sub(rf"\b{old}\b", new, text)
        for old, argument in row.keywords.items():
            text = re.sub(rf"\b{old}(?=\s*=[^=])", argument, text)
        return text

    # --- Names and attributes. ---

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._report(_NAMED.get(alias.name), alias)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            row = _NAMED.get(f"{module}.{alias.name}") or _NAMED.get(module)
            if not self._report(row, alias):
                self._report(_LOOSE_NAMES.get(alias.name), alias, certain=False)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._find_name(node):
            return
        row, owner = _MEMBERS.get(node.attr), _last_name(node.value)
        if row is not None:
            # A method of an import is the import's own.
            strange = owner in row.strangers or self.names.meanings(node.value)
            text = _dotted(node.value)
            if text in self.names.modules:
                self._report(row, node, self.names.modules[text])
            elif row.distinctive and not (row.strangers and strange):
                self._report(row, node, certain=False)
        row = _ATTRIBUTES.get(node.attr)
        if row is not None and (row.distinctive or owner in row.owners):
            self._report(row, node, not row.owners or owner in row.owners)
        self.visit(node.value)

    def _find_name(self, node: ast.Name | ast.Attribute) -> bool:
        """Reports an expression that is a name of the table as a whole."""
        if not isinstance(node.ctx, ast.Load):
            return False
        for name, certain in self.names.meanings(node).items():
            exact = (node in self.names.checks and _CHECKED.get(name)) or _NAMED.get(name)
            row = exact or _LOOSE_NAMES.get(name.rpartition(".")[2])
            if self._report(row, node, certain and exact is not None):
                return True
        return False

    visit_Name = _find_name

    # --- Calls. ---

    def visit_Call(self, node: ast.Call) -> None:
        callee, positional = node.func, node.args
        if "functools.partial" in self.names.meanings(callee) and positional:
            callee, positional = positional[0], positional[1:]
        names = self.names.meanings(callee)
        self.calls[node.func] = node
        arguments = [(keyword.arg or "", keyword, keyword.value) for keyword in node.keywords]
        arguments += [
            (row.names[0], positional[position], positional[position])
            for row, position in _POSITIONAL
            if len(positional) > position
            and names.keys() & set(row.homes)
            and not isinstance(positional[position], ast.Starred)
        ]
        for name, name_node, value in arguments:
            if name in _CONFIG_NAMES:
                certain = bool(_CONFIG_CALLEES & names.keys()) and all(names.values())
                self._check_mapping(value, certain)
            self._report(_VARIABLES.get(name), name_node)
            owner = next((full for full in names if f"{full}.{name}" in _ARGUMENTS), None)
            if owner is not None:
                self._report_value(_ARGUMENTS[f"{owner}.{name}"], name_node, value, names[owner])
            elif name in _LOOSE_ARGUMENTS and not _CALLEES & names.keys():
                self._report(_LOOSE_ARGUMENTS[name], name_node, certain=False)
        match node.func:
            case ast.Attribute(attr="get" | "pop" | "setdefault") if positional:
                self._check_item(node.func.value, positional[0])
            case ast.Attribute(attr="update") if positional:
                self._check_configuration(node.func.value, positional[0])
            case _:
                pass
        self.generic_visit(node)

    # --- Keys of the Trainer's configuration. ---

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._check_configuration(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> None:
        if node.value is not None:
            self._check_configuration(node.target, node.value)
        self.generic_visit(node)

    visit_NamedExpr = visit_AnnAssign

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in _CONFIG_NAMES:
                self._check_mapping(value, certain=False)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._check_item(node.value, node.slice)
        self.generic_visit(node)

    def _check_item(self, owner: ast.expr, key: ast.expr) -> None:
        self._check_configuration(owner, ast.Dict([key], [ast.Name("_", ast.Load())]))

    def _check_configuration(self, target: ast.AST, value: ast.expr) -> None:
        certain = _dotted(target) in self.names.configs
        if certain or _last_name(target) in _CONFIG_NAMES:
            self._check_mapping(value, certain)

    def _check_mapping(self, node: ast.expr, certain: bool) -> None:
        pairs: list[tuple[object, ast.AST, ast.expr]] = []
        for part in _parts_of(node):
            if isinstance(part, ast.Dict):
                keys = zip(part.keys, part.values, strict=True)
                pairs += [(k.value, k, item) for k, item in keys if isinstance(k, ast.Constant)]
            elif isinstance(part, ast.Call) and _last_name(part.func) == "dict":
                pairs += [(keyword.arg, keyword, keyword.value) for keyword in part.keywords]
        for name, key_node, value in pairs:
            self._report_value(_KEYS.get(str(name)), key_node, value, certain)

    def _report_value(
        self, row: CodeRow | None, key_node: ast.AST, value: ast.expr, certain: bool
    ) -> None:
        """Adds an argument or a key, unless its value needs nothing."""
        harmless = row.harmless if row else ()
        if not (isinstance(value, ast.Constant) and any(value.value is v for v in harmless)):
            self._report(row, key_node, certain)

    # --- Strings. ---

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring is prose
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self.format = self.format, self.format or node
        self.generic_visit(node)
        self.format = before

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        for text, row in _TEXTS.items():
            # Not as a part of another word; \b of a regular expression is no letter.
            if re.search(rf"(?:(?<!\w)|(?<=\\b)){re.escape(text)}(?!\w)", node.value):
                self._report(row, node)
        for variable, row in _VARIABLES.items():
            if node.value == variable or f"{variable}=" in node.value:
                self._report(row, node)
        self._report(_NAMED.get(node.value), node)
