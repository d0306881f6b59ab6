"""Packages that are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.cli.late_imports import late_imports

INIT = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
__version__ = "1.2"
class Base:
    def hello(self):
        return "hello"
def double(n):
    return 2 * n
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    """A package with a module in it, and whether either has run."""
    folder = tmp_path / "slow_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "inner.py").write_text("VALUE = {'a': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield lambda: (folder / "ran").exists()
    for name in [name for name in sys.modules if name.startswith("slow_package")]:
        del sys.modules[name]


def ran(code: str) -> dict[str, Any]:
    """Names that a program leaves whose imports are late."""
    names: dict[str, Any] = {"__name__": "program"}
    with late_imports(["slow_package"]):
        exec(code, names)
    return names


@pytest.mark.parametrize(
    "code",
    [
        "import slow_package",
        "import slow_package.inner as inner",
        "from slow_package import Base, double",
        "from slow_package.inner import VALUE",
        "import slow_package\nfrom typing import Union\nKind = Union[slow_package.Base, int]",
        "from slow_package import Base\ndef f(x: 'Base | None') -> Base | None: ...",
    ],
)
def test_an_import_alone_runs_nothing(package, code):
    ran(code)
    assert not package()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from slow_package import double\nfound = double(2)", 4),
        ("import slow_package\nfound = slow_package.double(3)", 6),
        ("import slow_package\nfound = slow_package.__version__", "1.2"),
        ("from slow_package import Base\nclass A(Base): ...\nfound = A().hello()", "hello"),
        ("from slow_package import Base\nfound = isinstance(3, Base)", False),
        ("from slow_package import Base\nfound = issubclass(int, Base)", False),
        ("from slow_package.inner import VALUE\nfound = VALUE['a']", 1),
        ("from slow_package import inner\nfound = inner.VALUE['a']", 1),
        ("import slow_package.inner\nfound = slow_package.inner.VALUE['a']", 1),
    ],
)
def test_any_use_is_of_the_real_thing(package, code, expected):
    assert ran(code)["found"] == expected
    assert package()


def test_what_was_imported_late_works_after_the_block(package):
    names = ran("import slow_package\nfrom slow_package import double")
    assert not package()
    assert names["double"](4) == 8
    assert names["slow_package"].Base is importlib.import_module("slow_package").Base


def test_after_the_block_an_import_is_an_ordinary_one(package):
    ran("import slow_package")
    module = importlib.import_module("slow_package")
    assert package()
    assert type(module).__name__ == "module"


@pytest.mark.parametrize("name", ["slow_package_that_is_missing", "slow_package.missing"])
def test_a_package_that_is_missing_is_found(package, name):
    with (
        pytest.raises(ModuleNotFoundError, match="missing"),
        late_imports(["slow_package", "slow_package_that_is_missing"]),
    ):
        importlib.import_module(name)


def test_others_and_what_is_imported_already_stay(package):
    importlib.import_module("slow_package")
    before = sys.modules["slow_package"]
    with late_imports(["slow_package"]):
        assert importlib.import_module("slow_package") is before
        assert type(importlib.import_module("json")).__name__ == "module"
