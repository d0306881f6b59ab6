"""Writes the mistakes in a run file into docs/reference/errors.md.

`python -m tests.support.run_mistakes_page`. `doctor` is tested to find each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.run_mistakes import GONE, MISTAKES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
MARK = re.compile(r"(<!-- mistakes in a run -->\n)(.*?)(?=<!-- end of mistakes in a run -->)", re.S)


def table() -> str:
    """The table as Markdown: what is written, and words of the message."""
    return "| written | the message names |\n|---|---|\n" + "".join(_rows())


def _rows() -> Iterator[str]:
    for name, (changes, words) in MISTAKES.items():
        if not name.startswith("without FSDP"):
            written = ", ".join(_shown(key, value) for key, value in changes.items())
            yield f"| {written} | {', '.join(f'`{word}`' for word in words)} |\n"


def _shown(key: str, value: Any) -> str:
    if value is GONE:
        return f"no `{key}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return f"`{key}: {text.removesuffix('...').strip()}`"


def page() -> str:
    """Returns the page with the table made anew."""
    return MARK.sub(lambda mark: mark[1] + table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
