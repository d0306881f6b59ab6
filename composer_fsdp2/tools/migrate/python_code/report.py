"""Findings in Python files, as text and as data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from composer_fsdp2.tools.migrate.python_code.files import CodeFile
from composer_fsdp2.tools.migrate.python_code.row import Kind
from composer_fsdp2.tools.migrate.python_code.uses import Use

__all__ = ["code_as_dict", "describe_code"]

_WIDTH = 100
_PERHAPS = "perhaps"


def describe_code(files: Sequence[CodeFile]) -> str:
    """The report, grouped by file and in it by what was found."""
    blocks = ["\n".join(_describe_file(file)) for file in files if _has_news(file)]
    return "\n\n".join([*blocks, _describe_counts(files)])


def code_as_dict(files: Sequence[CodeFile]) -> dict[str, Any]:
    """The report as one document for JSON."""
    return {
        "files": [
            {
                "path": str(file.path),
                "problem": file.problem,
                "uses": [_use_as_dict(use) for use in file.uses],
            }
            for file in files
            if _has_news(file)
        ],
        "files_read": sum(file.problem is None for file in files),
        "counts": _counts(files),
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


def _has_news(file: CodeFile) -> bool:
    return bool(file.uses or file.problem)


def _counts(files: Sequence[CodeFile]) -> dict[str, int]:
    """Every use is counted once: a use that is not certain, whatever it needs, as 'perhaps'."""
    found = Counter(
        use.row.kind.value if use.certain else _PERHAPS for file in files for use in file.uses
    )
    counts = {name: found[name] for name in (*(kind.value for kind in Kind), _PERHAPS)}
    counts["not read"] = sum(file.problem is not None for file in files)
    return counts


def _describe_counts(files: Sequence[CodeFile]) -> str:
    read = sum(file.problem is None for file in files)
    looked = f"{read} file{'' if read == 1 else 's'} read: "
    counts = _counts(files)
    unread = counts.pop("not read")
    shown = [f"{count} {name}" for name, count in counts.items() if count]
    text = looked + (", ".join(shown) or "no use of FSDP1") + "."
    return text + (f" {unread} could not be read." if unread else "")


def _describe_file(file: CodeFile) -> list[str]:
    lines = [_printable(str(file.path))]
    if file.problem is not None:
        lines += _wrapped(f"  not read: {file.problem}", "      ")
    groups: dict[tuple[str, bool], list[Use]] = {}
    for use in file.uses:
        groups.setdefault((use.row.title, use.certain), []).append(use)
    for uses in groups.values():
        lines += _describe_group(file, uses)
    return lines


def _describe_group(file: CodeFile, uses: Sequence[Use]) -> Iterable[str]:
    first = uses[0]
    kind = first.row.kind.value
    yield f"  {kind if first.certain else f'{_PERHAPS} {kind}'}: {first.row.title}"
    for use in uses:
        yield _place(file, use)
        if use.replacement is not None:
            yield from _wrapped(f"        write: {use.replacement}", " " * 15)
    yield from _wrapped(f"      use: {first.row.use}", " " * 11)
    yield from _wrapped(f"      why: {first.row.reason}", " " * 11)


def _place(file: CodeFile, use: Use) -> str:
    cell = "" if use.cell is None else f":cell {use.cell}"
    line = _printable(f"      {file.path}{cell}:{use.line}:{use.column}  {use.code}")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        _printable(text),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _printable(text: str) -> str:
    """Whatever is in a file or its name, the terminal gets no control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)
