"""Looks through the Python files below a folder, and describes the uses in each."""

from __future__ import annotations

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_fsdp2.config.messages import shortened
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.python_code.table import Kind
from composer_fsdp2.tools.migrate.python_code.uses import Source, Unreadable, Use, find_uses

__all__ = ["CodeFile", "code_as_dict", "describe_code", "migrate_code"]

_NOTEBOOK = ".ipynb"
_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})


@dataclass(frozen=True, slots=True)
class CodeFile:
    """Holds one file's uses of FSDP1."""

    path: Path
    uses: list[Use] = field(default_factory=list)
    problem: str | None = None
    """why it could not be read"""

    @property
    def needs_work(self) -> bool:
        """Whether something has to be changed; a 'perhaps' does not count."""
        certain = (use.row.kind for use in self.uses if use.certain)
        return self.problem is not None or any(kind is not Kind.NOTHING for kind in certain)


def migrate_code(path: Path) -> list[CodeFile]:
    """Looks through a Python file, or all those below a folder; executes and changes none of them.

    Args:
        path: a file or a folder. Hidden folders, links, virtual environments and builds below it
            are passed over.

    Returns:
        All files, in order of their paths.

    Raises:
        ConfigError: there is no such file or folder, or no Python file in it.
    """
    if path.is_file():
        return [_examine(path)]
    if not path.is_dir():
        raise ConfigError(
            f"There is no file or folder '{path}'. There is nothing to look through. Write the "
            f"path of Python code, absolute or from {Path.cwd()}."
        )
    files: list[CodeFile] = []

    def note(error: OSError) -> None:
        files.append(CodeFile(Path(error.filename), problem=error.strerror or str(error)))

    # Links to folders are not followed, so there are no loops and nothing outside is read.
    for folder, subfolders, names in os.walk(path, onerror=note):
        # A virtual environment has one of two files, whatever its name.
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not any(Path(folder, name, mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))
        )
        paths = (Path(folder, name) for name in sorted(names) if name.endswith((".py", _NOTEBOOK)))
        # A pipe would wait for ever; a link that leads nowhere is reported when it is read.
        files += [_examine(file) for file in paths if file.is_file() or not file.exists()]
    if not files:
        raise ConfigError(
            f"'{path}' has no Python file. There is nothing to look through. Give a file, or a "
            "folder with files *.py that is not hidden and no virtual environment."
        )
    return files


def _examine(path: Path) -> CodeFile:
    try:
        if path.suffix == _NOTEBOOK:
            problem = (
                "notebooks are not looked through, and this one speaks of FSDP; write it as Python "
                f"first: jupyter nbconvert --to script {path}"
            )
            return CodeFile(path, problem=problem if b"fsdp" in path.read_bytes().lower() else None)
        return CodeFile(path, find_uses(Source.read(path.read_bytes())))
    except OSError as error:
        return CodeFile(path, problem=error.strerror or str(error))
    except (Unreadable, RecursionError, MemoryError) as error:
        version = ".".join(map(str, sys.version_info[:2]))
        told = str(error) if isinstance(error, Unreadable) else "it is nested too deeply"
        return CodeFile(path, problem=f"Python {version} cannot parse it: {told}")


# --- The report, as text and as data. ---

_WIDTH = 100
_PERHAPS = "perhaps"


def describe_code(files: Sequence[CodeFile]) -> str:
    """Returns the report, grouped by file and in it by row of the table."""
    blocks = [
        "\n".join(
            # Control characters of a file or its name are kept from the terminal.
            "".join(character if character.isprintable() else "?" for character in line)
            for line in _describe_file(file)
        )
        for file in files
        if file.uses or file.problem
    ]
    counts = _counts(files)
    unread = counts.pop("not read")
    totals = [f"{count} {name}" for name, count in counts.items() if count]
    read = len(files) - unread
    text = f"{read} file{'' if read == 1 else 's'} read: {', '.join(totals) or 'no use of FSDP1'}."
    return "\n\n".join([*blocks, text + (f" {unread} could not be read." if unread else "")])


def code_as_dict(files: Sequence[CodeFile]) -> dict[str, Any]:
    """Returns the report as one document for JSON."""
    counts = _counts(files)
    return {
        "files": [
            {
                "path": str(file.path),
                "problem": file.problem,
                "uses": [
                    {
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
                    for use in file.uses
                ],
            }
            for file in files
            if file.uses or file.problem
        ],
        "files_read": len(files) - counts["not read"],
        "counts": counts,
    }


def _counts(files: Sequence[CodeFile]) -> dict[str, int]:
    """Counts each use once: a use that is not certain, whatever it needs, as 'perhaps'."""
    uses = Counter(
        use.row.kind.value if use.certain else _PERHAPS for file in files for use in file.uses
    )
    counts = {name: uses[name] for name in (*(kind.value for kind in Kind), _PERHAPS)}
    return {**counts, "not read": sum(file.problem is not None for file in files)}


def _describe_file(file: CodeFile) -> Iterator[str]:
    yield str(file.path)
    if file.problem is not None:
        yield from _wrapped("  not read: ", file.problem)
    groups: dict[tuple[str, bool], list[Use]] = {}
    for use in file.uses:
        groups.setdefault((use.row.title, use.certain), []).append(use)
    for (title, certain), uses in groups.items():
        row = uses[0].row
        yield f"  {'' if certain else f'{_PERHAPS} '}{row.kind.value}: {title}"
        for use in uses:
            line = f"      {file.path}:{use.line}:{use.column}  {use.code}"
            yield line if len(line) <= _WIDTH else shortened(line, _WIDTH - 3)
            if use.replacement is not None:
                yield from _wrapped("        write: ", use.replacement)
        yield from _wrapped("      use: ", row.use)
        yield from _wrapped("      why: ", row.reason)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        start + text,
        _WIDTH,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
