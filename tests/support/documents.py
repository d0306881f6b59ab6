"""Examples of README.md, MIGRATION.md and the pages in docs/, and how their commands are read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from composer_fsdp2.cli.main import app

ROOT = Path(__file__).parents[2]
README, MIGRATION = ROOT / "README.md", ROOT / "MIGRATION.md"
_DOCS = sorted(page for page in (ROOT / "docs").rglob("*.md") if "pictures" not in page.parts)
PAGES = [README, MIGRATION, *_DOCS]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A block of code of a page."""

    page: str
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.page}:{self.language}:{self.number}"


def examples(language: str, pages: list[Path] = PAGES) -> list[Example]:
    """Returns the blocks of pages in a language, without those that include a file."""
    return [
        Example(page.relative_to(ROOT).as_posix(), language, text, number)
        for page in pages
        for number, (name, text) in enumerate(_FENCE.findall(page.read_text()))
        if name == language and not text.startswith("--8<--")
    ]


def shell_lines(page: Path) -> list[str]:
    """Returns the lines of a page's bash blocks; a backslash joins a line to the next."""
    texts = [re.sub(r" *\\\n *", " ", example.text) for example in examples("bash", [page])]
    return [line for text in texts for line in text.splitlines()]


def command_lines() -> list[tuple[str, str]]:
    """Returns page and command of every line of a shell block, without comments."""
    return [
        (page.relative_to(ROOT).as_posix(), line.partition(" #")[0].strip())
        for page in PAGES
        for line in shell_lines(page)
        if line.strip() and not line.startswith("#")
    ]


def parse_command(words: list[str]) -> dict[str, Any]:
    """Reads the arguments of `composer-fsdp2` as the command line does; nothing is run.

    Returns:
        The values of the parameters, and under "command" the names of the command.
    """
    command = get_command(app)
    context, names = typer.Context(command), []
    while isinstance(command, TyperGroup):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, names = found, [*names, str(name)]
        context = typer.Context(command, parent=context, info_name=name)
    command.parse_args(context, words)
    return {**context.params, "command": " ".join(names)}


def programs(line: str) -> Iterator[list[str]]:
    """Yields the words of each command of a line, without assignments of variables before it."""
    for part in line.split(" && "):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        yield words
