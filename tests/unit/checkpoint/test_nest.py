"""Values and their key paths become dictionaries and lists again."""

from __future__ import annotations

import pytest

from composer_fsdp2.checkpoint.convert import nest
from composer_fsdp2.errors import CheckpointError


def test_what_some_ranks_did_not_have():
    """One rank of a node shows a progress bar, and the others save None in its place."""
    bars = [(("bar",), None), (("bar", "n"), 3), (("bar", "total"), 5), (("eval",), None)]
    for items in (bars, bars[::-1]):
        assert nest(items) == {"bar": {"n": 3, "total": 5}, "eval": None}


def test_values_that_contradict_each_other():
    with pytest.raises(CheckpointError, match="The values at 'bar'"):
        nest([(("bar",), 1), (("bar", "n"), 3)])
