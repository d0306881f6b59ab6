"""Writes the report of `doctor`: problems, warnings, the run, the installation."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from composer_fsdp2.config.schema import known_settings, values_of
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.findings import Finding
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from composer_fsdp2.tools.doctor import REPLICATE, SHARD, Machine, Run, mesh_of
from composer_fsdp2.trainer.patches import describe_patches

__all__ = ["Line", "backend_of", "describe_run", "report_lines"]

Line = tuple[str, str | None]
"""text, and its colour on a terminal"""
_LABEL, _WIDTH = 17, 100
_MOST = 20
"""lines without `verbose`; problems and warnings are never cut"""
_COLOURS = {"problem": "red", "warning": "yellow"}
_SHOWN_GROUPS = 4
# Described in lines of their own.
_OWN_LINES = {
    f"{SHARD}_degree",
    f"{REPLICATE}_degree",
    "reshard_after_forward",
    "mixed_precision",
    "state_dict_type",
}
_RESHARDS: dict[Any, str] = {
    "auto": "top-level units keep their parameters until backward, all others free them",
    True: "every unit frees its parameters after forward and gathers them again in backward",
    False: "every unit keeps its parameters from forward to backward",
}
_INIT = {
    "cpu": "every rank builds the whole model in its CPU memory",
    "mixed": "rank 0 builds the whole model in its CPU memory, the others nothing",
    "meta": "no rank builds the whole model",
}
_STATE_DICTS = {
    "sharded": "a checkpoint is a folder, to which every rank writes its part",
    "full": "a checkpoint is one file, for which rank 0 gathers everything",
}


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
    counts = {level: sum(f.level == level for f in findings) for level in _COLOURS}
    parts = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items() if n]
    colour = "red" if counts["problem"] else "yellow" if parts else "green"
    lines: list[Line] = [(f"{', '.join(parts)}:" if parts else "Nothing to warn of.", colour)]
    for found in findings:
        what = _wrapped(f"{found.level}: ", found.what)
        lines += [(text, _COLOURS[found.level]) for text in what]
        lines += _plain(_wrapped("  do: ", found.advice))
    about_run: list[Line] = []
    if run is not None:
        about_run = [("The run:", None), *_labelled(describe_run(run))]
    installed = _installation_lines(machine)
    room = _MOST - len(lines) - len(installed)
    if not verbose and len(about_run) > room:
        kept = max(room - 1, 0)
        more = f"... {len(about_run) - kept} more lines about the run with --verbose"
        about_run = [*about_run[:kept], *([(more, None)] if room > 0 else [])]
    return lines + about_run + installed + _relied_on(machine, verbose=verbose)


def _installation_lines(machine: Machine) -> list[Line]:
    names = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    versions = (f"{name} {version or 'is missing'}" for name, version in machine.versions.items())
    fits = sum(patch.problem is None for patch in machine.patches)
    found = sum(state.found for state in machine.members)
    return _labelled(
        [
            ("installed", ", ".join(versions)),
            ("GPUs", f"{', '.join(kinds) or 'none'}; backend {backend_of(bool(names))}"),
            (
                "relied on",
                f"{fits} of {len(machine.patches)} places in Composer fit, {found} of "
                f"{len(machine.members)} internals of torch are there (--verbose lists them)",
            ),
        ]
    )


def _relied_on(machine: Machine, *, verbose: bool) -> list[Line]:
    """Returns places in Composer and internals of torch: all of them, or those that do not fit."""
    patches = [patch for patch in machine.patches if verbose or patch.problem]
    members = [state for state in machine.members if verbose or not state.found]
    lines: list[str] = []
    if patches:
        title = (
            "Replaced in Composer while installed:" if verbose else "In Composer, not as expected:"
        )
        lines += ["", title, *describe_patches(patches).splitlines()]
    if members:
        lines += ["", "Private members of torch, by what needs them:"]
    rows: dict[str, list[str]] = {}
    for state in members:
        title = state.member.title if state.found else f"{state.member.title} (MISSING)"
        rows.setdefault(state.member.feature, []).append(title)
    named = [(feature, ", ".join(dict.fromkeys(titles))) for feature, titles in rows.items()]
    return [*_plain(lines), *_labelled(named)]


# --- Layout. ---


def _plain(lines: Iterable[str]) -> list[Line]:
    return [(line, None) for line in lines]


def _labelled(rows: Iterable[tuple[str, str]]) -> list[Line]:
    """Returns each label in its column; a longer label has its own space."""
    wrapped = (_wrapped(f"{label:{_LABEL - 1}} ", text, indent=_LABEL) for label, text in rows)
    return _plain(line for lines in wrapped for line in lines)


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


# --- The run. ---


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Returns the run in labels and texts; settings at their default are left out."""
    nodes = "1 node" if run.nodes == 1 else f"{run.nodes} nodes"
    where = "GPUs" if run.on_gpus else "the CPU (--gpus-per-node N: elsewhere, on GPUs)"
    lines = [("asks for", run.asks), ("ranks", f"{run.ranks} on {nodes}, on {where}")]
    if not run.shards or run.settings is None:
        return lines
    reshard = run.settings.reshard_after_forward
    lines += _describe_mesh(run)
    text = _RESHARDS.get(reshard, f"after forward, groups of {reshard} ranks keep one copy")
    lines.append(("reshard", f"{_written(reshard)}: {text}"))
    lines.append(("precision", _describe_precision(run)))
    kind = run.settings.state_dict_type
    lines.append(("state_dict_type", f"{kind}: {_STATE_DICTS[kind]}"))
    init = run.value("model.init_device")
    lines.append(("init_device", f"{init}: {_INIT[init]}" if init in _INIT else str(init)))
    known = known_settings()
    return lines + [
        (name, _written(value))
        for name, value in values_of(run.settings).items()
        if name not in _OWN_LINES and value != known[name].default
    ]


def _describe_mesh(run: Run) -> list[tuple[str, str]]:
    try:
        shape = mesh_of(run)
    except ConfigError:
        return [("mesh", "none fits the ranks")]
    assert shape is not None
    sizes = [f"{SHARD} {shape.shard}"]
    if shape.replicate is not None:
        sizes.insert(0, f"{REPLICATE} {shape.replicate}")
    copy = ("", f"each copy on {_grouped(run.ranks, shape.shard * shape.tensor)}")
    if shape.tensor == 1:
        return [("mesh", " x ".join(sizes)), copy]
    return [
        ("mesh", shape.describe()),
        ("", f"each layer on {_grouped(run.ranks, shape.tensor)}"),
        copy,
    ]


def _grouped(ranks: int, size: int) -> str:
    """Returns the groups of ranks next to each other."""
    starts = range(0, ranks, size)
    shown = starts[:_SHOWN_GROUPS]
    groups = [f"{n}" if size == 1 else f"{n}-{n + size - 1}" for n in shown]
    more = ", ..." if len(starts) > _SHOWN_GROUPS else ""
    return f"{size} {'ranks' if size > 1 else 'rank'}: {', '.join(groups)}{more}"


def _describe_precision(run: Run) -> str:
    assert run.settings is not None
    mixed = run.settings.mixed_precision
    try:
        policy = resolve_precision(mixed, compute_dtype(run.value("precision")))
    except ConfigError:
        return f"{run.value('precision')}: not supported"
    dtypes = [
        "the parameters' own dtype" if dtype is None else str(dtype).removeprefix("torch.")
        for dtype in (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
    ]
    name = mixed if isinstance(mixed, str) else "as written"
    return (
        f"{run.value('precision')}, mixed_precision {name}: computes in {dtypes[0]}, reduces "
        f"gradients in {dtypes[1]}"
    )


def _written(value: Any) -> str:
    """Returns a value as in YAML, without the fields of nested settings that say nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        inner = [f"{k}: {_written(v)}" for k, v in fields.items() if v not in (None, ())]
        return f"{{{', '.join(inner)}}}"
    return str(value)
