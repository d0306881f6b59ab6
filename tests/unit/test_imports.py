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

ARROWS = {
    "errors": set(),
    "fingerprint": set(),
    "config": {"errors"},
    "core": {"config", "errors", "fingerprint"},
    "checkpoint": {"core", "errors"},
    "parallel": {"config", "core", "errors"},
    "estimate": {"config", "core", "errors"},
    "migrate": {"config", "core", "errors"},
    "parity": {"errors"},
    "trainer": {
        "checkpoint",
        "config",
        "core",
        "errors",
        "estimate",
        "fingerprint",
        "migrate",
        "parallel",
    },
    "foundry": {"core", "errors", "trainer"},
    "console": {"errors", "launch"},
    "run_file": {"core", "errors", "foundry"},
    "doctor": {"core", "errors", "trainer"},
    "doctor_cli": {
        "console",
        "core",
        "doctor",
        "errors",
        "foundry",
        "launch",
        "run_file",
        "trainer",
    },
    "checkpoint_cli": {"checkpoint", "console", "errors"},
    "migrate_cli": {"console", "errors", "migrate"},
    "parity_cli": {
        "console",
        "errors",
        "foundry",
        "launch",
        "parity",
        "run_file",
        "trainer",
    },
}
"""What each part may import of ours besides itself; parts not listed may import anything."""

GLUE = {
    "trainer": {"composer", "transformers"},
    "foundry": {"composer", "llmfoundry", "transformers"},
    "cli": {"composer", "llmfoundry", "transformers"},
}
"""The libraries we plug into, and the only parts that may know them."""
PLUGGED_INTO = set.union(*GLUE.values())

PRIVATE = "torch.distributed.fsdp._fully_shard"
REPLACING = (
    "core/torch_private/",
    "core/watching.py",
    "trainer/patches/",
)
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


def _parts_imported(file: Path) -> set[str]:
    own = [name.split(".") for name in _imports(file) if name.startswith(f"{PACKAGE}.")]
    return {names[1] for names in own} - {_part(file)}


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_arrows_between_our_parts(file: Path):
    allowed = ARROWS.get(_part(file))
    if allowed is not None:
        assert _parts_imported(file) <= allowed


def test_no_circle_inside_trainer():
    """Also not through an import inside a function."""
    names = {f"{PACKAGE}.{_name(f)[:-3].replace('/', '.')}": f for f in FILES}
    names = {name: f for name, f in names.items() if name.startswith(f"{PACKAGE}.trainer.")}
    found = {name: [f"{one}." for one in _imports(f)] for name, f in names.items()}
    arrows = {
        name: {one for one in names for to in found[name] if to.startswith(f"{one}.")}
        for name in names
    }
    while ends := {name for name, to in arrows.items() if not to & arrows.keys()}:
        arrows = {name: to for name, to in arrows.items() if name not in ends}
    assert not arrows


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


@pytest.mark.parametrize("file", [f for f in FILES if _part(f) in ("config", "core")], ids=_name)
def test_config_and_core_need_torch_alone(file: Path):
    libraries = {name.split(".")[0] for name in _imports(file)}
    assert libraries - sys.stdlib_module_names <= {"torch", PACKAGE}


@pytest.mark.parametrize("file", [f for f in FILES if _part(f) == "checkpoint"], ids=_name)
def test_checkpoint_needs_torch_and_what_torch_reads(file: Path):
    libraries = {name.split(".")[0] for name in _imports(file)}
    assert libraries - sys.stdlib_module_names <= {"numpy", "safetensors", "torch", PACKAGE}


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
@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.cli", f"{PACKAGE}.foundry"])
def test_importing_has_no_side_effect(module: str):
    heavy = ", ".join(repr(name) for name in sorted(PLUGGED_INTO))
    code = f"import sys, {module}; print(*sys.modules.keys() & {{{heavy}}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT.parent, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
