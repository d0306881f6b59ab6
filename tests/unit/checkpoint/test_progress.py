"""Bars of a rank that saves or loads: seen on a terminal alone, with speed and time left."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from composer_fsdp2.checkpoint import progress
from composer_fsdp2.checkpoint.describe import describe_checkpoint
from composer_fsdp2.checkpoint.progress import CountedPlanner, bytes_of, counting_bytes
from composer_fsdp2.checkpoint.write import Savers, write_sharded


class Screen(io.StringIO):
    """Standard error that is a terminal, or is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def screen(monkeypatch):
    def use(terminal: bool) -> Screen:
        found = Screen(terminal)
        monkeypatch.setattr(sys, "stderr", found)
        monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
        return found

    return use


def count(total: int = 1000) -> None:
    with counting_bytes("Loading ep1", total) as advance:
        for _ in range(4):
            advance(total // 4)


def test_a_terminal_has_speed_and_time_left(screen):
    shown = screen(True)
    count()
    assert "Loading ep1" in shown.getvalue()
    assert "B/s" in shown.getvalue()


def test_a_file_has_nothing(screen):
    shown = screen(False)
    count()
    assert shown.getvalue() == ""


def test_a_thread_in_the_background_has_nothing(screen):
    shown = screen(True)
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert shown.getvalue() == ""


# One process is enough for a bar; torch says that it is alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_saving_counts_what_it_writes(screen, tmp_path: Path):
    shown = screen(True)
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
    counted = CountedPlanner(planner, plan, done.append)
    values = [counted.resolve_data(item) for item in plan.items]
    assert sum(done) == bytes_of(plan.items) == 40
    assert any(isinstance(value, torch.Tensor) for value in values)
    assert counted.flatten_state_dict is planner.flatten_state_dict
