"""Options that several commands have, and what a command says to a value that cannot be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from composer_fsdp2.config.messages import ascii_repr, nearest, one_of

__all__ = [
    "AsJson",
    "GpusPerNode",
    "Overrides",
    "PlainTyper",
    "Processes",
    "RanksOfRun",
    "plain_message",
]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Replaces a setting, as for train.", metavar="key=value"),
]
Processes = Annotated[
    int | None,
    typer.Option("--ranks", "-n", min=1, help="Processes; default one per GPU, 2 without any."),
]
RanksOfRun = Annotated[
    int | None,
    typer.Option("--ranks", "-n", min=1, help="Of the run; default one per GPU, 2 without."),
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Of the nodes the run is for; default those of this machine."),
]

# --- Values that cannot be. ---

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
            # Older versions of typer do not ask pydantic, and have no such cause.
            found = getattr(error.__cause__, "errors", list)()
            error.message = plain_message(error.message, found[0] if found else {})
            raise


def plain_message(message: str, details: Mapping[str, Any]) -> str:
    """Returns the sentence about a value that an option does not take.

    Args:
        message: typer's own.
        details: kind of the error, the value and the bounds, where pydantic names them.
    """
    if (matched := _CHOICE.match(message)) is not None:
        given, choices = matched["given"], re.findall(r"'([^']*)'", matched["choices"])
        start, listed = f"{ascii_repr(given)} is no choice.", one_of(choices)
        choice, what = _MEANT.get(given.lower(), ("", ""))
        if choice in choices:
            return f"{start} Write {choice}{what}. The choices are {listed}."
        return f"{start} Write {listed}.{nearest(given, choices)}"
    expected = _EXPECTED.get(str(details.get("type")))
    if expected is None:
        return message.removeprefix("Value error, ")
    belongs = expected.format(**(details.get("ctx") or {}))
    return f"{ascii_repr(details.get('input'))} cannot be. Write {belongs}."
