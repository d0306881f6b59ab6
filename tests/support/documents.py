"""Examples and links of the pages in docs/, and how their commands are read."""

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
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "pictures" not in page.parts)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Example:
    """A block of code of a page."""

    page: str
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.page}:{self.language}:{self.number}"

    @property
    def included(self) -> list[str]:
        """The files of the repository that are shown in its place."""
        return _INCLUDED.findall(self.text)


def examples(*languages: str) -> list[Example]:
    """Returns the blocks of all pages in these languages; of all languages without arguments."""
    found = []
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        for number, (language, text) in enumerate(_FENCE.findall(page.read_text())):
            if not languages or language in languages:
                found.append(Example(name, language, text, number))
    return found


def command_lines() -> list[tuple[str, str]]:
    """Returns page and command of every line of a shell block, without comments."""
    return [
        (example.page, line.partition(" #")[0].strip())
        for example in examples("bash")
        for line in example.text.replace("\\\n", " ").splitlines()
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


def links(page: Path) -> list[str]:
    """Returns the targets of the links of a page, outside code, that lead to no other host."""
    text = _FENCE.sub("", page.read_text())
    text = re.sub(r"`[^`\n]*`", lambda found: found[0].replace("](", ""), text)
    return [link for link in _LINK.findall(text) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Returns what a link to a heading of the page may have after its #."""
    text = _FENCE.sub("", page.read_text())
    own = set(re.findall(r"\{ ?#([\w.-]+) ?\}", text)) | set(re.findall(r'<a id="(.+?)"', text))
    headings = re.findall(r"^#+ (.*?)(?: \{ ?#.*\})?$", text, re.MULTILINE)
    return own | {_slug(heading) for heading in headings}


def _slug(heading: str) -> str:
    """As Python-Markdown makes it."""
    plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
