"""`composer-fsdp2 migrate`: a configuration of another trainer as one of ours, with a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import ExitCode, reported, say
from composer_fsdp2.cli.options import AsJson
from composer_fsdp2.config.messages import shortened
from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.tools.migrate.report import Entry, Report

__all__ = ["migrate"]

_Decisions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Reads KEY as VALUE, null takes it out; fsdp2.NAME sets a new setting.",
        metavar="KEY=VALUE",
    ),
]

# Written out, because help imports none of their tables.
_DIALECTS = (
    "Instead of recognising it: composer, composer-fsdp2, fsdp2-mixed, accelerate, "
    "accelerate-deepspeed, deepspeed, huggingface, huggingface-deepspeed or roll."
)


def migrate(
    config: Annotated[
        Path | None, typer.Argument(help="YAML or JSON.", metavar="CONFIG", show_default=False)
    ] = None,
    code: Annotated[
        Path | None, typer.Option(help="Python file or folder to look through instead.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new file; default prints it.")
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--from", help=_DIALECTS, metavar="DIALECT")
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the run.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node.")] = None,
    decisions: _Decisions = None,
    strict: Annotated[
        bool,
        typer.Option(help="Exit code 1 also where behaviour changes."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only the report; exit code 1 if a decision is needed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the sharding settings of CONFIG as `parallelism_config.fsdp2`; report on every key.

    CONFIG is YAML or JSON in one of these dialects, recognised from its content: Composer and LLM
    Foundry (FSDP1, or `FSDP_VERSION=2`), Accelerate and Hugging Face `TrainingArguments` (FSDP or
    DeepSpeed), ROLL, DeepSpeed. It stays as it is; everything else in it, comments included, is in
    the new file unchanged. A decision that you have to take is a comment at its place there.

    - `composer-fsdp2 migrate old.yaml -o new.yaml`: exit code 1 if something is left to decide; `>`
    in place of `-o` writes the same file

    - `composer-fsdp2 migrate old.yaml --check`: the same, and nothing is written

    - `composer-fsdp2 migrate old.yaml --set fsdp_config.auto_wrap=true --set fsdp2.async_save=true`

    With `--code PATH` instead of CONFIG it lists every use of FSDP1 in a Python file or folder,
    with its place and what to write instead. Nothing in PATH is imported, executed or changed.

    - `composer-fsdp2 migrate --code src --check`: exit code 1 if something has to be changed
    """
    from composer_fsdp2.tools.migrate.report import Status

    with reported():
        if code is not None:
            others = {
                "CONFIG": config,
                "--output": output,
                "--from": dialect,
                "--world-size": world_size,
                "--gpus-per-node": gpus_per_node,
                "--set": decisions,
                "--strict": strict,
                "--force": force,
            }
            raise typer.Exit(_migrate_code(code, others, check=check, as_json=as_json))
        if config is None:
            raise ConfigError(
                "Neither CONFIG nor --code is given. There is nothing to migrate. Write the path "
                "of a configuration, or --code and a Python file or folder."
            )
        report = _migrate_config(
            config,
            None if check else output,
            force,
            decisions or [],
            dialect=dialect,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
        )
        prints = output is None and not check
        _show(report, prints=prints, as_json=as_json)
        is_open = [Status.DECISION, Status.UNSUPPORTED]
        refused = [*is_open, Status.CHANGES] if strict else is_open
        if output is not None and not check and not as_json:
            again = f"composer-fsdp2 migrate {config} -o {output} --force --set KEY=VALUE"
            from composer_fsdp2.tools.migrate.engine import OF_RUNS

            is_run = report.dialect in OF_RUNS
            check_it = f"parity {config} {output}" if is_run else f"doctor {output}"
            goes_on = f"composer-fsdp2 {check_it}"
            typer.echo(f"\nNext: {again if report.having(*is_open) else goes_on}")
        raise typer.Exit(ExitCode.FAILED if report.having(*refused) else ExitCode.OK)


def _migrate_code(
    code: Path, others: Mapping[str, object], *, check: bool, as_json: bool
) -> ExitCode:
    """Prints the uses of FSDP1 in Python code; `others` are options that are not about code."""
    from composer_fsdp2.tools.migrate.python_code.files import (
        code_as_dict,
        describe_code,
        migrate_code,
    )

    if options := [name for name, value in others.items() if value]:
        raise ConfigError(
            f"{', '.join(options)} cannot be given together with --code. It is about "
            "configurations and would have no effect. Take it out, or run the command once for "
            "each."
        )
    files = migrate_code(code)
    typer.echo(json.dumps(code_as_dict(files), indent=2) if as_json else describe_code(files))
    return ExitCode.FAILED if check and any(f.needs_work for f in files) else ExitCode.OK


def _migrate_config(
    config: Path, output: Path | None, force: bool, items: list[str], **settings: Any
) -> Report:
    """Migrates a file; `items` are decisions as `--set` has them."""
    from composer_fsdp2.tools.migrate.document import parse_value
    from composer_fsdp2.tools.migrate.engine import migrate as migrate_text

    decisions: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigError(
                f"--set has '{item}', which is not key=value. It would decide nothing. Write a key "
                "of the report, '=' and a value, for example te_shard_fp8_weight=null."
            )
        decisions[key] = parse_value(value)

    if output is not None and output.resolve() == config.resolve():
        raise ConfigError(
            f"--output is the input '{config}'. The old settings would be lost. Give another path."
        )
    if output is not None and output.exists() and not force:
        raise ConfigError(
            f"'{output}' exists. Its content would be lost. Write another name, or --force."
        )
    try:
        if config.is_dir():  # perhaps a checkpoint of DeepSpeed, which another command converts
            from composer_fsdp2.checkpoint.contents import deepspeed_folder, detect_kind

            if deepspeed_folder(config) is not None:
                detect_kind(config)
        text = config.read_bytes().decode()  # with the file's own ends of lines
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{config}' cannot be read: {error}. There is nothing to migrate. Give the path of a "
            "YAML or JSON file."
        ) from None
    report = migrate_text(
        text, name=str(config), folder=config.parent, decisions=decisions, **settings
    )
    try:
        if output is not None:
            output.write_bytes(report.text.encode())
    except OSError as error:
        raise ConfigError(
            f"'{output}' cannot be written: {error}. The migration is not stored. Give a path in a "
            "folder that exists."
        ) from None
    return report


def _show(report: Report, *, prints: bool, as_json: bool) -> None:
    """Shows the report, beside the new file itself where that is printed."""
    if as_json:
        document = {
            "dialect": report.dialect,
            "keys": [
                {
                    "key": entry.key,
                    "value": entry.value,
                    "status": entry.status.value,
                    "reason": entry.reason,
                    "becomes": entry.settings,
                    "trainer": entry.beside,
                    "options": list(entry.options),
                }
                for entry in report.entries
            ],
            "remarks": list(report.remarks),
            "output": report.text,
        }
        typer.echo(json.dumps(document, default=str, indent=2))
    elif prints:
        typer.echo(report.text, nl=False)
        for line in _describe(report):
            say(escape(line))
    else:
        typer.echo("\n".join(_describe(report)))


def _describe(report: Report) -> list[str]:
    from composer_fsdp2.tools.migrate.report import Status

    untouched = [e for e in report.entries if e.row is None and e.status is Status.KEPT]
    lines = [f"Dialect: {report.title}"]
    for status in Status:
        # Keys that become nothing and have the same reason share a line.
        groups: dict[object, list[Entry]] = {}
        for entry in (e for e in report.having(status) if e not in untouched):
            outcome = entry.settings or entry.beside or entry.options
            groups.setdefault(entry.path if outcome else entry.reason, []).append(entry)
        lines += ["", f"{status.value}:"] if groups else []
        for entries in groups.values():
            keys = [
                e.key if status is Status.ADDED else f"{e.key}: {shortened(str(e.value), 200)}"
                for e in entries
            ]
            first = entries[0]
            new = [f"{name}: {value}" for name, value in {**first.settings, **first.beside}.items()]
            arrow = f" -> {', '.join(new)}" if new else ""
            lines += [f"  {', '.join(keys)}{arrow}", f"      {first.reason}"]
            lines += [f"      decide: {option}" for option in first.options]
    if untouched:
        count = "1 other key is" if len(untouched) == 1 else f"{len(untouched)} other keys are"
        lines += ["", f"{count} not about sharding and left as written; --json lists them."]
    return lines + [line for remark in report.remarks for line in ("", remark)]
