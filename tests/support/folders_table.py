"""Writes the folders into docs/architecture.md: `python -m tests.support.folders_table`."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "composer_fsdp2"
PAGE = ROOT / "docs" / "architecture.md"
MARK = re.compile(r"(<!-- folders -->\n)(.*?)(?=<!-- end of folders -->)", re.DOTALL)


def stages() -> Iterator[Path]:
    """Yields modules and folders of the package in the order of imports, with their subfolders."""
    for name in runpy.run_path(str(ROOT / ".ci" / "rules_code.py"))["ORDER"]:
        if (file := PACKAGE / f"{name}.py").exists():
            yield file
        yield from (file.parent for file in sorted((PACKAGE / name).glob("__init__.py")))
        yield from (file.parent for file in sorted((PACKAGE / name).glob("*/__init__.py")))


def first_sentence(file: Path) -> str:
    """Returns the first sentence of a module's docstring, in one line."""
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"(?<=\.)\s", " ".join(doc.split()))[0]


def table() -> str:
    """The table as Markdown."""
    lines = "| Folder | What it does |\n|---|---|\n"
    for path in stages():
        name = path.relative_to(PACKAGE).as_posix() + "/" * path.is_dir()
        doc = first_sentence(path / "__init__.py" if path.is_dir() else path)
        lines += f"| `{name}` | {doc.removesuffix('.')} |\n"
    return lines


def page() -> str:
    """Returns the page with the table made anew."""
    return MARK.sub(lambda mark: mark[1] + table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
