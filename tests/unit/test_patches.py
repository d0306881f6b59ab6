"""The table of replaced attributes: all of it or nothing, and back to exactly what was there."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

from composer_fsdp2.errors import PatchError
from composer_fsdp2.trainer import patches
from composer_fsdp2.trainer.patches import (
    PATCHES,
    PatchPoint,
    describe_patches,
    install,
    installed,
    uninstall,
)

pytest.importorskip("llmfoundry", reason="needs the extra foundry")


def current(target: str) -> object:
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return inspect.getattr_static(owner, name)


def state() -> list[object]:
    return [current(point.target) for point in PATCHES]


def all_replaced(originals: list[object]) -> bool:
    """Whether every target is a wrapper of what was there, and of nothing in between."""
    return all(
        now is not then and innermost(now) is innermost(then)
        for now, then in zip(state(), originals, strict=True)
    )


def innermost(replaced: object) -> object:
    if isinstance(replaced, ModuleType):
        return vars(replaced).get("_dist", replaced)
    assert callable(replaced)
    return inspect.unwrap(replaced)


def functions() -> list[PatchPoint]:
    return [point for point in PATCHES if not isinstance(current(point.target), ModuleType)]


@pytest.fixture(autouse=True)
def originals():
    """Every test starts from, and has to end with, what Composer has."""
    uninstall()
    before = state()
    yield before
    assert all(now is then for now, then in zip(state(), before, strict=True))


def test_in_and_out(originals):
    install()
    assert all_replaced(originals)
    uninstall()
    assert all(now is then for now, then in zip(state(), originals, strict=True))


def test_again_does_nothing(originals):
    install()
    install()
    assert all_replaced(originals)
    uninstall()
    uninstall()


def test_a_block_leaves_things_as_they_were(originals):
    with installed():
        assert all_replaced(originals)
        with installed():
            assert all_replaced(originals)
        assert all_replaced(originals)
    assert state() == originals
    install()
    with installed():
        pass
    assert all_replaced(originals)
    uninstall()


def test_a_block_that_fails_leaves_things_as_they_were(originals):
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert state() == originals


def test_the_replacement_is_what_the_trainer_calls():
    from composer.trainer import Trainer

    with installed():
        trainer = object.__new__(Trainer)
        parsed = trainer._parse_parallelism_config({"fsdp2": {"reshard_after_forward": False}})
        assert parsed.fsdp2.reshard_after_forward is False
        with pytest.raises(ValueError, match="not a key of parallelism_config"):
            trainer._parse_parallelism_config({"fdsp2": {}})


# --- all or nothing ---


def broken(**changes) -> PatchPoint:
    return dataclasses.replace(PATCHES[1], **changes)


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (broken(fingerprints=frozenset({"0" * 16})), "is not one the replacement was written for"),
        (broken(target=PATCHES[1].target + "_of_old"), "does not exist in this version"),
        (broken(takes=frozenset({"shape"})), "takes no shape, which the replacement was written"),
        (broken(target="composer.trainer.trainer:Trainer._gone"), "does not exist"),
    ],
)
def test_one_row_that_does_not_fit_and_nothing_is_replaced(monkeypatch, originals, point, said):
    monkeypatch.setattr(patches, "PATCHES", (PATCHES[0], point))
    with pytest.raises(PatchError) as caught:
        install()
    message = str(caught.value)
    assert f"'{point.target}'" in message
    assert said in message
    assert "Installed is mosaicml " in message
    assert state() == originals
    assert "cannot be installed: " in describe_patches()
    with pytest.raises(PatchError), installed():
        pass
    monkeypatch.undo()
    install()
    assert all_replaced(originals)
    uninstall()


def test_rows_of_llm_foundry_wait_for_it(monkeypatch, originals):
    """A run without it is not to import it."""
    monkeypatch.delitem(sys.modules, "llmfoundry")
    install()
    others = [point.package != "llmfoundry" for point in PATCHES]
    assert [now is not then for now, then in zip(state(), originals, strict=True)] == others
    monkeypatch.undo()
    install()
    assert all_replaced(originals)
    uninstall()


@pytest.mark.new_python
def test_composer_may_be_imported_later():
    code = """
import sys
import composer_fsdp2
composer_fsdp2.install()
from composer import Trainer
assert hasattr(Trainer._parse_parallelism_config, "__wrapped__")
assert "llmfoundry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- the table ---


def test_every_row_says_what_and_why():
    for point in PATCHES:
        assert ":" in point.target
        assert bool(point.fingerprints) != bool(point.takes)
        assert re.match(r"(mosaicml|llm-foundry|peft|torch|transformers) \d", point.versions)
        assert len(point.why.split()) > 5
    assert len({point.target for point in PATCHES}) == len(PATCHES)


def test_replacements_take_the_same_arguments():
    for point in functions():
        theirs = inspect.signature(current(point.target)).parameters.values()
        ours = inspect.signature(point.replacement)
        passed = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = {p.name: p.default for p in theirs if p.kind is p.KEYWORD_ONLY}
        ours.bind("original", *passed, **named)
        required = [p.name for p in theirs if p.default is p.empty and p.name in passed]
        ours.bind("original", *required)


def test_a_replaced_function_still_looks_like_the_original(originals):
    with installed():
        for now, then in zip(state(), originals, strict=True):
            if not isinstance(then, ModuleType):
                assert callable(now)
                assert callable(then)
                assert inspect.signature(now) == inspect.signature(then)
            assert now.__doc__ == then.__doc__


def test_the_table_as_text():
    text = describe_patches()
    for point in PATCHES:
        assert f"{point.target}\n  fits, not installed\n  because it {point.why}" in text
    with installed():
        assert describe_patches().count("\n  installed\n") == len(PATCHES)
