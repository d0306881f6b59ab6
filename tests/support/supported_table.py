"""Writes the table of versions into README.md: `python -m tests.support.supported_table`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
PAGE = ROOT / "README.md"
MARK = re.compile(r"(<!-- supported -->\n)(.*?)(?=<!-- end of supported -->)", re.DOTALL)

PACKAGES = ("torch", "mosaicml", "llm-foundry", "transformers")
RUNS = {"suite": "every test", "smoke": "the tests marked `smoke`"}
READ = "| - | main at 640518880 | - | - | its checkpoint functions were read, not run |\n"


def rows() -> list[list[str]]:
    """NAME, PINS, OVERRIDES, EXTRAS and RUNS of what `.ci/run` runs."""
    lines = (CI / "stacks.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def versions(pins: str, overrides: str, extras: str) -> dict[str, str]:
    """What is installed for a row, by package."""
    found = _pinned(pins) | (_pinned(overrides) if overrides != "-" else {})
    if "foundry" not in extras.split(","):
        del found["llm-foundry"]
    return found


def _pinned(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (CI / name).read_text(), re.MULTILINE))


def table() -> str:
    """The table as Markdown."""
    text = f"| {' | '.join(PACKAGES)} | runs |\n|---|---|---|---|---|\n"
    for _, pins, overrides, extras, runs in rows():
        found = versions(pins, overrides, extras)
        cells = [found.get(package, "-") for package in PACKAGES]
        text += f"| {' | '.join(cells)} | {RUNS[runs]} |\n"
    return text + READ


def page() -> str:
    """Returns the page with the table made anew."""
    return MARK.sub(lambda mark: mark[1] + table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
