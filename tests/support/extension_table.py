"""Writes docs/reference/callbacks.md: `python -m tests.support.extension_table`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from composer_fsdp2.trainer.extensions.table import ALGORITHMS, CALLBACKS, Extension

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "callbacks.md"

HEAD = """\
# Callbacks and algorithms

All callbacks and algorithms of Composer. Each gives the result of the same run without sharding, or
is refused before training starts. The error says what to use instead. A class that is derived from
a refused one is refused too.

Batch norms keep the statistics of their rank, as under FSDP1.

`python -m tests.support.extension_table` writes this page.
"""

FOUNDRY = """\
## LLM Foundry

`clip_lion`, `adalr_lion`, `mono_checkpoint_saver`, `hf_checkpointer` and `layer_freezing` of LLM
Foundry work under FSDP2. `tests/dist/test_foundry.py` tests them.

## FSDP2Monitor

`callbacks: {fsdp2_monitor: {}}` logs what FSDP2 communicates and holds in every batch.
[Memory and speed](../memory-and-speed.md#see-what-fsdp2-does-in-a-batch) lists its metrics.
"""


def works(entry: Extension) -> bool:
    """Whether there is a way to use it."""
    return entry.refusal is None or bool(entry.refusal.what)


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD, f"## Callbacks\n\n{table(CALLBACKS)}", f"## Algorithms\n\n{table(ALGORITHMS)}"]
    return "\n".join([*parts, FOUNDRY])


def table(kind: Iterable[Extension]) -> str:
    """A table as Markdown; those that differ in nothing but their name share a line."""
    lines = "| name | | remark, or what to use instead |\n|---|---|---|\n"
    names: dict[tuple[str, str], list[str]] = {}
    for entry in kind:
        names.setdefault(_cells(entry), []).append(f"`{entry.name}`")
    return lines + "".join(f"| {', '.join(n)} | {' | '.join(c)} |\n" for c, n in names.items())


def _cells(entry: Extension) -> tuple[str, str]:
    if entry.refusal is None:
        return "works", entry.remark
    if not works(entry):
        return "refused", entry.refusal.message
    return f"works; refused: {entry.refusal.what}", entry.remark


if __name__ == "__main__":
    PAGE.write_text(page())
