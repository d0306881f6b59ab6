"""Entries of one site together: what they say twice, what contradicts, and what FSDP2 refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.tools.migrate.report import Entry, Status

__all__ = ["GIVEN", "merge_entries"]

GIVEN = "given by --set"
"""reason of the entries that `--set fsdp2.NAME` makes"""


def merge_entries(
    entries: Sequence[Entry], present: Collection[str], world_size: int | None
) -> None:
    """Leaves every setting in one entry, and makes decisions of what cannot be written.

    Args:
        entries: of one site, those given by `--set fsdp2.NAME` with `GIVEN` as their reason.
        present: keys beside the site, which stay.
        world_size: ranks of the run, if known.
    """
    _keep_own(entries, present)
    _check_each(entries)
    _prefer_given(entries)
    for place, spoken in _spoken(entries).items():
        _check_conflict(place, spoken)
    _join(entries)
    _check_together(entries, world_size)


def _plain(entry: Entry) -> dict[str, Any]:
    """An entry's settings without those only the run can resolve."""
    settings = entry.settings.items()
    return {k: v for k, v in settings if not (isinstance(v, str) and "${" in v)}


def _keep_own(entries: Sequence[Entry], present: Collection[str]) -> None:
    """Keeps the settings of the trainer itself that the file has."""
    for entry in entries:
        for name in [name for name in entry.beside if name in present]:
            del entry.beside[name]
            entry.reason += f"; the file has its own `{name}`, which stays"


def _check_each(entries: Sequence[Entry]) -> None:
    """A value FSDP2 does not take is a decision."""
    for entry in entries:
        # Checked alone, `load_monolith_rank0_only` would miss its state_dict_type.
        settings = {"state_dict_type": "full", **_plain(entry)}
        try:
            parse_config(settings)
        except ConfigError as error:
            entry.decide(str(error), f"{entry.key}=<another value>")


def _prefer_given(entries: Sequence[Entry]) -> None:
    """Puts the values of `--set fsdp2.NAME` in the place of what keys of the input became."""
    given = {name for entry in entries if entry.reason == GIVEN for name in entry.becomes}
    for entry in entries:
        for name in [n for n in entry.becomes if n in given and entry.reason != GIVEN]:
            del entry.becomes[name]
            entry.reason += f"; --set gives `{name}`"


# --- The same setting from several keys. ---

_Spoken = list[tuple[Entry, Any]]


def _spoken(entries: Sequence[Entry]) -> dict[tuple[str, ...], _Spoken]:
    """Returns what the entries say of each setting, and of each part of a mapping."""
    found: dict[tuple[str, ...], _Spoken] = {}
    for entry in entries:
        for path, value in (*_parts(entry.settings, ()), *_parts(entry.beside, ("",))):
            found.setdefault(path, []).append((entry, value))
    return found


def _parts(
    settings: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value and len(path) < 2:
            yield from _parts(value, (*path, name))
            # A mapping in one place and a word in another contradict each other as a whole.
            yield (*path, name), dict
        else:
            yield (*path, name), value


def _check_conflict(place: tuple[str, ...], spoken: _Spoken) -> None:
    """Keys that say different things about one setting are a decision, whichever comes last."""
    first = spoken[0][1]
    if all(type(value) is type(first) and value == first for _, value in spoken):
        return
    name = ".".join(part for part in place if part)
    said = " and ".join(f"`{entry.key}: {ascii_repr(entry.value)}`" for entry, _ in spoken)
    options = [f"{entry.key}=null" for entry, _ in spoken if entry.status is not Status.ADDED]
    for entry, _ in spoken:
        if entry.status is not Status.ADDED and not entry.is_open:
            entry.decide(f"{said} say different things about `{name}`", *options)


def _join(entries: Sequence[Entry]) -> None:
    """Every setting is written once: mappings are joined where they are written first."""
    holders: dict[str, Entry] = {}
    for entry in entries:
        for setting in list(entry.becomes):
            first = holders.setdefault(setting, entry)
            if first is entry:
                continue
            value = entry.becomes.pop(setting)
            before = first.becomes[setting]
            if isinstance(before, dict) and isinstance(value, dict):
                first.becomes[setting] = {**before, **value}


def _check_together(entries: Sequence[Entry], world_size: int | None) -> None:
    """Settings that cannot hold together are a decision of the keys they came from."""
    degrees = [e for e in entries if any("degree" in setting for setting in e.becomes)]
    for blamed in (degrees, entries):
        error = _problem(entries, world_size)
        for entry in blamed if error else ():
            if entry.becomes:
                entry.decide(error, f"{entry.key}=<another value>")


def _problem(entries: Sequence[Entry], world_size: int | None) -> str:
    """Returns the error of all settings together, or ""."""
    settings = {k: v for entry in entries for k, v in _plain(entry).items()}
    try:
        config = parse_config(settings)
        if world_size is not None:
            MeshShape.resolve(config, world_size)
    except ConfigError as error:
        return str(error)
    return ""
