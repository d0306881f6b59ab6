"""The runs of `yamls/experts` hold the experts of each layer on the 8 GPUs of a node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from composer_fsdp2.foundry.cluster import Cluster, environment
from composer_fsdp2.foundry.transform import fsdp2_settings, parse_run_config
from composer_fsdp2.parallel.expert.plan import REASON, ExpertPlan
from composer_fsdp2.parallel.expert.transformation import ExpertParallel
from composer_fsdp2.prepare.model import TRANSFORMATIONS
from composer_fsdp2.prepare.plan import PreparePlan

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from tests.support import yaml_models
from tests.support.yaml_memory import ROOT, commands_of, comment_of, gpus_of, plain

RUNS = sorted((ROOT / "yamls" / "experts").glob("*.yaml"))
DEGREE = 8


@pytest.mark.table("mixtral-8x7b")
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_its_comment_says_is_planned(path: Path):
    values: dict[str, Any] = plain(OmegaConf.load(path))  # pyright: ignore
    commands = commands_of(path)
    for ranks, command in zip((8, 64), commands, strict=True):
        assert gpus_of(command) == ranks
        assert command[-1] == f"yamls/experts/{path.name}"
        model = yaml_models.build_model(values["model"])
        cluster = Cluster(ranks=ranks, ranks_per_node=8, on_gpus=True)
        with environment(cluster.first_rank()):
            plan = PreparePlan(
                model,
                None,
                fsdp2_settings(parse_run_config(values)),
                "fp32",
                "cpu",
                mesh=None,
                transformations=TRANSFORMATIONS,
            )
        found: ExpertPlan = plan.plan_of(ExpertParallel)
        layers = yaml_models.CONFIGS[values["variables"]["model"]]["num_hidden_layers"]
        units = [unit for unit in plan.units.units if unit.reason == REASON]
        assert found.degree == DEGREE
        assert len(found.lists) == len(units) == layers
        (count,) = {held.count for held in found.lists}
        (elements,) = {unit.numel for unit in units}
        rows = re.findall(r"^ +(\d+) +(\d+) +(\d+\.\d)$", comment_of(path), re.MULTILINE)
        assert rows == [
            (str(degree), str(count // degree), f"{elements * 2 / degree / 1e9:.1f}")
            for degree in (1, DEGREE)
        ]
