"""The runs of `yamls/tensor` plan for the 64 GPUs that they are written for."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from composer_fsdp2.foundry.cluster import Cluster, environment
from composer_fsdp2.foundry.transform import fsdp2_settings, parse_run_config, transform
from composer_fsdp2.parallel.parallelism import GroupSizes
from composer_fsdp2.parallel.tensor.layers import LayerPlan
from composer_fsdp2.parallel.tensor.transformation import TensorParallel
from composer_fsdp2.patches import uninstall
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from tests.support import yaml_models
from tests.support.yaml_memory import ROOT, commands_of, comment_of, gpus_of, plain

RUNS = sorted((ROOT / "yamls" / "tensor").glob("*.yaml"))
RANKS, DEGREE = 64, 8
every_run = pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
CLUSTER = Cluster(ranks=RANKS, ranks_per_node=8, on_gpus=True)


def settings_of(path: Path) -> dict[str, Any]:
    return plain(OmegaConf.load(path))  # pyright: ignore


@functools.cache
def planned(path: Path) -> tuple[PreparePlan, LayerPlan, GroupSizes]:
    values = settings_of(path)
    model, settings = yaml_models.build_model(values["model"]), parse_run_config(values)
    with environment(CLUSTER.first_rank()):
        plan = PreparePlan(
            model,
            None,
            fsdp2_settings(settings),
            "fp32",
            "cpu",
            mesh=None,
            transformations=TRANSFORMATIONS,
        )
    layers = plan.plan_of(TensorParallel)
    return plan, layers, TensorParallel().sizes(plan.tree, layers, plan.units, plan.shape)


@pytest.mark.table("qwen3-32b")
@every_run
def test_every_attention_and_mlp_is_divided_and_each_rank_holds_a_64th(path: Path):
    plan, layers, sizes = planned(path)
    name = settings_of(path)["variables"]["model"]
    count = yaml_models.CONFIGS[name]["num_hidden_layers"]
    assert plan.shape.axes == {"dp_shard": 8, "tp": 8}
    for layer in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert sum(key.endswith(f".{layer}") for key in layers.cuts) == count
    assert sizes.elements == pytest.approx(yaml_models.PARAMETERS[name], rel=0.005)
    # What stays whole in a group is the embedding alone, and norms.
    shape = yaml_models.CONFIGS[name]
    embedding = shape["vocab_size"] * shape["hidden_size"]
    assert sizes.elements - sizes.divided == pytest.approx(embedding, rel=0.01)
    assert sizes.held == pytest.approx(sizes.divided / RANKS + embedding / DEGREE, rel=0.01)


@pytest.mark.table("qwen3-32b")
@every_run
def test_what_its_comment_says_is_computed(path: Path):
    sizes, comment = planned(path)[2], comment_of(path).replace("\n", " ")
    pattern = r"(\d+\.\d) of weights.* block is (\d+\.\d) in bf16.* divided, (\d+\.\d)\."
    held, block, embedding = re.findall(pattern, comment)[0]
    assert held == f"{sizes.held_bytes / 1e9:.1f}"
    units = planned(path)[0].units.units
    largest = max(u.numel for u in units if not u.top_level and u.role is None) / DEGREE
    assert block == f"{largest * torch.bfloat16.itemsize / 1e9:.1f}"
    assert embedding == f"{sizes.gathered * torch.bfloat16.itemsize / 1e9:.1f}"
    ((*start, last),) = commands_of(path)[:1]
    assert gpus_of([*start, last]) == RANKS
    assert last == f"yamls/tensor/{path.name}"


@every_run
def test_groups_share_the_batch_and_read_the_same(path: Path):
    with environment(CLUSTER.first_rank()):
        parsed = transform(settings_of(path))
    uninstall()
    assert parsed["train_loader"]["dataset"]["replication"] == DEGREE
    assert parsed["eval_loader"]["dataset"]["replication"] == DEGREE
    groups = RANKS // DEGREE
    assert (
        parsed["global_train_batch_size"] % (groups * parsed["device_train_microbatch_size"]) == 0
    )
