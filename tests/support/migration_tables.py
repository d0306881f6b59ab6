"""Writes docs/reference/migration-keys.md's tables: `python -m tests.support.migration_tables`.

A line is a row of a dialect's table. What it becomes is taken from a real migration, the first of
the row's cases in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer_fsdp2.tools.migrate.accelerate import ACCELERATE, UNSHARDED
from composer_fsdp2.tools.migrate.arguments import TRAINING_ARGUMENTS
from composer_fsdp2.tools.migrate.composer import FSDP1, FSDP_VERSION_2
from composer_fsdp2.tools.migrate.deepspeed import DEEPSPEED
from composer_fsdp2.tools.migrate.deepspeed_trainers import ACCELERATE_DEEPSPEED
from composer_fsdp2.tools.migrate.report import SAME, Dialect, Entry, Report, Row
from composer_fsdp2.tools.migrate.roll import ROLL
from tests.unit.tools.test_migrate_composer import fsdp1_reports, version2_reports
from tests.unit.tools.test_migrate_dialects import reports_of
from tests.unit.tools.test_migrate_trainers import OWN_ROWS, plugin_reports, unsharded_reports

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration-keys.md"
MARK = re.compile(r"(<!-- keys: ([\w-]+) -->\n)(.*?)<!-- end of keys -->", re.DOTALL)
HEADER = ("key", "value", "becomes", "status", "reason")

_OTHER = "any other"


class Table(NamedTuple):
    """A dialect, its rows on the page and a migration of each."""

    dialect: Dialect
    rows: tuple[Row, ...]
    reports: Callable[[], Iterable[Report]]


def _whole(dialect: Dialect) -> Table:
    return Table(dialect, (*dialect.rows, *dialect.outside), lambda: reports_of(dialect))


TABLES = {
    table.dialect.name: table
    for table in (
        Table(FSDP1, (*FSDP1.rows, *FSDP1.outside), fsdp1_reports),
        # The keys around the block are FSDP1's.
        Table(FSDP_VERSION_2, FSDP_VERSION_2.rows, version2_reports),
        _whole(ACCELERATE),
        # The block is Accelerate's.
        Table(
            TRAINING_ARGUMENTS,
            tuple(row for row in TRAINING_ARGUMENTS.rows if not row.key.startswith("config.")),
            lambda: reports_of(TRAINING_ARGUMENTS),
        ),
        _whole(ROLL),
        _whole(DEEPSPEED),
        # The rest is DeepSpeed's own table, and Accelerate's for the launcher.
        Table(ACCELERATE_DEEPSPEED, tuple(OWN_ROWS), plugin_reports),
        Table(UNSHARDED, UNSHARDED.outside, unsharded_reports),
    )
}


def table(name: str) -> str:
    """A dialect's table as Markdown."""
    _, rows, reports = TABLES[name]
    first: dict[int, Entry] = {}
    for entry in (entry for report in reports() for entry in report.entries):
        if entry.row is not None and entry.status is entry.row.status:
            first.setdefault(id(entry.row), entry)
    cells = [_cells(row, first[id(row)], rows) for row in rows]
    return "".join(_line(line) for line in [HEADER, ("---",) * len(HEADER), *_merged(cells)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _cells(row: Row, entry: Entry, rows: tuple[Row, ...]) -> tuple[str, ...]:
    is_first = next(other for other in rows if other.key == row.key) is row
    # An option names the key as the file has it, and the page without the mappings around it.
    key = _key(row, entry)
    options = (option.replace(f"{entry.key}=", f"{key}=", 1) for option in entry.options)
    decide = ", ".join(map(_option, options))
    return (
        f"`{key}`",
        _values(row, entry, "any" if is_first else _OTHER),
        _becomes(row, entry),
        row.status.value,
        f"{row.reason}; decide: {decide}" if decide else row.reason,
    )


def _key(row: Row, entry: Entry) -> str:
    """As the file has it: a table may call a block by another name."""
    if row.key.startswith("*."):
        return row.key
    return ".".join(entry.path[-len(row.key.split(".")) :])


def _values(row: Row, entry: Entry, every: str) -> str:
    named = ", ".join(dict.fromkeys(f"`{_text(choice)}`" for choice in row.choices))
    # A test of values says in its docstring which ones it means.
    test = (row.when.__doc__ or "") if callable(row.when) else ""
    described = test.partition("\n")[0].removesuffix(".")
    words = named or described[:1].lower() + described[1:] or every
    # A setting that depends on the value says nothing without one.
    depends = callable(row.settings) or callable(row.trainer)
    depends |= not named and row.settings != entry.becomes
    return f"{words}, for example `{_text(entry.value)}`" if depends else words


def _becomes(row: Row, entry: Entry) -> str:
    if list(entry.becomes.values()) == [SAME]:
        (name,) = entry.becomes
        return "the same" if name == row.key.rpartition(".")[2] else f"`{name}`"
    return ", ".join(_settings(entry)) or "-"


def _settings(entry: Entry) -> list[str]:
    own = {} if SAME in entry.becomes.values() else entry.settings
    given = {**own, **entry.beside}.items()
    return [f"`{name}: {_text(value)}`" for name, value in given]


def _option(option: str) -> str:
    return f"`{option}`" if "=" in option.partition(" ")[0] or option.startswith("--") else option


def _text(value: Any) -> str:
    """A value as YAML writes it in a line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or '""'


def _merged(lines: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Keys that differ in nothing but their name share a line, if no other line comes first."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, values, *rest in lines:
        apart = key if values.startswith(_OTHER) else ""
        keys.setdefault((apart, values, *rest), []).append(key)
    return [(", ".join(found), *rest) for (_, *rest), found in keys.items()]


def page() -> str:
    """Returns the page with the tables made anew."""
    text = PAGE.read_text()
    assert {name for _, name, _ in MARK.findall(text)} == set(TABLES)
    return MARK.sub(lambda mark: f"{mark[1]}{table(mark[2])}<!-- end of keys -->", text)


if __name__ == "__main__":
    PAGE.write_text(page())
