"""A mutant is in this process and on ranks, and is taken out again."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_fsdp2 import text
from composer_fsdp2.config.setting import count, null_or
from composer_fsdp2.guards import watchdog
from tests.support import mutated

FILE = "composer_fsdp2/text.py"
SPANS = "rank - 1:"


@pytest.fixture
def mutant():
    """Ranks that follow each other are no span any more."""
    source = (mutated.ROOT / FILE).read_bytes()
    start = source.index(SPANS.encode())
    line = source[:start].count(b"\n") + 1
    yield mutated.Mutant(FILE, line, start, start + len(SPANS), "rank - 2:")
    mutated.plant(None)


def spans() -> str:
    return text.rank_text([0, 1])


def test_it_is_planted_and_taken_out(mutant, ranks):
    assert (spans(), *ranks(2, spans)) == ("ranks 0-1",) * 3
    mutated.plant(mutant)
    assert (spans(), *ranks(2, spans)) == ("ranks 0, 1",) * 3
    mutated.plant(None)
    assert (spans(), *ranks(2, spans)) == ("ranks 0-1",) * 3


def test_methods_and_wrapped_functions_are_found():
    functions = mutated._function_objects(watchdog)
    names = {function.__qualname__ for function in functions}
    assert {"add_rank_report", "CollectiveWatchdog.look"} <= names
    assert Path(str(text.__file__)) == mutated.ROOT / FILE


def test_a_closure_that_was_made_before_is_another_one():
    """The types of settings are made when their file is imported."""
    file = "composer_fsdp2/config/setting.py"
    source = (mutated.ROOT / file).read_bytes()
    start = source.index(b"value is None or values.accepts(value)")
    accepts = null_or(count("units")).accepts
    line = source[:start].count(b"\n") + 1
    mutated.plant(mutated.Mutant(file, line, start, start + len("value is None"), "False"))
    assert not accepts(None)
    mutated.plant(None)
    assert accepts(None)
