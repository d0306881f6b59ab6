"""Reads the pages of the documentation: blocks, commands, links, headings and phrases to avoid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from composer_fsdp2.cli.main import app
from composer_fsdp2.config.fsdp1 import convert_fsdp1
from composer_fsdp2.trainer.config import parse_parallelism_config

__all__ = [
    "AVOIDED",
    "ROOT",
    "anchors",
    "avoided_phrases",
    "blocks",
    "broken_links",
    "check_command",
    "check_yaml",
    "commands",
    "links",
    "migration_pages",
    "pages",
    "shell_lines",
]

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*?)(?: \{#([\w-]+)\})?$", re.MULTILINE)
# Of `[text](target)`, also of pictures and of links around pictures.
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|\b(?:src|href)=\"([^\"]+)\"")

# Phrases that make a reader guess: a pronoun or a verb without the thing it speaks of, words that
# are not the standard term, and sentences that begin with "What". See CONTRIBUTING.md.
AVOIDED = (
    r"\btold of\b",
    r"\bstands? in for\b",
    r"\bwhat no rule\b",
    r"\bnothing stays\b",
    r"\bwithout a word\b",
    r"\bas ever\b",
    r"\bwhoever\b",
    r"\bsays? so\b",
    r"\bin all else\b",
    r"\bis led (?:there|here)\b",
    r"\bspeaks? of\b",
    r"\bha(?:s|ve) not[.,;:)]",
    r"\bare not there\b",
    r"\bgives? (?:its|their) .{0,40} away\b",
    r"\bnobody (?:would|looks|writes)\b",
    r"\bcosts? no good\b",
    r"\bknows? nothing of\b",
)


def pages() -> list[Path]:
    """Returns README.md, MIGRATION.md and every page under docs/, in the order of their names."""
    return [ROOT / "README.md", ROOT / "MIGRATION.md", *sorted((ROOT / "docs").rglob("*.md"))]


def migration_pages() -> list[Path]:
    """Returns the pages on moving from FSDP1."""
    return [ROOT / "MIGRATION.md", ROOT / "docs" / "from-fsdp1.md"]


def blocks(text: str, language: str) -> list[str]:
    """Returns the contents of the code blocks of a language, without their indentation."""
    found = [match for match in FENCE.finditer(text) if match[2] == language]
    return [re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE) for match in found]


def shell_lines(text: str) -> list[str]:
    """Returns the lines of the bash blocks; a backslash at the end joins a line to the next."""
    joined = (re.sub(r" *\\\n *", " ", block) for block in blocks(text, "bash"))
    return [line for block in joined for line in block.splitlines()]


def commands(text: str) -> list[str]:
    """Returns the calls of `composer-fsdp2` in the bash blocks, without comments."""
    parts = (part for line in shell_lines(text) for part in line.partition(" #")[0].split(" && "))
    names = (part.strip().removeprefix(".venv/bin/") for part in parts)
    return [name for name in names if name.startswith("composer-fsdp2 ")]


def check_command(line: str) -> None:
    """Parses a call as the command line does; runs nothing.

    Raises:
        click.UsageError: for a command, option or argument that does not exist.
    """
    command, words = get_command(app), shlex.split(line)[1:]
    context = typer.Context(command)
    while isinstance(command, TyperGroup):
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, parent=context, info_name=name)
    command.parse_args(context, words)


def check_yaml(block: str) -> None:
    """Parses a block of YAML as a run does.

    Raises:
        ConfigError: for settings that the package refuses.
        AssertionError: for a `parallelism_config` without FSDP2.
    """
    config = yaml.safe_load(block)
    if "fsdp_config" in config:
        convert_fsdp1(config["fsdp_config"], world_size=8, local_world_size=8)
    elif "parallelism_config" in config:
        assert parse_parallelism_config(config["parallelism_config"]) is not None


def _prose(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Returns the targets of links and pictures, web addresses left out."""
    found = (link or source for link, source in LINK.findall(FENCE.sub("", text)))
    return [target for target in found if not re.match(r"(?:https?|mailto):", target)]


def anchors(text: str) -> set[str]:
    """Returns the fragments that headings can be linked by, as GitHub makes them."""
    found = HEADING.findall(FENCE.sub("", text))
    return {own or re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title, own in found}


def broken_links(page: Path) -> Iterator[str]:
    """Yields the links of a page that lead to no file, or to no heading of a page."""
    for target in links(page.read_text()):
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        missing = not file.exists() or ROOT not in (file, *file.parents)
        if missing or (fragment and fragment not in anchors(file.read_text())):
            yield target


def avoided_phrases(text: str) -> list[str]:
    """Returns what a page has of the phrases to avoid; code is left out."""
    prose = " ".join(_prose(text).split())
    return [found[0] for phrase in AVOIDED for found in re.finditer(phrase, prose, re.IGNORECASE)]
