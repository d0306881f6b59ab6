"""Collects what is wrong with a run, as sentences of the libraries and of this package."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from composer_fsdp2.config.messages import shortened
from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

__all__ = ["OWN_ERRORS", "Finding", "Findings", "findings_of"]

OWN_ERRORS = (CheckpointError, ConfigError, PatchError, PlanError)
_NUMBERED = re.compile(r"^ +\d+\. ", re.MULTILINE)
"""how an error begins each of several mistakes"""
_NETWORK = ("huggingface_hub", "requests", "urllib3", "httpx")


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds a sentence about a problem, and a sentence of advice."""

    level: Literal["problem", "warning"]
    """at a problem a run would fail, or train something else than asked"""
    what: str
    advice: str


def findings_of(error: Exception) -> Iterator[Finding]:
    """Yields each mistake that an error of this package numbers, or the error.

    The last sentence says what to write instead.
    """
    _, *lines = _NUMBERED.split(str(error))
    for text in lines or [str(error)]:
        problem, _, advice = " ".join(text.split()).rpartition(". ")
        told, cure = (f"{problem}.", advice) if problem else (advice, "Correct it.")
        yield Finding("problem", shortened(told), shortened(cure))


_INVALID = re.compile(r"'([^']*)' is invalid")
"""matches the sentence of `wrong_kinds` about a value"""


@dataclass(slots=True)
class Findings:
    """Collects errors of steps that do not depend on each other."""

    findings: list[Finding] = field(default_factory=list[Finding])

    def add(
        self, problem: str, advice: str, level: Literal["problem", "warning"] = "problem"
    ) -> None:
        """Adds a finding, unless it is there already."""
        finding = Finding(level, shortened(problem), shortened(advice))
        if finding not in self.findings:
            self.findings.append(finding)

    @contextlib.contextmanager
    def step(self, where: str, advice: str = "") -> Generator[None]:
        """Adds errors of the block as findings. The code after the block runs all the same."""
        try:
            yield
        except OWN_ERRORS as error:
            for finding in findings_of(error):
                self.add(finding.what, finding.advice)
        except (Exception, SystemExit) as error:
            kind, begins = type(error).__name__, (f"{where}:", f"{where}.")
            follows = isinstance(error, KeyError | TypeError) or kind == "RegistryError"
            here = [earlier.what for earlier in self.findings if earlier.what.startswith(begins)]
            values = [match[1] for match in map(_INVALID.search, here) if match]
            if (follows and here) or any(value in str(error) for value in values):
                return  # from an unknown name or argument or a wrong value, which has been added
            if _is_of_network(error):
                self.add(
                    f"{where}: {_told(error)}. This machine does not have it, and the network was "
                    "not asked.",
                    "Download it first to have it checked here.",
                    "warning",
                )
            else:
                there = "Correct it there; the run would stop at this place."
                # The advice of a step is about values, and no name of a registry.
                self.add(
                    f"{where}: {_told(error)}.",
                    there if kind == "RegistryError" else advice or there,
                )


def _is_of_network(error: BaseException | None) -> bool:
    """Returns whether an error, or its cause, is about an address that was not reached."""
    while error is not None:
        is_of_package = type(error).__module__.partition(".")[0] in _NETWORK
        if isinstance(error, ConnectionError) or (is_of_package and isinstance(error, OSError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: BaseException) -> str:
    """Returns an error and its cause in one line; of an empty error, the line that raised it."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    elif not text:
        text = f"raised by `{traceback.extract_tb(error.__traceback__)[-1].line}`"
    told = f"{type(error).__name__}: {text}"
    return told if error.__cause__ is None else f"{told}, because of {_told(error.__cause__)}"
