"""The phrases that the documentation does not use, and how they are found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[2] / ".ci"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", CI / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def phrases(prose) -> list:
    return list(prose.read_phrases((CI / "words.txt").read_text()))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A warning.\n\nThe loss is told of in it.", 3),
        ("A block that Stands\nin for another.", 1),
        ("`code`\nWhat no rule covers", 2),
    ],
)
def test_a_phrase_is_found_with_its_line(prose, phrases, text, line):
    assert [found.line for found in prose.find_phrases(text, phrases)] == [line]


@pytest.mark.parametrize(
    "text",
    ["retold offers", "Run `echo told of`.", "```\ntold of\n```", "<!-- told of -->"],
)
def test_code_comments_and_parts_of_words_are_not_read(prose, phrases, text):
    assert not list(prose.find_phrases(prose.without_code(text), phrases))


def test_blanks_keep_the_lines_and_their_places(prose):
    text = "a\n```python\nb\n\nc = 1\n```\nd `e\nf` g"
    blank = prose.without_code(text)
    assert [len(line) for line in blank.split("\n")] == [len(line) for line in text.split("\n")]
    assert blank.endswith("d --\n-- g")


def test_no_page_has_one(prose, phrases):
    found = [
        f"{file.name}:{line}: {text}"
        for file in prose.pages()
        for line, text in prose.find_phrases(prose.without_code(file.read_text()), phrases)
    ]
    assert not found


def test_no_comment_docstring_or_error_of_the_package_has_one(prose, phrases):
    root = CI.parent
    found = [
        f"{file.relative_to(root)}:{line}: {text}"
        for file in sorted((root / "composer_fsdp2").rglob("*.py"))
        for line, text in prose.find_phrases(file.read_text(), phrases)
    ]
    assert not found
