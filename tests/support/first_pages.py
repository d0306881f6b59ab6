"""Reads README.md, MIGRATION.md and the pages on moving from FSDP1; the rest is in `documents`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml

from composer_fsdp2.config.fsdp1 import convert_fsdp1
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.documents import anchors, links, parse_command

__all__ = [
    "AVOIDED",
    "ERRORS",
    "FROM_FSDP1",
    "KEYS",
    "MIGRATION",
    "README",
    "ROOT",
    "avoided_phrases",
    "blocks",
    "broken_links",
    "check_command",
    "check_yaml",
    "commands",
    "leads_somewhere",
    "shell_lines",
]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MIGRATION = ROOT / "MIGRATION.md"
FROM_FSDP1 = ROOT / "docs" / "from-fsdp1.md"
KEYS = ROOT / "docs" / "reference" / "migration-keys.md"
ERRORS = ROOT / "docs" / "reference" / "errors.md"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Phrases that make a reader guess: a pronoun or verb whose thing the sentence does not name, words
# that are not the standard term, sentences that begin with "What".
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
    r"\bgives? (?:its|their) .{0,40} away\b",
    r"\bnobody (?:would|looks|writes)\b",
    r"\bcosts? no good\b",
    r"\bknows? nothing of\b",
)


def blocks(text: str, language: str) -> list[str]:
    """Returns the contents of the code blocks of a language."""
    return [content for name, content in _FENCE.findall(text) if name == language]


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
    """Raises an error for a command, option or argument that does not exist; runs nothing."""
    parse_command(shlex.split(line)[1:])


def check_yaml(block: str) -> None:
    """Raises an error for settings that the package refuses, or a block without any."""
    config = yaml.safe_load(block)
    if "fsdp_config" in config:
        convert_fsdp1(config["fsdp_config"], world_size=8, local_world_size=8)
    else:
        assert parse_parallelism_config(config["parallelism_config"]) is not None


def broken_links(page: Path) -> Iterator[str]:
    """Yields the links of a page that lead to no file, or to no heading of a page."""
    yield from (link for link in links(page) if not leads_somewhere(link, page))


def leads_somewhere(link: str, page: Path = README) -> bool:
    """Returns whether a link on a page leads to a file, and to a heading of it if it names one."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


def avoided_phrases(text: str) -> list[str]:
    """Returns what a page has of `AVOIDED`; code is left out."""
    prose = " ".join(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text)).split())
    return [found[0] for phrase in AVOIDED for found in re.finditer(phrase, prose, re.IGNORECASE)]
