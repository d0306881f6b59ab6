"""Describes the uses found in Python files, as text and as data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from composer_fsdp2.tools.migrate.python_code.files import CodeFile
from composer_fsdp2.tools.migrate.python_code.row import Kind
from composer_fsdp2.tools.migrate.python_code.uses import Use

__all__ = ["code_as_dict", "describe_code"]

_WIDTH = 100
_PERHAPS = "perhaps"


def describe_code(files: Sequence[CodeFile]) -> str:
    """Returns the report, grouped by file and in it by row of the table."""
    blocks = ["\n".join(_describe_file(file)) for file in files if file.uses or file.problem]
    counts = _counts(files)
    unread = counts.pop("not read")
    shown = [f"{count} {name}" for name, count in counts.items() if count]
    read = len(files) - unread
    text = f"{read} file{'' if read == 1 else 's'} read: {', '.join(shown) or 'no use of FSDP1'}."
    return "\n\n".join([*blocks, text + (f" {unread} could not be read." if unread else "")])


def code_as_dict(files: Sequence[CodeFile]) -> dict[str, Any]:
    """Returns the report as one document for JSON."""
    counts = _counts(files)
    return {
        "files": [
            {
                "path": str(file.path),
                "problem": file.problem,
                "uses": [_use_as_dict(use) for use in file.uses],
            }
            for file in files
            if file.uses or file.problem
        ],
        "files_read": len(files) - counts["not read"],
        "counts": counts,
    }


def _use_as_dict(use: Use) -> dict[str, Any]:
    return {
        **({} if use.cell is None else {"cell": use.cell}),
        "line": use.line,
        "column": use.column,
        "found": use.row.title,
        "kind": use.row.kind.value,
        "certain": use.certain,
        "use": use.row.use,
        "reason": use.row.reason,
        "code": use.code,
        "replacement": use.replacement,
    }


def _counts(files: Sequence[CodeFile]) -> dict[str, int]:
    """Counts each use once: a use that is not certain, whatever it needs, as 'perhaps'."""
    found = Counter(
        use.row.kind.value if use.certain else _PERHAPS for file in files for use in file.uses
    )
    counts = {name: found[name] for name in (*(kind.value for kind in Kind), _PERHAPS)}
    return {**counts, "not read": sum(file.problem is not None for file in files)}


def _describe_file(file: CodeFile) -> Iterator[str]:
    yield _printable(str(file.path))
    if file.problem is not None:
        yield from _wrapped("  not read: ", file.problem, 6)
    groups: dict[tuple[str, bool], list[Use]] = {}
    for use in file.uses:
        groups.setdefault((use.row.title, use.certain), []).append(use)
    for (title, certain), uses in groups.items():
        row = uses[0].row
        yield f"  {'' if certain else f'{_PERHAPS} '}{row.kind.value}: {title}"
        for use in uses:
            cell = "" if use.cell is None else f":cell {use.cell}"
            line = f"      {file.path}{cell}:{use.line}:{use.column}  {use.code}"
            yield _printable(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...")
            if use.replacement is not None:
                yield from _wrapped("        write: ", use.replacement, 15)
        yield from _wrapped("      use: ", row.use, 11)
        yield from _wrapped("      why: ", row.reason, 11)


def _wrapped(start: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        _printable(start + text),
        _WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _printable(text: str) -> str:
    """Keeps control characters of a file or its name from the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
