"""Finds uses of FSDP1 and reads of shards in Python code; imports and executes nothing of it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from composer_fsdp2.tools.migrate.python_code.names import (
    CONFIG_CALLEES,
    CONFIG_NAMES,
    Names,
    dotted,
    last_name,
)
from composer_fsdp2.tools.migrate.python_code.row import CodeRow, Found, Kind
from composer_fsdp2.tools.migrate.python_code.source import Source, Unreadable
from composer_fsdp2.tools.migrate.python_code.table import CODE_ROWS, NUMBER, SAVED, VALUES

__all__ = ["Use", "find_uses"]


@dataclass(frozen=True, slots=True)
class Use:
    """Names one place that a row of the table speaks of."""

    row: CodeRow
    line: int
    column: int
    """both count from 1, in characters"""
    certain: bool
    """false where imports do not tell whose name it is, and for all reads of shards"""
    code: str
    """the line it is in"""
    replacement: str | None = None
    """the new line, where only another function has to be named"""
    cell: int | None = None
    """of a notebook, in which lines are counted"""


def find_uses(source: Source) -> list[Use]:
    """Returns all uses of FSDP1 and reads of shards in a file, in order of place.

    Raises:
        Unreadable: the file is nested too deeply.
    """
    try:
        finder = _Finder(source)
        finder.visit(source.tree)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    return sorted(finder.uses.values(), key=lambda use: (use.cell or 0, use.line, use.column))


# --- The table, by kind of place. ---


def _index(*kinds: Found) -> dict[str, CodeRow]:
    found: dict[str, CodeRow] = {}
    for row in CODE_ROWS:
        for name in row.qualified() if row.found in kinds else ():
            found.setdefault(name, row)
    return found


def _by_name(*kinds: Found) -> dict[str, CodeRow]:
    """Returns the rows of names that nothing else is called."""
    rows = [row for row in CODE_ROWS if row.found in kinds and row.distinctive]
    return {name: row for row in rows for name in row.names}


_NAMED = _index(Found.NAME, Found.MEMBER)
_CHECKED = _index(Found.CHECK)
_ARGUMENTS = _index(Found.ARGUMENT)
_TEXTS = _index(Found.TEXT)
_VARIABLES = _index(Found.VARIABLE)
_ATTRIBUTES = _index(Found.ATTRIBUTE)
_KEYS = {name: row for row in CODE_ROWS if row.found is Found.KEY for name in row.names}
_MEMBERS = {name: row for row in CODE_ROWS if row.found is Found.MEMBER for name in row.names}
_CALLEES = frozenset(name.rpartition(".")[0] for name in _ARGUMENTS)
_POSITIONAL = [(row, row.position) for row in CODE_ROWS if row.position is not None]
_LOOSE_NAMES, _LOOSE_ARGUMENTS = _by_name(Found.NAME), _by_name(Found.ARGUMENT)


class _Finder(ast.NodeVisitor):
    """Compares names, calls and strings with the table."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names = Names(source.tree)
        self.uses: dict[tuple[int, int, str], Use] = {}
        self.calls: dict[ast.AST, ast.Call] = {}
        """the call of each function that is called"""
        self.checks: set[ast.AST] = set()
        """parts of the classes of `isinstance`"""
        self.format: ast.JoinedStr | None = None
        self.is_whole = False
        """inside of `with summon_full_params`"""

    def _report(self, row: CodeRow, node: ast.AST, certain: bool = True) -> None:
        # Places inside f-strings are right only from Python 3.12 on.
        place = self.format or node
        line, utf8 = place.lineno, place.col_offset  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(place, ast.Attribute) and row.found is not Found.NAME:
            line = place.end_lineno or line
            utf8 = (place.end_col_offset or 0) - len(place.attr.encode())
        column = self.source.column(line, utf8) + 1
        code = self.source.lines[line - 1].strip()
        can_replace = certain and row.kind is Kind.REPLACE and self.format is None
        replacement = self._new_line(row, node) if can_replace else None
        cell, inside = self.source.place(line)
        use = Use(row, inside, column, certain, code, replacement, cell)
        self.uses.setdefault((line, column, row.title), use)

    def _new_line(self, row: CodeRow, node: ast.AST) -> str | None:
        """Returns the line, of a call all its lines, with the other function and arguments."""
        module, _, new = row.replacement.rpartition(".")
        if isinstance(node, ast.alias):
            return f"from {module} import {new}" + (f" as {node.asname}" if node.asname else "")
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        whole = self.calls.get(node, node)
        end = whole.end_lineno or whole.lineno
        text = " ".join(line.strip() for line in self.source.lines[whole.lineno - 1 : end])
        for old in row.names:
            text = re.sub(rf"\b[\w.]+\.{old}\b", row.replacement, text)
            text = re.sub(rf"\b{old}\b", new, text)
        for old, argument in row.keywords.items():
            text = re.sub(rf"\b{old}(?=\s*=[^=])", argument, text)
        return text

    # --- Names and attributes. ---

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in _NAMED:
                self._report(_NAMED[alias.name], alias)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            row = _NAMED.get(f"{module}.{alias.name}") or _NAMED.get(module)
            if row is not None:
                self._report(row, alias)
            elif alias.name in _LOOSE_NAMES:
                self._report(_LOOSE_NAMES[alias.name], alias, certain=False)

    def visit_Name(self, node: ast.Name) -> None:
        self._find_name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._find_name(node):
            return
        row, owner = _MEMBERS.get(node.attr), last_name(node.value)
        if row is not None:
            # A method of an import is the import's own.
            strange = owner in row.strangers or self.names.meanings(node.value)
            text = dotted(node.value)
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
            known = (node in self.checks and _CHECKED.get(name)) or _NAMED.get(name)
            row = known or _LOOSE_NAMES.get(name.rpartition(".")[2])
            if row is not None:
                self._report(row, node, certain and known is not None)
                return True
        return False

    # --- Calls. ---

    def visit_Call(self, node: ast.Call) -> None:
        callee, given = node.func, node.args
        if "functools.partial" in self.names.meanings(callee) and given:
            callee, given = given[0], given[1:]
        names = self.names.meanings(callee)
        self.calls[node.func] = node
        for keyword in node.keywords:
            self._check_argument(keyword.arg or "", keyword, keyword.value, names)
        for row, position in _POSITIONAL:
            is_given = len(given) > position and names.keys() & set(row.homes)
            if is_given and not isinstance(given[position], ast.Starred):
                self._check_argument(row.names[0], given[position], given[position], names)
        if dotted(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            self.checks.update(ast.walk(node.args[1]))
        if isinstance(node.func, ast.Attribute) and given and node.func.attr in ("get", "pop"):
            self._check_item(node.func.value, given[0])
        self._check_read(node)
        self.generic_visit(node)

    def _check_argument(
        self, name: str, place: ast.AST, value: ast.expr, callees: dict[str, bool]
    ) -> None:
        if name in CONFIG_NAMES:
            known = bool(CONFIG_CALLEES & callees.keys()) and all(callees.values())
            self._check_mapping(value, known)
        if name in _VARIABLES:
            self._report(_VARIABLES[name], place)
        for callee, certain in callees.items():
            row = _ARGUMENTS.get(f"{callee}.{name}")
            if row is not None:
                if not _is_harmless(row, value):
                    self._report(row, place, certain)
                return
        if name in _LOOSE_ARGUMENTS and not _CALLEES & callees.keys():
            self._report(_LOOSE_ARGUMENTS[name], place, certain=False)

    # --- Keys of the Trainer's configuration. ---

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._check_configuration(target, node.value)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in CONFIG_NAMES:
                self._check_mapping(value, certain=False)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._check_item(node.value, node.slice)
        self.generic_visit(node)

    def _check_item(self, owner: ast.expr, key: ast.expr) -> None:
        self._check_configuration(owner, ast.Dict([key], [ast.Name("_", ast.Load())]))

    def _check_configuration(self, target: ast.AST, value: ast.expr) -> None:
        certain = dotted(target) in self.names.configs
        if certain or last_name(target) in CONFIG_NAMES:
            self._check_mapping(value, certain)

    def _check_mapping(self, node: ast.expr, certain: bool) -> None:
        pairs: list[tuple[object, ast.AST, ast.expr]] = []
        if isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values, strict=True)
            pairs = [(key.value, key, item) for key, item in keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.Call) and last_name(node.func) == "dict":
            pairs = [(keyword.arg, keyword, keyword.value) for keyword in node.keywords]
        for name, place, value in pairs:
            row = _KEYS.get(str(name))
            if row is not None and not _is_harmless(row, value):
                self._report(row, place, certain)

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
        if node.value in _NAMED:
            self._report(_NAMED[node.value], node)

    # --- Reads of shards, see [Note: numbers of shards]. ---

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self.is_whole
        called = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
        self.is_whole |= any(last_name(call.func) == "summon_full_params" for call in called)
        self.generic_visit(node)
        self.is_whole = before

    visit_AsyncWith = visit_With

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if node.format_spec is not None:  # formats as a number
            self._report_read(NUMBER, node.value, node.value)
        self.generic_visit(node)

    def _check_read(self, node: ast.Call) -> None:
        """Whether the model is sharded cannot be seen, so every read is a 'perhaps'."""
        name, callee = last_name(node.func), dotted(node.func)
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and name in ("item", "tolist", "numpy"):
            self._report_read(NUMBER if name == "item" else VALUES, node, node.func.value)
        elif name in ("any", "all") and node in self.names.tests:
            self._report_read(NUMBER, node, node)
        elif first is None:
            return
        elif callee in ("float", "int", "bool", "complex") or callee.startswith("math."):
            self._report_read(NUMBER, node, first)
        elif callee in ("np.asarray", "np.array", "numpy.asarray", "numpy.array"):
            self._report_read(VALUES, node, first)
        elif callee in ("torch.save", "pickle.dump", "pickle.dumps"):
            self._report_read(SAVED, node, first)

    def _report_read(self, row: CodeRow, node: ast.expr, value: ast.expr) -> None:
        if not self.is_whole and self.names.holds_shards(value):
            self._report(row, node, certain=False)


def _is_harmless(row: CodeRow, value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and any(value.value is v for v in row.harmless)
