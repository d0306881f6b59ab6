"""Public functions say what they take, return and raise, and have an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import distributed as dist

import composer_fsdp2
from composer_fsdp2.errors import CheckpointError

NAMES = [name for name in composer_fsdp2.__all__ if not name.startswith("__")]
FUNCTIONS = [n for n in NAMES if isinstance(getattr(composer_fsdp2, n), FunctionType)]
ERRORS = [n for n in NAMES if n.endswith("Error")]
EXAMPLES = [n for n in NAMES if n not in ERRORS]

NEVER_RAISES = {"apply_activation", "uninstall"}
WITH_SOURCE = {
    "FSDP2Monitor",
    "apply_activation",
    "apply_plan",
    "clip_grad_norm_",
    "prepare_fully_shard",
    "summon_full_params",
    "tied_groups",
}
"""public names with a formula, or a behaviour that is torch's or Composer's"""

_ENTRY = re.compile(r"^ {4}(\w+):", re.MULTILINE)
_UPSTREAM = re.compile(
    r"https://github\.com/pytorch/pytorch/blob/v[\d.]+/(torch/\S+?\.py)(?:#L(\d+))?"
)


def sections(text: str) -> dict[str, str]:
    """What stands under `Args:` and the like; `Collective:` and `Source:` may stand in a line."""
    parts = re.split(r"^(Args|Returns|Yields|Raises|Source|Example):", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def missing(function: FunctionType, text: str) -> list[str]:
    """What a docstring of a public function lacks."""
    found, name = sections(text), function.__name__
    signature = inspect.signature(function)
    described = {*_ENTRY.findall(found.get("Args", ""))}
    lacks = [f"argument {param}" for param in signature.parameters if param not in described]
    if not re.search(r"\bCollective: (yes|no)\b", text):
        lacks.append("Collective: yes or no")
    if signature.return_annotation not in (None, "None") and not found.keys() & {
        "Returns",
        "Yields",
    }:
        lacks.append("Returns")
    if "Raises" not in found and name not in NEVER_RAISES:
        lacks.append("Raises")
    if ">>> " not in found.get("Example", ""):
        lacks.append("Example")
    if name in WITH_SOURCE and "https://" not in found.get("Source", ""):
        lacks.append("Source")
    return lacks


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_all(name: str):
    function = getattr(composer_fsdp2, name)
    assert missing(function, inspect.getdoc(function) or "") == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_name_has_an_example(name: str):
    assert ">>> " in (inspect.getdoc(getattr(composer_fsdp2, name)) or "")


def test_what_is_missing_is_found():
    def apply_plan(model: object, plan: object) -> int: ...

    text = "Does it.\n\nArgs:\n    model: whole.\n\nRaises:\n    PlanError: never."
    assert missing(apply_plan, text) == [
        "argument plan",
        "Collective: yes or no",
        "Returns",
        "Example",
        "Source",
    ]


@pytest.fixture
def alone(monkeypatch) -> Iterator[None]:
    """One rank that is its own world, for examples that are collective."""
    for key in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(key, "0")
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)
    dist.destroy_process_group()


def run_example(name: str, text: str) -> str:
    """What of an example went otherwise; empty where all of it is right."""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("alone")
def test_the_example_runs(name: str):
    assert run_example(name, inspect.getdoc(getattr(composer_fsdp2, name)) or "") == ""


def test_a_wrong_example_is_found():
    assert "Expected:" in run_example("wrong", ">>> 1 + 1\n3\n")


def test_errors_need_no_example():
    assert issubclass(CheckpointError, ValueError)
    assert all(inspect.getdoc(getattr(composer_fsdp2, name)) for name in ERRORS)


# --- Every docstring. ---

ROOT = Path(composer_fsdp2.__file__).parent


def vague(text: str) -> list[int]:
    """Lines of docstrings that say neither what is done nor what something is."""
    starts = [
        (node.value.lineno, str(node.value.value).lstrip())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return [line for line, said in starts if said.startswith(("What ", "Stands in "))]


def test_no_docstring_begins_with_what():
    files = {f.relative_to(ROOT).as_posix(): f for f in sorted(ROOT.rglob("*.py"))}
    found = {name: vague(file.read_text(encoding="utf-8")) for name, file in files.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_vague_docstring_is_found():
    assert vague('"""What it is."""\nx = 1\n"""Number of ranks."""\n') == [1]


# --- Links to torch. ---

LINKS = {
    (file.relative_to(ROOT).as_posix(), found.group(1), int(found.group(2) or 1))
    for file in sorted(ROOT.rglob("*.py"))
    for found in _UPSTREAM.finditer(file.read_text(encoding="utf-8"))
}
DEPENDS_ON_TORCH = ("shard/", "runtime/", "checkpoint/")


@pytest.mark.parametrize(("file", "path", "line"), sorted(LINKS))
def test_a_link_to_torch_names_a_line_of_torch(file: str, path: str, line: int):
    place = Path(torch.__file__).parents[1] / path
    if torch.__version__.startswith("2.7.0"):  # the version that the links name
        assert place.exists(), f"{file}: {path}"
        assert line <= len(place.read_text(encoding="utf-8").splitlines()), f"{file}: {path}"


@pytest.mark.parametrize("folder", DEPENDS_ON_TORCH)
def test_folders_that_depend_on_torch_say_where(folder: str):
    assert len({file for file, _, _ in LINKS if file.startswith(folder)}) >= 3
