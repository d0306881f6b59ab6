"""Text of `composer-fsdp2 doctor`: problems, warnings, the run, the installation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_fsdp2.tools.doctor import Finding, Machine, Run

__all__ = ["Line", "backend_of", "report_lines"]

_LABEL, _WIDTH = 17, 100
_MOST = 20
"""lines without `verbose`; problems and warnings are never cut"""
_COLOURS = {"problem": "red", "warning": "yellow"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of output; the colour is for a terminal."""

    text: str
    colour: str | None = None


def backend_of(on_gpus: bool) -> str:
    """Returns the name of the library through which ranks talk."""
    return "nccl" if on_gpus else "gloo"


def report_lines(
    machine: Machine, run: Run | None, findings: Sequence[Finding], *, verbose: bool
) -> list[Line]:
    """Returns the report, problems first.

    Args:
        machine: what is installed.
        run: what is asked for; `None` where there is none, or it could not be read.
        findings: what is wrong, problems first.
        verbose: whether to list everything that Composer and torch are relied on for, and to say
            more than fits on a screen.
    """
    lines = [_summary(findings)]
    for found in findings:
        colour = _COLOURS[found.level]
        lines += [Line(text, colour) for text in _wrapped(f"{found.level}: ", found.what)]
        lines += [Line(text) for text in _wrapped("  do: ", found.advice)]
    about_run = _run_lines(run)
    installed = _installation_lines(machine)
    room = _MOST - len(lines) - len(installed)
    if not verbose and len(about_run) > room:
        kept = max(room - 1, 0)
        rest = len(about_run) - kept
        more = f"... {rest} more lines about the run with --verbose"
        about_run = [*about_run[:kept], *([Line(more)] if room > 0 else [])]
    lines += about_run + installed
    return lines + _relied_on(machine) if verbose else lines + _misfits(machine)


def _summary(findings: Sequence[Finding]) -> Line:
    counts = {level: sum(f.level == level for f in findings) for level in _COLOURS}
    parts = [
        f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count
    ]
    if not parts:
        return Line("Nothing to warn of.", "green")
    return Line(f"{', '.join(parts)}:", "red" if counts["problem"] else "yellow")


def _run_lines(run: Run | None) -> list[Line]:
    if run is None:
        return []
    from composer_fsdp2.tools.doctor_describe import describe_run

    lines = [Line("The run:")]
    for label, text in describe_run(run):
        lines += _labelled(label, text)
    return lines


# --- What is installed. ---


def _installation_lines(machine: Machine) -> list[Line]:
    versions = (f"{name} {version or 'is missing'}" for name, version in machine.versions.items())
    fits = sum(patch.problem is None for patch in machine.patches)
    found = sum(state.found for state in machine.members)
    return [
        *_labelled("installed", ", ".join(versions)),
        *_labelled("GPUs", f"{_describe_gpus(machine)}; backend {backend_of(bool(machine.gpus))}"),
        *_labelled(
            "relied on",
            f"{fits} of {len(machine.patches)} places in Composer fit, {found} of "
            f"{len(machine.members)} internals of torch are there (--verbose lists them)",
        ),
    ]


def _describe_gpus(machine: Machine) -> str:
    names = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(kinds) or "none"


def _relied_on(machine: Machine) -> list[Line]:
    """Everything replaced in Composer and used of torch."""
    from composer_fsdp2.trainer.patches import describe_patches

    lines = [Line(""), Line("Replaced in Composer while installed:")]
    lines += [Line(text) for text in describe_patches(machine.patches).splitlines()]
    return [*lines, *_members(machine, only_missing=False)]


def _misfits(machine: Machine) -> list[Line]:
    """Only what is not as it should be."""
    from composer_fsdp2.trainer.patches import describe_patches

    lines = list[Line]()
    misfits = [patch for patch in machine.patches if patch.problem]
    if misfits:
        lines += [Line(""), Line("In Composer, not as expected:")]
        lines += [Line(text) for text in describe_patches(misfits).splitlines()]
    return [*lines, *_members(machine, only_missing=True)]


def _members(machine: Machine, *, only_missing: bool) -> list[Line]:
    rows = [state for state in machine.members if not (only_missing and state.found)]
    if not rows:
        return []
    lines = [Line(""), Line("Private members of torch, by what needs them:")]
    for feature in dict.fromkeys(state.member.feature for state in rows):
        mine = [state for state in rows if state.member.feature == feature]
        names = (s.member.title if s.found else f"{s.member.title} (MISSING)" for s in mine)
        lines += _labelled(feature, ", ".join(dict.fromkeys(names)))
    return lines


# --- Layout. ---


def _labelled(label: str, text: str) -> list[Line]:
    """The label in its column; a label longer than that has its own space."""
    return [Line(line) for line in _wrapped(f"{label:{_LABEL - 1}} ", text, indent=_LABEL)]


def _wrapped(start: str, text: str, indent: int = 5) -> list[str]:
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        # A path or a setting that is broken cannot be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [start.rstrip()]
