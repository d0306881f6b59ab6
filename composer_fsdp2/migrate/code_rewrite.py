"""Changes the one word of a call that changes in one word, and no other byte of the file."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence

from composer_fsdp2.migrate.code import Use, find_uses
from composer_fsdp2.migrate.code_source import Source, Unreadable
from composer_fsdp2.migrate.code_table import CODE_ROWS, CodeRow, Kind, Rewrite

__all__ = ["Refusal", "borrowed_from", "rewrite"]

_ROWS = [row for row in CODE_ROWS if row.kind is Kind.REWRITE]
_NAMES = frozenset(name for row in _ROWS for name in row.names)
_HOMES = frozenset(home for row in _ROWS for home in row.homes)

_Edit = tuple[int, int, str, str]
"""line, column in characters, old and new text"""


class Refusal(Exception):
    """Why a file cannot be rewritten safely, as the end of a sentence."""


def rewrite(source: Source, uses: Sequence[Use]) -> bytes | None:
    """The file with every use that changes in one word changed; None where there is none.

    Raises:
        Refusal: when not every such use can be changed without a change of meaning.
    """
    edits = []
    for row in _ROWS:
        own = [use for use in uses if use.row is row]
        if row.rewrite is not None and own:
            edits += _edits(source, row, row.rewrite, own)
    if not edits:
        return None
    if source.text.encode(source.encoding) != source.raw:
        raise Refusal(f"its encoding {source.encoding} does not give the same bytes again")
    new = _apply(source, edits).encode(source.encoding)
    _check(new, uses)
    return new


def borrowed_from(source: Source) -> frozenset[str]:
    """Modules, by their last names, that a file may take a word from that `rewrite` changes."""
    found: set[str] = set()
    modules: set[str] = set()
    by_attribute = False
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            module, taken = node.module or "__init__", {alias.name for alias in node.names}
            modules |= taken
            if node.level or module not in _HOMES:
                found |= {module} if taken & {*_NAMES, "*"} else set()
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            by_attribute |= node.attr in _NAMES
    # Which of them an attribute belongs to is not followed.
    found |= modules if by_attribute else set()
    return frozenset(name.rpartition(".")[2] for name in found)


def _check(new: bytes, uses: Sequence[Use]) -> None:
    """The new file has to parse, and to use what the old one did but for the changed words."""
    try:
        left = Counter(use.row.title for use in find_uses(Source.read(new)))
    except Unreadable as error:
        raise Refusal(f"it would not parse afterwards: {error}") from None
    if left != Counter(use.row.title for use in uses if use.row.kind is not Kind.REWRITE):
        raise Refusal("it would use FSDP1 in other places than before")


def _edits(source: Source, row: CodeRow, change: Rewrite, uses: Sequence[Use]) -> list[_Edit]:
    (old,) = row.names
    if not all(use.certain for use in uses):
        raise Refusal(f"it is not certain that '{old}' is Composer's everywhere in it")
    _check_strings(source, old)
    edits: list[_Edit] = []
    for use in uses:
        edits += _edits_of(source, change, old, use)
    if not any(isinstance(use.within, ast.Call) for use in uses):
        raise Refusal(f"it does not call '{old}', and other files may import it from here")
    _check_words(source, old, change.name, edits)
    return edits


def _edits_of(source: Source, change: Rewrite, old: str, use: Use) -> Iterator[_Edit]:
    node, within = use.node, use.within
    if isinstance(within, ast.ImportFrom) and isinstance(node, ast.alias):
        yield _module_edit(source, change, within)
        yield node.lineno, source.column(node.lineno, node.col_offset), old, change.name
    elif isinstance(within, ast.Call) and isinstance(node, ast.Name):
        _check_call(within)
        if node.id == old:
            yield node.lineno, source.column(node.lineno, node.col_offset), old, change.name
        renamed = dict(change.arguments)
        for keyword in within.keywords:
            if keyword.arg in renamed:
                column = source.column(keyword.lineno, keyword.col_offset)
                yield keyword.lineno, column, keyword.arg, renamed[keyword.arg]
    else:
        raise Refusal(f"line {use.line} does more with '{old}' than to import or call it by name")


def _module_edit(source: Source, change: Rewrite, node: ast.ImportFrom) -> _Edit:
    if len(node.names) > 1:
        raise Refusal(f"line {node.lineno} imports other names together with it")
    column = source.column(node.lineno, node.col_offset)
    found = re.compile(r"from[ \t]+([\w.]+)[ \t]+import\b").match(
        source.lines[node.lineno - 1], column
    )
    if found is None or found[1] != node.module:
        raise Refusal(f"the import in line {node.lineno} is written in an unusual way")
    return node.lineno, found.start(1), found[1], change.module


def _check_call(call: ast.Call) -> None:
    if any(isinstance(value, ast.Starred) for value in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    ):
        raise Refusal(f"the call in line {call.lineno} passes arguments with '*'")


def _check_strings(source: Source, old: str) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value == old or node.value.endswith(f".{old}"):
                raise Refusal(f"line {node.lineno} names it in a string, as '__all__' does")
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            raise Refusal(f"line {node.lineno} imports everything of a module")


def _check_words(source: Source, old: str, new: str, edits: Sequence[_Edit]) -> None:
    """Every occurrence of the old word is one that is changed, and the new word is free."""
    changed = {(line, column) for line, column, *_ in edits}
    for token in _tokens(source):
        if token.string == new:
            raise Refusal(f"line {token.start[0]} has another '{new}'")
        if token.string == old and token.start not in changed:
            raise Refusal(f"line {token.start[0]} uses '{old}' in another way")


def _tokens(source: Source) -> list[tokenize.TokenInfo]:
    """All words of the code, those outside strings and comments."""
    # Python's tokenizer knows no lines that end in a carriage return alone.
    lines = (line.rstrip("\r\n") + "\n" for line in source.lines)
    try:
        tokens = list(tokenize.generate_tokens(lambda: next(lines, "")))
    except (tokenize.TokenError, SyntaxError) as error:
        raise Refusal(f"its words cannot be told apart: {error}") from None
    return [token for token in tokens if token.type == tokenize.NAME]


def _apply(source: Source, edits: Sequence[_Edit]) -> str:
    lines = list(source.lines)
    for number, column, old, new in sorted(edits, reverse=True):
        line = lines[number - 1]
        if not line.startswith(old, column):
            raise Refusal(f"line {number} is written in an unusual way")
        lines[number - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)
