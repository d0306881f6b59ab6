"""Values of options that cannot be: says in a sentence what is wrong and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from composer_fsdp2.config.messages import ascii_repr, nearest

__all__ = ["PlainTyper", "plain_message"]

# What other programs call a choice -> the choice, and what it is where the name does not say so.
_MEANT: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("huggingface", "hugging_face", "hugging-face", "transformers", "safetensors"),
        ("hf", ", which exports a folder for Hugging Face's from_pretrained"),
    ),
    **dict.fromkeys(("dcp", "shards", "distributed"), ("sharded", "")),
    **dict.fromkeys(("monolithic", "single", "file", "pt"), ("full", "")),
    **dict.fromkeys(("bf16", "amp_bf16"), ("bfloat16", "")),
    **dict.fromkeys(("fp16", "half", "amp_fp16"), ("float16", "")),
    **dict.fromkeys(("fp32", "float"), ("float32", "")),
}
# Kinds of errors of pydantic, which typer asks for values -> what belongs there.
_EXPECTED = {
    "bool_parsing": "true or false",
    "float_parsing": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
}
_CHOICE = re.compile(
    r"^(?:Value error, )?(?P<quote>['\"])(?P<given>.*)(?P=quote)"
    r" is not one of (?P<choices>.+?)\.?$",
    re.DOTALL,
)


class PlainTyper(typer.Typer):
    """A `Typer` whose commands answer a value that cannot be with `plain_message`."""

    def command(self, *args: Any, **kwargs: Any) -> Any:
        """As `Typer.command`."""
        return super().command(*args, **{"cls": _PlainCommand, **kwargs})


class _PlainCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As `TyperCommand.parse_args`."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = plain_message(error.message, _first_error(error))
            raise


def _first_error(error: BaseException) -> Mapping[str, Any]:
    """Returns what pydantic says; older versions of typer have no such cause."""
    found = getattr(error.__cause__, "errors", list)()
    return found[0] if found else {}


def plain_message(message: str, details: Mapping[str, Any]) -> str:
    """Returns the sentence about a value that an option does not take.

    Args:
        message: typer's own.
        details: kind of the error, the value and the bounds, where pydantic names them.
    """
    choice = _CHOICE.match(message)
    if choice is not None:
        return _of_choice(choice["given"], re.findall(r"'([^']*)'", choice["choices"]))
    expected = _EXPECTED.get(str(details.get("type")))
    if expected is None:
        return message.removeprefix("Value error, ")
    belongs = expected.format(**(details.get("ctx") or {}))
    return f"{ascii_repr(details.get('input'))} cannot be. Write {belongs}."


def _of_choice(given: str, choices: list[str]) -> str:
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
    start = f"{ascii_repr(given)} is no choice."
    choice, what = _MEANT.get(given.lower(), ("", ""))
    if choice in choices:
        return f"{start} Write {choice}{what}. The choices are {listed}."
    return f"{start} Write {listed}.{nearest(given, choices)}"
