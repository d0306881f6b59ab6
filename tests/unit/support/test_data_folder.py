"""The tests read nothing outside the repository: a clone in an empty folder has all they need.

Paths that start at a file's own place, `Path(__file__).parents[3] / "yamls"`, are worked out from
the source, through names and imports of names; every one has to lie in the repository.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_folder import CONFIGS, FSDP1_CHECKPOINTS, ROOT

FOLDERS = ("tests", "benchmarks", "composer_fsdp2", "yamls")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
ABOVE = re.compile(r"""(?<![\w"')}./])\.\./""")
"""A relative path that starts one folder higher."""


def place_of(node: ast.AST, file: Path, names: dict[str, Path]) -> Path | None:
    """The path that an expression stands for, as far as it is written there."""
    match node:
        case ast.Call(ast.Name("Path"), [ast.Name("__file__")]):
            return file
        case ast.Name(name):
            return names.get(name)
        case ast.Call(ast.Attribute(base, "resolve" | "absolute")):
            return place_of(base, file, names)
        case ast.Attribute(base, "parent"):
            found = place_of(base, file, names)
            return found and found.parent
        case ast.Subscript(ast.Attribute(base, "parents"), ast.Constant(int(number))):
            found = place_of(base, file, names)
            return found and found.parents[number]
        case ast.BinOp(base, ast.Div(), part):
            found = place_of(base, file, names)
            # What is not written out is taken for the name of one file or folder.
            added = str(part.value) if isinstance(part, ast.Constant) else "one"
            return found and Path(os.path.normpath(found / added))
    return None


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def names_in(file: Path) -> dict[str, Path]:
    return names_of(parsed(file), file)


def names_of(tree: ast.Module, file: Path) -> dict[str, Path]:
    """Names of a module that are paths: its own and those it imports from our modules."""
    names: dict[str, Path] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            source = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            theirs = names_in(source) if source in FILES else {}
            names |= {a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = place_of(node.value, file, names)
            if found:
                names[node.targets[0].id] = found
    return names


def outside(text: str, file: Path) -> Iterator[str]:
    """Paths of a source that leave the repository."""
    tree = ast.parse(text)
    names = names_of(tree, file)
    for node in ast.walk(tree):
        found = place_of(node, file, names)
        if found and not found.is_relative_to(ROOT):
            yield f"{file}:{getattr(node, 'lineno', 0)}: {found}"


def test_no_module_looks_outside_the_repository():
    assert len(FILES) > 100
    assert [line for file in FILES for line in outside(file.read_text(), file)] == []


@pytest.mark.parametrize(
    "text",
    [
        'X = Path(__file__).parents[3].parent / "fixtures"',
        'X = Path(__file__).resolve().parents[3] / "fixtures"',
        "from tests.support.data_folder import ROOT as R\n"
        'def f():\n    return (R.parent / "x").glob("*")',
        'HERE = Path(__file__).parent\nX = HERE / ".." / ".." / ".." / "x"',
        'HERE = Path(__file__).parent\nX = HERE / "../../../x"',
    ],
)
def test_a_path_that_leaves_it_is_found(text: str):
    assert list(outside(text, ROOT / "tests" / "unit" / "test_planted.py")) != []


def test_no_other_file_names_a_folder_above_its_own():
    """The `cd` to the root at the top of a script is none: nothing follows its dots.

    Nor are the folders of mkdocs.yml, which counts from .ci/ and names two of the repository.
    """
    kinds = (".ci/*", "tests/data/**/*.yaml", "yamls/**/*.yaml", "pyproject.toml")
    files = [file for kind in kinds for file in ROOT.glob(kind) if file.is_file()]
    assert len(files) > 40
    inside = {ROOT / ".ci" / "mkdocs.yml": ("../docs", "../build/site")}
    named = []
    for file in files:
        text = file.read_text()
        for path in inside.get(file, ()):
            text = text.replace(f": {path}\n", ": \n")
        named += [file] if ABOVE.search(text) else []
    assert named == []
    assert ABOVE.search("cp -r ../shared/x .")


@pytest.mark.parametrize("folder", [CONFIGS, FSDP1_CHECKPOINTS])
def test_git_has_every_file(folder: Path):
    """None is left out by a rule of `.gitignore`, which would only show in a clone."""
    if not (ROOT / ".git").exists():
        return  # a copy without its history has what was copied
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--ignored", "--", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [
        line
        for line in done.stdout.splitlines()
        if line.startswith("!!") and "__pycache__" not in line
    ] == []
