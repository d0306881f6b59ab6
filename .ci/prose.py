"""Checks the style of the documentation: phrases of words.txt, and the rules of proselint.json.

    python .ci/prose.py [FILE ...]    # default: every page of the documentation, and the package

Code in the text of pages is not read; of Python, only phrases are checked. The exit status is 1
when something was found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

CI = Path(__file__).resolve().parent
FENCE = re.compile(r"^([ >]*)(```+|~~~+).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
HEADING = re.compile(r"^(#+ .*)\S$", re.MULTILINE)
LINK_TARGET = re.compile(r"(?<=\])\([^)\s]*\)")


class Finding(NamedTuple):
    """One place in the prose of a file."""

    line: int
    text: str


class Phrase(NamedTuple):
    """A row of words.txt."""

    pattern: re.Pattern[str]
    text: str
    instead: str


def read_phrases(text: str, by_hand: bool = False) -> Iterator[Phrase]:
    """Reads rows `phrase => instead`; lines that begin with `#` are comments.

    Args:
        text: content of words.txt.
        by_hand: also the part for pages that are written by hand.
    """
    common, _, more = text.partition("[written by hand]")
    for line in [*common.splitlines(), *(more.splitlines() if by_hand else ())]:
        if line.strip() and not line.startswith("#"):
            phrase, instead = line.split(" => ")
            words = r"\s+".join(map(re.escape, phrase.split()))
            yield Phrase(re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE), phrase, instead)


def without_code(markdown: str, keep_targets: bool = False) -> str:
    """Returns the text with code, comments and targets of links blank, of the same length.

    Code within a sentence becomes dashes: the words around it are no repetition.
    """
    blanks = [(FENCE, " "), (COMMENT, " "), (INLINE, "-"), (LINK_TARGET, " ")]
    for pattern, filler in blanks[: 3 if keep_targets else 4]:
        markdown = pattern.sub(partial(_filled, filler), markdown)
    return markdown


def _filled(filler: str, match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", filler, match[0])


def find_phrases(prose: str, phrases: Iterable[Phrase]) -> Iterator[Finding]:
    """Yields every phrase of the house's list in the prose."""
    for phrase in phrases:
        for match in phrase.pattern.finditer(prose):
            line = prose.count("\n", 0, match.start()) + 1
            yield Finding(line, f"'{phrase.text}': {phrase.instead}")


def find_style(prose: dict[Path, str]) -> dict[Path, list[Finding]]:
    """Returns what proselint finds in the prose of every file, read without its code."""
    options = ["--output-format", "json", "--config", str(CI / "proselint.json")]
    with tempfile.TemporaryDirectory() as folder:
        copies = {
            Path(folder).resolve() / f"{number}.md": file for number, file in enumerate(prose)
        }
        for copy, file in copies.items():
            # A heading that ends in a full stop is not read on into the sentence below it.
            copy.write_text(HEADING.sub(r"\1.", prose[file]))
        checked = subprocess.run(
            [Path(sys.executable).with_name("proselint"), "check", *options, *copies],
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        results = json.loads(checked.stdout)["result"]
    except (ValueError, KeyError):
        raise RuntimeError(f"proselint gave no result: {checked.stderr}") from None
    return {
        copies[Path(name.removeprefix("file://"))]: [
            Finding(row["pos"][0], f"{row['check_path']}: {row['message']}")
            for row in found.get("diagnostics", ())
        ]
        for name, found in results.items()
    }


def pages() -> list[Path]:
    """Returns the Markdown files of the repository, without the data of tests."""
    root = CI.parent
    folders = (root / name for name in (".github", "benchmarks", "docs"))
    return [
        *sorted(root.glob("*.md")),
        *(file for f in folders for file in sorted(f.rglob("*.md"))),
    ]


def is_by_hand(file: Path, text: str) -> bool:
    """Returns whether a file is a page that no command writes, and no list of changes or form."""
    apart = file.name == "CHANGELOG.md" or ".github" in file.parts
    return file.suffix == ".md" and not apart and "writes this page" not in text


def main(arguments: list[str]) -> int:
    """Prints every finding as `FILE:LINE: text`."""
    words = (CI / "words.txt").read_text()
    package = sorted((CI.parent / "composer_fsdp2").rglob("*.py"))
    files = [Path(argument).resolve() for argument in arguments] or [*pages(), *package]
    texts = {file: file.read_text() for file in files}
    prose = {file: without_code(texts[file]) for file in files if file.suffix == ".md"}
    style = find_style(prose)
    count = 0
    for file in files:
        phrases = list(read_phrases(words, is_by_hand(file, texts[file])))
        text = prose.get(file, texts[file])
        found = sorted([*find_phrases(text, phrases), *style.get(file, ())])
        count += len(found)
        for line, message in found:
            print(f"{file}:{line}: {message}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
