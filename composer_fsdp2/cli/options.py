"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "GpusPerNode", "Overrides", "Processes", "RanksOfRun"]

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
