"""Fingerprints: of what is executed, and of nothing else."""

from __future__ import annotations

import textwrap

import pytest

from composer_fsdp2.fingerprint import fingerprint, fingerprint_text

CODE = """
def add(a, b: int = 1):
    '''Adds.'''
    # a sum
    text = f"{a} and {b!r:>{a}} or"
    return a + b, text
"""


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("Adds.", "Adds two numbers."),
        CODE.replace("    '''Adds.'''\n", ""),
        CODE.replace("# a sum", ""),
        CODE.replace('f"', "f'").replace('or"', "or'"),
        CODE.replace("a + b, text", "(a + b,\n        text)"),
        textwrap.indent(CODE.strip(), "    "),
    ],
)
def test_prose_and_form_do_not_count(same: str):
    assert fingerprint_text(same) == fingerprint_text(CODE)


@pytest.mark.parametrize(
    "changes",
    [("a + b", "a - b"), ("= 1", "= True"), ("= 1", "= 1.0"), ("and", "und"), ("!r", "!s")],
)
def test_code_counts(changes: tuple[str, str]):
    assert fingerprint_text(CODE.replace(*changes)) != fingerprint_text(CODE)


def test_the_same_on_every_python():
    """The value is written down, and tests run on several versions."""
    assert fingerprint_text(CODE) == "6dfdfd674a53a511"


class Method:
    def method(self) -> str:
        """A method, indented."""
        return """text
that starts at the left"""


def test_of_a_method():
    assert fingerprint(Method.method) == fingerprint_text(
        'def method(self) -> str:\n    return """text\nthat starts at the left"""\n'
    )
