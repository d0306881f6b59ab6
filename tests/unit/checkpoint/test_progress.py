"""Bytes that a save writes, for its bar."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from composer_fsdp2.checkpoint.describe import describe_checkpoint
from composer_fsdp2.checkpoint.write import CountedPlanner, Savers, bytes_of, write_sharded
from tests.support.screen import show_on


# One process is enough for a bar; torch says that it is alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_saving_counts_what_it_writes(monkeypatch, tmp_path: Path):
    shown = show_on(monkeypatch, True)
    state = {"a": torch.arange(1000.0), "b": {"c": torch.ones(3, 4, dtype=torch.bfloat16)}, "n": 1}
    write_sharded(state, tmp_path / "saved", Savers(None, None, writes=True, first_on_node=True))
    assert "Saving checkpoint:" in shown.getvalue()
    assert "/4.02k" in shown.getvalue()
    assert describe_checkpoint(tmp_path / "saved").tensors == 2


def test_every_byte_of_a_plan_is_counted_once():
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.arange(10.0), "n": 1}, None, True)
    plan = planner.create_local_plan()
    done: list[int] = []
    counted = CountedPlanner(planner, done.append)
    values = [counted.resolve_data(item) for item in plan.items]
    assert sum(done) == bytes_of(plan.items) == 40
    assert any(isinstance(value, torch.Tensor) for value in values)
    assert counted.flatten_state_dict is planner.flatten_state_dict
