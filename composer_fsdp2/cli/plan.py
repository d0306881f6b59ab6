"""`composer-fsdp2 plan`: the FSDP2 units of a run, as a table, as JSON or as a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import reported, say
from composer_fsdp2.cli.doctor import cluster_of, rehearsed
from composer_fsdp2.cli.options import AsJson, GpusPerNode, Overrides, RanksOfRun
from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.foundry.rehearsal import Rehearsal

__all__ = ["HELP", "plan"]

HELP = """Show the FSDP2 units of RUN.yaml; with `--plot FILE` also draw them.

The model is built without its weights and nothing is trained. A unit is what one all-gather brings
together. The table and the picture show size, nesting, ties and frozen parameters.

- `composer-fsdp2 plan run.yaml`

- `composer-fsdp2 plan run.yaml --plot plan.svg`: also .png or .pdf

- `composer-fsdp2 plan run.yaml --ranks 64 --gpus-per-node 8`: for a cluster this machine is not

Exit code 1 if the model cannot be planned, 2 for a mistake in the command line or the settings.
"""


def plan(
    run: Annotated[Path, typer.Argument(help="A training run of LLM Foundry.", metavar="RUN.yaml")],
    overrides: Overrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draws the units; the ending decides: .svg, .png, .pdf.", metavar="FILE"),
    ] = None,
    ranks: RanksOfRun = None,
    gpus_per_node: GpusPerNode = None,
    as_json: AsJson = False,
) -> None:
    """Prints the plan to standard output and all else to standard error."""
    with reported():
        if plot is not None:
            from composer_fsdp2.tools.pictures import check_destination

            check_destination(plot)
        found = _rehearse(run, overrides or [], ranks, gpus_per_node)
        if found.units is None:
            for finding in found.findings:
                say(f"[red]{finding.level}: {escape(finding.what)}[/] {escape(finding.advice)}")
            say("[red]The model cannot be planned.[/]")
            raise typer.Exit(1)
        text = str(found.units) if found.sizes is None else f"{found.units}\n{found.sizes}"
        typer.echo(_as_json(found) if as_json else text)
        if found.findings:
            count = "A problem was" if len(found.findings) == 1 else "Problems were"
            command = f"composer-fsdp2 doctor {run}"
            say(f"[yellow]{count} found on the way; '{escape(command)}' shows more.[/]")
        if plot is not None:
            _draw(found, plot, f"Units of {run.name}")


def _as_json(found: Rehearsal) -> str:
    assert found.units is not None
    document: dict[str, Any] = {**dataclasses.asdict(found.units), "frozen": dict(found.frozen)}
    if found.sizes is not None:
        document["tensor_parallel"] = dataclasses.asdict(found.sizes)
    return json.dumps(document, indent=2, default=str)


def _rehearse(
    run: Path, overrides: list[str], ranks: int | None, gpus_per_node: int | None
) -> Rehearsal:
    from composer_fsdp2.foundry.run_file import check_installed, read_parallelism, read_run
    from composer_fsdp2.foundry.transform import requests_fsdp2
    from composer_fsdp2.tools.migrate.signs import check_is_run

    check_installed()
    cfg = read_run(run, overrides)
    check_is_run(run, cfg)
    if not requests_fsdp2(read_parallelism(cfg)):
        raise ConfigError(
            f"{run} does not ask for FSDP2: it has no `parallelism_config.fsdp2`. There are no "
            "units to show. Write `parallelism_config: {fsdp2: {}}`, or let `composer-fsdp2 "
            "migrate` change settings of FSDP1."
        )
    return rehearsed(cfg, cluster_of(ranks, gpus_per_node))


def _draw(found: Rehearsal, file: Path, title: str) -> None:
    from composer_fsdp2.tools.pictures import plan_picture, write_figure

    assert found.units is not None
    write_figure(plan_picture(found.units, found.frozen, title), file)
    say(f"picture  {escape(str(file))}")
