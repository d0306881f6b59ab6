"""Finds the Python files and notebooks below a folder, and the uses of FSDP1 in each."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.python_code.row import Kind
from composer_fsdp2.tools.migrate.python_code.source import NOTEBOOK, Source, Unreadable
from composer_fsdp2.tools.migrate.python_code.uses import Use, find_uses

__all__ = ["CodeFile", "migrate_code"]

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""files of a virtual environment, whatever its name"""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """Holds one file's uses."""

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
    problems: list[CodeFile] = []

    def note(error: OSError) -> None:
        problems.append(CodeFile(Path(error.filename), problem=error.strerror or str(error)))

    # Links to folders are not followed, so there are no loops and nothing outside is read.
    for folder, subfolders, names in os.walk(path, onerror=note):
        subfolders[:] = sorted(name for name in subfolders if _is_wanted(Path(folder, name)))
        found = (Path(folder, name) for name in sorted(names) if name.endswith((".py", NOTEBOOK)))
        # A pipe would wait for ever; a link that leads nowhere is reported when it is read.
        files += [_examine(file) for file in found if file.is_file() or not file.exists()]
    if not files and not problems:
        raise ConfigError(
            f"'{path}' has no Python file. There is nothing to look through. Give a file, or a "
            "folder with files *.py or *.ipynb that is not hidden and no virtual environment."
        )
    return files + problems


def _examine(path: Path) -> CodeFile:
    is_notebook = path.suffix == NOTEBOOK
    try:
        raw = path.read_bytes()
        source = Source.read_notebook(raw) if is_notebook else Source.read(raw)
        return CodeFile(path, find_uses(source), source.problem)
    except OSError as error:
        return CodeFile(path, problem=error.strerror or str(error))
    except Unreadable as error:
        version = ".".join(map(str, sys.version_info[:2]))
        reader = "" if is_notebook else f"Python {version} cannot parse it: "
        return CodeFile(path, problem=f"{reader}{error}")


def _is_wanted(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED:
        return False
    return not any((folder / name).exists() for name in _ENVIRONMENT)
