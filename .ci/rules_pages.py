"""House rules about pages: links, files that they name, form. Text in, offenders out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import prose
from rules_code import ROOT, Found

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
_PAGE = re.compile(
    r"(?<![\w/])(?:docs/[\w/-]+|README|MIGRATION|CONTRIBUTING|CHANGELOG)\.(?:md|ipynb)(?:#[\w-]+)?"
)
_FILE = re.compile(r"`((?:\.ci|\.github|benchmarks|composer_fsdp2|docs|tests|yamls)/[\w./-]+)")
_TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")


def find(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yields the lines and matches of a pattern."""
    return ((text.count("\n", 0, m.start()) + 1, m) for m in pattern.finditer(text))


def broken_links(page: Path, text: str) -> Iterator[Found]:
    """Yields links of a page to no file, or to no heading of a page; code is not read."""
    for line, match in find(_LINK, prose.without_code(text, keep_targets=True)):
        if "://" not in match[1] and not leads_somewhere(match[1], page):
            yield line, match[1]


def leads_somewhere(link: str, page: Path) -> bool:
    """Returns whether a link on a page leads to a file, and to a heading of it if it names one."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


@cache
def anchors(text: str) -> set[str]:
    """Returns what a link to a heading of a page may have after its #, as Python-Markdown does."""
    text = _FENCE.sub("", text)
    own = re.findall(r"\{ ?#([\w.-]+) ?\}", text) + re.findall(r'<a id="(.+?)"', text)
    headings = re.findall(r"^#+ (.*?)(?: \{ ?#.*\})?$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {*own, *(re.sub(r"[-\s]+", "-", heading) for heading in plain)}


def missing_pages(text: str) -> Iterator[Found]:
    """Yields pages that a source names and that are not there."""
    for line, match in find(_PAGE, text):
        if not leads_somewhere(match[0], ROOT / "README.md"):
            yield line, match[0]


def missing_files(text: str) -> Iterator[Found]:
    """Yields files and tests of the repository that a page names and that are not there."""
    for line, match in find(_FILE, text):
        if not (ROOT / match[1]).exists():
            yield line, match[1]
    for line, match in find(_TEST, text):
        file = ROOT / match[1]
        if not file.exists() or f"\ndef {match[2]}(" not in file.read_text():
            yield line, match[0]


def wrong_form(text: str) -> Iterator[Found]:
    """Yields headings beside the first that name the page's subject, and blocks nobody tests."""
    plain = _FENCE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), text)
    titles = [line for line, _ in find(re.compile(r"^# ", re.MULTILINE), plain)]
    if titles != [1]:
        yield 1, f"a page begins with its one first heading: lines {titles}"
    for line, match in find(_FENCE, text):
        if match[2] not in {"bash", "json", "python", "text", "yaml"}:
            yield line, f"no test reads a block in '{match[2]}'"


def wide_commands(text: str) -> Iterator[Found]:
    """Yields lines to copy that need scrolling: GitHub shows about 95 characters of code."""
    for start, match in find(_FENCE, text):
        for number, line in enumerate(match[3].splitlines() if match[2] == "bash" else (), 1):
            if len(line) > 90:
                yield start + number, f"{len(line)} characters"


def paths_above(text: str) -> Iterator[Found]:
    """Yields relative paths that start one folder higher; a `cd` to the root has none."""
    for number, line in enumerate(text.splitlines(), 1):
        # mkdocs.yml counts from .ci/ and names two folders of the repository.
        if re.search(r"""(?<![\w"')}./])\.\./(?!docs$|build/site$)""", line):
            yield number, line.strip()
