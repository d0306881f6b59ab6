"""What every command says: errors first, exit codes, help, completion, progress."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from composer_fsdp2.cli import console, main
from composer_fsdp2.cli.console import EXIT_CODES, ExitCode, progress, reported
from composer_fsdp2.cli.launch import RankError
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.engine import DIALECTS
from tests.support.screen import show_on

ROOT = Path(__file__).parents[3]


def commands() -> list[list[str]]:
    """Every command with its group."""
    found: list[list[str]] = []
    for name, command in get_command(main.app).commands.items():  # pyright: ignore
        inner = getattr(command, "commands", None)
        found += [[name, part] for part in inner] if inner else [[name]]
    return found


def run(*args: str):
    return CliRunner().invoke(main.app, list(args))


# --- Errors. ---


@pytest.fixture
def report(capsys, monkeypatch):
    """What is printed for an error, and the exit code."""
    monkeypatch.delenv("RANK", raising=False)

    def of(error: Exception) -> tuple[str, int]:
        with pytest.raises(typer.Exit) as caught, reported():
            raise error
        return capsys.readouterr().err, caught.value.exit_code

    return of


def test_a_mistake_has_no_traceback(report):
    said, code = report(ConfigError("It is wrong. Nothing works. Write another."))
    assert code == ExitCode.USAGE
    assert said == "ConfigError: It is wrong. Nothing works. Write another.\n"


def test_anything_else_keeps_its_traceback_in_a_file(report, tmp_path, monkeypatch):
    monkeypatch.setattr(console.tempfile, "tempdir", str(tmp_path))
    said, code = report(ZeroDivisionError("of [everything]"))
    assert code == ExitCode.FAILED
    assert said.startswith("ZeroDivisionError: of [everything]\n")
    assert "Traceback" not in said
    (file,) = tmp_path.iterdir()
    assert str(file) in said
    text = file.read_text()
    assert "Traceback (most recent call last)" in text
    assert "raise error" in text
    assert text.rstrip().endswith("ZeroDivisionError: of [everything]")


def test_a_traceback_that_cannot_be_written_is_shown(report, monkeypatch):
    monkeypatch.setattr(console.tempfile, "tempdir", "/nowhere/at/all")
    said, _ = report(ZeroDivisionError("of all"))
    assert said.startswith("ZeroDivisionError: of all\n")
    assert "raise error" in said


def test_a_rank_that_failed_says_why_first(report, tmp_path):
    error = RankError(1, "ValueError: no", "", tmp_path / "a.log", tmp_path / "t.log")
    said, code = report(error)
    assert code == ExitCode.FAILED
    assert said == (
        f"\nRank 1 failed: ValueError: no\nThe traceback: {tmp_path}/t.log\n"
        f"All it wrote: {tmp_path}/a.log\n"
    )


@pytest.mark.parametrize(
    ("forced", "no_color", "coloured"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_colours(report, monkeypatch, forced, no_color, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if forced:
        monkeypatch.setattr(console, "Console", lambda **kw: Console(**kw, force_terminal=True))
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    said, _ = report(ConfigError("It is wrong. Write another."))
    assert ("\x1b[31m" in said) == coloured
    assert "It is wrong" in said


# --- Exit codes. ---


def test_exit_codes_are_in_the_help():
    assert [code.value for code in ExitCode] == [0, 1, 2]
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run("--help").stdout).split())
    assert EXIT_CODES in text


@pytest.mark.table("migrate", "train")
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_mistake_in_the_command_line_is_exit_code_2(command):
    for args in (["--no-such-option"], ["nowhere.yaml", "nowhere-else", "--no-such-option"]):
        result = run(*command, *args)
        assert result.exit_code == ExitCode.USAGE, result.output
        assert "Traceback" not in result.output
        assert "--no-such-option" in result.stderr


# --- Help. ---


def test_help_begins_with_a_verb():
    verbs = {"Show", "Write", "Train", "Evaluate", "Read", "Compare", "Draw"}
    for command in commands():
        about = re.search(r"Usage:.*\n\s*\n\s*(\w+)", run(*command, "--help").stdout)
        assert about is not None, command
        assert about[1] in verbs, command


@pytest.mark.parametrize("command", [c for c in commands() if len(c) == 1], ids=" ".join)
def test_help_has_an_example(command):
    text = run(*command, "--help").stdout
    assert f"composer-fsdp2 {command[0]}" in text.partition("Usage:")[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(monkeypatch, shell):
    """The script that is installed, and what it asks for."""
    monkeypatch.setenv("_COMPOSER_FSDP2_COMPLETE", f"source_{shell}")
    script = CliRunner().invoke(main.app, [], prog_name="composer-fsdp2").stdout
    assert "_COMPOSER_FSDP2_COMPLETE" in script
    assert "composer-fsdp2" in script
    asked = {"COMP_WORDS": "composer-fsdp2 do", "COMP_CWORD": "1"}
    asked |= {
        "_TYPER_COMPLETE_ARGS": "composer-fsdp2 do",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_COMPOSER_FSDP2_COMPLETE", f"complete_{shell}")
    answer = CliRunner().invoke(main.app, [], prog_name="composer-fsdp2").stdout
    assert "doctor" in answer
    assert "migrate" not in answer


# --- Progress. ---


def test_progress_in_a_file_says_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("Reading") as advance:
        for _ in range(100):
            advance(1, 100)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("unit", "said"),
    [("B", r"5\.00M/10\.0M .*<\d\d:\d\d, .*B/s"), (" steps", r"5\d+/1\d+ .* steps/s")],
)
def test_progress_on_a_terminal_has_speed_and_time_left(monkeypatch, unit, said):
    screen = show_on(monkeypatch, terminal=True)
    with progress("Reading", unit) as advance:
        advance(1_000_000, 10_000_000)
        time.sleep(0.05)
        advance(4_000_000, 10_000_000)
    assert re.search(rf"Reading: .*{said}", screen.getvalue())


# --- A dry run. ---


@pytest.fixture
def quickstart(monkeypatch, tmp_path):
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        main.launch, "launch_ranks", lambda *args: pytest.fail(f"ranks started: {args}")
    )
    small = [f"variables.folder={tmp_path}", "variables.text.megabytes=0.1"]
    return lambda *args: run("train", "yamls/quickstart.yaml", "--dry-run", *small, *args)


def test_a_dry_run_is_doctor_and_the_plan(quickstart):
    done = quickstart("max_duration=4ba", "--ranks", "2")
    assert done.exit_code == 0, done.output
    report, _, plan = done.stdout.partition("\nThe plan:\n")
    assert "asks for         FSDP2" in report
    assert "model.transformer.blocks.0" in plan
    *_, last = plan.strip().splitlines()
    assert last.startswith("Nothing was started. Without --dry-run it trains: composer-fsdp2 train")
    assert last.endswith("max_duration=4ba --ranks 2")


def test_a_dry_run_of_a_bad_run_is_exit_code_1(quickstart):
    done = quickstart("optimizer.name=no_such")
    assert done.exit_code == ExitCode.FAILED
    assert "problem: optimizer.name" in done.stdout
    assert "The run would fail" in done.stdout


@pytest.mark.parametrize("args", [["--log-dir", "x"], ["max_duration"]])
def test_a_dry_run_with_a_mistake_is_exit_code_2(quickstart, args):
    assert quickstart(*args).exit_code == ExitCode.USAGE


def test_help_of_migrate_lists_the_dialects():
    command = vars(get_command(main.app))["commands"]["migrate"]
    option = next(option for option in command.params if option.name == "dialect")
    listed = re.split(r", | or ", option.help.partition(": ")[2].rstrip("."))
    assert sorted(listed) == sorted(DIALECTS)
