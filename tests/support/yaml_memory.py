"""Writes the memory that runs need into their YAMLs: `python -m tests.support.yaml_memory`.

The comment at the top of a YAML holds the commands that start it, on one node and on several. Every
command is a line of the table: its overrides applied, its model planned on meta as the Trainer
would, the mesh resolved for its number of GPUs. Nothing is measured, and activations are not in it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.models import ComposerModel
from omegaconf import DictConfig, OmegaConf

from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.wrap_plan import ShardUnit, WrapPlan
from composer_fsdp2.prepare.conventions import trainer_rules
from composer_fsdp2.shard.precision import compute_dtype, resolve_precision
from tests.support.recent_models import missing
from tests.support.yaml_models import build_model

ROOT = Path(__file__).parents[2]
NEWEST = sorted((ROOT / "yamls" / "newest").glob("*.yaml"))
"""of models that transformers 4 does not have"""
RUNS = sorted(
    p for part in ("finetune", "pretrain") for p in (ROOT / "yamls" / part).glob("*.yaml")
)
GPUS_PER_NODE = 8
GB = 1e9
FP32_BYTES = 4
ADAM_STATES = 2
TABLE = re.compile(r"(`python -m tests\.support\.yaml_memory`:\n#\n)(?:#   .*\n)+")
STATED = re.compile(r"of 8 GPUs with (\d+) GB")


@dataclass(frozen=True, slots=True)
class Run:
    """One command of a YAML's comment, planned."""

    gpus: int
    gpu_gb: int
    """of memory that the comment asks of a GPU"""
    config: DictConfig
    model: ComposerModel
    plan: WrapPlan
    mesh: MeshShape


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def together(self) -> int:
        """All of them at the moment of the largest gathering."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def comment_of(path: Path) -> str:
    """The comment at the top of a file, without its marks."""
    lines = path.read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def commands_of(path: Path) -> list[list[str]]:
    """The words of every command in the comment; one may go over several lines."""
    whole = comment_of(path).replace("\\\n", " ")
    lines = [line.strip() for line in whole.splitlines()]
    return [shlex.split(x) for x in lines if x.startswith(("composer-fsdp2 ", "torchrun "))]


def gpus_of(command: list[str]) -> int:
    if command[0] != "torchrun":
        return GPUS_PER_NODE
    counts = [int(command[command.index(key) + 1]) for key in ("--nnodes", "--nproc-per-node")]
    return math.prod(counts)


@functools.cache
def runs_of(path: Path) -> list[Run]:
    """Every run the comment of a YAML has a command for."""
    stated = [int(found) for found in STATED.findall(comment_of(path))]
    commands = commands_of(path)
    return [
        plan_run(path, command, gpu_gb) for command, gpu_gb in zip(commands, stated, strict=True)
    ]


def plan_run(path: Path, command: list[str], gpu_gb: int) -> Run:
    """Plans a run with the rules and settings the Trainer would use."""
    overrides = command[command.index(str(path.relative_to(ROOT))) + 1 :]
    config = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    assert isinstance(config, DictConfig)
    model, settings, plan = plan_values(plain(config))
    gpus = gpus_of(command)
    return Run(gpus, gpu_gb, config, model, plan, MeshShape.resolve(settings, gpus))


def plan_values(values: Mapping[str, Any]) -> tuple[ComposerModel, FSDP2Config, WrapPlan]:
    """The model of a run, on meta, and its plan by the rules the Trainer uses."""
    block = values["parallelism_config"]["fsdp2"]
    # The plan is the same for every mesh.
    settings = {key: value for key, value in block.items() if not key.endswith("_degree")}
    model = build_model(values["model"])
    return model, parse_config(block), _plan(model, json.dumps(settings, sort_keys=True))


@functools.cache
def _plan(model: ComposerModel, settings: str) -> WrapPlan:
    config = parse_config(json.loads(settings))
    return plan_wrapping(
        model,
        trainer_rules(ModuleTree.read(model), config.wrap_policy),
        reshard_after_forward=config.reshard_after_forward,
        tied_weights=config.tied_weights,
        ignored_params=config.ignored_params,
    )


def plain(config: DictConfig) -> dict[str, Any]:
    """The config with its interpolations resolved."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def memory_of(run: Run) -> Memory:
    """What a rank holds through the whole of training, and what it gathers for a moment.

    Source: FSDP2 cuts every parameter along its first dimension into as many parts as there are
    shards and pads all of them to the size of the first. LLM Foundry builds models in fp32, so the
    shards, their gradients and both of Adam's moments are fp32: 16 bytes an element.
    """
    shapes = {name: param.shape for name, param in run.model.named_parameters()}
    owned = sum(
        padded_shard(shapes[name], run.mesh.shard) for name in shapes.keys() - _repeated(run.plan)
    )
    shard_bytes = owned * FP32_BYTES
    return Memory(shard_bytes, shard_bytes, ADAM_STATES * shard_bytes, gathered_bytes(run))


def _repeated(plan: WrapPlan) -> set[str]:
    """All names of a tied parameter but one."""
    return {name for names in plan.tied for name in names[1:]}


def padded_shard(shape: torch.Size, shards: int) -> int:
    """Elements of one rank's part of a parameter."""
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def gathered_bytes(run: Run) -> int:
    """The most that gathered units take at one moment of a backward pass.

    There are five candidates. The head's gradient, in the dtype of computing and, on its way to the
    other ranks, in that of reducing, beside the first block gathered ahead. While a block computes:
    the block and the one gathered ahead of it, in the dtype of computing; the block's whole
    gradient in the same dtype; the gradient of what came before it, the head or another block, in
    the dtype of reducing. An embedding's gradient in both, beside that of the last block. Units
    that keep their weights do so through all of these, with their gradients. When those units are
    reduced at the very end, their weights are gone, but their gradients are there in both dtypes.
    The same block twice stands for two neighbours.
    """
    values = plain(run.config)
    settings = parse_config(values["parallelism_config"]["fsdp2"])
    policy = resolve_precision(settings.mixed_precision, compute_dtype(values["precision"]))
    assert policy.param_dtype is not None
    assert policy.reduce_dtype is not None
    compute, reduce = policy.param_dtype.itemsize, policy.reduce_dtype.itemsize
    units = run.plan.units
    kept = sum(unit.numel for unit in units if unit.top_level and not unit.reshard_after_forward)
    head = sum(unit.numel for unit in units if unit.role == "head")
    embedding = sum(unit.numel for unit in units if unit.role == "embedding")
    block = max(unit.numel for unit in blocks(run.plan))
    through_all = kept * 2 * compute
    return max(
        through_all + head * (compute + reduce) + block * compute,
        through_all + head * reduce + block * 3 * compute,
        through_all + block * (3 * compute + reduce),
        through_all + embedding * (compute + reduce) + block * reduce,
        kept * (compute + reduce) + max(embedding, block) * reduce,
    )


def blocks(plan: WrapPlan) -> list[ShardUnit]:
    """Units that free their weights after forward, and gather them again for backward."""
    return [unit for unit in plan.units if unit.reshard_after_forward and unit.role is None]


def table(path: Path) -> str:
    """The lines of the comment, without its marks."""
    runs = runs_of(path)
    lines = ["GPUs  replicas x shards  weights  gradients  Adam  gathered  together"]
    lines += [_row(run, memory_of(run)) for run in runs]
    if plain(runs[0].config)["model"].get("init_device") == "mixed":
        whole = sum(unit.numel for unit in runs[0].plan.units) * FP32_BYTES
        lines.append(f"CPU memory of rank 0 when it reads the whole model: {whole / GB:.0f}")
    return "".join(f"#   {line}\n" for line in lines)


def _row(run: Run, memory: Memory) -> str:
    mesh = f"{run.mesh.replicate or 1} x {run.mesh.shard}"
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.gathered, memory.together)
    widths = (7, 9, 4, 8, 8)
    cells = [f"{part / GB:>{width}.1f}" for part, width in zip(parts, widths, strict=True)]
    return f"{run.gpus:>4}  {mesh:>17}  " + "  ".join(cells)


def with_table(path: Path) -> str:
    """The text of a YAML with its table computed anew."""
    text, count = TABLE.subn(lambda match: match[1] + table(path), path.read_text())
    assert count == 1, path
    return text


def has_newest() -> bool:
    """Whether transformers here has the models of `yamls/newest`."""
    return not any(map(missing, ("GPT-OSS", "Qwen3.5", "Gemma 4")))


def main() -> None:
    for path in (*RUNS, *(NEWEST if has_newest() else ())):
        path.write_text(with_table(path))


if __name__ == "__main__":
    main()
