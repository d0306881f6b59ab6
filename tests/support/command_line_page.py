"""Writes docs/reference/command-line.md: `python -m tests.support.command_line_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.core import TyperGroup, TyperOption
from typer.main import get_command

from composer_fsdp2.cli.console import ExitCode
from composer_fsdp2.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"

_TAKES = {int: "N", float: "X", Path: "PATH"}

HEAD = """\
# Command line

```text
composer-fsdp2 COMMAND [OPTIONS] ARGUMENTS
```

`--help` after any command shows its part of this page. Results go to standard output. Messages go
to standard error. `composer-fsdp2 --install-completion` has your shell complete commands.

`python -m tests.support.command_line_page` writes this page.

## Exit codes

{codes}| 128 + N | a signal N ended the command |

## Commands

"""


CODES = {
    ExitCode.OK: "done; the answer is good",
    ExitCode.FAILED: "done; the answer is bad: a run failed or would fail, checkpoints are damaged "
    "or differ, or a decision is left",
    ExitCode.USAGE: "not begun: a mistake in the command line, the YAML or a path, which is named",
}


def page() -> str:
    """The page as Markdown."""
    commands = list(_commands(get_command(app), ["composer-fsdp2"]))
    listed = "".join(f"- [`{name}`](#{name.replace(' ', '-')})\n" for name, _ in commands)
    sections = "".join(f"\n{_section(*found)}" for found in commands)
    rows = "".join(f"| {code.value} | {CODES[code]} |\n" for code in ExitCode)
    head = HEAD.replace("{codes}", f"| Code | Meaning |\n|---|---|\n{rows}")
    return head + listed + _own_options(get_command(app)) + sections


def _own_options(group: Any) -> str:
    """Options before the name of a command; those that typer adds for completion are left out."""
    kinds = get_type_hints(group.callback) if group.callback else {}
    own = [param for param in group.params if param.name in kinds]
    rows = [_row(_option(param, kinds[param.name]), param) for param in own]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return (
        f"\nOptions before a command:\n\n| option | default | meaning |\n|---|---|---|\n{table}"
        if rows
        else ""
    )


def _commands(command: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(command, TyperGroup):
        yield " ".join(names), command
        return
    for name in sorted(command.commands):
        yield from _commands(command.commands[name], [*names, name])


def _section(name: str, command: Any) -> str:
    params = [param for param in command.params if param.name != "help"]
    options = [param for param in params if isinstance(param, TyperOption)]
    arguments = [param for param in params if param not in options]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
    help_text = _without_blank_items(inspect.cleandoc(command.help or ""))
    rows = [_row(f"`{_argument(param)}`", param) for param in arguments]
    kinds = get_type_hints(command.callback)
    rows += [_row(_option(param, kinds[param.name]), param) for param in options]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    parts = [f"## `{name}`\n", f"```text\n{usage}\n```\n", f"{help_text}\n"]
    if rows:
        parts.append(f"| argument or option | default | meaning |\n|---|---|---|\n{table}")
    return "\n".join(parts)


def _without_blank_items(text: str) -> str:
    """Joins the items of a list, which the console needs blank lines between."""
    return re.sub(r"(?m)^(- .*(?:\n(?!- ).+)*)\n\n(?=- )", r"\1\n", text)


def _row(shown: str, param: Any) -> tuple[str, str, str]:
    return shown.replace("|", r"\|"), _default(param), _one_line(param.help or "")


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper()).strip("[]")
    name = f"{name} ..." if param.nargs == -1 else name
    return name if param.required else f"[{name}]"


def _option(param: Any, kind: Any) -> str:
    takes = "" if param.is_flag else f" {param.metavar or _takes(kind)}"
    return ", ".join(f"`{name}{takes}`" for name in (*param.opts, *param.secondary_opts))


def _takes(kind: Any) -> str:
    """The value of an option, by the type of the function's argument."""
    kinds = {kind, *get_args(kind)} - {type(None)}
    for one in kinds:
        if get_origin(one) is Literal:
            return "|".join(get_args(one))
    return next((text for known, text in _TAKES.items() if known in kinds), "TEXT")


def _default(param: Any) -> str:
    if param.required:
        return "has to be given"
    default = getattr(param.default, "value", param.default)
    return "" if default in (None, False, ()) else f"`{default}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page())
