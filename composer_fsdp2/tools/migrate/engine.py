"""Migrates a configuration: recognise its dialect, walk its keys, write the new file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from composer_fsdp2.config.fsdp1 import FSDP1_STRATEGIES
from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.findings import findings_of
from composer_fsdp2.foundry.run_file import NEEDED
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.tools.migrate import (
    accelerate,
    arguments,
    composer,
    deepspeed,
    deepspeed_trainers,
    roll,
)
from composer_fsdp2.tools.migrate.document import Document, read_settings
from composer_fsdp2.tools.migrate.report import (
    ADDED,
    CHANGES,
    CONVERTED,
    DECISION,
    KEPT,
    NOT_NEEDED,
    SAME,
    Context,
    Dialect,
    Entry,
    Path,
    Ranks,
    Report,
    Row,
    Site,
    settings_for,
    value_at,
)
from composer_fsdp2.tools.migrate.shared_rows import SHARDING_KEYS
from composer_fsdp2.tools.migrate.signs import check_is_converted, foreign_sign, sharding_in

__all__ = ["DIALECTS", "OF_RUNS", "migrate"]

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        deepspeed.DEEPSPEED,
        roll.ROLL,
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

OF_RUNS = frozenset(
    {
        dialect.name
        for dialect in (composer.MIXED, composer.FSDP_VERSION_2, composer.FSDP1, composer.FSDP2)
    }
)
"""dialects whose files are runs of LLM Foundry"""
_JOB = "parameters"
"""where the platform's own files hold the run they start"""
_BYTE_ORDER_MARK = "\ufeff"
_OF_PLACE = re.compile(r"\$\{\s*(\.|(fsdp_config|parallelism_config\.fsdp)\b)")
"""interpolations that start from a place, or lead to one, that the new file has not"""
_GIVEN = "given by --set"
"""reason of the entries that `--set fsdp2.NAME` makes"""
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
        name: of the text, in error messages.
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
    sites, in_file = spoken.find(data), spoken.ranks(data)
    ranks = (world_size or in_file[0], gpus_per_node or in_file[1])
    work = _Migration(document, data, spoken, dict(decisions or {}), ranks, folder)
    results = [(site, work.site(site)) for site in sites]
    new = document.replace(results) if results else document
    entries = [entry for _, site_entries in results for entry in site_entries]
    replaced = {entry.path for entry in entries}
    if twice := sorted(".".join(path) for path in document.duplicates if path not in replaced):
        raise ConfigError(
            f"'{name}' says {', '.join(map(repr, twice[:5]))} more than once. Which one counts "
            "depends on the reader. Remove all but one."
        )
    keys = {(*site.parent, key) for site in sites for key in site.keys}
    around = {(), *(site.parent for site in sites)}
    outside = list(work.outside(document.data, (), keys, around))
    entries += outside
    undecided = [entry for entry in outside if entry.is_open]
    if spoken is _NOTHING and not undecided and (sign := foreign_sign(data)):
        raise ConfigError(
            f"'{name}' is in a dialect that is not known: '{sign}' says how its trainer shards a "
            "run, and no table here has it. Nothing would be migrated. Write "
            "`parallelism_config: {fsdp2: {...}}` by hand, or give a file of one of the trainers "
            f"that are known: {', '.join(DIALECTS)}."
        )
    if undecided and (sites or document.text == text):  # JSON that stays JSON has no comments
        new = new.noted(undecided)
    if unused := [key for key in work.decisions if key not in work.used]:
        hint = nearest(unused[0], [entry.key for entry in entries])
        raise ConfigError(
            f"--set names '{unused[0]}', which is no sharding key of the input. It would have no "
            f"effect.{hint} Write a key of the report, or fsdp2.NAME for a setting of the new file."
        )
    written = (_BYTE_ORDER_MARK if mark else "") + (text if new is document else new.text)
    remarks = _remarks(results, new.data, is_run=spoken.name in OF_RUNS)
    return Report(spoken.name, spoken.title, tuple(entries), written, remarks)


@dataclass(slots=True)
class _Migration:
    """Walks one document."""

    document: Document
    resolved: dict[str, Any]
    dialect: Dialect
    decisions: dict[str, Any]
    ranks: Ranks
    folder: File | None
    used: set[str] = field(default_factory=set[str])
    """decisions that fit a key"""

    def site(self, site: Site) -> list[Entry]:
        """Returns the results for the keys of one site, and what is added."""
        context = Context({}, self.resolved, site, *self.ranks)
        values, head = context.parent, site.wrapper[0]
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
        self.dialect.finish(context)
        entries = [*context.entries.values(), *context.added]
        for decision, value in self.decisions.items():
            start, _, setting = decision.partition(".")
            if start == "fsdp2" and setting:
                self.used.add(decision)
                path = (*site.parent, *site.wrapper, setting)
                entries.append(Entry(path, None, ADDED, _GIVEN, {setting: value}))
        _check_each(entries, [name for name in values if name not in site.keys])
        _join(entries)
        _check_together(entries, self.ranks[0])
        return entries

    def _add_around(self, context: Context) -> None:
        """Adds settings of keys around the site; the first row of the table counts."""
        rows = self.dialect.around
        covered = set[str]()
        for key in dict.fromkeys(row.key for row in rows):
            around_key, value = context.around(key)
            row = next((row for row in rows if row.key == key and row.matches(value)), None)
            if row is None or value is None or key in context.entries:
                continue
            settings = settings_for(row.settings, value)
            beside = settings_for(row.trainer, value)
            if new := {**settings, **beside}.keys() - covered:
                block = context.site.wrapper if settings else ()
                path = (*context.site.parent, *block, ", ".join(sorted(new)))
                said = f"`{around_key}` says it"
                context.added.append(Entry(path, None, ADDED, said, settings, beside=beside))
            covered |= new

    def outside(
        self, data: Mapping[str, Any], path: Path, replaced: set[Path], around: set[Path]
    ) -> Iterator[Entry]:
        """Yields entries of all keys that are not replaced; `around` are the sites' mappings."""
        for key, value in data.items():
            entry = Entry((*path, key), value, KEPT, "not about sharding; left as it is")
            name = entry.key
            if entry.path in replaced:
                continue
            # `*.` stands for any place.
            rows = [
                row
                for row in self.dialect.outside
                if name == row.key or (row.key[:2] == "*." and f".{name}".endswith(row.key[1:]))
            ]
            if isinstance(value, Mapping) and value and not rows:
                yield from self.outside(value, entry.path, replaced, around)
                continue
            row = next((row for row in rows if row.matches(value)), None)
            if row is not None:
                entry.follow(row, value)
            elif reason := sharding_in(self.document.data, entry.path, value, around):
                entry.decide(reason, "remove it", "move its settings to where the run reads them")
            yield entry

    def _walk(self, context: Context, key: str, path: Path, value: Any) -> None:
        """Works out a key of a site, or those of the mapping in it or in the file it names."""
        name, dialect = ".".join(path), self.dialect
        rows = [row for row in dialect.rows if row.key == key]
        is_block = not rows and any(r.key.startswith(f"{key}.") or not key for r in dialect.rows)
        decision = next((g for g in self.decisions if name == g or name.endswith(f".{g}")), None)
        if decision is not None:
            self.used.add(decision)
            value = self.decisions[decision]
        entry = Entry(path, value, DECISION, "")
        if is_block and key in dialect.files and isinstance(value, str):
            value, source = read_settings(value, self.folder)
            context.entries[key] = entry
            entry.become(CONVERTED, f"its settings were read from '{source}'")
            if value is None:
                entry.decide(
                    f"the file {source}", "put its content here as a mapping", f"{name}=null"
                )
                return
        if is_block and isinstance(value, Mapping) and value:
            for inner, item in value.items():
                part = inner.removeprefix(dialect.prefix)
                self._walk(context, f"{key}.{part}" if key else part, (*path, inner), item)
            return
        context.entries[key] = entry
        if is_block and value:
            word = str(entry.value).upper()
            strategy = [f"{name}={{sharding_strategy: {word}}}"] if word in FSDP1_STRATEGIES else []
            entry.decide(
                f"takes a mapping of settings, and {ascii_repr(value)} says nothing that is known",
                *strategy,
                "write its settings as a block, one key per line",
                f"{name}=null",
            )
        elif is_block:
            entry.become(CONVERTED, "holds no settings: the defaults")
        else:
            self._follow(entry, key, rows, is_given=decision is not None)

    def _follow(self, entry: Entry, key: str, rows: Sequence[Row], *, is_given: bool) -> None:
        """Takes the first row that speaks of the value, which the file or `--set` gives."""
        row = next((row for row in rows if row.matches(entry.value)), None)
        if is_given and entry.value is None:
            entry.become(NOT_NEEDED, "taken out by --set")
        elif not rows:
            name = key.rpartition(".")[2]
            names = sorted({row.key.rpartition(".")[2] for row in self.dialect.rows})
            if name in names:
                reason = "is a key of this dialect, but not in this place; it would have no effect"
                entry.decide(reason, f"{name}=null", "move it to where it is read")
            else:
                reason = "is not a key of this dialect; it would have no effect."
                entry.decide(reason + nearest(name, names), f"{name}=null", "correct its name")
        elif row is None:
            entry.decide(
                f"{entry.value!r} is not a value this key is known to take",
                *dict.fromkeys(f"{entry.key}={choice}" for row in rows for choice in row.choices),
                f"{entry.key}=null",
            )
        else:
            entry.follow(row, entry.value)
            if is_given:
                # What --set says is not in the input's text.
                entry.becomes = entry.settings
            elif isinstance(text := value_at(self.document.data, entry.path), str) and "${" in text:
                _write_out(entry, text)
            if not is_given and (values := self.document.duplicates.get(entry.path)):
                reason = "written more than once; which one counts depends on the reader"
                entry.decide(reason, *(f"{entry.key}={value}" for value in values))


def _write_out(entry: Entry, text: str) -> None:
    """Writes the value of an interpolation out, where the new file has no place for it.

    Args:
        entry: of a key whose row is known.
        text: the value as the file writes it.
    """
    stays = bool(entry.becomes) and all(v is SAME for v in entry.becomes.values())
    counts = bool(entry.becomes) or (entry.row is not None and entry.row.when is not None)
    if entry.is_open or not counts or (stays and not _OF_PLACE.search(text)):
        return
    entry.becomes = entry.settings
    if "${" in str(entry.value):
        entry.decide(
            f"`{text}` leads elsewhere from the new place, and its value is not known here",
            f"{entry.key}=<its value>",
        )
        return
    entry.reason += f"; `{text}` is {ascii_repr(entry.value)} here, which is written out"
    if "oc.env" in text:
        entry.status = CHANGES


# --- Entries of one site together: what they say twice, what contradicts, what FSDP2 refuses. ---


def _check_each(entries: Sequence[Entry], present: Collection[str]) -> None:
    """Makes decisions of values that FSDP2 refuses; `--set` and the file's own keys win."""
    for entry in entries:
        for name in [name for name in entry.beside if name in present]:
            del entry.beside[name]
            entry.reason += f"; the file has its own `{name}`, which stays"
        try:
            # Checked alone, `load_monolith_rank0_only` would miss its state_dict_type.
            parse_config({"state_dict_type": "full", **_plain(entry)})
        except ConfigError as error:
            entry.decide(str(error), f"{entry.key}=<another value>")
    decided = {name for entry in entries if entry.reason == _GIVEN for name in entry.becomes}
    for entry in (entry for entry in entries if entry.reason != _GIVEN):
        for name in [name for name in entry.becomes if name in decided]:
            del entry.becomes[name]
            entry.reason += f"; --set gives `{name}`"


def _plain(entry: Entry) -> dict[str, Any]:
    """Returns an entry's settings without those only the run can resolve."""
    settings = entry.settings.items()
    return {k: v for k, v in settings if not (isinstance(v, str) and "${" in v)}


def _join(entries: Sequence[Entry]) -> None:
    """Leaves every setting in the entry that says it first; a contradiction is a decision."""
    spoken: dict[tuple[str, ...], list[tuple[Entry, Any]]] = {}
    for entry in entries:
        for setting_path, value in (*_parts(entry.settings, ()), *_parts(entry.beside, ("",))):
            spoken.setdefault(setting_path, []).append((entry, value))
    for setting_path, said in spoken.items():
        first = said[0][1]
        if all(type(value) is type(first) and value == first for _, value in said):
            continue
        name = ".".join(part for part in setting_path if part)
        told = " and ".join(f"`{entry.key}: {ascii_repr(entry.value)}`" for entry, _ in said)
        from_input = [entry for entry, _ in said if entry.status is not ADDED]
        for entry in (entry for entry in from_input if not entry.is_open):
            options = [f"{entry.key}=null" for entry in from_input]
            entry.decide(f"{told} say different things about `{name}`", *options)
    holders: dict[str, Entry] = {}
    for entry in entries:
        for setting in list(entry.becomes):
            first = holders.setdefault(setting, entry)
            if first is not entry:
                before, value = first.becomes[setting], entry.becomes.pop(setting)
                if isinstance(before, dict) and isinstance(value, dict):
                    first.becomes[setting] = {**before, **value}


def _parts(
    settings: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each setting, and each part of a mapping, with its place."""
    for name, value in settings.items():
        if isinstance(value, dict) and value and len(path) < 2:
            yield from _parts(value, (*path, name))
            # A mapping in one place and a word in another contradict each other as a whole.
            value = dict
        yield (*path, name), value


def _check_together(entries: Sequence[Entry], world_size: int | None) -> None:
    """Makes decisions of the keys without which a mistake of all settings together goes."""

    def mistakes(entries: Sequence[Entry]) -> list[str]:
        settings = {k: v for entry in entries for k, v in _plain(entry).items()}
        try:
            config = parse_config(settings)
            if world_size is not None:
                MeshShape.resolve(config, world_size)
        except ConfigError as error:
            return [f"{finding.what} {finding.advice}" for finding in findings_of(error)]
        return []

    while told := mistakes(entries):
        written = [entry for entry in entries if entry.becomes]
        gone: list[tuple[Entry, list[str]]] = []
        for entry in written:
            remaining = mistakes([other for other in entries if other is not entry])
            gone.append((entry, [text for text in told if text not in remaining]))
        # Of mistakes that two keys make, each without the other, both have a part.
        blamed = [pair for pair in gone if pair[1]] or [(entry, told) for entry in written]
        for entry, texts in blamed:
            entry.decide(" ".join(texts), f"{entry.key}=<another value>")


# --- The whole file: its dialect, its interpolations, and where its settings stand. ---


def _choose(data: Mapping[str, Any], name: str | None, file: str) -> Dialect:
    if name is None and composer.is_ours(data):
        _check_half_migrated(data, file)
        return composer.MIXED if composer.MIXED.find(data) else composer.FSDP2
    if name is None:
        check_is_converted(file, data)
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
        others = ["parallelism_config.fsdp"] if block.get("fsdp") is not None else []
        others += [key for key in SHARDING_KEYS if data.get(key)]
        if others:
            ours = ".".join([*path, "parallelism_config.fsdp2"])
            theirs = ".".join([*path, others[0]])
            raise ConfigError(
                f"'{file}' has both '{theirs}' and '{ours}': it is half migrated. A run follows "
                "one of them and would ignore or refuse the other. Move what you need to "
                f"'{ours}' and remove '{theirs}'."
            )
    for key, value in data.items():
        if isinstance(value, Mapping) and key != "parallelism_config":
            _check_half_migrated(value, file, (*path, key))


def _resolve(document: Document) -> dict[str, Any]:
    """Returns the data with interpolations replaced as far as they can be here."""
    if "${" not in document.text:
        return document.data
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    data = document.data
    try:
        tree = OmegaConf.create(data)
    except (OmegaConfBaseException, ValueError):
        return data
    # The platform hands a run on as a file, in which `${...}` start from its own top.
    inner: Any = OmegaConf.create(data[_JOB]) if isinstance(data.get(_JOB), Mapping) else None

    def resolved(path: Path, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: resolved((*path, key), item) for key, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        inside = inner is not None and path[0] == _JOB
        start: Any = inner if inside else tree
        inner_path = path[1:] if inside else path
        try:
            selected: Any = OmegaConf.select(start, ".".join(inner_path), default=value)
            return (
                OmegaConf.to_container(selected, resolve=True)
                if OmegaConf.is_config(selected)
                else selected
            )
        except (OmegaConfBaseException, RecursionError):
            return value

    return resolved((), data)


def _remarks(
    results: Sequence[tuple[Site, list[Entry]]], data: Mapping[str, Any], *, is_run: bool
) -> tuple[str, ...]:
    """Says where settings go that are not where LLM Foundry reads them, and what a run lacks.

    Args:
        results: sites with their entries.
        data: of the new file.
        is_run: whether the file is a run of LLM Foundry.
    """
    target, remarks = ".".join(Site((), {}).wrapper), list[str]()
    for site, entries in results:
        site_path = ".".join((*site.parent, *site.wrapper))
        if site_path == target or site.parent[:1] == (_JOB,):
            continue
        beside = dict.fromkeys(f"`{name}`" for entry in entries for name in entry.beside)
        with_them = f", with {', '.join(beside)} beside them" if beside else ""
        remarks.append(
            f"The new settings stand at '{site_path}'{with_them}. LLM Foundry and `composer-fsdp2 "
            f"train` read '{target}' at the top of a run: move them there."
        )
    present = {*data, *(key for site, _ in results for key in value_at(data, site.parent) or ())}
    lacking = [f"`{key}: {value}`" for key, value in NEEDED.items() if key not in present]
    if results and lacking and not is_run:
        remarks.append(
            f"A run of LLM Foundry needs what this file does not say: write {', '.join(lacking)}. "
            "Keys of the old trainer that are left as written belong under `variables`, or go. "
            "`composer-fsdp2 doctor` says whether the run is complete."
        )
    return tuple(remarks)
