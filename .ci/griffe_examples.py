"""Makes the `Example:` of a docstring a block of code in the API pages, as `Examples:` is one."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Examples"]

_SINGULAR = re.compile(r"^( *)Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """griffe knows the plural alone, and would read code after the singular as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in the docstring of whatever was read."""
        if obj.docstring is not None:
            obj.docstring.value = _SINGULAR.sub(r"\1Examples:", obj.docstring.value)
