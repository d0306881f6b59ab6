"""Concludes findings from the facts of a machine and a run, and writes the report of `doctor`.

Pure: facts in, findings and lines out. What the libraries check themselves is not here:
`foundry/rehearsal.py` lets them check it.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.config.schema import FSDP2Config, known_settings
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate.report import fits, preparing_text
from composer_fsdp2.foundry.findings import Finding, findings_of
from composer_fsdp2.patches import describe_patches
from composer_fsdp2.pins import ROWS, row_of, versions_of
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.shard.communication import missing_for
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from composer_fsdp2.step.agreement import neighbours
from composer_fsdp2.text import size_text
from composer_fsdp2.torch_private.members import EVERY_RUN

if TYPE_CHECKING:
    from composer_fsdp2.estimate.forecast import Forecast
    from composer_fsdp2.patches import PatchState
    from composer_fsdp2.torch_private.members import MemberState

__all__ = [
    "KEYS",
    "LocalGpu",
    "Machine",
    "RunFacts",
    "backend_of",
    "describe_run",
    "examine",
    "memory_findings",
    "mesh_of",
    "report_lines",
    "runs_on",
]

KEYS = ("model.init_device", "model.pretrained", "precision")
"""keys of a run, besides those about parallelism, that findings depend on"""
_DEFAULTS = {"precision": "amp_bf16", "model.init_device": "cpu"}
"""LLM Foundry's"""
_SHARD, _REPLICATE = "data_parallel_shard", "data_parallel_replicate"
"""Composer's names of the mesh axes, and the beginnings of the settings' names"""


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """One GPU of this machine."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """compute capability"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Versions and variables of this machine."""

    versions: Mapping[str, str | None]
    """of packages; `None` is not installed"""
    gpus: tuple[LocalGpu, ...] = ()
    patches: tuple[PatchState, ...] = ()
    members: tuple[MemberState, ...] = ()
    """private members of torch"""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nccl: tuple[int, ...] | None = None
    """version of torch's NCCL"""
    interfaces: tuple[str, ...] = ()
    """names of its network interfaces"""
    built_for: tuple[str, ...] = ()
    """architectures that torch has code for, such as `sm_90`"""
    open_files: int = -1
    """how many a process may have, sockets too; -1 is any number"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Settings of a training YAML, and where it would run."""

    path: str = "OLD.yaml"
    asks: Literal["FSDP2", "FSDP1", "neither"]
    settings: FSDP2Config | None = None
    """with FSDP2 only"""
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """the same, before defaults of this package are filled in"""
    ranks: int
    ranks_per_node: int
    on_gpus: bool
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """values of `KEYS`; a key that is missing or cannot be resolved is not in it"""
    builds_on_meta: bool | None = None
    """whether `init_device: meta` would build a model of mixed; `None` where nobody tried"""
    units: int | None = None
    """how many units FSDP2 would make; `None` where the model was not built"""

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return -(-self.ranks // self.ranks_per_node)

    def value(self, key: str) -> Any:
        """Returns the value of one of `KEYS`, or LLM Foundry's default, or `None`."""
        return self.others.get(key, _DEFAULTS.get(key))


def mesh_of(run: RunFacts) -> MeshShape | None:
    """Returns the mesh of a run under FSDP2; `None` where its degrees do not fit the ranks."""
    if run.settings is None:
        return None
    try:
        return MeshShape.resolve(run.settings, run.ranks)
    except ConfigError:
        return None


def memory_findings(forecast: Forecast, gpu: LocalGpu) -> Iterator[Finding]:
    """Yields a finding where a step is predicted to need more than the memory of a GPU.

    Args:
        forecast: peak and state of a step in bytes.
        gpu: the memory of this machine's GPU, and where the figure is from.
    """
    state_bytes = sum(size for kind, size in forecast.held.items() if kind not in forecast.on_host)
    gpu_bytes, how = gpu.memory_bytes, "--search` finds settings that fit."
    if state_bytes > gpu_bytes:
        yield Finding(
            "problem",
            f"Parameters, gradients and optimizer state take {size_text(state_bytes)} of each "
            f"rank, and {gpu.name} has {size_text(gpu_bytes)}. The first step would run out "
            "of memory.",
            f"Use more ranks, or optimizer_state; `composer-fsdp2 plan RUN.yaml {how}",
        )
    elif not fits(forecast, gpu_bytes / 2**30):
        yield Finding(
            "warning",
            f"A step is predicted to need {size_text(forecast.peak_bytes)}, and {gpu.name} has "
            f"{size_text(gpu_bytes)}, some of which CUDA and NCCL take. It may run out of memory.",
            f"Use a smaller microbatch, or recompute; `composer-fsdp2 plan RUN.yaml {how}",
        )


def examine(
    machine: Machine, run: RunFacts | None, rehearsed: Iterable[Finding] = ()
) -> list[Finding]:
    """Returns all findings, problems first.

    Args:
        machine: versions, devices and environment of this machine.
        run: the settings and ranks that a file asks for; `None` checks the machine alone.
        rehearsed: findings of a rehearsal of the run.
    """
    findings = [*_versions(machine), *_torch(machine), *_surroundings(machine, run)]
    if run is not None:
        findings += _asked(run)
        if run.settings is not None:
            findings += _mesh(run, run.settings)
            full = run.settings.state_dict_type == "full"
            is_mixed = run.value("model.init_device") == "mixed"
            findings += _warnings(
                (
                    is_mixed and run.builds_on_meta is True and not run.value("model.pretrained"),
                    "model.init_device is mixed: rank 0 holds the whole model in CPU memory while "
                    "it starts.",
                    "Write init_device: meta, with which the model's own initialisers run unit by "
                    "unit.",
                ),
                (
                    full and run.settings.async_save,
                    "async_save with state_dict_type full: training waits until rank 0 has "
                    "gathered model and optimizer, and rank 0 holds them in CPU memory twice.",
                    "Write state_dict_type: sharded, where every rank copies its own part.",
                ),
                (
                    full and run.nodes > 1,
                    f"state_dict_type is full on {run.ranks} ranks: at every save rank 0 gathers "
                    "model and optimizer in its CPU memory and writes alone, while the others "
                    "wait.",
                    "Write state_dict_type: sharded; 'composer-fsdp2 checkpoint convert' makes "
                    "one file.",
                ),
            )
            if run.on_gpus:
                communication, one_node = run.settings.communication, run.nodes == 1
                findings += (
                    Finding("problem" if lack.needed else "warning", f"{lack.what}.", lack.advice)
                    for lack in missing_for(
                        communication, machine.environment, machine.nccl, one_node=one_node
                    )
                )
    findings += [finding for finding in rehearsed if finding not in findings]
    return sorted(findings, key=lambda finding: finding.level != "problem")


def _warnings(*rows: tuple[object, str, str]) -> Iterator[Finding]:
    """Yields the rows whose first value is true, each with its sentence and its advice."""
    return (Finding("warning", problem, advice) for holds, problem, advice in rows if holds)


# --- What is installed. ---

_STACK = ("torch", "mosaicml", "llm-foundry", "transformers")
_EXPECTED = "; `pip check` complains of pins of mosaicml and llm-foundry, which does no harm"


def _stack_of(machine: Machine) -> dict[str, str]:
    """Returns the versions that a tested row is known by, without what follows a plus."""
    return {name: (machine.versions.get(name) or "").partition("+")[0] for name in _STACK}


def _versions(machine: Machine) -> Iterator[Finding]:
    """Finds versions that are beside the others, and what no longer fits them in Composer."""
    here = _stack_of(machine)
    # torch or transformers was taken back to the pins of Composer or Foundry.
    for row in ROWS if row_of(here) is None else ():
        tested = versions_of(row, _STACK)
        other = [name for name in ("torch", "transformers") if here[name] != tested[name]]
        if len(other) == 1 and here[other[0]] == versions_of("stable", _STACK)[other[0]]:
            yield Finding(
                "warning",
                f"{other[0]} {here[other[0]]} is beside the other versions of the row {row}, which "
                f"has {other[0]} {tested[other[0]]}. pip takes it back when it installs something "
                "that depends on mosaicml or llm-foundry, because of their pins.",
                f"Run `python -m composer_fsdp2.pins {row} > pins.txt && pip install --no-deps -r "
                "pins.txt`.",
            )
    misfits = [patch for patch in machine.patches if patch.state == "does not fit"]
    if misfits:
        needed = sorted({patch.versions for patch in misfits})
        yield Finding(
            "problem",
            f"{len(misfits)} of {len(machine.patches)} places in Composer are not what their "
            f"replacements were written for, {misfits[0].target} first. Runs with FSDP2 stop at "
            "the start with a PatchError.",
            f"Install {' and '.join(needed)}.",
        )
        return
    off = [patch for patch in machine.patches if patch.state == "switched off"]
    for feature in dict.fromkeys(patch.feature for patch in off):
        needed = sorted({patch.versions for patch in off if patch.feature == feature})
        yield Finding(
            "warning",
            f"Switched off, because what it replaces is not known here: {feature}. A run that asks "
            "for it stops with a PatchError.",
            f"Do without it, or install {' and '.join(needed)}.",
        )
    tested = {patch.versions for patch in machine.patches if patch.versions.startswith("mosaicml ")}
    installed = (machine.versions.get("mosaicml") or "").partition("+")[0]
    yield from _warnings(
        (
            tested and not off and f"mosaicml {installed}" not in tested,
            f"mosaicml {installed} is not a version this package was tested with "
            f"({', '.join(tested)}). All that it replaces is unchanged there; the rest may not be.",
            f"Install {' or '.join(tested)} if something goes wrong.",
        )
    )


def _torch(machine: Machine) -> Iterator[Finding]:
    """Finds what this torch lacks: private members that are used, and code for the GPUs."""
    missing = [state.member for state in machine.members if not state.found]
    for feature in dict.fromkeys(member.feature for member in missing):
        names = ", ".join(member.title for member in missing if member.feature == feature)
        needed = feature == EVERY_RUN
        yield Finding(
            "problem" if needed else "warning",
            f"torch {machine.versions.get('torch')} has no {names}. Runs with "
            f"{'FSDP2' if needed else feature} stop at the start with a PatchError.",
            "Install a torch this package was tested with (2.7 to 2.15)"
            + ("." if needed else f", or leave {feature} out."),
        )
    for gpu in dict.fromkeys(machine.gpus):
        if runs_on(gpu.capability, machine.built_for):
            continue
        torch, (major, minor) = machine.versions.get("torch"), gpu.capability
        # Source: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
        cuda = "12.8 or newer" if major >= 10 else "12.6 or older"
        yield Finding(
            "problem",
            f"{gpu.name} has compute capability {major}.{minor}, and torch {torch} was compiled "
            f"for {', '.join(machine.built_for)}. The first kernel would fail.",
            f"Install a wheel of torch that was built with CUDA {cuda}.",
        )


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Returns whether a GPU can run one of the architectures that torch was compiled for.

    Code (`sm_90`) runs on the same major version from its minor one on. PTX (`compute_90`) is
    compiled for every later GPU when it is loaded.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
    """
    architectures = re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(built_for))
    return not architectures or any(
        (int(major), int(minor)) <= capability
        and (kind == "compute" or int(major) == capability[0])
        for kind, major, minor in architectures
    )


def _surroundings(machine: Machine, run: RunFacts | None) -> Iterator[Finding]:
    """Yields findings about a shell's variables, and about interfaces and open files of ranks."""
    switched = machine.environment.get("FSDP_VERSION") == "2"
    yield from _warnings(
        (
            {"RANK", "WORLD_SIZE"} <= machine.environment.keys(),
            "RANK and WORLD_SIZE are set, as a launcher sets them. Here 'composer-fsdp2 train' "
            "takes itself for one rank, starts no others and waits for them.",
            "In a shell without a launcher: unset RANK WORLD_SIZE",
        ),
        (
            switched and run is None,
            "FSDP_VERSION=2 is set, Composer's own switch. After composer_fsdp2.install() a "
            "Trainer reads FSDP1 settings as FSDP2; an LLM Foundry run with `fsdp_config` gets "
            "Composer's FSDP2, which ignores most of them.",
            "unset FSDP_VERSION, and write parallelism_config.fsdp2.",
        ),
        (
            switched and run is not None and run.asks == "FSDP1",
            "FSDP_VERSION=2 is set: the FSDP1 settings go to Composer's own FSDP2, which ignores "
            "sharding_strategy, the degrees and most others, with a warning only.",
            "unset FSDP_VERSION, and migrate the settings.",
        ),
    )
    here = machine.interfaces
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        written = machine.environment.get(name, "")
        # NCCL takes beginnings of names, after `=` whole ones, and after `^` those it may not use.
        is_exact = name.startswith("GLOO") or written.startswith("=")
        names = written.lstrip("=").split(",")
        matches = [
            interface in here if is_exact else any(i.startswith(interface) for i in here)
            for interface in names
        ]
        yield from _warnings(
            (
                written and not written.startswith("^") and not any(matches),
                f"{name} is {written}, and the interfaces of this machine are {', '.join(here)}. "
                "Ranks could not connect here.",
                "Write the name of the interface that the nodes share; `ip address` lists them.",
            )
        )
    if run is None or run.settings is None:
        return
    settings = run.settings
    # Groups for agreements, others for the order of collectives, and those of saves.
    saves = settings.async_save and 1 + (settings.data_parallel_replicate_degree not in (None, 1))
    sockets = (1 + (settings.order_check != "never") + saves) * neighbours(run.ranks) + 100
    yield from _warnings(
        (
            0 <= machine.open_files < sockets,
            f"A process may open {machine.open_files} files here (`ulimit -n`), and each of "
            f"{run.ranks} ranks has about {sockets} open, most of them sockets of gloo. Ranks "
            "could not connect.",
            f"On every node, before the run starts: ulimit -n {max(65536, 2 * sockets)}",
        )
    )


# --- What the run asks for, and how FSDP2 would shard it. ---


def _asked(run: RunFacts) -> Iterator[Finding]:
    # On one rank LLM Foundry drops the settings and trains without FSDP1.
    without_gpu = run.asks == "FSDP1" and not run.on_gpus and run.ranks > 1
    if without_gpu:
        yield Finding(
            "problem",
            "The settings are FSDP1's, which shards on GPUs alone, and there is no GPU. The run "
            "would stop when it shards the model.",
            f"composer-fsdp2 migrate {run.path} -o NEW.yaml",
        )
    yield from _warnings(
        (
            run.asks == "neither",
            "FSDP2 is not asked for. Every rank would hold the whole model and optimizer.",
            "Write `parallelism_config: {fsdp2: {}}`.",
        ),
        (
            run.asks == "FSDP1" and not without_gpu,
            "The settings are FSDP1's, and the run would use FSDP1.",
            f"composer-fsdp2 migrate {run.path} -o NEW.yaml",
        ),
        (
            run.asks == "FSDP2" and run.ranks == 1,
            "On one rank there is nobody to share with: it holds the whole model and optimizer.",
            "Start two ranks or more to save memory: --ranks 2",
        ),
    )
    precision = run.value("precision")
    if not run.on_gpus and precision != "fp32":
        default = "" if "precision" in run.others else ", LLM Foundry's default"
        yield Finding(
            "problem",
            f"precision is {precision}{default}, and there is no GPU. Composer trains in fp32 "
            "alone on the CPU.",
            "Write precision: fp32. mixed_precision: {param_dtype: bf16, reduce_dtype: fp32} "
            "computes in bf16 all the same.",
        )


def _mesh(run: RunFacts, settings: FSDP2Config) -> Iterator[Finding]:
    reshard, per_node = settings.reshard_after_forward, run.ranks_per_node
    try:
        shape = MeshShape.resolve(settings, run.ranks)
        shape.check_reshard(reshard, "the run")
    except ConfigError as error:
        return findings_of(error)

    def crosses(group: int) -> bool:
        """Whether a group of consecutive ranks lies on more than one node."""
        return run.nodes > 1 and (group > per_node or per_node % group > 0)

    # Ranks of the groups that keep a copy between forward and backward.
    size = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else None
    # With tensor parallelism the network carries a part of each parameter already.
    no_tensor_parallel = shape.tensor == 1
    sizes = ", ".join(str(n) for n in range(2, per_node + 1) if per_node % n == 0)
    advice = f"If a node holds a replica: {_SHARD}_degree: {per_node} and {_REPLICATE}_degree: -1."
    if reshard in ("auto", True) and shape.shard % per_node == 0:
        advice += f" Or reshard_after_forward: {per_node}: backward then gathers in the node."
    slow = preparing_text(run.units, shape.shard) if run.units else None
    slow = f" {slow}" if slow else ""
    return _warnings(
        (
            run.nodes == 1 and size is not None and size < shape.shard,
            f"reshard_after_forward is {size} on a single node. Every rank keeps 1/{size} of "
            f"the parameters between forward and backward instead of 1/{shape.shard}; what it "
            "saves is traffic between nodes.",
            "Write auto for less memory, or false for no second gather.",
        ),
        (
            crosses(shape.tensor),
            f"tensor_parallel.degree is {shape.tensor}, and groups of {shape.tensor} ranks do not "
            f"fit into nodes of {per_node}: every divided layer exchanges its output over the "
            "network between them, in forward and backward.",
            f"Use one of {sizes}." if sizes else "Leave tensor parallelism out.",
        ),
        (
            no_tensor_parallel and crosses(shape.shard),
            f"The {shape.shard} ranks of one replica are on more than one node: parameters are "
            f"gathered over the network between them.{slow}",
            advice,
        ),
        (
            no_tensor_parallel and size is not None and crosses(size),
            f"reshard_after_forward is {size}, and groups of {size} ranks do not fit into "
            f"nodes of {per_node}: the gathers of backward go over the network as well.",
            f"Use {per_node}, or a divisor of it.",
        ),
    )


# --- The report: problems, warnings, the run, the installation. ---

Line = tuple[str, str | None]
"""a line of text, and its colour on a terminal"""
_LABEL, _WIDTH = 17, 100
_MOST = 20
"""lines without `verbose`; problems and warnings are never cut"""
_COLOURS = {"problem": "red", "warning": "yellow"}
_SHOWN_GROUPS = 4


def backend_of(on_gpus: bool) -> str:
    """Returns the name of the library through which ranks talk."""
    return "nccl" if on_gpus else "gloo"


def report_lines(
    machine: Machine, run: RunFacts | None, findings: Sequence[Finding], *, verbose: bool
) -> list[Line]:
    """Returns the report, problems first.

    Args:
        machine: versions, devices and environment of this machine.
        run: the settings and ranks that a file asks for; `None` without a file that can be read.
        findings: those of `examine`.
        verbose: whether to list everything that Composer and torch are relied on for, and to say
            more than fits on a screen.
    """
    counts = {level: sum(f.level == level for f in findings) for level in _COLOURS}
    parts = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items() if n]
    colour = "red" if counts["problem"] else "yellow" if parts else "green"
    lines: list[Line] = [(f"{', '.join(parts)}:" if parts else "Nothing to warn of.", colour)]
    for finding in findings:
        problem = _wrapped(f"{finding.level}: ", finding.what)
        lines += [(text, _COLOURS[finding.level]) for text in problem]
        lines += [(text, None) for text in _wrapped("  do: ", finding.advice)]
    about_run = [] if run is None else ["The run:", *_labelled(describe_run(run))]
    names = [f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    versions = (f"{name} {version or 'is missing'}" for name, version in machine.versions.items())
    fits = sum(patch.problem is None for patch in machine.patches)
    there = sum(state.found for state in machine.members)
    row = row_of(_stack_of(machine))
    installed = _labelled(
        [
            ("installed", ", ".join(versions)),
            *([("tested as", row + _EXPECTED * (row != "stable"))] if row else []),
            ("GPUs", f"{', '.join(kinds) or 'none'}; backend {backend_of(bool(names))}"),
            (
                "relied on",
                f"{fits} of {len(machine.patches)} places in Composer fit, {there} of "
                f"{len(machine.members)} internals of torch are there (--verbose lists them)",
            ),
        ]
    )
    room = _MOST - len(lines) - len(installed)
    if not verbose and len(about_run) > room:
        shown_lines = max(room - 1, 0)
        more = f"... {len(about_run) - shown_lines} more lines about the run with --verbose"
        about_run = [*about_run[:shown_lines], more][: max(room, 0)]
    plain = [*about_run, *installed, *_relied_on(machine, verbose=verbose)]
    return lines + [(text, None) for text in plain]


def _relied_on(machine: Machine, *, verbose: bool) -> list[str]:
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
    named = ((feature, ", ".join(dict.fromkeys(titles))) for feature, titles in rows.items())
    return [*lines, *_labelled(named)]


def _labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Returns lines of a label, padded to a column, and its text."""
    wrapped = (_wrapped(f"{label:{_LABEL - 1}} ", text, indent=_LABEL) for label, text in rows)
    return [line for lines in wrapped for line in lines]


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


# --- The run in words. ---

_OWN_LINES = {
    f"{_SHARD}_degree",
    f"{_REPLICATE}_degree",
    "reshard_after_forward",
    "mixed_precision",
    "state_dict_type",
}
"""settings that are described in lines of their own"""
_RESHARDS: dict[Any, str] = {
    "auto": "top-level units keep their parameters until backward, all others free them",
    True: "every unit frees its parameters after forward and gathers them again in backward",
    False: "every unit keeps its parameters from forward to backward",
}
_INIT = {
    "cpu": "cpu: every rank builds the whole model in its CPU memory",
    "mixed": "mixed: rank 0 builds the whole model in its CPU memory, the others nothing",
    "meta": "meta: no rank builds the whole model",
}
_STATE_DICTS = {
    "sharded": "a checkpoint is a folder, to which every rank writes its part",
    "full": "a checkpoint is one file, for which rank 0 gathers everything",
}


def describe_run(run: RunFacts) -> list[tuple[str, str]]:
    """Returns the run in labels and texts; other settings as written, if not their default."""
    nodes = "1 node" if run.nodes == 1 else f"{run.nodes} nodes"
    where = "GPUs" if run.on_gpus else "the CPU (--gpus-per-node N: elsewhere, on GPUs)"
    lines = [("asks for", run.asks), ("ranks", f"{run.ranks} on {nodes}, on {where}")]
    settings = run.settings
    if settings is None:
        return lines
    shape = mesh_of(run)
    if shape is None:
        lines.append(("mesh", "none fits the ranks"))
    else:
        mesh, copy = shape.describe(), _grouped(run.ranks, shape.shard * shape.tensor)
        if shape.tensor == 1:
            outer = "" if shape.replicate is None else f"{_REPLICATE} {shape.replicate} x "
            mesh = f"{outer}{_SHARD} {shape.shard}"
        lines.append(("mesh", mesh))
        if shape.tensor > 1:
            lines.append(("", f"each layer on {_grouped(run.ranks, shape.tensor)}"))
        lines.append(("", f"each replica on {copy}"))
    mixed, precision = settings.mixed_precision, run.value("precision")
    try:
        policy = resolve_precision(mixed, compute_dtype(precision))
    except ConfigError:
        lines.append(("precision", f"{precision}: not supported"))
    else:
        dtypes = [
            "the parameters' own dtype" if dtype is None else str(dtype).removeprefix("torch.")
            for dtype in (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
        ]
        name = mixed if isinstance(mixed, str) else "as written"
        name = f", mixed_precision {mixed}" if isinstance(mixed, str) else ""
        text = f"{precision}{name}: computes in {dtypes[0]}, reduces gradients in {dtypes[1]}"
        lines.append(("precision", text))
    reshard, kind = settings.reshard_after_forward, settings.state_dict_type
    text = _RESHARDS.get(reshard, f"after forward, groups of {reshard} ranks keep one copy")
    init, declared = run.value("model.init_device"), known_settings()
    return [
        *lines,
        ("reshard", f"{str(reshard).lower()}: {text}"),
        ("state_dict_type", f"{kind}: {_STATE_DICTS[kind]}"),
        ("init_device", _INIT.get(init, str(init))),
        *(
            (name, ascii_repr(value))
            for name, value in run.written.items()
            if name in declared and name not in _OWN_LINES and value != declared[name].default
        ),
    ]


def _grouped(ranks: int, size: int) -> str:
    """Returns the groups of ranks next to each other."""
    starts = range(0, ranks, size)
    shown = starts[:_SHOWN_GROUPS]
    groups = [f"{n}" if size == 1 else f"{n}-{n + size - 1}" for n in shown]
    more = ", ..." if len(starts) > _SHOWN_GROUPS else ""
    return f"{size} {'ranks' if size > 1 else 'rank'}: {', '.join(groups)}{more}"
