"""What the tests of `migrate` share: rows of tables and the keys of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Dialect, Entry, Report
from tests.support.data_folder import CONFIGS

COUNTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("batch", "microbatch", "accumulation", "evaluated"), (4,)),
    "steps": (500, -1),
    "epochs": (3, 1.5),
    "folder": ("out",),
    **dict.fromkeys(("saves", "evaluates"), (500, 0.1)),
    "saved": ("steps", "epoch", "no", "best"),
    "evaluation": ("steps", "epoch", "no"),
    "kept": (0, 2),
    "weights": (False, True),
    "logs": (10, 0.1, 0),
    "seed": (3,),
    "rate": (2e-5,),
    "decay": (0.1,),
    "beta1": (0.9,),
    "beta2": (0.95,),
    "epsilon": (1e-8,),
    "method": ("adamw_torch", "adafactor"),
    "warmup": (20, 0.1, 0),
    "warmed part": (0.03, 0),
    "schedule": ("cosine", "polynomial"),
    "frozen": ("vision_tower",),
}
"""a value for each row of what a key counts"""


def counted(keys: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Keys of a dialect's counts with values that reach each of their rows."""
    return [(key, value) for key, name in keys.items() for value in (*COUNTED[name], None)]


def files(pattern: str) -> list[Path]:
    """Configurations of `tests/data/configs`; without one there is nothing to test.

    Raises:
        FileNotFoundError: if no file is of this pattern.
    """
    found = sorted(CONFIGS.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no file {pattern} in {CONFIGS}")
    return found


def text_of(file: Path) -> str:
    """What is written there, with the file's own ends of lines."""
    return file.read_bytes().decode()


def entry_of(report: Report, key: str) -> Entry:
    (found,) = [entry for entry in report.entries if entry.key == key]
    return found


def settings_of(report: Report) -> dict[str, Any]:
    return {k: v for entry in report.entries for k, v in entry.settings.items()}


def key_paths(data: Any, path: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield f"{path}{key}"
        if isinstance(value, Mapping):
            yield from key_paths(value, f"{path}{key}.")


def missing(data: Mapping[str, Any], report: Report) -> list[str]:
    """Keys of the input that the report neither names nor holds inside or around others."""
    named = [entry.key for entry in report.entries]
    return [
        path
        for path in key_paths(data)
        if not any(f"{n}.".startswith(f"{path}.") or f"{path}.".startswith(f"{n}.") for n in named)
    ]


def rows_without_a_case(dialect: Dialect, reports: list[Report]) -> list[Any]:
    """Rows of a table that no case of a test reached."""
    reached = [id(entry.row) for report in reports for entry in report.entries]
    return [r for r in (*dialect.rows, *dialect.outside) if id(r) not in reached]


def check_stable(report: Report) -> None:
    again = migrate(report.text)
    assert again.text == report.text
    assert again.dialect in ("fsdp2", "none", "accelerate-unsharded")
