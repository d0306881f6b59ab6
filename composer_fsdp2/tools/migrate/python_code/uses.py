"""Uses of FSDP1 in the text of a Python file. Nothing of the file is imported or executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from composer_fsdp2.tools.migrate.python_code.known import (
    CONFIG_CALLEES,
    CONFIG_NAMES,
    checked_objects,
    last_name,
    learn,
)
from composer_fsdp2.tools.migrate.python_code.names import Scope, ScopedVisitor, dotted, read_scopes
from composer_fsdp2.tools.migrate.python_code.replacement import replaced_line
from composer_fsdp2.tools.migrate.python_code.row import CodeRow, Found
from composer_fsdp2.tools.migrate.python_code.source import Source, Unreadable
from composer_fsdp2.tools.migrate.python_code.table import CODE_ROWS

__all__ = ["Use", "find_uses"]


@dataclass(frozen=True, slots=True)
class Use:
    """One place that a row of the table speaks of."""

    row: CodeRow
    line: int
    column: int
    """both count from 1, in characters"""
    certain: bool
    """false where imports do not tell whose name it is"""
    code: str
    """the line it is in"""
    replacement: str | None = None
    """what to write for that line, where it only has to name another function"""
    cell: int | None = None
    """of a notebook, in which lines are counted"""


def find_uses(source: Source) -> list[Use]:
    """All uses of FSDP1 in a file, in order of place.

    Raises:
        Unreadable: when the file is nested too deeply.
    """
    if not _WORTH_A_LOOK.search(source.text):
        return []
    try:
        scopes = read_scopes(source.tree)
        finder = _Finder(scopes, source, learn(scopes, source.tree))
        finder.visit(source.tree)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    return sorted(finder.uses.values(), key=lambda use: (use.line, use.column))


# --- The table, by what is looked for. ---


def _index(*kinds: Found) -> dict[str, CodeRow]:
    found: dict[str, CodeRow] = {}
    for row in CODE_ROWS:
        if row.found in kinds:
            for name in row.qualified() if row.homes else row.names:
                found.setdefault(name, row)
    return found


_NAMED = _index(Found.NAME, Found.MEMBER)
_CHECKED = _index(Found.CHECK)
_ARGUMENTS = _index(Found.ARGUMENT)
_KEYS = _index(Found.KEY)
_TEXTS = _index(Found.TEXT)
_VARIABLES = _index(Found.VARIABLE)
_CALLEES = frozenset(name.rpartition(".")[0] for name in _ARGUMENTS)
_MEMBERS = {name: row for row in CODE_ROWS if row.found is Found.MEMBER for name in row.names}
_LOOSE = {
    name: row
    for row in CODE_ROWS
    if row.found in (Found.NAME, Found.ARGUMENT) and row.distinctive
    for name in row.names
}
_ATTRIBUTES = {name: row for row in CODE_ROWS if row.found is Found.ATTRIBUTE for name in row.names}
_POSITIONAL = [(row, row.position) for row in CODE_ROWS if row.position is not None]
_MAPPING_READS = ("get", "pop", "setdefault")
_ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv", "os.unsetenv")


def _worth_a_look() -> re.Pattern[str]:
    """Text that any use holds; most names of the table do not occur without "fsdp"."""
    words = {name for row in CODE_ROWS if row.distinctive or not row.homes for name in row.names}
    words |= {home.rpartition(".")[2] for row, _ in _POSITIONAL for home in row.homes}
    named = [row for row in CODE_ROWS if row.found is Found.NAME]
    words |= {
        n for r in named if not any("fsdp" in q.lower() for q in r.qualified()) for n in r.names
    }
    return re.compile("|".join(["(?i:fsdp)", *sorted(words)]))


_WORTH_A_LOOK = _worth_a_look()


class _Finder(ScopedVisitor):
    """Compares names, calls and strings with the table."""

    def __init__(self, scopes: dict[ast.AST, Scope], source: Source, configs: set[str]) -> None:
        super().__init__(scopes, source.tree)
        self.source = source
        self.configs = configs
        self.uses: dict[tuple[int, int, str], Use] = {}
        self._checking = False
        self._environment = False
        self._holding: frozenset[str] = frozenset()
        self._format: ast.JoinedStr | None = None

    def _report(
        self, row: CodeRow, node: ast.AST, certain: bool = True, within: ast.AST | None = None
    ) -> None:
        # Places inside f-strings are right only from Python 3.12 on.
        place = self._format or node
        line, utf8 = place.lineno, place.col_offset  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(place, ast.Attribute) and row.found is not Found.NAME:
            line = place.end_lineno or line
            utf8 = (place.end_col_offset or 0) - len(place.attr.encode())
        column = self.source.column(line, utf8) + 1
        code = self.source.lines[line - 1].strip()
        known = certain and self._format is None
        replacement = replaced_line(self.source, row, node, within) if known else None
        use = Use(row, line, column, certain, code, replacement)
        self.uses.setdefault((line, column, row.title), use)

    # --- Names. ---

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in _NAMED:
                self._report(_NAMED[alias.name], alias)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            row = _NAMED.get(f"{module}.{alias.name}") or _NAMED.get(module)
            if row is not None:
                self._report(row, alias, within=node)
            elif alias.name in _LOOSE and _LOOSE[alias.name].found is Found.NAME:
                self._report(_LOOSE[alias.name], alias, certain=False)

    def visit_Name(self, node: ast.Name) -> None:
        self._name(node, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._name(node, None):
            self._attribute(node)
            self.visit(node.value)

    def _name(self, node: ast.Name | ast.Attribute, within: ast.AST | None) -> bool:
        """Whether the whole expression is a name of the table."""
        if not isinstance(node.ctx, ast.Load):
            return False
        for meaning in self.scope.meanings(node):
            row = _CHECKED.get(meaning.name) if self._checking else None
            row = row or _NAMED.get(meaning.name)
            if row is not None:
                self._report(row, node, meaning.certain, within)
                return True
        for meaning in self.scope.meanings(node):
            row = _LOOSE.get(meaning.name.rpartition(".")[2])
            if row is not None and row.found is Found.NAME:
                self._report(row, node, certain=False)
                return True
        return False

    def _attribute(self, node: ast.Attribute) -> None:
        """Reports an attribute of an object, by what is known of the object."""
        row = _MEMBERS.get(node.attr)
        if row is not None:
            certain = self.scope.knows(node.value) or dotted(node.value) in self._holding
            if certain or self._may_be(row, node) or self.scope.suspects(node.value):
                self._report(row, node, certain)
                return
        row = _ATTRIBUTES.get(node.attr)
        if row is not None:
            owned = not row.owners or last_name(node.value) in row.owners
            if owned or row.distinctive:
                self._report(row, node, owned)

    def _may_be(self, row: CodeRow, node: ast.Attribute) -> bool:
        """Whether a method of such a name is worth a 'perhaps'; that of an import is its own."""
        strange = last_name(node.value) in row.strangers
        return row.distinctive and not (
            strange or (row.strangers and self.scope.meanings(node.value))
        )

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._where(node.test, node.body)
        for statement in node.orelse:
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._where(node.test, [node.body])
        self.visit(node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._where(node, node.values)

    def _where(self, test: ast.expr, nodes: Sequence[ast.AST]) -> None:
        """Visits what is reached where a condition holds, such as `isinstance(x, FSDP)`."""
        before = self._holding
        self._holding = before | checked_objects(self.scope, test)
        for node in nodes:
            self.visit(node)
        self._holding = before

    # --- Calls. ---

    def visit_Call(self, node: ast.Call) -> None:
        callee, given = node.func, node.args
        meanings = self.scope.meanings(callee)
        if any(m.name == "functools.partial" for m in meanings) and given:
            callee, given = given[0], given[1:]
            meanings = self.scope.meanings(callee)
        names = {meaning.name: meaning.certain for meaning in meanings}
        self._arguments(node, given, names)
        if dotted(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            self.visit(node.args[0])
            self._check(node.args[1])
            return
        if isinstance(node.func, (ast.Name, ast.Attribute)) and self._name(node.func, node):
            children: list[ast.AST] = [*node.args, *node.keywords]
        else:
            children = [node.func, *node.args, *node.keywords]
        environment = any(name.startswith(_ENVIRONMENT) for name in names)
        self._each(children, environment)

    def _each(self, nodes: list[ast.AST], environment: bool) -> None:
        before, self._environment = self._environment, environment
        for node in nodes:
            self.visit(node)
        self._environment = before

    def _arguments(self, node: ast.Call, given: list[ast.expr], names: dict[str, bool]) -> None:
        for keyword in node.keywords:
            name = keyword.arg or ""
            self._argument(name, keyword, keyword.value, names)
            if name in _VARIABLES:
                self._report(_VARIABLES[name], keyword, certain=False)
            if name in CONFIG_NAMES:
                known = any(callee in CONFIG_CALLEES for callee in names)
                self._mapping(keyword.value, known and all(names.values()))
        for row, position in _POSITIONAL:
            before = given[: position + 1]
            starred = any(isinstance(value, ast.Starred) for value in before)
            ours = names.keys() & set(row.homes)
            if ours and len(before) == position + 1 and not starred:
                self._argument(row.names[0], before[-1], before[-1], names)
        if (
            last_name(node.func) in _MAPPING_READS
            and isinstance(node.func, ast.Attribute)
            and given
        ):
            self._key(node.func.value, given[0])

    def _argument(
        self, name: str, place: ast.AST, value: ast.expr, callees: dict[str, bool]
    ) -> None:
        for callee, certain in callees.items():
            row = _ARGUMENTS.get(f"{callee}.{name}")
            if row is not None and not _is_harmless(row, value):
                self._report(row, place, certain)
                return
        loose = _LOOSE.get(name)
        if loose is not None and loose.found is Found.ARGUMENT and not _CALLEES & callees.keys():
            self._report(loose, place, certain=False)

    # --- Type checks. ---

    def _check(self, node: ast.AST) -> None:
        before, self._checking = self._checking, True
        self.visit(node)
        self._checking = before

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        check = isinstance(left, ast.Call) and last_name(left.func) == "type"
        self.visit(left)
        for other in node.comparators:
            if check:
                self._check(other)
            else:
                self.visit(other)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._check(node.cls)
        for pattern in (*node.patterns, *node.kwd_patterns):
            self.visit(pattern)

    # --- Keys of the Trainer's configuration. ---

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._configuration(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._configuration(node.target, node.value)
        self.generic_visit(node)

    def _configuration(self, target: ast.AST, value: ast.expr) -> None:
        text = dotted(target)
        if text in self.configs or last_name(target) in CONFIG_NAMES:
            self._mapping(value, certain=text in self.configs)

    def _mapping(self, node: ast.expr, certain: bool) -> None:
        pairs: list[tuple[str | None, ast.AST, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = [(_text(k), k, v) for k, v in zip(node.keys, node.values, strict=True) if k]
        elif isinstance(node, ast.Call) and last_name(node.func) == "dict":
            pairs = [(keyword.arg, keyword, keyword.value) for keyword in node.keywords]
        for name, place, value in pairs:
            row = next((row for key, row in _KEYS.items() if key.endswith(f".{name}")), None)
            if row is not None and not _is_harmless(row, value):
                self._report(row, place, certain)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and _text(key) in CONFIG_NAMES:
                self._mapping(value, certain=False)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._key(node.value, node.slice)
        self.visit(node.value)
        names = [meaning.name for meaning in self.scope.meanings(node.value)]
        self._each([node.slice], any(name.startswith(_ENVIRONMENT) for name in names))

    def _key(self, owner: ast.expr, key: ast.expr) -> None:
        text = dotted(owner)
        if text in self.configs or last_name(owner) in CONFIG_NAMES:
            fake = ast.Dict([key], [ast.Name("_", ast.Load())])
            self._mapping(fake, certain=text in self.configs)

    # --- Strings. ---

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring is prose
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self._format = self._format, self._format or node
        self.generic_visit(node)
        self._format = before

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        for text, row in _TEXTS.items():
            # Not as a part of another word; \b of a regular expression is no letter.
            if re.search(rf"(?:(?<!\w)|(?<=\\b)){re.escape(text)}(?!\w)", node.value):
                self._report(row, node)
        for variable, row in _VARIABLES.items():
            if node.value == variable or f"{variable}=" in node.value:
                self._report(row, node, self._environment)
        if node.value in _NAMED:
            self._report(_NAMED[node.value], node)


def _text(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def _is_harmless(row: CodeRow, value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and any(value.value is v for v in row.harmless)
