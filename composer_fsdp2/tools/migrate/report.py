"""Results for every key of a configuration, and the tables that decide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "ADDED",
    "CHANGES",
    "CONVERTED",
    "DECISION",
    "KEPT",
    "NOT_NEEDED",
    "RENAMED",
    "SAME",
    "UNSUPPORTED",
    "Context",
    "Dialect",
    "Entry",
    "Path",
    "Ranks",
    "Report",
    "Row",
    "Site",
    "Status",
    "settings_for",
    "value_at",
]

Path = tuple[str, ...]
Ranks = tuple[int | None, int | None]


class Status(str, Enum):
    """Result for a key."""

    KEPT = "kept"
    RENAMED = "renamed"
    CONVERTED = "converted"
    NOT_NEEDED = "no longer needed"
    CHANGES = "changes behaviour"
    DECISION = "needs a decision"
    UNSUPPORTED = "not supported yet"
    ADDED = "added"
    """was not in the input; written out because its default is another one in FSDP2"""


KEPT, RENAMED, CONVERTED, NOT_NEEDED, CHANGES, DECISION, UNSUPPORTED, ADDED = Status


class _Marker(Enum):
    SAME = "the value of the input"


SAME = _Marker.SAME
"""a setting's value: as the input writes it, interpolation included"""

Convert = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a dialect's table: a key, the values it speaks of, and what they become."""

    key: str
    """dotted path from the site, as `Site.keys` names its first part"""
    status: Status
    reason: str
    when: Any = None
    """a tuple of values (strings compare in capitals), a test, or `None` for all values"""
    settings: Mapping[str, Any] | Convert = field(default_factory=dict)
    """FSDP2 settings; `SAME` stands for the value"""
    options: tuple[str, ...] = ()
    """what a user may decide: `=VALUE` for `--set` of this key, `KEY=VALUE` of another, or words"""
    trainer: Mapping[str, Any] | Convert = field(default_factory=dict)
    """settings of LLM Foundry's own, written beside the block"""

    def matches(self, value: Any) -> bool:
        """Whether the row speaks of this value."""
        if callable(self.when):
            return bool(self.when(value))
        if self.when is None:
            return True
        if isinstance(value, str):
            return any(isinstance(c, str) and value.upper() == c.upper() for c in self.when)
        return any(type(value) is type(choice) and value == choice for choice in self.when)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Returns the values that the row names one by one."""
        return self.when if isinstance(self.when, tuple) else ()


def settings_for(settings: Mapping[str, Any] | Convert, value: Any) -> dict[str, Any]:
    """Returns what a row says of a value; a copy, because entries are changed afterwards."""
    return deepcopy(dict(settings(value) if callable(settings) else settings))


@dataclass(slots=True)
class Entry:
    """Result for one key, with its value."""

    path: Path
    value: Any
    status: Status
    reason: str
    becomes: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    row: Row | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    """settings of the trainer"""

    @property
    def key(self) -> str:
        """Returns the path with dots."""
        return ".".join(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the new form, with the values of the input filled in."""
        return {k: self.value if v is SAME else v for k, v in self.becomes.items()}

    @property
    def is_open(self) -> bool:
        """Whether something is left to the user, so that nothing is written for it."""
        return self.status in (Status.DECISION, Status.UNSUPPORTED)

    def follow(self, row: Row, value: Any) -> None:
        """Takes over what a row of the table says of a value."""
        self.row, self.status, self.reason = row, row.status, row.reason
        self.becomes = settings_for(row.settings, value)
        self.beside = settings_for(row.trainer, value)
        self.options = tuple(f"{self.key}{o}" if o[0] == "=" else o for o in row.options)

    def decide(self, reason: str, *options: str) -> None:
        """Makes it the user's decision; nothing is written for it."""
        self.status, self.reason, self.options = Status.DECISION, reason, options
        self.becomes.clear()
        self.beside.clear()

    def become(self, status: Status, reason: str, **settings: Any) -> None:
        """Replaces what the table said, where other keys have a say in it."""
        self.status, self.reason, self.becomes = status, reason, settings
        self.options = ()


def value_at(data: Any, path: Path) -> Any:
    """Returns the value at a path of mappings, or `None`."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


@dataclass(frozen=True, slots=True)
class Site:
    """A mapping of the input that holds sharding settings."""

    parent: Path
    keys: Mapping[str, str]
    """keys of the parent that are replaced, and the first part of their rows' keys"""
    wrapper: Path = ("parallelism_config", "fsdp2")
    """keys written around the settings"""


@dataclass(slots=True)
class Context:
    """Results for the keys of one site, while they are worked out."""

    entries: dict[str, Entry]
    """by the dotted key of the table"""
    data: Mapping[str, Any]
    """the whole input, interpolations replaced"""
    site: Site
    world_size: int | None
    """given, or else what the file says"""
    gpus_per_node: int | None
    added: list[Entry] = field(default_factory=list)

    def value(self, key: str, default: Any = None) -> Any:
        """Returns the input's value of a key of the table."""
        return self.entries[key].value if key in self.entries else default

    @property
    def parent(self) -> Mapping[str, Any]:
        """Returns the mapping that the site is in."""
        return value_at(self.data, self.site.parent)

    def around(self, key: str) -> tuple[str, Any]:
        """Returns a key with dots, and its value, from the innermost mapping around the site."""
        for length in range(len(self.site.parent), -1, -1):
            path = (*self.site.parent[:length], *key.split("."))
            if (value := value_at(self.data, path)) is not None:
                return ".".join(path), value
        return key, None

    def add(self, reason: str, **settings: Any) -> None:
        """Writes out settings the input does not have; those that need each other together."""
        path = (*self.site.parent, *self.site.wrapper, ", ".join(settings))
        self.added.append(Entry(path, None, Status.ADDED, reason, settings))


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write sharding settings: where they are, and what each becomes."""

    name: str
    title: str
    site: Callable[[Mapping[str, Any], Path], Site | None]
    """the site that a mapping at a path of the input is"""
    rows: tuple[Row, ...]
    outside: tuple[Row, ...] = ()
    """keys that stay where they are and still have something to say; dotted from the top"""
    around: tuple[Row, ...] = ()
    """keys of the mappings around a site, which stay; what they become is added to the site"""
    finish: Callable[[Context], None] = lambda _: None
    """settings that follow from several keys"""
    nested: bool = True
    """sites are looked for at any depth, and not at the top alone"""
    prefix: str = ""
    """beginning that keys may have or lack without a difference"""
    ranks: Callable[[Mapping[str, Any]], Ranks] = lambda _: (None, None)
    """ranks in all and per node, as far as the file says them"""
    files: frozenset[str] = frozenset()
    """keys of the table that may name a file in place of the settings in it"""

    def find(self, data: Mapping[str, Any], path: Path = ()) -> list[Site]:
        """Returns the sites, none of which is inside of another one."""
        if (site := self.site(data, path)) is not None:
            return [site]
        inner = [(key, value) for key, value in data.items() if isinstance(value, Mapping)]
        return [s for key, value in inner if self.nested for s in self.find(value, (*path, key))]


@dataclass(frozen=True, slots=True)
class Report:
    """The new file and what became of every key of the old one."""

    dialect: str
    title: str
    entries: tuple[Entry, ...]
    text: str
    remarks: tuple[str, ...] = ()
    """about the file as a whole"""

    def having(self, *statuses: Status) -> list[Entry]:
        """Returns the entries with one of these statuses."""
        return [entry for entry in self.entries if entry.status in statuses]
