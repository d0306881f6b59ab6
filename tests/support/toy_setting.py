"""A setting in one file: what a transformation from elsewhere brings with it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from composer_fsdp2.config import schema
from composer_fsdp2.config.setting import Setting, count

OUTPUT_FACTOR = Setting(
    name="toy_output_factor",
    default=1,
    values=count("times", least=1),
    meaning="multiplies what every block returns by so much",
)


@contextlib.contextmanager
def declaring(*settings: Setting[Any]) -> Generator[None]:
    """Declares settings for a block; afterwards the known ones are those of before."""
    before = dict(schema._DECLARED)
    try:
        for declared in settings:
            schema.declare_setting(declared)
        yield
    finally:
        schema._DECLARED.clear()
        schema._DECLARED.update(before)
