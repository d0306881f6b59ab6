"""Concludes findings from the facts of a machine and a run. Pure: facts in, findings out.

What the libraries check themselves is not here: `foundry/rehearsal.py` lets them check it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.findings import Finding, findings_of
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.shard.nccl_environment import missing_for
from composer_fsdp2.shard.torch_private.members import EVERY_RUN

if TYPE_CHECKING:
    from composer_fsdp2.shard.torch_private.members import MemberState
    from composer_fsdp2.trainer.patches import PatchState

__all__ = ["KEYS", "Gpu", "Machine", "Run", "examine", "mesh_of"]

KEYS = (
    "model.init_device",
    "model.pretrained",
    "precision",
)
"""Keys of a run, besides those about parallelism, that decide something here."""

_DEFAULTS = {"precision": "amp_bf16", "model.init_device": "cpu"}
"""LLM Foundry's"""
SHARD, REPLICATE = "data_parallel_shard", "data_parallel_replicate"
"""Composer's names of the mesh axes, and the beginnings of the settings' names"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Versions and variables of this machine."""

    versions: Mapping[str, str | None]
    """of packages; `None` is not installed"""
    gpus: tuple[Gpu, ...] = ()
    patches: tuple[PatchState, ...] = ()
    members: tuple[MemberState, ...] = ()
    """private ones of torch"""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nccl: tuple[int, ...] | None = None
    """version of torch's NCCL"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Settings of a training YAML, and where it would run."""

    path: str = "OLD.yaml"
    asks: Literal["FSDP2", "FSDP1", "neither"]
    settings: FSDP2Config | None = None
    """with FSDP2 only"""
    ranks: int
    ranks_per_node: int
    on_gpus: bool
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """values of `KEYS`; a key that is missing or cannot be resolved is not in it"""
    builds_on_meta: bool | None = None
    """whether `init_device: meta` builds the model; `None` where nobody tried"""
    units: int | None = None
    """how many units FSDP2 would make; `None` where the model was not built"""

    @property
    def nodes(self) -> int:
        """Nodes it takes."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 will be used."""
        return self.asks == "FSDP2"

    def value(self, key: str) -> Any:
        """One of `KEYS`, or LLM Foundry's default, or `None`."""
        return self.others.get(key, _DEFAULTS.get(key))


Findings = Iterator[Finding]


def examine(machine: Machine, run: Run | None, rehearsed: Iterable[Finding] = ()) -> list[Finding]:
    """Returns all findings, problems first.

    Args:
        machine: what is installed.
        run: what is asked for.
        rehearsed: what going through the run found.
    """
    found = [*_patches(machine), *_members(machine), *_environment(machine, run)]
    if run is not None:
        found += _asked(run)
        if run.settings is not None:
            found += [*_mesh(run, run.settings), *_memory(run, run.settings)]
            found += _collectives(machine, run, run.settings)
    for finding in rehearsed:
        # The name of a step stands before what is said already.
        known = (
            finding.advice == other.advice and finding.what.endswith(other.what) for other in found
        )
        if not any(known):
            found.append(finding)
    return sorted(found, key=lambda finding: finding.level != "problem")


def mesh_of(run: Run) -> MeshShape | None:
    """Returns the mesh of a run under FSDP2; `None` without one.

    Raises:
        ConfigError: the degrees do not fit the number of ranks.
    """
    return None if run.settings is None else MeshShape.resolve(run.settings, run.ranks)


# --- What is installed. ---


def _patches(machine: Machine) -> Findings:
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
    if off:
        return
    known = {patch.versions for patch in machine.patches if patch.versions.startswith("mosaicml ")}
    installed = (machine.versions.get("mosaicml") or "").partition("+")[0]
    if known and f"mosaicml {installed}" not in known:
        yield Finding(
            "warning",
            f"mosaicml {installed} is not a version this package was tested with "
            f"({', '.join(known)}). All that it replaces is unchanged there; the rest may not be.",
            f"Install {' or '.join(known)} if something goes wrong.",
        )


def _members(machine: Machine) -> Findings:
    missing = [state.member for state in machine.members if not state.found]
    for feature in dict.fromkeys(member.feature for member in missing):
        names = ", ".join(member.title for member in missing if member.feature == feature)
        needed = feature == EVERY_RUN
        what = "Runs with FSDP2 stop" if needed else f"Runs with {feature} stop"
        yield Finding(
            "problem" if needed else "warning",
            f"torch {machine.versions.get('torch')} has no {names}. {what} at the start with a "
            "PatchError.",
            "Install a torch this package was tested with (2.7 to 2.15)"
            + ("." if needed else f", or leave {feature} out."),
        )


# --- The environment a run inherits. ---


def _environment(machine: Machine, run: Run | None) -> Findings:
    if {"RANK", "WORLD_SIZE"} <= machine.environment.keys():
        yield Finding(
            "warning",
            "RANK and WORLD_SIZE are set, as a launcher sets them. Here 'composer-fsdp2 train' "
            "takes itself for one rank, starts no others and waits for them.",
            "In a shell without a launcher: unset RANK WORLD_SIZE",
        )
    if machine.environment.get("FSDP_VERSION") != "2" or (run and run.asks == "FSDP2"):
        return
    if run is None:
        yield Finding(
            "warning",
            "FSDP_VERSION=2 is set, Composer's own switch. After composer_fsdp2.install() a "
            "Trainer reads FSDP1 settings as FSDP2; an LLM Foundry run with `fsdp_config` gets "
            "Composer's FSDP2, which ignores most of them.",
            "unset FSDP_VERSION, and write parallelism_config.fsdp2.",
        )
    elif run.asks == "FSDP1":
        yield Finding(
            "warning",
            "FSDP_VERSION=2 is set: the FSDP1 settings go to Composer's own FSDP2, which ignores "
            "sharding_strategy, the degrees and most others, with a warning only.",
            "unset FSDP_VERSION, and migrate the settings.",
        )


# --- What the run asks for. ---


def _asked(run: Run) -> Findings:
    if run.asks == "neither":
        yield Finding(
            "warning",
            "FSDP2 is not asked for. Every rank would hold the whole model and optimizer.",
            "Write `parallelism_config: {fsdp2: {}}`.",
        )
    elif run.asks == "FSDP1":
        yield Finding(
            "warning",
            "The settings are FSDP1's, and the run would use FSDP1.",
            f"composer-fsdp2 migrate {run.path} -o NEW.yaml",
        )
    elif run.ranks == 1:
        yield Finding(
            "warning",
            "On one rank there is nobody to share with: it holds the whole model and optimizer.",
            "Start two ranks or more to save memory: --ranks 2",
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


# --- How FSDP2 would shard. ---


def _mesh(run: Run, settings: FSDP2Config) -> Findings:
    reshard = settings.reshard_after_forward
    try:
        shape = MeshShape.resolve(settings, run.ranks)
        shape.check_reshard(reshard, "the run")
    except ConfigError as error:
        yield from findings_of(error)
        return
    # Ranks of the groups that keep a copy between forward and backward.
    size = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else None
    if run.nodes > 1:
        yield from _mesh_over_nodes(shape, size, reshard, run.ranks_per_node)
    elif size is not None and size < shape.shard:
        yield Finding(
            "warning",
            f"reshard_after_forward is {size} on a single node. Every rank keeps 1/{size} of "
            f"the parameters between forward and backward instead of 1/{shape.shard}; what it "
            "saves is traffic between nodes.",
            "Write auto for less memory, or false for no second gather.",
        )


def _mesh_over_nodes(
    shape: MeshShape, size: int | None, reshard: bool | int | str, per_node: int
) -> Findings:
    if not _fits(shape.tensor, per_node):
        sizes = ", ".join(str(n) for n in range(2, per_node + 1) if per_node % n == 0)
        yield Finding(
            "warning",
            f"tensor_parallel.degree is {shape.tensor}, and groups of {shape.tensor} ranks do not "
            f"fit into nodes of {per_node}: every divided layer exchanges its output over the "
            "network between them, in forward and backward.",
            f"Use one of {sizes}." if sizes else "Leave tensor parallelism out.",
        )
    if shape.tensor > 1:
        return  # what is gathered over the network is a part already
    if not _fits(shape.shard, per_node):
        advice = (
            f"If a node holds a whole copy: {SHARD}_degree: {per_node} and {REPLICATE}_degree: -1."
        )
        if reshard in ("auto", True) and shape.shard % per_node == 0:
            advice += f" Or reshard_after_forward: {per_node}: backward then gathers in the node."
        yield Finding(
            "warning",
            f"The {shape.shard} ranks of one copy are on more than one node: parameters are "
            "gathered over the network between them.",
            advice,
        )
    if size is not None and not _fits(size, per_node):
        yield Finding(
            "warning",
            f"reshard_after_forward is {size}, and groups of {size} ranks do not fit into "
            f"nodes of {per_node}: the gathers of backward go over the network as well.",
            f"Use {per_node}, or a divisor of it.",
        )


def _fits(size: int, per_node: int) -> bool:
    """Whether groups of consecutive ranks stay within nodes."""
    return size <= per_node and per_node % size == 0


# --- Memory and checkpoints. ---


def _memory(run: Run, settings: FSDP2Config) -> Findings:
    mixed = run.value("model.init_device") == "mixed" and not run.value("model.pretrained")
    if mixed and run.builds_on_meta is not False:
        yield Finding(
            "warning",
            "model.init_device is mixed: rank 0 holds the whole model in CPU memory while it "
            "starts.",
            "Write init_device: meta, with which the model's own initialisers run unit by unit.",
        )
    full = settings.state_dict_type == "full"
    if full and settings.async_save:
        yield Finding(
            "warning",
            "async_save with state_dict_type full: training waits until rank 0 has gathered model "
            "and optimizer, and rank 0 holds them in CPU memory twice.",
            "Write state_dict_type: sharded, where every rank copies its own part.",
        )
    if full and run.nodes > 1:
        yield Finding(
            "warning",
            f"state_dict_type is full on {run.ranks} ranks: at every save rank 0 gathers model and "
            "optimizer in its CPU memory and writes alone, while the others wait.",
            "Write state_dict_type: sharded; 'composer-fsdp2 checkpoint convert' makes one file.",
        )


def _collectives(machine: Machine, run: Run, settings: FSDP2Config) -> Findings:
    """Yields what NCCL lacks for what the run asks of it."""
    if run.on_gpus:
        asked, one_node = settings.communication, run.nodes == 1
        for lack in missing_for(asked, machine.environment, machine.nccl, one_node=one_node):
            yield Finding("problem" if lack.needed else "warning", f"{lack.what}.", lack.advice)
