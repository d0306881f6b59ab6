"""The runs of `yamls/long` divide their sequences between the 8 GPUs that they are written for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from composer_fsdp2.foundry.cluster import Cluster, environment
from composer_fsdp2.foundry.transform import fsdp2_settings, parse_run_config, transform
from composer_fsdp2.parallel.sequence.transformation import SequenceParallel
from composer_fsdp2.patches import uninstall
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from tests.support import yaml_models
from tests.support.yaml_memory import ROOT, commands_of, comment_of, plain

RUNS = sorted((ROOT / "yamls" / "long").glob("*.yaml"))
RANKS = 8
METHODS = {8: "ulysses", 4: "gather_kv"}
"""by degree, for 32 heads of queries and 8 of keys and values"""
every_run = pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
CLUSTER = Cluster(ranks=RANKS, ranks_per_node=RANKS, on_gpus=True)


def settings_of(path: Path) -> dict[str, Any]:
    return plain(OmegaConf.load(path))  # pyright: ignore


def degree_of(values: dict[str, Any]) -> int:
    return values["parallelism_config"]["sequence_parallel"]["degree"]


@every_run
def test_every_attention_is_divided_and_the_model_is_sharded_over_all_ranks(path: Path):
    values = settings_of(path)
    shape = yaml_models.CONFIGS[values["variables"]["model"]]
    model = yaml_models.build_model(values["model"])
    with environment(CLUSTER.first_rank()):
        plan = PreparePlan(
            model,
            None,
            fsdp2_settings(parse_run_config(values)),
            "fp32",
            "cpu",
            mesh=None,
            transformations=TRANSFORMATIONS,
        )
    found = plan.plan_of(SequenceParallel)
    assert plan.shape.axes == {"dp_shard": RANKS}
    assert len(found.attention) == shape["num_hidden_layers"]
    # Of 8 ranks each would gather the keys and values of 7 others.
    assert (found.degree, found.method) == (degree_of(values), METHODS[degree_of(values)])
    assert not found.frees  # blocks are run again as a whole


@every_run
def test_groups_share_the_batch_and_read_the_same(path: Path):
    values = settings_of(path)
    with environment(CLUSTER.first_rank()):
        parsed = transform(values)
    uninstall()
    degree = degree_of(values)
    assert parsed["train_loader"]["dataset"]["replication"] == degree
    assert parsed["eval_loader"]["dataset"]["replication"] == degree
    assert values["max_seq_len"] % degree == 0
    assert values["global_train_batch_size"] % (RANKS // degree) == 0


@every_run
def test_what_its_comment_says_is_computed(path: Path):
    values = settings_of(path)
    shape, length = yaml_models.CONFIGS[values["variables"]["model"]], values["max_seq_len"]
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+\.\d)$", comment_of(path), re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, degree_of(values)]
    for degree, tokens, kept in rows:
        share = length // int(degree)
        inputs = share * shape["hidden_size"] * shape["num_hidden_layers"] * 2
        assert (int(tokens), kept) == (share, f"{inputs / 1e9:.1f}")
    ((*_, last),) = commands_of(path)[:1]
    assert last == f"yamls/long/{path.name}"
