"""The arrows between our packages, and who may touch other people's.

Read from the source, because an import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "composer_fsdp2"
ROOT = Path(__file__).parents[2] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

ORDER = (
    "errors",
    "fingerprint",
    "progress",
    "ranks",
    "config",
    "plan",
    "blocks",
    "parallel",
    "shard",
    "runtime",
    "optim",
    "checkpoint",
    "estimate",
    "trainer",
    "foundry",
    "tools",
    "cli",
)
"""Stages of the way a model takes. Each may import itself and those before it."""

EVERYWHERE = "shard.torch_private"
"""The room of private members of torch imports `errors` and `fingerprint` alone: stages before
`shard` may use it too."""

GLUE = {
    "trainer": {"composer", "transformers"},
    "foundry": {"composer", "llmfoundry", "transformers"},
    "cli": {"composer", "llmfoundry", "transformers"},
}
"""The libraries we plug into, and the only parts that may know them."""
PLUGGED_INTO = set.union(*GLUE.values())

PRIVATE = "torch.distributed.fsdp._fully_shard"
REPLACING = ("shard/torch_private/", "trainer/patches/")
"""The only files that may assign to attributes of other packages."""


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _part(file: Path) -> str:
    """The subpackage or module directly under the package: `core`, `cli`."""
    return file.relative_to(ROOT).with_suffix("").parts[0]


def _imports(file: Path) -> Iterator[str]:
    """Full dotted names; `from a import b` yields `a.b`, which covers modules and names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(ROOT.parent).parent.parts
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _own_imports(file: Path) -> set[str]:
    """Dotted names below the package that a file imports, as modules."""
    names = {name.removeprefix(f"{PACKAGE}.") for name in _imports(file) if PACKAGE in name}
    return {_module_of(name) for name in names} - {""}


def _module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a module or a package of ours."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").exists() or path.is_dir():
            return ".".join(parts[:length])
    return ""


def wrong_arrows(part: str, imported: set[str]) -> set[str]:
    """The imports of a file in `part` that lead up, or to a folder nobody knows."""
    allowed = {*ORDER[: ORDER.index(part) + 1]} if part in ORDER else {*ORDER}
    up = {name for name in imported if name.partition(".")[0] not in allowed}
    return {name for name in up if not name.startswith(EVERYWHERE)}


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_arrows_point_down(file: Path):
    assert not wrong_arrows(_part(file), _own_imports(file))


def test_the_room_of_private_members_is_at_the_bottom():
    files = [file for file in FILES if "torch_private" in file.parts]
    imported = set.union(*(_own_imports(file) for file in files))
    others = {name for name in imported if not name.startswith(EVERYWHERE)}
    assert files
    assert others <= {"errors", "fingerprint"}


def test_an_arrow_that_points_up_is_found():
    assert wrong_arrows("plan", {"errors", "plan.rules", "shard.apply"}) == {"shard.apply"}
    assert wrong_arrows("shard", {"utils"}) == {"utils"}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others."""
    found: list[str] = []
    for start in imports:
        seen: set[str] = set()
        open_ends = [*imports[start]]
        while open_ends:
            if (name := open_ends.pop()) not in seen:
                seen.add(name)
                open_ends += imports.get(name, ())
        found += [start] if start in seen else []
    return found


def test_no_circles():
    """Also not by imports inside functions."""
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in FILES}
    imports = {name: _own_imports(file) for name, file in modules.items() if "__init__" not in name}
    assert not circles(imports)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_nothing_in_trainer_imports_the_patches():
    importing = {
        _name(file)
        for file in FILES
        for name in _imports(file)
        if _part(file) == "trainer" and name.startswith(f"{PACKAGE}.trainer.patches")
    }
    assert {name for name in importing if not name.startswith("trainer/patches/")} == set()


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_only_glue_knows_what_we_plug_into(file: Path):
    libraries = {name.split(".")[0] for name in _imports(file)}
    assert libraries & PLUGGED_INTO <= GLUE.get(_part(file), set())


NEEDS_TORCH_ALONE = ("ranks", "config", "plan", "parallel", "blocks", "shard", "runtime", "optim")


@pytest.mark.parametrize("file", [f for f in FILES if _part(f) in NEEDS_TORCH_ALONE], ids=_name)
def test_works_on_any_module_with_torch_alone(file: Path):
    libraries = {name.split(".")[0] for name in _imports(file)}
    assert libraries - sys.stdlib_module_names <= {"torch", PACKAGE}


@pytest.mark.parametrize("file", [f for f in FILES if _part(f) == "checkpoint"], ids=_name)
def test_checkpoint_needs_torch_and_what_torch_reads(file: Path):
    libraries = {name.split(".")[0] for name in _imports(file)}
    allowed = {"numpy", "safetensors", "torch", "tqdm", PACKAGE}
    assert libraries - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_no_private_fsdp_module(file: Path):
    assert not [name for name in _imports(file) if f"{name}.".startswith(f"{PRIVATE}.")]


def _foreign_names(tree: ast.Module) -> set[str]:
    """Names a file binds to something of another package by importing it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins = [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            origins = [(alias.asname or alias.name, node.module or "") for alias in node.names]
        else:
            continue
        for bound, origin in origins:
            if origin.split(".")[0] not in {PACKAGE, *sys.stdlib_module_names}:
                names.add(bound.split(".")[0])
    return names


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _attributes_assigned(tree: ast.Module) -> Iterator[tuple[str | None, int]]:
    """First name and line of every `a.b.c = x`, `del a.b.c` and `setattr(a.b, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield _root_name(node), node.lineno
        elif isinstance(node, ast.Call) and _root_name(node.func) in {"delattr", "setattr"}:
            yield _root_name(node.args[0]), node.lineno


@pytest.mark.parametrize(
    "file", [f for f in FILES if not _name(f).startswith(REPLACING)], ids=_name
)
def test_who_may_assign_to_other_packages(file: Path):
    tree = ast.parse(file.read_text())
    foreign = _foreign_names(tree)
    assert not [f"line {line}" for name, line in _attributes_assigned(tree) if name in foreign]


@pytest.mark.smoke
@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.cli.main", f"{PACKAGE}.foundry.transform"])
def test_importing_has_no_side_effect(module: str):
    heavy = ", ".join(repr(name) for name in sorted(PLUGGED_INTO))
    code = f"import sys, {module}; print(*sys.modules.keys() & {{{heavy}}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT.parent, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FOLDER = 5000
MOST_LINES_OF_A_FUNCTION = 60


def _lines(file: Path) -> int:
    return file.read_text().count("\n")


def test_no_file_is_too_long_to_be_read():
    assert {_name(f): _lines(f) for f in FILES if _lines(f) > MOST_LINES_OF_A_FILE} == {}


def test_no_folder_holds_several_subjects():
    """Subfolders count by themselves."""
    folders = {file.parent for file in FILES}
    lines = {folder: sum(_lines(f) for f in FILES if f.parent == folder) for folder in folders}
    assert {f: count for f, count in lines.items() if count > MOST_LINES_OF_A_FOLDER} == {}


def long_functions(text: str, most: int = MOST_LINES_OF_A_FUNCTION) -> list[str]:
    """Names of functions with more lines than that, docstrings left out."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            prose = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
            if node.end_lineno - node.lineno + 1 - prose > most:
                found.append(node.name)
    return found


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_no_function_is_too_long_to_be_read(file: Path):
    assert not long_functions(file.read_text())


def test_a_long_function_is_found():
    text = 'def f():\n    """One\n    two."""\n    a = 1\n    return a\n'
    assert long_functions(text, most=2) == ["f"]
    assert long_functions(text, most=3) == []


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_no_assert_guards_against_input(file: Path):
    """`python -O` drops asserts, so nobody may wait for what they raise."""
    handlers = [
        n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ExceptHandler)
    ]
    caught = [ast.unparse(handler.type) for handler in handlers if handler.type is not None]
    assert not [names for names in caught if "AssertionError" in names]
