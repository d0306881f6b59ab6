"""Attributes of one object that are others for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["override_attribute"]


@contextmanager
def override_attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    """Gives one object an attribute of its own while a block runs."""
    before = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in before:
            setattr(owner, name, before[name])
