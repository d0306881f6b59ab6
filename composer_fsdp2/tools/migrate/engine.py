"""Migrates a configuration: recognise its dialect, walk its keys, write the new file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from composer_fsdp2.config.fsdp1 import FSDP1_STRATEGIES
from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate import accelerate, composer, deepspeed
from composer_fsdp2.tools.migrate.dialects import (
    arguments,
    deepspeed_trainers,
    roll,
    verl,
)
from composer_fsdp2.tools.migrate.document import Document, check_result, read_settings
from composer_fsdp2.tools.migrate.leftover import foreign_sign, sharding_in
from composer_fsdp2.tools.migrate.merging import GIVEN, merge_entries
from composer_fsdp2.tools.migrate.report import (
    Context,
    Dialect,
    Entry,
    Path,
    Report,
    Row,
    Site,
    Status,
)
from composer_fsdp2.tools.migrate.shared_rows import SHARDING_KEYS

__all__ = ["DIALECTS", "migrate"]

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        deepspeed.DEEPSPEED,
        roll.ROLL,
        verl.VERL,
        deepspeed_trainers.ACCELERATE_DEEPSPEED,
        accelerate.ACCELERATE,
        deepspeed_trainers.ARGUMENTS_DEEPSPEED,
        arguments.TRAINING_ARGUMENTS,
        composer.MIXED,
        composer.FSDP_VERSION_2,
        composer.FSDP1,
    )
}
"""In the order in which they are tried."""

_JOB = "parameters"
"""where the platform's own files hold the run they start"""
_LONG_LIST = 1_000
_BYTE_ORDER_MARK = "\ufeff"
_OUTSIDE = "not about sharding; left as it is"
_NOTHING = Dialect("none", "nothing about sharding", lambda _data, _path: None, ())


def migrate(
    text: str,
    *,
    name: str = "the configuration",
    folder: File | None = None,
    dialect: str | None = None,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    decisions: Mapping[str, Any] | None = None,
) -> Report:
    """Migrates one configuration.

    Args:
        text: YAML or JSON.
        name: what errors call it.
        folder: where files are looked for that the configuration names; without it they are not.
        dialect: a key of `DIALECTS`; recognised from the content without it.
        world_size: ranks of the run, where settings depend on it.
        gpus_per_node: ranks per node, likewise.
        decisions: values by key: a key of the report is read as if the input held that value,
            `null` takes it out; `fsdp2.NAME` sets a setting of the new file.

    Raises:
        ConfigError: it cannot be read, is in another dialect, or a decision fits no key.
    """
    text, mark = text.removeprefix(_BYTE_ORDER_MARK), text.startswith(_BYTE_ORDER_MARK)
    document = Document(text, name)
    data = _resolve(document)
    spoken = _choose(data, dialect, name)
    sites = spoken.find(data)
    work = _Work(document, data, spoken, dict(decisions or {}), (world_size, gpus_per_node), folder)
    entries: list[Entry] = []
    new = text
    # From the last to the first, so that the lines of the others stay where they are.
    for number, site in enumerate(sorted(sites, key=document.first_line, reverse=True)):
        found = work.site(site)
        output = Document(new, name) if number else document
        new = output.replace(site, found)
        check_result(new)
        entries = found + entries
    replaced = {entry.path for entry in entries}
    if twice := sorted(".".join(path) for path in work.duplicates if path not in replaced):
        raise ConfigError(
            f"'{name}' says {', '.join(map(repr, twice[:5]))} more than once. Which one counts "
            "depends on the reader. Remove all but one."
        )
    outside = work.outside(sites)
    entries += outside
    left = [entry for entry in outside if entry.is_open]
    if spoken is _NOTHING and not left and (sign := foreign_sign(data)):
        raise ConfigError(
            f"'{name}' is in a dialect that is not known: '{sign}' says how its trainer shards a "
            "run, and no table here has it. Nothing would be migrated. Write "
            "`parallelism_config: {fsdp2: {...}}` by hand, or give a file of one of the trainers "
            f"that are known: {', '.join(DIALECTS)}."
        )
    if left and (sites or document.text == text):  # JSON that stays JSON has no comments
        new = Document(new, name).noted(left)
        check_result(new)
    if unused := [key for key in work.decisions if key not in work.used]:
        hint = nearest(unused[0], [entry.key for entry in entries])
        raise ConfigError(
            f"--set names '{unused[0]}', which is no sharding key of the input. It would have no "
            f"effect.{hint} Write a key of the report, or fsdp2.NAME for a setting of the new file."
        )
    new = _BYTE_ORDER_MARK + new if mark else new
    return Report(spoken.name, spoken.title, tuple(entries), new, _remarks(sites))


class _Work:
    """Walks one document."""

    def __init__(
        self,
        document: Document,
        resolved: dict[str, Any],
        dialect: Dialect,
        decisions: dict[str, Any],
        ranks: tuple[int | None, int | None],
        folder: File | None,
    ) -> None:
        self.data = document.data
        self.resolved = resolved
        self.dialect = dialect
        self.decisions = decisions
        self.folder = folder
        self.used: set[str] = set()
        in_file = dialect.ranks(resolved)
        self.ranks = (ranks[0] or in_file[0], ranks[1] or in_file[1])
        self.duplicates = document.duplicates()

    def site(self, site: Site) -> list[Entry]:
        """Returns the results for the keys of one site, and what is added."""
        context = Context({}, self.resolved, site, *self.ranks)
        values = context.parent
        head = site.wrapper[0]
        if head in values and head not in site.keys:
            raise ConfigError(
                f"The configuration has both '{next(iter(site.keys))}' and '{head}'. The new "
                f"settings would stand in a second '{head}'. Remove the one that is there, or move "
                "what you need to it."
            )
        for key, first in site.keys.items():
            if key in values:
                self._walk(context, first, (*site.parent, key), values[key])
        self._add_around(context)
        if self.dialect.finish is not None:
            self.dialect.finish(context)
        entries = [*context.entries.values(), *context.added]
        for given, value in self.decisions.items():
            start, _, setting = given.partition(".")
            if start == "fsdp2" and setting:
                self.used.add(given)
                path = (*site.parent, *site.wrapper, setting)
                entries.append(Entry(path, None, Status.ADDED, GIVEN, {setting: value}))
        merge_entries(entries, [n for n in values if n not in site.keys], self.ranks[0])
        return entries

    def _add_around(self, context: Context) -> None:
        """Adds settings of keys around the site; the first row of the table counts."""
        rows = self.dialect.around
        known = set[str]()
        for key in dict.fromkeys(row.key for row in rows):
            place, value = context.around(key)
            row = next((row for row in rows if row.key == key and row.matches(value)), None)
            if row is None or value is None or key in context.entries:
                continue
            settings, beside = row.becomes(value), row.beside(value)
            if new := {**settings, **beside}.keys() - known:
                block = context.site.wrapper if settings else ()
                path = (*context.site.parent, *block, ", ".join(sorted(new)))
                said = Entry(
                    path, None, Status.ADDED, f"`{place}` says it", settings, beside=beside
                )
                context.added.append(said)
            known |= new

    def outside(self, sites: list[Site]) -> list[Entry]:
        """Entries of all keys that are in no site."""
        replaced = {(*site.parent, key) for site in sites for key in site.keys}
        rows = self.dialect.outside
        parents = {(), *(site.parent for site in sites)}
        entries: list[Entry] = []

        def whole(path: Path) -> bool:
            return path in replaced or any(_is_at(row, ".".join(path)) for row in rows)

        for path, value in _leaves(self.data, (), whole):
            if path in replaced:
                continue
            entry = Entry(path, value, Status.KEPT, _OUTSIDE)
            row = next((r for r in rows if _is_at(r, entry.key) and r.matches(value)), None)
            if row is not None:
                entry = Entry(path, value, row.status, row.reason, {}, row.options, row)
            elif reason := sharding_in(self.data, path, value, parents):
                entry.decide(reason, "remove it", "move its settings to where the run reads them")
            self._check_twice(entry)
            entries.append(entry)
        return entries

    def _walk(self, context: Context, key: str, path: Path, value: Any) -> None:
        rows = [row for row in self.dialect.rows if row.key == key]
        inner = any(row.key.startswith(f"{key}.") or not key for row in self.dialect.rows)
        if inner and not rows:
            value = self._block(context, key, path, value)
            if key in context.entries and context.entries[key].is_open:
                return
        if not rows and inner and isinstance(value, Mapping) and value:
            for name, item in value.items():
                part = name.removeprefix(self.dialect.prefix)
                self._walk(context, f"{key}.{part}" if key else part, (*path, name), item)
            return
        entry = self._entry(path, value, rows)
        if not rows and inner and not value:
            entry.become(Status.CONVERTED, "holds no settings: the defaults")
        elif not rows and entry.is_open:
            entry.decide(*(_no_block(entry) if inner else _unknown(key, self.dialect.rows)))
        context.entries[key] = entry

    def _block(self, context: Context, key: str, path: Path, value: Any) -> Any:
        """A value that should be a mapping, after `--set` and with the file that it names."""
        name = ".".join(path)
        if name in self.decisions:
            self.used.add(name)
            value = self.decisions[name]
        if key not in self.dialect.files or not isinstance(value, str):
            return value
        settings, place = read_settings(value, self.folder)
        entry = Entry(path, value, Status.CONVERTED, f"its settings were read from '{place}'")
        context.entries[key] = entry
        if settings is None:
            entry.decide(f"the file {place}", "put its content here as a mapping", f"{name}=null")
            return value
        return settings

    def _entry(self, path: Path, value: Any, rows: Sequence[Row]) -> Entry:
        entry = Entry(path, value, Status.DECISION, "")
        decided = self._decision(entry.key)
        if decided is not None:
            entry.value = value = self.decisions[decided]
        if decided is not None and value is None:
            entry.become(Status.NOT_NEEDED, "taken out by --set")
            return entry
        row = next((row for row in rows if row.matches(value)), None)
        if row is None:
            known = [str(choice) for row in rows for choice in row.choices]
            entry.decide(
                f"{value!r} is not a value this key is known to take",
                *(f"{entry.key}={choice}" for choice in known),
                f"{entry.key}=null",
            )
            return entry
        entry.row = row
        entry.become(row.status, row.reason, **row.becomes(value))
        entry.options = tuple(self._addressed(option, entry, row) for option in row.options)
        entry.beside = row.beside(value)
        if decided is not None:
            # What --set says is not in the input's text.
            entry.becomes = entry.settings
        else:
            self._check_twice(entry)
        return entry

    def _addressed(self, option: str, entry: Entry, row: Row) -> str:
        """An option about the entry itself, with the key as the file has it."""
        name, equals, value = option.partition("=")
        block, _, last = name.rpartition(".")
        own = f"{block}.{last.removeprefix(self.dialect.prefix)}".lstrip(".")
        if equals and f".{row.key}".endswith(f".{own}"):
            return f"{entry.key}={value}"
        return option

    def _check_twice(self, entry: Entry) -> None:
        values = self.duplicates.get(entry.path)
        if values:
            options = [f"{entry.key}={value}" for value in values]
            entry.decide("written more than once; which one counts depends on the reader", *options)

    def _decision(self, key: str) -> str | None:
        for given in self.decisions:
            if key == given or key.endswith(f".{given}"):
                self.used.add(given)
                return given
        return None


def _choose(data: Mapping[str, Any], name: str | None, file: str) -> Dialect:
    if name is None and composer.is_ours(data):
        _check_half_migrated(data, file)
        return composer.MIXED if composer.MIXED.find(data) else composer.FSDP2
    if name is None and accelerate.shards_nothing(data):
        return accelerate.UNSHARDED
    if name is None:
        return next((d for d in DIALECTS.values() if d.find(data)), _NOTHING)
    if name not in DIALECTS:
        hint = nearest(name, DIALECTS) or f" There are {', '.join(DIALECTS)}."
        raise ConfigError(f"There is no dialect '{name}'. Nothing can be read by it.{hint}")
    if not DIALECTS[name].find(data):
        raise ConfigError(
            f"'{file}' holds no settings in the dialect '{name}'. Nothing would be migrated. Leave "
            "the dialect out to have it recognised."
        )
    return DIALECTS[name]


def _check_half_migrated(data: Mapping[str, Any], file: str, path: Path = ()) -> None:
    """Refuses settings of ours beside those of another dialect in one run.

    Raises:
        ConfigError: with both places.
    """
    block = data.get("parallelism_config")
    if isinstance(block, Mapping) and "fsdp2" in block:
        others = [["parallelism_config", "fsdp"]] if block.get("fsdp") is not None else []
        others += [[key] for key in SHARDING_KEYS if data.get(key)]
        if others:
            place = ".".join([*path, "parallelism_config", "fsdp2"])
            raise ConfigError(
                f"'{file}' has both '{'.'.join([*path, *others[0]])}' and '{place}': it is half "
                "migrated. A run follows one of them and would ignore or refuse the other. Move "
                f"what you need to '{place}' and remove '{'.'.join([*path, *others[0]])}'."
            )
    for key, value in data.items():
        if isinstance(value, Mapping) and key != "parallelism_config":
            _check_half_migrated(value, file, (*path, key))


def _resolve(document: Document) -> dict[str, Any]:
    """The data with interpolations replaced as far as they can be here."""
    if "${" not in document.text:
        return document.data
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    data = _without_long_lists(document.data)
    try:
        tree = OmegaConf.create(data)
    except (OmegaConfBaseException, ValueError):
        return document.data
    # The platform hands a run on as a file, in which `${...}` start from its own top.
    inner: Any = OmegaConf.create(data[_JOB]) if isinstance(data.get(_JOB), Mapping) else None

    def resolved(path: Path, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: resolved((*path, key), item) for key, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        inside = inner is not None and path[0] == _JOB
        try:
            start: Any = inner if inside else tree
            place = path[1:] if inside else path
            found = OmegaConf.select(start, ".".join(place), default=value)
            whole = OmegaConf.is_config(found)
            return OmegaConf.to_container(found, resolve=True) if whole else found
        except (OmegaConfBaseException, RecursionError):
            return value

    return resolved((), document.data)


def _without_long_lists(value: Any) -> Any:
    """The same without data that no setting points at: omegaconf takes 0.2 ms for each item."""
    if isinstance(value, Mapping):
        return {key: _without_long_lists(item) for key, item in value.items()}
    return [] if isinstance(value, list) and len(value) > _LONG_LIST else value


def _remarks(sites: Sequence[Site]) -> tuple[str, ...]:
    """Where the new settings have to go if they are not where LLM Foundry reads them."""
    nested = [
        ".".join((*site.parent, *site.wrapper))
        for site in sites
        if site.parent and site.parent[0] != _JOB
    ]
    wanted = ".".join(Site((), {}).wrapper)
    return tuple(
        f"The new settings stand at '{place}'. LLM Foundry and `composer-fsdp2 train` read "
        f"'{wanted}' at the top of a run: move them there."
        for place in nested
        if place != wanted
    )


def _leaves(
    data: Mapping[str, Any], path: Path, whole: Callable[[Path], bool]
) -> Iterator[tuple[Path, Any]]:
    """Values that are no mappings, and those `whole` holds for, whatever they are."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, Mapping) and value and not whole(here):
            yield from _leaves(value, here, whole)
        else:
            yield here, value


def _is_at(row: Row, key: str) -> bool:
    """Whether a row speaks of a path; `*.` stands for any place."""
    return key == row.key or (row.key[:2] == "*." and f".{key}".endswith(row.key[1:]))


def _no_block(entry: Entry) -> tuple[str, ...]:
    reason = (
        f"takes a mapping of settings, and {ascii_repr(entry.value)} says nothing that is known"
    )
    options = ["write its settings as a block, one key per line", f"{entry.key}=null"]
    word = entry.value if isinstance(entry.value, str) else ""
    if word.upper() in FSDP1_STRATEGIES:
        options.insert(0, f"{entry.key}={{sharding_strategy: {word.upper()}}}")
    return (reason, *options)


def _unknown(key: str, rows: Sequence[Row]) -> tuple[str, ...]:
    name = key.rpartition(".")[2]
    known = sorted({row.key.rpartition(".")[2] for row in rows})
    if name in known:
        reason = "is a key of this dialect, but not in this place; it would have no effect"
        return (reason, f"{name}=null", "move it to where it is read")
    reason = f"is not a key of this dialect; it would have no effect.{nearest(name, known)}"
    return (reason, f"{name}=null", "correct its name")
