"""Writes the table of extensions into README.md: `python -m tests.support.extension_table`."""

from __future__ import annotations

import re
from pathlib import Path

from composer_fsdp2.trainer.extensions import ALGORITHMS, CALLBACKS, Extension

PAGE = Path(__file__).parents[2] / "README.md"
MARK = re.compile(r"(<!-- extensions -->\n)(.*?)(?=<!-- end of extensions -->)", re.DOTALL)


def table() -> str:
    """The table as Markdown; those that differ in nothing but their name share a line."""
    lines = "| | | |\n|---|---|---|\n"
    for kind in (CALLBACKS, ALGORITHMS):
        names: dict[tuple[str, str], list[str]] = {}
        for entry in kind:
            names.setdefault(_cells(entry), []).append(f"`{entry.name}`")
        lines += "".join(f"| {', '.join(n)} | {' | '.join(c)} |\n" for c, n in names.items())
    return lines


def _cells(entry: Extension) -> tuple[str, str]:
    if entry.refusal is None:
        return "works", entry.remark
    if not entry.works:
        return "refused", entry.refusal.message
    return f"works; refused: {entry.refusal.what}", entry.remark


if __name__ == "__main__":
    PAGE.write_text(MARK.sub(lambda mark: mark[1] + table(), PAGE.read_text()))
