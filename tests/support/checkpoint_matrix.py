"""Writes the table of checkpoints that resume: `python -m tests.support.checkpoint_matrix`.

It runs the matrix test and writes the results into docs/from-fsdp1.md; a cell that failed says so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.dist.test_fsdp1_checkpoints import WORLDS
from tests.support.fsdp1_fixtures import NAMES, expected

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"(<!-- matrix -->\n).*?(<!-- end of matrix -->)", re.DOTALL)
SAVED_BY = {
    "ddp_2r": "no FSDP, 2 ranks",
    "full_2r": "FSDP1, full, 2 ranks",
    "full_actckpt_2r": "FSDP1, full, activation checkpointing",
    "full_flatparam_2r": "FSDP1, full, flat parameters",
    "full_weights_only_2r": "FSDP1, full, weights only",
    "sharded_dtensor_2r": "FSDP1, sharded, DTensor, 2 ranks",
    "sharded_dtensor_4r": "FSDP1, sharded, DTensor, 4 ranks",
    "sharded_dtensor_actckpt_2r": "FSDP1, sharded, activation checkpointing",
    "sharded_dtensor_dropout_2r": "FSDP1, sharded, dropout (random states)",
    "sharded_dtensor_hsdp_2x2": "FSDP1, sharded, DTensor, HSDP 2x2",
    "sharded_dtensor_weights_only_2r": "FSDP1, sharded, weights only",
    "sharded_flatparam_2r": "FSDP1, sharded, flat parameters",
    "sharded_flatparam_shardedtensor_2r": "FSDP1, sharded, flat parameters, ShardedTensor",
    "sharded_legacy_optimizer_root_2r": "FSDP1, sharded, optimizer at the root",
    "sharded_shardedtensor_2r": "FSDP1, sharded, ShardedTensor, 2 ranks",
    "sharded_shardedtensor_hsdp_2x2": "FSDP1, sharded, ShardedTensor, HSDP 2x2",
    "single_process": "no FSDP, 1 process",
}


def measure() -> dict[tuple[str, str], float | None]:
    """The largest difference of the next five losses."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines")
        lines.touch()
        test = "tests/dist/test_fsdp1_checkpoints.py::test_every_fixture_into_every_run"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", test],
            cwd=ROOT,
            env={**os.environ, "CHECKPOINT_MATRIX": str(lines)},
            check=False,
        )
        cells = [json.loads(line) for line in lines.read_text().splitlines()]
    return {(cell["name"], cell["into"]): cell["difference"] for cell in cells}


def describe_cell(name: str, difference: float | None) -> str:
    if expected(name)["weights_only"]:
        return "weights exact"
    return "exact" if difference is None else f"exact, {difference:.0e}".replace("0e+00", "0")


def table() -> str:
    found = measure()
    lines = [
        f"Measured with torch {torch.__version__.split('+')[0]} on CPU.",
        "",
        "| saved by | " + " | ".join(f"into {into}" for into in WORLDS) + " |",
        "|---|" + "---|" * len(WORLDS),
    ]
    for name in NAMES:
        cells = [
            describe_cell(name, found[name, into]) if (name, into) in found else "**failed**"
            for into in WORLDS
        ]
        lines.append(f"| {SAVED_BY[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    path = ROOT / "docs" / "from-fsdp1.md"
    text, count = MARK.subn(lambda m: m[1] + table() + m[2], path.read_text())
    assert count == 1
    path.write_text(text)


if __name__ == "__main__":
    main()
