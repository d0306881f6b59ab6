"""Two runs that save to one folder, and places where nothing can be written: nothing is lost."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from composer_fsdp2 import installed
from composer_fsdp2.checkpoint.describe import verify_checkpoint
from composer_fsdp2.checkpoint.source import open_checkpoint
from composer_fsdp2.checkpoint.staging import Publications, hidden, staged
from composer_fsdp2.checkpoint.write import Savers, write_sharded
from composer_fsdp2.errors import CheckpointError
from tests.dist.test_trainer_checkpoints import FORMATS, HALF, _run
from tests.support.pairs import parametrize_pairs
from tests.support.saved import no_space

ANOTHER = "was written by another run"


def state_of(value: float) -> dict[str, Any]:
    """Each rank has something of its own to write."""
    rank = dist.get_rank()
    weights = {f"w{rank}": torch.full((64, 8), value), f"v{rank}": torch.full((3,), value)}
    return {"state": {"model": weights, "run_name": f"run {value}"}}


def savers() -> Savers:
    return Savers(None, None, writes=True)


def holds(path: Path, value: float) -> None:
    assert verify_checkpoint(path, lambda *_: None)["problems"] == []
    saved = open_checkpoint(path)
    assert len(saved.tensors) == 2 * dist.get_world_size()
    for key in saved.tensors:
        assert (saved.tensor(key) == value).all()


def names_in(folder: Path) -> list[str]:
    dist.barrier()
    found = sorted(item.name for item in folder.iterdir())
    dist.barrier()
    return found


class Meanwhile(DefaultSavePlanner):
    """Another run saves, from beginning to end, while this one is in the middle of it."""

    def __init__(self, folder: Path, own: Publications, when: str) -> None:
        super().__init__()
        self._given, self._when = (folder, own), when

    def create_local_plan(self) -> SavePlan:
        self._save("plans")
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._save("writes")  # its file is open, and the first value is not in it yet
        return super().resolve_data(write_item)

    def _save(self, when: str) -> None:
        if when == self._when:
            self._when = ""
            folder, own = self._given
            write_sharded(state_of(2.0), folder, savers(), publications=own)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("when", ["plans", "writes"])
@pytest.mark.parametrize("before", [False, True], ids=["nothing there", "an older one there"])
def test_two_runs_at_the_same_time(before: bool, when: str, tmp_path: Path):
    folder = tmp_path / "ep0-ba5"
    if before:
        write_sharded(state_of(0.0), folder, savers())
    dist.barrier()
    first, second = Publications(), Publications()
    planner = Meanwhile(folder, second, when)
    with pytest.raises(CheckpointError, match=ANOTHER) as caught:
        write_sharded(state_of(1.0), folder, savers(), planner, publications=first)
    holds(folder, 2.0)
    kept = next(name for name in names_in(tmp_path) if name != "ep0-ba5")
    assert kept in str(caught.value)
    holds(tmp_path / kept, 1.0)
    assert names_in(tmp_path) == ["ep0-ba5", kept]


@pytest.mark.world_size(2)
def test_two_runs_one_after_the_other(tmp_path: Path):
    folder, runs = tmp_path / "ep0-ba5", [Publications(), Publications()]
    for value in (1.0, 2.0):  # one run may save again
        write_sharded(state_of(value), folder, savers(), publications=runs[0])
    holds(folder, 2.0)
    dist.barrier()
    with pytest.raises(CheckpointError, match=ANOTHER):
        write_sharded(state_of(3.0), folder, savers(), publications=runs[1])
    holds(folder, 2.0)
    # A run that begins later goes on from it, and may write it again.
    dist.barrier()
    write_sharded(state_of(4.0), folder, savers(), publications=Publications())
    holds(folder, 4.0)


@pytest.mark.world_size(1)
def test_two_runs_and_one_file(tmp_path: Path):
    path, first, second = tmp_path / "a.pt", Publications(), Publications()

    def save(own: Publications, text: str) -> None:
        with staged(path, folder=False, replace=True, publications=own) as temporary:
            if text == "first":
                save(second, "second")
            temporary.write_text(text)

    with pytest.raises(CheckpointError, match=ANOTHER):
        save(first, "first")
    assert path.read_text() == "second"
    kept = next(item for item in tmp_path.iterdir() if item != path)
    assert kept.suffix == ".pt"
    assert kept.read_text() == "first"
    save(second, "again")
    assert path.read_text() == "again"


@pytest.mark.table("full")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_two_trainers(kind: str, tmp_path: Path):
    """The one that was prepared first has seen nothing of the other's checkpoints."""
    fsdp2 = {"state_dict_type": kind}
    first, _ = _run(tmp_path / "a", fsdp2, until=HALF)
    _run(tmp_path / "b", fsdp2, until=HALF)
    dist.barrier()
    name = str(tmp_path / "b" / "ep{epoch}-ba{batch}-rank{rank}.pt")
    with installed(), pytest.raises(CheckpointError, match=ANOTHER):
        first.save_checkpoint(name)
    found = [item for item in names_in(tmp_path / "b") if "latest" not in item]
    assert len(found) == 2
    for item in found:
        assert verify_checkpoint(tmp_path / "b" / item, lambda *_: None)["problems"] == []


@pytest.mark.world_size(2)
def test_what_was_left_behind_goes_and_what_is_being_written_stays(tmp_path: Path):
    folder = tmp_path / "ep0-ba5"
    left, busy = hidden(folder, secrets.token_hex(6)), hidden(folder, secrets.token_hex(6))
    other = hidden(tmp_path / "ep0-ba50", secrets.token_hex(6))
    handle = None
    if dist.get_rank() == 0:
        for item in (left, busy, other, tmp_path / ".incomplete.ep0-ba5"):
            item.mkdir()
            (item / "__0_0.distcp").write_text("half")
        handle = os.open(busy, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    names = dist.get_rank(), [busy.name, other.name]
    box: list[Any] = [names[1]]
    dist.broadcast_object_list(box)
    write_sharded(state_of(1.0), folder, savers())
    assert names_in(tmp_path) == sorted([*box[0], "ep0-ba5"])
    if handle is not None:
        os.close(handle)


# --- Places that take nothing. ---


def _one_sentence(error: CheckpointError) -> None:
    """The same on all ranks: what, where, how much room there is, what to do; nothing of torch."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(error))
    assert len(set(said)) == 1, said
    text = said[0]
    assert "could not be written: " in text
    assert text.count("could not be written") == 1
    assert "GB are free in" in text
    assert "earlier ones are as they were" in text
    for hidden_in in ("inline_container", "enforce fail", "Errno", "Traceback", "RuntimeError"):
        assert hidden_in not in text


@pytest.mark.table("full-2000-None")
@pytest.mark.world_size(2)
@parametrize_pairs(kind=FORMATS, size_bytes=(0, 100, 1000, 2000, 3000), rank=(0, 1, None))
def test_full_disk(kind: str, size_bytes: int, rank: int | None, tmp_path: Path):
    trainer, _ = _run(tmp_path, {"state_dict_type": kind}, until=HALF)
    name = str(tmp_path / "ep{epoch}-ba{batch}-rank{rank}.pt")
    before = sorted(open_checkpoint(tmp_path / FORMATS[kind]).paths)
    dist.barrier()
    if kind == "full" and rank == 1:
        return  # it writes nothing
    full = no_space(size_bytes) if rank in (None, dist.get_rank()) else no_space(-1)
    with full, installed(), pytest.raises(CheckpointError) as caught:
        trainer.save_checkpoint(name)
    _one_sentence(caught.value)
    assert not [item for item in names_in(tmp_path) if item.startswith(".")]
    assert verify_checkpoint(tmp_path / FORMATS[kind], lambda *_: None)["problems"] == []
    assert sorted(open_checkpoint(tmp_path / FORMATS[kind]).paths) == before


@pytest.mark.table("sharded-True", "full-True")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_place_for_reading_only(kind: str, background: bool, tmp_path: Path):
    """Nobody may write in /proc, root neither."""
    fsdp2 = {"state_dict_type": kind, "async_save": background}
    trainer, _ = _run(tmp_path, fsdp2, until=HALF)
    with installed(), pytest.raises(CheckpointError) as caught:
        trainer.save_checkpoint("/proc/self/ep{epoch}-ba{batch}/rank{rank}.pt")
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    assert "could not be written" in said[0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("place", ["/proc/self/runs", "file/runs"])
def test_a_run_that_could_not_save_does_not_begin(place: str, tmp_path: Path):
    if dist.get_rank() == 0:
        (tmp_path / "file").touch()
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        _run(tmp_path / place, {}, until=HALF)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    assert "save_folder" in said[0]
