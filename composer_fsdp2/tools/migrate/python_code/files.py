"""Finds the Python files and notebooks below a folder, and what has to change in each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.python_code.notebook import SUFFIX, read_cells
from composer_fsdp2.tools.migrate.python_code.reads import find_reads
from composer_fsdp2.tools.migrate.python_code.row import Kind
from composer_fsdp2.tools.migrate.python_code.source import Source, Unreadable
from composer_fsdp2.tools.migrate.python_code.uses import Use, find_uses

__all__ = ["CodeFile", "migrate_code"]

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""what a virtual environment has, whatever its name"""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """One file, and what was found in it."""

    path: Path
    uses: list[Use] = field(default_factory=list)
    problem: str | None = None
    """why it could not be read"""

    @property
    def needs_work(self) -> bool:
        """Whether something has to be changed; what is only perhaps FSDP1 does not count."""
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
        ConfigError: when there is no such file or folder, or no Python file in it.
    """
    files = [file if file.problem else _examine(file.path) for file in _python_files(path)]
    if not files:
        raise ConfigError(
            f"'{path}' has no Python file. There is nothing to look through. Give a file, or a "
            "folder with files *.py or *.ipynb that is not hidden and no virtual environment."
        )
    return files


def _examine(path: Path) -> CodeFile:
    try:
        if path.suffix == SUFFIX:
            return _examine_notebook(path)
        return CodeFile(path, _found_in(Source.read(path.read_bytes())))
    except OSError as error:
        return CodeFile(path, problem=error.strerror or str(error))
    except Unreadable as error:
        version = ".".join(map(str, sys.version_info[:2]))
        reader = "" if path.suffix == SUFFIX else f"Python {version} cannot parse it: "
        return CodeFile(path, problem=f"{reader}{error}")


def _found_in(source: Source) -> list[Use]:
    found = [*find_uses(source), *find_reads(source)]
    return sorted(found, key=lambda use: (use.line, use.column))


def _examine_notebook(path: Path) -> CodeFile:
    """Looks through the cells together: a later one uses what an earlier one imports."""
    cells = read_cells(path.read_bytes())
    read = [(cell.number, cell.source) for cell in cells if cell.source is not None]
    uses, line = list[Use](), 0
    whole = Source.parse("".join(f"{source.text}\n" for _, source in read), awaits=True)
    found = _found_in(whole)
    for number, source in read:
        count = f"{source.text}\n".count("\n")
        inside = (use for use in found if line < use.line <= line + count)
        uses += [replace(use, line=use.line - line, cell=number) for use in inside]
        line += count
    problems = [f"cell {cell.number}: {cell.problem}" for cell in cells if cell.problem]
    return CodeFile(path, uses, "; ".join(problems) or None)


# --- Which files. ---


def _python_files(path: Path) -> Iterator[CodeFile]:
    if path.is_file():
        yield CodeFile(path)
        return
    if not path.is_dir():
        raise ConfigError(
            f"There is no file or folder '{path}'. There is nothing to look through. Write the "
            f"path of Python code, absolute or from {Path.cwd()}."
        )
    problems: list[CodeFile] = []

    def note(error: OSError) -> None:
        problems.append(CodeFile(Path(error.filename), problem=error.strerror or str(error)))

    # Links to folders are not followed, so there are no loops and nothing outside is read.
    for folder, subfolders, names in os.walk(path, onerror=note):
        subfolders[:] = sorted(name for name in subfolders if _wanted(Path(folder, name)))
        files = (Path(folder, name) for name in sorted(names) if name.endswith((".py", SUFFIX)))
        # A pipe would wait for ever; a link that leads nowhere is reported when it is read.
        yield from (CodeFile(f) for f in files if os.path.isfile(f) or not os.path.exists(f))
    yield from problems


def _wanted(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED:
        return False
    return not any(os.path.exists(folder / name) for name in _ENVIRONMENT)
