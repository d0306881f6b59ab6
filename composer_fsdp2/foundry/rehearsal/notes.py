"""Mistakes that a rehearsal finds, and the form in which they are reported."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_fsdp2.config.messages import shortened
from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError
from composer_fsdp2.foundry.registry_names import unknown_name

__all__ = ["Cluster", "Mistake", "Notes", "is_network_error"]

_OWN = (CheckpointError, ConfigError, PatchError, PlanError)
_CORRECT = "Correct it there; the run would stop at this place."
_NETWORK = ("couldn't connect", "max retries exceeded", "connection error", "resolve host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the run would take place."""

    ranks: int
    ranks_per_node: int
    on_gpus: bool
    is_here: bool
    """whether on this machine"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that would make the run fail."""

    what: str
    advice: str
    level: Literal["problem", "warning"] = "problem"
    """a warning where it could not be made sure of"""


@dataclass(slots=True)
class Notes:
    """Collects mistakes; what does not depend on the wrong part is looked at all the same."""

    cluster: Cluster
    mistakes: list[Mistake] = field(default_factory=list[Mistake])
    run_has_values: bool = False
    """whether weights that are on meta here have values in the run"""

    def add(self, what: str, advice: str, level: Literal["problem", "warning"] = "problem") -> None:
        """Adds one, unless it is there already."""
        mistake = Mistake(shortened(what), shortened(advice), level)
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def step(self, where: str, advice: str = _CORRECT) -> _Step:
        """A part of the run: whatever it raises is noted."""
        return _Step(self, where, advice)

    def caught(self, where: str, error: Exception | SystemExit, advice: str = _CORRECT) -> None:
        """Adds what a part of the run raised."""
        noted = any(one.what.startswith(f"{where}:") for one in self.mistakes)
        if isinstance(error, TypeError) and "missing" in str(error) and noted:
            return  # the argument that is missing is the misspelt one
        if isinstance(error, _OWN):
            what, _, cure = str(error).rpartition(". ")
            self.add(f"{where}: {what}.", cure)
        elif self.run_has_values and "meta tensor" in str(error):
            self.add(
                f"{where}: {_told(error)}. Here the model is on meta, and has no values.",
                "Nothing here: the run builds the model with values (init_device: cpu).",
                "warning",
            )
        elif isinstance(error, ImportError):
            self.add(f"{where}: {_told(error)}.", "Install it, or take it out.")
        elif is_network_error(error):
            self.unreachable(where, _told(error))
        else:
            self.add(f"{where}: {_told(error)}.", advice)

    def unreachable(self, where: str, told: str) -> None:
        """Something that only the network knows; where the run takes place it may be reachable."""
        self.add(
            f"{where}: {told}. It is not on this machine, and the network could not be asked.",
            "Download it first, correct the name, or run this where the network is.",
            "problem" if self.cluster.is_here else "warning",
        )

    def known(self, where: str, name: Any, names: Iterable[str], place: str) -> bool:
        """Whether a name is one of those in a registry; notes it where it is not."""
        found = unknown_name(where, name, names, place)
        if found is not None:
            self.add(*found)
        return found is None


class _Step:
    """Notes an error, and lets the program go on after the block. As a class it can say so."""

    def __init__(self, notes: Notes, where: str, advice: str) -> None:
        self._notes = notes
        self._where = where
        self._advice = advice

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception | SystemExit):
            return False
        self._notes.caught(self._where, error, self._advice)
        return True


def is_network_error(error: BaseException) -> bool:
    """Whether an error, or one it came from, is about a place that was not reached."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        modules = {cls.__module__.partition(".")[0] for cls in type(seen).__mro__}
        names = {cls.__name__ for cls in type(seen).__mro__}
        if "requests" in modules or {"ConnectionError", "LocalEntryNotFoundError"} & names:
            return True
        text = str(seen).lower()
        if any(part in text for part in _NETWORK):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _told(error: BaseException) -> str:
    """The error in one line, with what it came from; an empty one by the line that raised it."""
    text = " ".join(str(error).split()).rstrip(".")
    if not text:
        frames = traceback.extract_tb(error.__traceback__)
        text = f"raised by `{frames[-1].line}`" if frames else "without a message"
    told = f"{type(error).__name__}: {text}"
    cause = error.__cause__
    if cause is not None:
        told += f", because of {type(cause).__name__}: {' '.join(str(cause).split()).rstrip('.')}"
    return told
