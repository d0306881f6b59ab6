"""Writes the list of transformations into docs/how-it-works.md.

`python -m tests.support.transformations_list`
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from composer_fsdp2.prepare.model import TRANSFORMATIONS

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
MARK = re.compile(
    r"(<!-- transformations -->\n)(.*?)(?=<!-- end of transformations -->)", re.DOTALL
)


def table() -> str:
    """The list as Markdown: first lines of the classes' docstrings."""
    docs = [inspect.getdoc(type(step)) or "" for step in TRANSFORMATIONS]
    return "".join(f"{n}. {doc.splitlines()[0]}\n" for n, doc in enumerate(docs, 1))


def page() -> str:
    """Returns the page with the list made anew."""
    return MARK.sub(lambda mark: mark[1] + table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
