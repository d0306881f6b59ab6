"""Values that an option cannot take: a sentence with what to write, and no word of a library."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.cli.console import ExitCode
from composer_fsdp2.cli.options import PlainTyper, plain_message

# What belongs to the libraries that read a command line.
_ALIEN = ("Value error", "Input should", "unable to parse", "validation error")


def said(*args: str) -> str:
    result = CliRunner().invoke(main.app, list(args))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "word", ["huggingface", "HuggingFace", "hugging-face", "transformers", "safetensors"]
)
def test_what_exports_to_hugging_face_is_named(word):
    text = said("checkpoint", "convert", "a", "b", "--to", word)
    assert f"'--to': '{word}' is no choice. Write hf, which exports a folder for Hugging" in text
    assert "The choices are sharded, full or hf." in text


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--to", "ful"), ("'ful' is no choice", "Did you mean 'full'?", "sharded, full or hf")),
        (("--to", "monolithic"), ("Write full. The choices are",)),
        (("--to", "dcp"), ("Write sharded. The choices are",)),
        (("--to", ""), ("'' is no choice", "Write sharded, full or hf.")),
        (("--to", "it's"), ("is no choice",)),
        (("--to", "hf", "--dtype", "bf16"), ("'--dtype'", "Write bfloat16.")),
        (("--to", "hf", "--dtype", "fp16"), ("'--dtype'", "Write float16.")),
        (("--to", "hf", "--dtype", "int8"), ("Write bfloat16, float16 or float32.",)),
        (("--to", "hf", "--weights", "ema"), ("Write saved or trained.",)),
    ],
)
def test_choices_of_a_conversion(args, parts):
    text = said("checkpoint", "convert", "a", "b", *args)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("train", "a.yaml", "--ranks", "0"), "'0' cannot be. Write at least 1."),
        (("train", "a.yaml", "-n", "two"), "'two' cannot be. Write a whole number."),
        (("train", "a.yaml", "-n", "1.5"), "'1.5' cannot be. Write a whole number."),
        (("train", "a.yaml", "--console", "quiet"), "Write line or full."),
        (("parity", "a", "b", "--tolerance", "-1"), "'-1' cannot be. Write at least 0.0."),
        (("parity", "a", "b", "--tolerance", "x"), "'x' cannot be. Write a number."),
        (("init", "--goal", "fine-tune"), "Did you mean 'finetune'?"),
        (("init", "--gpus", "-2"), "Write at least 0."),
        (("doctor", "--gpus-per-node", "no"), "Write a whole number."),
    ],
)
def test_other_values(args, part):
    assert part in said(*args)


def values():
    """Every option of every command that takes a value, and the command."""
    for command in get_command(main.app).commands.values():  # pyright: ignore
        for part in (getattr(command, "commands", None) or {"": command}).values():
            for param in part.params:
                if param.param_type_name == "option" and not param.is_flag:
                    yield part, param.opts[0]


def test_no_command_shows_words_of_a_library():
    """What is added later as well."""
    texts = [answer(command, option) for command, option in values()]
    assert not [text for text in texts if any(word in text for word in _ALIEN)]
    assert sum(" Write " in text for text in texts) >= 12


def answer(command, option: str) -> str:
    """What a command says to a value that no option with choices or numbers takes."""
    try:
        command.make_context("x", [option, "~~"])
    except typer.BadParameter as error:
        return error.format_message()
    return ""


class Colour(str, Enum):
    red = "red"


def test_a_command_of_any_application():
    app = PlainTyper()

    @app.command()
    def paint(colour: Annotated[Colour, typer.Argument()]) -> None:
        """Paints."""

    result = CliRunner().invoke(app, ["blue"])
    assert "'blue' is no choice. Write red." in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Value error, it is odd.", "it is odd."),
        ("it is odd.", "it is odd."),
        ("'x' is not one of 'a', 'b'.", "'x' is no choice. Write a or b."),
        ("Value error, 'x' is not one of 'a'", "'x' is no choice. Write a."),
    ],
)
def test_messages_of_old_and_new_versions(message, expected):
    assert plain_message(message, {}) == expected
