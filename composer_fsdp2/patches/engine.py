"""Replaces attributes of other packages by the rows of a table, and puts them back.

It knows no table: rows are handed in. [Note: what an unknown source does] Rows of `CORE` are all
replaced or none is: without them no run with FSDP2 would be right. Rows of another feature whose
source is unknown switch that feature off. None of its rows is installed, and a run that asks for
the feature is refused by name: by `check_features` when a Trainer starts, or by the function
itself, which then refuses the calls for which the row's `asks` is true and passes on all others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from composer_fsdp2.errors import PatchError
from composer_fsdp2.fingerprint import fingerprint

__all__ = [
    "CORE",
    "Asks",
    "Feature",
    "PatchPoint",
    "PatchState",
    "always",
    "asked_by_class",
    "check_feature",
    "check_features",
    "check_versions",
    "describe_patches",
    "install_rows",
    "rows_installed",
    "states",
    "uninstall_rows",
]

_DISTRIBUTIONS = {"composer": "mosaicml", "llmfoundry": "llm-foundry"}
"""modules whose package has another name"""


Asks = Callable[[tuple[Any, ...], Any, Any], bool]
"""Whether a Trainer was asked for a feature, from its algorithms, callbacks and optimizers, from
`device_train_microbatch_size` as it was written, and from the parsed settings of FSDP2."""


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """Something a run may ask for, and that rows make work under FSDP2."""

    name: str
    instead: str = ""
    """the cure when the feature is switched off: one sentence"""
    asked: Asks = lambda _items, _size, _settings: False
    """false where the calls tell whether they are asked for it; see `PatchPoint.asks`"""


CORE = Feature("core")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPoint:
    """One attribute of another package that is replaced."""

    target: str
    """`package.module:attribute` or `package.module:Class.attribute`"""
    replacement: str
    """`module:name` below this package, imported when it is called; it gets the original as its
    first argument, before those of the call; for what cannot be called, it alone"""
    feature: Feature
    why: str
    """behaviour without the replacement"""
    upstream: str
    """address of the lines that `why` is about"""
    fingerprints: Set[str] = frozenset()
    """versions of the sources the replacement was read for"""
    takes: Set[str] = frozenset()
    """or the arguments the replacement needs, when the original still does the work"""
    versions: str
    """of the package, for the message when none fits"""
    source: str = ""
    """name of the source that was read, where that is not the target"""
    asks: Callable[..., bool] | None = None
    """whether the arguments of a call ask for the feature; other calls go to the original"""
    needed: Callable[[], bool] = lambda: True
    """whether the installed packages lack what the replacement adds"""

    @property
    def package(self) -> str:
        """The package the target is in."""
        return self.target.partition(".")[0]


_originals: dict[str, Any] = {}
_off: dict[Feature, str] = {}
"""features that are switched off, and why"""


# --- For tables. ---


def always(*_args: Any, **_kwargs: Any) -> bool:
    """Says, as the `asks` of a row, that every call asks for the feature."""
    return True


def asked_by_class(*names: str, when: Callable[[Any], bool] = lambda _: True) -> Asks:
    """Returns an `asked` that finds objects of a class, or of one derived from it.

    Args:
        names: of the classes, as `package.module:Class`, so that nothing has to be imported.
        when: says which of their objects ask for the feature.
    """

    def asked(items: tuple[Any, ...], *_: Any) -> bool:
        return any(
            f"{cls.__module__}:{cls.__qualname__}" in names and when(item)
            for item in items
            for cls in type(item).__mro__
        )

    return asked


# --- Installing. ---


def install_rows(rows: Sequence[PatchPoint]) -> None:
    """Replaces every target; see [Note: what an unknown source does].

    Calling it again does nothing, or what has become possible since: rows of LLM Foundry wait until
    it has been imported. Collective: no.

    Raises:
        PatchError: naming every core row whose source is not one it was written for.
    """
    missing = [row for row in rows if _is_wanted(row) and row.target not in _originals]
    problems = {row.target: problem for row in missing if (problem := _problem(row)) is not None}
    unknown = [row for row in missing if row.target in problems]
    core = [row for row in unknown if row.feature is CORE]
    if core:
        listed = "".join(f"\n- {problems[row.target]}" for row in core)
        packages = dict.fromkeys(["torch", "mosaicml", *map(_distribution, core)])
        here = ", ".join(f"{name} {_version(name)}" for name in packages)
        versions = " and ".join(dict.fromkeys(row.versions for row in core))
        raise PatchError(
            f"FSDP2 cannot be installed, and nothing was replaced: {len(core)} functions that "
            "every run with it goes through are not known."
            f"{listed}\nReplacing them could change the run in ways nobody tested. "
            f"Installed are {here}; install {versions}, or a composer_fsdp2 that knows these."
        )
    _off.update({row.feature: problems[row.target] for row in reversed(unknown)})
    for row in rows:
        if _is_wanted(row) and row.target not in _originals:
            _replace(row)


def _replace(row: PatchPoint) -> None:
    if row.feature in _off and (row.asks is None or _missing(row) is not None):
        return
    owner, name = _locate(row.target)
    original = _original(owner, name)
    _originals[row.target] = original
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original if kind is None else original.__func__
    if not callable(function):
        setattr(owner, name, _resolve(row.replacement)(original))
        return

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if row.asks is not None and not row.asks(*args, **kwargs):
            return function(*args, **kwargs)
        check_feature(row.feature)
        return _resolve(row.replacement)(function, *args, **kwargs)

    setattr(owner, name, call if kind is None else kind(call))


def _original(owner: Any, name: str) -> Any:
    # `getattr` would take the function out of a class method, which has to be put back whole.
    static = inspect.getattr_static(owner, name)
    return getattr(owner, name) if inspect.isgetsetdescriptor(static) else static


def _resolve(replacement: str) -> Any:
    return pkgutil.resolve_name(f"composer_fsdp2.{replacement}")


def _is_wanted(row: PatchPoint) -> bool:
    match row.package:
        case "llmfoundry":
            return "llmfoundry" in sys.modules and row.needed()
        case "peft":  # Composer imports it where it is installed
            return importlib.util.find_spec("peft") is not None and row.needed()
        case _:
            return row.needed()


def uninstall_rows() -> None:
    """Puts every original back. Does nothing where no row is installed."""
    _restore(set(_originals))
    _off.clear()


def _restore(targets: Set[str]) -> None:
    for target in targets:
        owner, name = _locate(target)
        setattr(owner, name, _originals.pop(target))


@contextlib.contextmanager
def rows_installed(rows: Sequence[PatchPoint]) -> Generator[None]:
    """Installs rows while a block runs."""
    before, off = set(_originals), set(_off)
    install_rows(rows)
    try:
        yield
    finally:
        _restore(_originals.keys() - before)
        for feature in _off.keys() - off:
            del _off[feature]


# --- Features that are switched off. ---


def check_features(items: tuple[Any, ...], microbatch_size: Any, settings: Any) -> None:
    """Refuses a Trainer that asks for a feature that is switched off. Collective: no.

    Args:
        items: algorithms, callbacks and optimizers.
        microbatch_size: the Trainer's `device_train_microbatch_size`, a number or "auto".
        settings: the parsed settings of FSDP2.

    Raises:
        PatchError: naming the feature.
    """
    for feature in _off:
        if feature.asked(items, microbatch_size, settings):
            check_feature(feature)


def check_feature(feature: Feature) -> None:
    """Refuses a feature that is switched off. Collective: no.

    Raises:
        PatchError: naming it, the function whose source is unknown, and what to write instead.
    """
    if feature in _off:
        raise PatchError(
            f"{feature.name} is asked for and is switched off. {_off[feature]} Its replacement "
            f"could change the run in ways nobody tested. {feature.instead} Or install a version "
            "that is known."
        )


# --- What is installed here. ---


def check_versions(needs: Mapping[str, tuple[int, int]]) -> None:
    """Refuses packages that are too old to be looked at. Collective: no.

    Args:
        needs: the least version of packages, as major and minor.

    Raises:
        PatchError: naming the version that is here and the one that is needed.
    """
    for package, least in needs.items():
        version = _version(package)
        match = re.match(r"(\d+)\.(\d+)", version)
        if match and (int(match[1]), int(match[2])) < least:
            needed = ".".join(map(str, least))
            raise PatchError(
                f"{package} {version} is installed, and composer_fsdp2 needs {package} {needed} or "
                f"newer, so nothing was replaced: pip install '{package}>={needed}'."
            )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"  # a checkout that is only on the path


def _distribution(row: PatchPoint) -> str:
    return _DISTRIBUTIONS.get(row.package, row.package)


def _problem(row: PatchPoint) -> str | None:
    """Returns in one sentence why a row cannot be installed, or None."""
    if (missing := _missing(row)) is not None:
        return missing
    if row.takes:
        lacks = row.takes - inspect.signature(pkgutil.resolve_name(row.target)).parameters.keys()
        if not lacks:
            return None
        return (
            f"'{row.target}' of {_here(row)} takes no {', '.join(sorted(lacks))}, which the "
            f"replacement was written for ({row.versions})."
        )
    try:
        if row.source:
            digest = fingerprint(pkgutil.resolve_name(row.source))
        else:
            digest = fingerprint(inspect.getattr_static(*_locate(row.target)))
    except (ImportError, AttributeError, OSError, SyntaxError, TypeError) as error:
        digest = f"cannot be read: {error}"
    if digest in row.fingerprints:
        return None
    digests = ", ".join(sorted(row.fingerprints))
    return (
        f"The source of '{row.source or row.target}' of {_here(row)} (fingerprint {digest}) is not "
        f"one the replacement was written for ({row.versions}: {digests})."
    )


def _missing(row: PatchPoint) -> str | None:
    try:
        _locate(row.target)
    except (ImportError, AttributeError):
        return (
            f"'{row.target}' does not exist in {_here(row)}; the replacement is for {row.versions}."
        )
    return None


def _here(row: PatchPoint) -> str:
    return f"{_distribution(row)} {_version(_distribution(row))}"


def _locate(target: str) -> tuple[Any, str]:
    """Returns the module or class that has an attribute, and the attribute's name."""
    pkgutil.resolve_name(target)
    module, _, path = target.partition(":")
    outer, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{outer}"), name


# --- The table in words. ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """State of one row of the table."""

    target: str
    feature: str
    why: str
    upstream: str
    versions: str
    state: Literal["installed", "fits", "does not fit", "switched off"]
    """`does not fit` is core's, and stops the installation"""
    problem: str | None = None
    """why the row cannot be installed"""


def states(rows: Sequence[PatchPoint]) -> tuple[PatchState, ...]:
    """Returns the state of every row whose package there is. It changes nothing but imports."""
    present = [
        row for row in rows if importlib.util.find_spec(row.package) is not None and row.needed()
    ]
    off, problems = dict(_off), dict[str, str | None]()
    for row in present:
        if row.target not in _originals or row.feature in _off:
            problems[row.target] = _off.get(row.feature) or _problem(row)
        if (problem := problems.get(row.target)) is not None and row.feature is not CORE:
            off.setdefault(row.feature, problem)
    row_states: list[PatchState] = []
    for row in present:
        problem = problems.get(row.target) or off.get(row.feature)
        state: Any = "installed" if row.target in _originals else "fits"
        if problem is not None:
            state = "does not fit" if row.feature is CORE else "switched off"
        row_states.append(
            PatchState(
                target=row.target,
                feature=row.feature.name,
                why=row.why,
                upstream=row.upstream,
                versions=row.versions,
                state=state,
                problem=problem,
            )
        )
    return tuple(row_states)


def describe_patches(row_states: Sequence[PatchState]) -> str:
    """Returns the table with the state of every row as text."""
    lines: list[str] = []
    for row in row_states:
        shown = {
            "installed": "installed",
            "fits": "fits, not installed",
            "does not fit": f"cannot be installed: {row.problem}",
            "switched off": f"switched off with {row.feature}: {row.problem}",
        }
        lines += [
            row.target,
            f"  {shown[row.state]}",
            f"  because it {row.why}",
            f"  for {row.feature}: {row.upstream}",
        ]
    return "\n".join(lines)
