"""Finds the Python files below a folder, and replaces those whose one word changes."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migrate.code import Use, find_uses
from composer_fsdp2.migrate.code_rewrite import Refusal, borrowed_from, rewrite
from composer_fsdp2.migrate.code_source import Source, Unreadable
from composer_fsdp2.migrate.code_table import Kind

__all__ = ["CodeFile", "migrate_code"]

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""what a virtual environment has, whatever its name"""


@dataclass(slots=True)
class CodeFile:
    """One file, and what was found in it."""

    path: Path
    uses: list[Use]
    """what is left to do"""
    problem: str | None = None
    """why it could not be read"""
    unwritten: str | None = None
    """why what changes in one word could not be changed"""
    refusal: str | None = None
    """why what changes in one word has to be changed by hand"""
    rewritten: tuple[Use, ...] = ()
    """what was changed, at its old place"""

    def kind(self, use: Use) -> Kind:
        """What a use needs here."""
        return Kind.BY_HAND if self.refusal and use.row.kind is Kind.REWRITE else use.row.kind

    @property
    def needs_hands(self) -> bool:
        """Whether something has to be done by hand; what is only perhaps FSDP1 does not count."""
        by_hand = any(self.kind(use) is Kind.BY_HAND and use.certain for use in self.uses)
        return by_hand or self.problem is not None or self.unwritten is not None


def migrate_code(path: Path, *, write: bool) -> list[CodeFile]:
    """Looks through a Python file, or all those below a folder; executes none of them.

    Args:
        path: a file or a folder. Hidden folders, links, virtual environments and builds below it
            are passed over.
        write: whether to change what changes in one word.

    Returns:
        All files, in order of their paths.

    Raises:
        ConfigError: when there is no such file or folder, or no Python file in it.
    """
    files: list[CodeFile] = []
    changes: dict[int, bytes] = {}
    borrowed: set[str] = set()
    for found in _python_files(path):
        file = CodeFile(found.path, [], problem=found.problem)
        files.append(file)
        if file.problem is None:
            new = _examine(file, borrowed)
            if new is not None:
                changes[len(files) - 1] = new
    if not files:
        raise ConfigError(
            f"'{path}' has no Python file. There is nothing to look through. Give a file, or a "
            "folder with files *.py that is not hidden and no virtual environment."
        )
    for index, new in changes.items():
        _change(files[index], new, borrowed, write=write)
    return files


def _examine(file: CodeFile, borrowed: set[str]) -> bytes | None:
    """Fills in what is in the file; returns its new content where one is possible."""
    try:
        source = Source.read(file.path.read_bytes())
        file.uses = find_uses(source)
        borrowed |= borrowed_from(source)
        return rewrite(source, file.uses)
    except OSError as error:
        file.problem = error.strerror or str(error)
    except Unreadable as error:
        version = ".".join(map(str, sys.version_info[:2]))
        file.problem = f"Python {version} cannot parse it: {error}"
    except Refusal as refusal:
        file.refusal = str(refusal)
    return None


def _change(file: CodeFile, new: bytes, borrowed: set[str], *, write: bool) -> None:
    names = {file.path.stem}
    if file.path.stem == "__init__":
        names.add(file.path.resolve().parent.name)
    if names & borrowed:
        file.refusal = "another file imports it from here"
    elif file.path.is_symlink():
        file.refusal = "it is a link, and would stop being one"
    if not write or file.refusal:
        return
    try:
        _replace(file.path, new)
    except OSError as error:
        file.unwritten = error.strerror or str(error)
        return
    file.rewritten = tuple(use for use in file.uses if use.row.kind is Kind.REWRITE)
    file.uses = find_uses(Source.read(new))


def _replace(path: Path, content: bytes) -> None:
    """The old file or the new one is there at any moment, with the same permissions."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not os.access(path, os.W_OK):
        raise PermissionError("it is read-only")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- Which files. ---


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    problem: str | None = None


def _python_files(path: Path) -> Iterator[_Found]:
    if path.is_file():
        yield _Found(path)
        return
    if not path.is_dir():
        raise ConfigError(
            f"There is no file or folder '{path}'. There is nothing to look through. Write the "
            f"path of Python code, absolute or from {Path.cwd()}."
        )
    problems: list[_Found] = []

    def note(error: OSError) -> None:
        problems.append(_Found(Path(error.filename), error.strerror or str(error)))

    # Links to folders are not followed, so there are no loops and nothing outside is written.
    for folder, subfolders, names in os.walk(path, onerror=note):
        subfolders[:] = sorted(name for name in subfolders if _wanted(Path(folder, name)))
        files = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        # A pipe would wait for ever; a link that leads nowhere is reported when it is read.
        yield from (_Found(f) for f in files if os.path.isfile(f) or not os.path.exists(f))
    yield from problems


def _wanted(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED:
        return False
    return not any(os.path.exists(folder / name) for name in _ENVIRONMENT)
