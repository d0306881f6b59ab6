"""`composer-fsdp2 plan`: the units of a run, and what a step of it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import ExitCode, reported, say
from composer_fsdp2.cli.doctor import cluster_of, rehearsed
from composer_fsdp2.cli.options import AsJson, GpusPerNode, Overrides, RanksOfRun
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import run_file
from composer_fsdp2.foundry.cluster import Cluster, quiet
from composer_fsdp2.foundry.transform import requests_fsdp2

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from composer_fsdp2.estimate.clock import Gpu
    from composer_fsdp2.estimate.forecast import Forecast
    from composer_fsdp2.foundry.rehearsal import Rehearsal

__all__ = ["forecast_of", "plan"]

_BLOCK = "parallelism_config.fsdp2"


def plan(
    run: Annotated[Path, typer.Argument(help="A training run of LLM Foundry.", metavar="RUN.yaml")],
    overrides: Overrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draws units and memory; a .svg, .png or .pdf.", metavar="FILE"),
    ] = None,
    ranks: RanksOfRun = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the run, on GPUs that need not be here.")
    ] = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU, for its memory and speed: H100.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of one GPU, to say whether it fits.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="A line for each value of a setting.", metavar="key=a,b,c"),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Settings that fit, the quickest first; takes minutes.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --search: puts the best into RUN.yaml.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show whether RUN.yaml fits, its FSDP2 units, and what memory and communication a step takes.

    The answer comes first: whether it fits, tokens and seconds of a step, what to try.
    The model is built without its weights and nothing is trained. A unit is what one all-gather
    brings together. A step is traced on tensors without memory, by the code that trains: bytes of
    parameters, gradients, optimizer state and collectives are exact, and the peak is what a
    step needs without gaps between tensors. Neither data nor a tokenizer is needed, and nothing
    is downloaded.

    - `composer-fsdp2 plan run.yaml`

    - `composer-fsdp2 plan run.yaml --plot plan.svg`: also .png or .pdf

    - `composer-fsdp2 plan run.yaml --gpus 64 --gpus-per-node 8 --gpu H100`: for a cluster elsewhere

    - `composer-fsdp2 plan run.yaml --compare device_train_microbatch_size=1,2,4`

    - `composer-fsdp2 plan run.yaml --gpus 64 --gpu H100 --search`: shards, replicas, resharding,
    recomputation, microbatch and offloading

    Exit code 1 if the model cannot be planned or does not fit, 2 for a mistake in the command line
    or the settings.
    """
    from composer_fsdp2.estimate.clock import GPUS, gpu_named
    from composer_fsdp2.estimate.report import comparison_lines, fits
    from composer_fsdp2.tools.pictures import check_picture_path

    with reported():
        _check_outputs(compare=compare, search=search or write, json=as_json, plot=plot)
        if plot is not None:
            check_picture_path(plot)
        figures = None if gpu is None else gpu_named(gpu)
        memory = gpu_memory or (figures and figures.memory_gib)
        cfg = _read(run, overrides or [])
        cluster = _cluster(cfg, ranks, gpus, gpus_per_node, on_gpus=memory is not None)
        if compare is not None:
            forecasts = _compared(run, overrides or [], cluster, compare)
            lines = comparison_lines(compare.partition("=")[0], forecasts, figures or GPUS["H100"])
            typer.echo("\n".join(lines))
            return
        rehearsal = _planned(cfg, cluster)
        if search or write:
            _search(run, rehearsal, cluster, figures or GPUS["H100"], memory, write=write)
            return
        forecast = forecast_of(rehearsal, cluster)
        if as_json:
            typer.echo(json.dumps(_document(rehearsal, forecast, figures), indent=2, default=str))
        else:
            typer.echo("\n".join(_lines(rehearsal, forecast, figures, memory)))
        if plot is not None:
            _draw(run, rehearsal, forecast, plot)
        if forecast is not None and memory is not None and not fits(forecast, memory):
            raise typer.Exit(ExitCode.FAILED)


def _draw(run: Path, rehearsal: Rehearsal, forecast: Forecast | None, plot: Path) -> None:
    """Draws units, and memory of a step where there is a forecast."""
    from composer_fsdp2.tools.pictures import plan_picture, write_figure

    assert rehearsal.units is not None
    step = None if forecast is None or forecast.kept is None else forecast
    title = f"Units of {run.name}"
    write_figure(plan_picture(rehearsal.units, rehearsal.frozen, title, step), plot)
    say(f"picture  {escape(str(plot))}")


def _check_outputs(**outputs: object) -> None:
    """Refuses two options of which each prints its own document."""
    options = [f"--{name}" for name, value in outputs.items() if value]
    if options[1:] and options[0] in ("--compare", "--search"):
        raise ConfigError(
            f"{' and '.join(options)} are given. {options[0]} prints a table of its own, and the "
            "rest would have no effect. Give one of them."
        )


def _read(run: Path, overrides: list[str]) -> DictConfig:
    """Reads a run with FSDP2; a run with FSDP1 is read as `migrate` would write it.

    Raises:
        ConfigError: it asks for neither, or is no run.
    """
    from composer_fsdp2.tools.migrate.engine import migrate
    from composer_fsdp2.tools.migrate.signs import check_is_run

    run_file.check_installed()
    cfg = run_file.read_run(run, overrides)
    check_is_run(run, cfg)
    parsed = run_file.read_parallelism(cfg)
    if parsed.get("fsdp_config") and not requests_fsdp2(parsed):
        say(f"{escape(str(run))} asks for FSDP1: this is a plan of what `migrate` makes of it.")
        with tempfile.TemporaryDirectory() as folder:
            migrated = Path(folder, run.name)
            migrated.write_text(migrate(run.read_text(encoding="utf-8"), name=str(run)).text)
            cfg = run_file.read_run(migrated, overrides)
        parsed = run_file.read_parallelism(cfg)
    if not requests_fsdp2(parsed):
        raise ConfigError(
            f"{run} does not ask for FSDP2: it has no `parallelism_config.fsdp2`. There are no "
            "units to show. Write `parallelism_config: {fsdp2: {}}`, or let `composer-fsdp2 "
            "migrate` change settings of FSDP1."
        )
    return cfg


def _cluster(
    cfg: DictConfig,
    ranks: int | None,
    gpus: int | None,
    gpus_per_node: int | None,
    *,
    on_gpus: bool,
) -> Cluster:
    """Returns the ranks of the options, or without any those of this machine.

    Where degrees of the run need more than this machine has, it is nodes of 8 GPUs.

    Raises:
        ConfigError: both numbers are given, the ranks do not fill nodes, or no number of nodes fits
            the degrees.
    """
    if ranks and gpus:
        raise ConfigError(
            f"--ranks is {ranks} and --gpus is {gpus}. Both are the number of ranks, and --gpus "
            "says that they are on GPUs. Give one of them."
        )
    cluster = cluster_of(gpus or ranks, gpus_per_node or (gpus and min(gpus, 8)))
    cluster = dataclasses.replace(cluster, on_gpus=cluster.on_gpus or on_gpus)
    if ranks or gpus or gpus_per_node:
        return cluster
    parsed = run_file.read_parallelism(cfg)
    try:
        run_file.check_ranks(parsed, cluster.ranks)
    except ConfigError as error:
        for number in (8, 16, 32, 64, 128, 256, 512, 1024):
            with contextlib.suppress(ConfigError):
                run_file.check_ranks(parsed, number)
                say(
                    f"The degrees of the run need other ranks than these: --gpus {number} is taken."
                )
                return Cluster(ranks=number, ranks_per_node=8, on_gpus=True)
        raise error from None
    return cluster


def _planned(cfg: DictConfig, cluster: Cluster) -> Rehearsal:
    """Rehearses a run and prints the findings; ends where the model cannot be planned."""
    rehearsal = rehearsed(cfg, cluster, plan_only=True)
    for finding in rehearsal.findings:
        say(f"[yellow]{finding.level}: {escape(finding.what)}[/] {escape(finding.advice)}")
    if rehearsal.units is None:
        say("[red]The model cannot be planned.[/]")
        raise typer.Exit(ExitCode.FAILED)
    return rehearsal


def forecast_of(rehearsal: Rehearsal, cluster: Cluster) -> Forecast | None:
    """Predicts a step; `None` for a run that has no optimizer."""
    from composer_fsdp2.foundry.forecast import forecast_run

    if rehearsal.parts is None:
        return None
    with quiet(errors=True):
        return forecast_run(rehearsal.parts, cluster)


def _compared(
    run: Path, overrides: list[str], cluster: Cluster, compare: str
) -> list[tuple[str, Forecast]]:
    """Returns the forecast for each value of a setting.

    Raises:
        ConfigError: it is not `key=a,b`.
    """
    key, _, values = compare.partition("=")
    if not key or not values:
        raise ConfigError(
            f"--compare is '{compare}', which is no setting with values. Each value would be a "
            "line. Write --compare key=a,b,c."
        )
    forecasts: list[tuple[str, Forecast]] = []
    for value in values.split(","):
        rehearsal = _planned(_read(run, [*overrides, f"{key}={value}"]), cluster)
        if (forecast := forecast_of(rehearsal, cluster)) is None:
            raise ConfigError(
                f"With {key}={value} the optimizer cannot be built. There would be nothing to "
                f"compare. See what `composer-fsdp2 doctor {run}` finds."
            )
        forecasts.append((value, forecast))
    return forecasts


def _search(
    run: Path,
    rehearsal: Rehearsal,
    cluster: Cluster,
    gpu: Gpu,
    memory: float | None,
    *,
    write: bool,
) -> None:
    """Prints the best settings, and writes the first of them.

    Raises:
        ConfigError: the memory of a GPU is not known, or the run has no optimizer.
    """
    from ruamel.yaml import YAML

    from composer_fsdp2.estimate.search import search_lines, written
    from composer_fsdp2.foundry.forecast import search_run

    if memory is None or rehearsal.parts is None:
        raise ConfigError(
            "--search is given, and the memory of a GPU is not known, or the optimizer cannot be "
            "built. Nothing could be left out for its size. Give --gpu or --gpu-memory, and see "
            "what doctor finds."
        )
    block = run_file.read_setting(run_file.read_run(run, [], jobs=not write), _BLOCK)
    if write and not isinstance(block, Mapping):
        raise ConfigError(
            f"--write is given, and {run} has no mapping under `{_BLOCK}`. The settings that are "
            f"found would have no place. Write `parallelism_config: {{fsdp2: {{}}}}` into {run}."
        )
    with quiet():
        best, lost = search_run(rehearsal.parts, cluster, gpu, memory)
    typer.echo("\n".join(search_lines(best, lost)))
    if not best:
        raise typer.Exit(ExitCode.FAILED)
    if not write:
        return
    choice, yaml = best[0].choice, YAML()  # keeps comments and order
    yaml.preserve_quotes = True
    document = yaml.load(run.read_text(encoding="utf-8"))
    block = document["parallelism_config"]["fsdp2"]
    keys = written(choice, block.get("optimizer_state"))
    block.update({key: value for key, value in keys.items() if value is not None})
    if choice.replicate == 1:
        block.pop("data_parallel_replicate_degree", None)
    if choice.frozen == "shard":
        block.pop("frozen", None)
    document["device_train_microbatch_size"] = choice.rows
    with run.open("w", encoding="utf-8") as file:
        yaml.dump(document, file)
    say(f"Written to {escape(str(run))}.")


def _lines(
    rehearsal: Rehearsal, forecast: Forecast | None, gpu: Gpu | None, memory: float | None
) -> Iterator[str]:
    """Yields the answer, the units, and the details of a step."""
    from composer_fsdp2.estimate.report import answer_lines, forecast_lines, preparing_text
    from composer_fsdp2.foundry.forecast import batch_of

    parts = rehearsal.parts
    if forecast is not None and parts is not None:
        first = "what the warning about rows says." if parts.plan.uneven_shards else ""
        yield from answer_lines(forecast, parts.settings, batch_of(parts), gpu, memory, first=first)
        shards = max((s.axis.ranks for s in forecast.sent if s.axis.name == "dp_shard"), default=1)
        if slow := preparing_text(len(rehearsal.units.units) if rehearsal.units else 0, shards):
            yield (
                f"{slow} With data_parallel_shard_degree: {forecast.ranks_per_node} and "
                "data_parallel_replicate_degree: -1 (HSDP) it takes no longer on more ranks."
            )
        yield ""
    yield str(rehearsal.units)
    if rehearsal.sizes is not None:
        yield str(rehearsal.sizes)
    if forecast is not None:
        yield from forecast_lines(forecast, gpu)


def _document(rehearsal: Rehearsal, forecast: Forecast | None, gpu: Gpu | None) -> dict[str, Any]:
    from composer_fsdp2.estimate.clock import step_times

    units: Any = rehearsal.units
    document: dict[str, Any] = {**dataclasses.asdict(units), "frozen": dict(rehearsal.frozen)}
    for unit in document["units"]:
        unit["modules"] = [unit.pop("module")]  # the form that this document has always had
    if rehearsal.sizes is not None:
        document["tensor_parallel"] = dataclasses.asdict(rehearsal.sizes)
    if forecast is not None:
        document["forecast"] = forecast.as_dict()
        if gpu is not None:
            document["seconds"] = dataclasses.asdict(step_times(forecast, gpu))
    return document
