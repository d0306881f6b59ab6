"""Says where a run takes place, and sets the variables by which programs are told."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass

__all__ = ["LAUNCHED", "OFFLINE", "Cluster", "environment", "quiet"]

LAUNCHED = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""set by a launcher for each rank"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""variables that keep Hugging Face's libraries offline; the libraries read them at import"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks of a run, and the kind of machine they are on."""

    ranks: int
    ranks_per_node: int
    on_gpus: bool

    def first_rank(self) -> dict[str, str]:
        """Returns the variables of the first rank, as a launcher sets them."""
        values = (0, 0, 0, self.ranks, self.ranks_per_node)
        return dict(zip(LAUNCHED, map(str, values), strict=True))


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Sets variables for a block, and takes back all that the block changes."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def quiet(*, errors: bool = False) -> Generator[None]:
    """Keeps standard output clean, and leaves warnings and logging as they were.

    Args:
        errors: are not logged either, as those of a model that cannot be traced.
    """
    disabled = logging.root.manager.disable
    try:
        logging.disable(logging.ERROR if errors else logging.WARNING)
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
