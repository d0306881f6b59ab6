"""`composer-fsdp2 checkpoint`: look at, convert, verify and compare checkpoints, without a GPU."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import ExitCode, progress, reported, say
from composer_fsdp2.cli.options import AsJson
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.text import size_text

__all__ = ["app"]

_LINES = 20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Look at, convert, verify and compare checkpoints: folders of shards and single files.
Of DeepSpeed's checkpoints the weights are read.

Nothing in a checkpoint is executed. `COMPOSER_FSDP2_TRUST` names paths for which it may be.
""",
)

_SOURCE = "Folder of shards, file, or folder of DeepSpeed."

PathArgument = Annotated[Path, typer.Argument(help=_SOURCE, metavar="PATH")]


@app.command(help="Show what a checkpoint holds. Exit code 1 if it is damaged or incomplete.")
def inspect(path: PathArgument, as_json: AsJson = False) -> None:
    """Reads metadata and small values, no weights."""
    from composer_fsdp2.checkpoint.describe import describe_checkpoint

    with reported():
        facts = describe_checkpoint(path)
        _answer(facts, _describe(facts), as_json=as_json, good=not facts["problems"])


@app.command(
    help="""Write a checkpoint as another kind, in one process and little memory.

- `sharded`: a folder as torch.distributed.checkpoint and Composer write it

- `full`: one file, as Composer's `state_dict_type: full`

- `hf`: safetensors, config and tokenizer for `from_pretrained`

The source stays as it is. DST must not exist, or be an empty folder; it appears when it is whole.
"""
)
def convert(
    source: Annotated[Path, typer.Argument(help=_SOURCE, metavar="SRC")],
    destination: Annotated[Path, typer.Argument(help="Folder or file.", metavar="DST")],
    to: Annotated[Literal["sharded", "full", "hf"], typer.Option(help="What to write.")],
    max_shard_size: Annotated[
        str, typer.Option(help="A new file begins there; sharded and hf.", metavar="SIZE")
    ] = "5GB",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of floating point weights; hf only."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json, or a folder with it, in place of what is in SRC; hf only."),
    ] = None,
    weights: Annotated[
        Literal["saved", "trained"],
        typer.Option(
            help="trained: in place of EMA's averages, which a checkpoint has as its model; "
            "full only."
        ),
    ] = "saved",
    prefix: Annotated[
        str | None,
        typer.Option(
            help="What the names of weights begin with in the ComposerModel, model. for a "
            "HuggingFaceModel; '' for names as they are; DeepSpeed only.",
            show_default="model., if not all begin so",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reads with checksums and writes under a temporary name."""
    import torch

    from composer_fsdp2.checkpoint.convert import convert_to_sharded, write_full
    from composer_fsdp2.checkpoint.deepspeed import open_any_checkpoint
    from composer_fsdp2.checkpoint.huggingface import write_huggingface
    from composer_fsdp2.checkpoint.staging import check_destination

    with reported():
        max_bytes = _check_options(
            to, max_shard_size, trained=weights == "trained", for_hf=bool(dtype or config)
        )
        try:
            check_destination(destination, folder=to != "full")
            opened = open_any_checkpoint(source, prefix=prefix)
            remarks = list(opened.remarks)
            with progress("Converting") as advance:
                if to == "sharded":
                    convert_to_sharded(opened, destination, max_bytes, advance)
                elif to == "full":
                    write_full(opened, destination, advance, trained=weights == "trained")
                else:
                    cast = None if dtype is None else getattr(torch, dtype)
                    remarks += write_huggingface(
                        opened, destination, max_bytes, advance, dtype=cast, config=config
                    )
        except KeyboardInterrupt:
            raise CheckpointError(
                f"Interrupted before '{destination}' was complete. Nothing is left of it, because "
                "half a checkpoint is none. Convert again."
            ) from None
        files = [item for item in destination.rglob("*") if item.is_file()] or [destination]
        sizes = {item.name: item.stat().st_size for item in sorted(files)}
        if remarks and not as_json:
            say("\n".join(f"[yellow]{escape(remark)}[/]" for remark in remarks))
        result = {"path": str(destination), "files": sizes, "remarks": remarks}
        total = f"{_count(len(sizes), 'file')}, {size_text(sum(sizes.values()))}"
        _answer(result, [f"Wrote {destination}: {total}"], as_json=as_json, good=True)


@app.command(help="Read all of a checkpoint and compare it with its checksums; exit code 0 or 1.")
def verify(path: PathArgument, as_json: AsJson = False) -> None:
    """Finds flipped bytes, missing, cut off and foreign files."""
    from composer_fsdp2.checkpoint.describe import verify_checkpoint

    with reported():
        with progress("Reading") as advance:
            check = verify_checkpoint(path, advance)
        whole = "is whole" if check["checksums"] else "can be read, and has no checksums to compare"
        result = "is not good" if check["problems"] else whole
        parts, size = _count(check["parts"], "value"), size_text(check["size_bytes"])
        lines = [f"{path} {result}: {parts}, {size}", *(f"  {told}" for told in check["problems"])]
        _answer(check, lines, as_json=as_json, good=not check["problems"])


@app.command(
    help="""Compare two checkpoints of any kind; exit code 0 if they are equal, else 1.

- `composer-fsdp2 checkpoint diff A B --weights`: whether a move kept the weights

- `composer-fsdp2 checkpoint diff A B --tolerance 1e-6`: elements a of A and b of B are equal if
|a - b| <= 1e-6 + 1e-6 |b|
"""
)
def diff(
    first: Annotated[Path, typer.Argument(help="Folder or file.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder or file.", metavar="B")],
    weights: Annotated[
        bool, typer.Option("--weights", help="The model alone, without optimizer and progress.")
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(help="Of elements, absolute and relative; 0: equal bytes.", metavar="X"),
    ] = 0.0,
    everything: Annotated[
        bool, typer.Option("--all", help=f"All lines, not {_LINES} of each section.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compares tensors, and values of everything else."""
    from composer_fsdp2.checkpoint.deepspeed import open_any_checkpoint
    from composer_fsdp2.checkpoint.describe import compare_checkpoints

    with reported():
        if not 0 <= tolerance < math.inf:
            raise ConfigError(
                f"--tolerance is {tolerance}. It would not tell equal from different. Write a "
                "number from 0 on, for example 1e-6."
            )
        with progress("Comparing") as advance:
            comparison = compare_checkpoints(
                open_any_checkpoint(first),
                open_any_checkpoint(second),
                advance,
                tolerance=tolerance,
                weights=weights,
            )
        sections = {
            f"Only in {first}": comparison["only_in_first"],
            f"Only in {second}": comparison["only_in_second"],
            "Shape or dtype differ": [
                f"{key}: {a} | {b}" for key, (a, b) in comparison["layouts"].items()
            ],
            "Other objects": [f"{key}: {a} | {b}" for key, (a, b) in comparison["objects"].items()],
            "Values differ": [
                f"{key}: at most {float(n):.3g} apart" for key, n in comparison["values"].items()
            ],
        }
        lines: list[str] = []
        for title, items in sections.items():
            shown = items if everything else items[:_LINES]
            lines += [f"{title} ({len(items)}):"] if items else []
            lines += [f"  {item}" for item in shown]
            if len(items) > len(shown):
                lines.append(f"  ... {len(items) - len(shown)} more, see --all")
        tensors = _count(comparison["equal_tensors"], "tensor")
        equal = f"{tensors} and {_count(comparison['equal_objects'], 'object')}"
        verdict = "Equal" if comparison["equal"] else "Not equal"
        lines.append(f"{verdict}: {equal} are the same in both")
        _answer(comparison, lines, as_json=as_json, good=comparison["equal"])


def _check_options(to: str, max_shard_size: str, *, trained: bool, for_hf: bool) -> int:
    """Refuses options without effect, and returns the bytes at which a new file begins."""
    if trained and to != "full":
        raise ConfigError(
            f"--weights trained is given with --to {to}. Only whole weights can be exchanged. "
            "Write --to full, and convert the file again if need be."
        )
    if for_hf and to != "hf":
        raise ConfigError(
            f"--dtype or --config is given with --to {to}. It would have no effect: a "
            "checkpoint keeps its values and needs no config. Remove it, or write --to hf."
        )
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *([A-Z]*)", max_shard_size.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size <= 0:
        raise ConfigError(
            f"--max-shard-size is '{max_shard_size}', which is no size. Files cannot be divided by "
            "it. Write for example 5GB or 500MiB."
        )
    return size


# --- Text. ---


def _answer(facts: dict[str, Any], lines: Iterable[str], *, as_json: bool, good: bool) -> NoReturn:
    """Prints what was found, as JSON or as text, and ends the command."""
    typer.echo(json.dumps(facts, indent=1, default=repr) if as_json else "\n".join(lines))
    raise typer.Exit(ExitCode.OK if good else ExitCode.FAILED)


def _describe(facts: dict[str, Any]) -> Iterator[str]:
    # Along which dimensions tensors lie in pieces, where that is not rows alone.
    pieces = ""
    if any(cut.startswith("dim") and cut != "dim 0" for cut in facts["pieces"]):
        pieces = ", ".join(f"{cut} ({_count(n, 'tensor')})" for cut, n in facts["pieces"].items())
    yield f"{facts['path']}: {facts['kind'] or 'no checkpoint'}"
    items = (
        ("run", facts["run_name"]),
        ("world size", facts["world_size"]),
        ("mesh", facts["mesh"]),
        ("saved at", ", ".join(f"{unit} {n}" for unit, n in facts["progress"].items())),
        ("torch", facts["torch_version"]),
        ("composer", facts["composer_version"]),
        ("parameters", f"{facts['parameters']:,}" if facts["parameters"] else None),
        ("dtypes", ", ".join(f"{name} ({n:,})" for name, n in facts["dtypes"].items())),
        (
            "values",
            f"{facts['tensors']} tensors, {facts['objects']} objects" if facts["tensors"] else None,
        ),
        ("in pieces", pieces),
        ("size", f"{size_text(facts['size_bytes'])} in {_count(len(facts['files']), 'file')}"),
    )
    yield from (f"  {name:12}{value}" for name, value in items if value not in (None, ""))
    for optimizer, groups in facts["optimizers"].items():
        yield f"  {'optimizer':12}{optimizer}, {_count(len(groups), 'group')}"
        for i, group in enumerate(groups):
            settings = ", ".join(
                f"{key}={value}" for key, value in group["hyperparameters"].items()
            )
            names = "names unknown" if group["names"] is None else _count(group["names"], "name")
            yield f"    {i}: {names}; {settings or 'values cannot be read'}"
    for tie in facts["ties"]:
        yield f"  {'tied':12}{' = '.join(tie)}"
    for problem in facts["problems"]:
        yield f"  {'problem':12}{problem}"
    for remark in facts["remarks"]:
        yield f"  {'note':12}{remark}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
