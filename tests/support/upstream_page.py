"""Writes docs/reference/upstream-points.md: `python -m tests.support.upstream_page`."""

from __future__ import annotations

from pathlib import Path

from tests.support.upstream_points import describe_points

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "upstream-points.md"

HEAD = """\
# Points of Composer's own FSDP2

Composer 0.32.1 has a path for FSDP2 of its own (`FSDP_VERSION=2`). Each row names one thing that it
gets wrong, and the tests of this package that show the right behaviour.

`python -m tests.support.upstream_page` writes this page.

"""


def page() -> str:
    """The page as Markdown."""
    return f"{HEAD}{describe_points()}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
