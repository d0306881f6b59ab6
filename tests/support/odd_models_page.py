"""Writes docs/odd-models.md: `python -m tests.support.odd_models_page`."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_models import WRAPPINGS, Odd, kinds

PAGE = Path(__file__).parents[2] / "docs" / "odd-models.md"

HEAD = """\
# Odd models

What becomes of a model that is built in an unusual way. Each row is a test
(`tests/matrix/test_odd_models.py`): the model is trained on two ranks, and is equal to an unsharded
copy that was trained on the same batches (losses, weights and buffers), or it is refused by name,
with the same sentence on every rank and before anything is changed where the model shows it. There
is no third case.

Every kind is tried in three wrappings:

{wrappings}

`python -m tests.support.odd_models_page` writes this page.

"""


def page() -> str:
    """The page as Markdown."""
    listed = "\n".join(f"- **{name}**: {text}." for name, text in WRAPPINGS.items())
    groups = [_group(title, group) for title, group in kinds().items()]
    return HEAD.format(wrappings=listed.replace("`{}`", "`fsdp2: {}`")) + "\n".join(groups)


def _group(title: str, group: dict[str, Odd]) -> str:
    header = ["kind", *WRAPPINGS, "what to write instead"]
    rows = [_row(header), _row(["---"] * len(header))]
    rows += [_row(_cells(kind)) for kind in group.values()]
    return f"## {title}\n\n" + "".join(rows)


def _cells(kind: Odd) -> list[str]:
    return [kind.says, *(_found(kind, wrapping) for wrapping in WRAPPINGS), kind.instead]


def _found(kind: Odd, wrapping: str) -> str:
    if wrapping in kind.depends:
        return "by torch's version"
    return "refused" if kind.words(wrapping) else "trains"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n".replace("  ", " ")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
