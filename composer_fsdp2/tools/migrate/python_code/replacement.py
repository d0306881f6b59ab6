"""The line to write in the place of one that only has to name another function."""

from __future__ import annotations

import ast

from composer_fsdp2.tools.migrate.python_code.row import CodeRow, Replacement
from composer_fsdp2.tools.migrate.python_code.source import Source

__all__ = ["replaced_line"]


def replaced_line(
    source: Source, row: CodeRow, node: ast.AST, within: ast.AST | None
) -> str | None:
    """Returns what to write for one use of a row that has a replacement.

    Args:
        source: the file.
        row: what was found.
        node: where: a name, or an item of an import.
        within: the import, or the call of the name, that the node is in.

    Returns:
        For an import the import of the other function; for any other use its line with the other
        name, a call of several lines on one. None where that cannot be told, as in a string.
    """
    change = row.replacement
    if change is None:
        return None
    if isinstance(node, ast.alias):
        given = f" as {node.asname}" if node.asname else ""
        return f"from {change.module} import {change.name}{given}"
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    if isinstance(within, ast.Call):
        return _in_place(source, within, _call(within, row, change))
    return _in_place(source, node, ast.unparse(_named(node, row, change)))


def _named(node: ast.expr, row: CodeRow, change: Replacement) -> ast.expr:
    """The other name; one that an import gives (`import ... as`) stays, for the import changes."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(ast.Name(change.module), change.name)
    if isinstance(node, ast.Name) and node.id in row.names:
        return ast.Name(change.name)
    return node


def _call(call: ast.Call, row: CodeRow, change: Replacement) -> str:
    renamed = dict(change.arguments)
    keywords = [
        ast.keyword(arg=renamed.get(k.arg, k.arg) if k.arg else None, value=k.value)
        for k in call.keywords
    ]
    return ast.unparse(ast.Call(_named(call.func, row, change), call.args, keywords))


def _in_place(source: Source, node: ast.expr, text: str) -> str:
    """The lines of an expression as one, with another text in its place."""
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    before = source.lines[node.lineno - 1][: source.column(node.lineno, node.col_offset)]
    after = source.lines[end_line - 1][source.column(end_line, end) :]
    return f"{before}{text}{after}".strip()
