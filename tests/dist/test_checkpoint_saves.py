"""Saves: whole or absent, in the background on request, and good for going back to FSDP1."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from composer import Callback
from composer.callbacks import CheckpointSaver
from composer.optim import LinearScheduler
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composer_fsdp2 import installed
from composer_fsdp2.checkpoint.contents import CHECKSUMS
from composer_fsdp2.checkpoint.convert import convert_to_sharded
from composer_fsdp2.checkpoint.source import FolderCheckpoint, open_checkpoint
from composer_fsdp2.checkpoint.write import Savers, write_sharded
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.step import agreement
from composer_fsdp2.trainer.checkpoint import save
from tests.dist.test_fsdp1_checkpoints import resume
from tests.dist.test_trainer_checkpoints import FORMATS, HALF, STEPS, _check_resume, _run, _state
from tests.support.fsdp1_fixtures import expected, fsdp1_losses
from tests.support.limits import scaled
from tests.support.models import TinyComposer
from tests.support.saved import as_newer_torch, limit_files, no_space
from tests.support.training import built, largest_difference, samples_of, trainer_for


def everything(path: Path) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(path)
    return {key: saved.tensor(key) for key in saved.tensors}


# --- in the background ---


@pytest.mark.table("sharded")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_five_and_five_steps_are_ten(kind: str, tmp_path: Path):
    _check_resume(tmp_path, {"state_dict_type": kind, "async_save": True}, FORMATS[kind])


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_hsdp(tmp_path: Path):
    fsdp2 = {"async_save": True, "data_parallel_replicate_degree": 2}
    _check_resume(tmp_path, fsdp2, FORMATS["sharded"])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("replicas", [None, 2])
def test_ranks_of_a_background_save_talk_in_rows_and_columns(
    replicas: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """gloo connects each rank of a group with each other, so no new group has all of them."""
    sizes: list[int] = []
    monkeypatch.setattr(agreement, "_ROWS_FROM", 4)
    make = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and isinstance(group, dist.ProcessGroup):
            sizes.append(group.size())
        return group

    monkeypatch.setattr(dist, "new_group", counted)
    fsdp2 = {"async_save": True, "data_parallel_replicate_degree": replicas}
    _check_resume(tmp_path, fsdp2, FORMATS["sharded"])
    assert sizes
    assert max(sizes) == 2


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_checkpoints_as_without(kind: str, tmp_path: Path):
    """Values are those of the moment of the save, though training went on meanwhile."""
    for name, background in (("a", False), ("b", True)):
        fsdp2 = {"state_dict_type": kind, "async_save": background}
        _run(tmp_path / name, fsdp2, save_num_checkpoints_to_keep=1)
    left = [sorted(item.name for item in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert left[0] == left[1]
    assert len(left[0]) == 2  # the link and the newest
    file = next(name for name in left[0] if "ba10" in name)
    a, b = everything(tmp_path / "a" / file), everything(tmp_path / "b" / file)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a if not key.startswith("rng"))
    assert (tmp_path / "b" / "latest-rank0.pt").resolve().name == file


@pytest.mark.table("background")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_old_checkpoints_go_and_the_newest_stays_with_replicas(background: bool, tmp_path: Path):
    """Ranks of the second replica write nothing, and know of no checkpoint that is kept."""
    fsdp2 = {"data_parallel_replicate_degree": 2, "async_save": background}
    _run(tmp_path, fsdp2, save_num_checkpoints_to_keep=1)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["ep0-ba10", "latest-rank0.pt"]
    files = sorted(item.name for item in (tmp_path / "ep0-ba10").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]


@pytest.mark.world_size(1)
def test_a_background_keeps_no_run_in_memory(tmp_path: Path):
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters()),
            samples_of(2, 8),
            {"async_save": True},
            batch=8,
            save_folder=str(tmp_path),
        )
        trainer.fit()
        saver = next(c for c in trainer.state.callbacks if isinstance(c, CheckpointSaver))
        background = save._backgrounds[saver]
        assert background is not None
        assert background.written is None  # it would have the saver itself, through its State
        trainer.close()
    assert saver not in save._backgrounds


class SlowPlanner(DefaultSavePlanner):
    """Takes its time, and remembers when it was busy."""

    busy: ClassVar[list[tuple[float, float]]] = []

    def finish_plan(self, new_plan: Any) -> Any:
        start = time.monotonic()
        time.sleep(scaled(1.0))
        self.busy.append((start, time.monotonic()))
        return super().finish_plan(new_plan)


class Clock(Callback):
    """When each batch began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        del state, logger
        self.starts.append(time.monotonic())


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_training_goes_on_meanwhile_and_fit_waits(tmp_path: Path):
    SlowPlanner.busy.clear()
    clock = Clock()
    _run(
        tmp_path,
        {"async_save": True, "save_planner": SlowPlanner()},
        until=STEPS - 1,
        callbacks=[clock],
    )
    assert len(SlowPlanner.busy) == 2
    (start, end), (last_start, last_end) = SlowPlanner.busy
    assert [start < moment < end for moment in clock.starts].count(True) >= 2
    assert last_start > end, "two saves were in flight"
    assert last_end < time.monotonic()
    assert sorted(item.name for item in tmp_path.iterdir())[:2] == ["ep0-ba5", "ep0-ba9"]


@pytest.mark.world_size(2)
def test_where_gloo_connects_nobody_training_waits_for_the_save(tmp_path: Path):
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", refused)
        with pytest.warns(UserWarning, match="gloo cannot connect.*no route.*Training waits"):
            _run(tmp_path, {"async_save": True, "order_check": "never"}, until=HALF)
    assert (tmp_path / "ep0-ba5" / ".metadata").is_file()
    assert not [one for one in threading.enumerate() if one.name == "checkpoint"]


@pytest.mark.world_size(2)
def test_the_thread_writes_from_the_device_of_its_rank(tmp_path: Path):
    """torch's writer takes streams of the current device, the first one where no other is set."""
    found: list[tuple[str, Any]] = []
    set_device = torch.cpu.set_device

    def note(device: Any) -> None:
        found.append((threading.current_thread().name, device))
        set_device(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "set_device", note)
        _run(tmp_path, {"async_save": True}, until=HALF)
    assert found == [("checkpoint", torch.device("cpu"))]


def fill_disk(_state_dict: dict[str, Any]) -> None:
    """As `save_ignore_keys`, which is called right before anything is written."""
    limit_files(2000)


@pytest.mark.table("full-background")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_that_fails_is_told_and_leaves_nothing(kind: str, background: bool, tmp_path: Path):
    fsdp2 = {"state_dict_type": kind, "async_save": background}
    _run(tmp_path, fsdp2, until=HALF)
    before = sorted(item.name for item in tmp_path.iterdir())
    plenty = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with no_space(plenty), pytest.raises(CheckpointError, match="not be written") as caught:
        _run(tmp_path, fsdp2, autoresume=True, run_name="again", save_ignore_keys=fill_disk)
    assert "ba10" in str(caught.value)
    assert "Make room" in str(caught.value)
    dist.barrier()
    assert sorted(item.name for item in tmp_path.iterdir()) == before
    assert (tmp_path / "latest-rank0.pt").resolve().name == FORMATS[kind]
    whole, _ = _run(tmp_path / "whole", fsdp2)
    resumed, _ = _run(tmp_path, fsdp2, seed=1, autoresume=True, run_name="again")
    assert largest_difference(_state(resumed), _state(whole)) == 0.0


def fill_disk_of_rank_1(state_dict: dict[str, Any]) -> None:
    """Not earlier: the ranks' own store is a file too, and may be larger by then."""
    if dist.get_rank() == 1:
        fill_disk(state_dict)


@pytest.mark.world_size(2)
def test_one_rank_that_cannot_write_stops_all(tmp_path: Path):
    plenty = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with no_space(plenty), pytest.raises(CheckpointError, match="could not be written"):
        _run(tmp_path, {}, save_ignore_keys=fill_disk_of_rank_1)
    dist.barrier()
    assert [item for item in tmp_path.iterdir() if "ba" in item.name] == []


@pytest.mark.world_size(2)
def test_a_destination_that_cannot_be(tmp_path: Path):
    folder = tmp_path / "folder"
    trainer, _ = _run(folder, {}, until=HALF)
    target = tmp_path / "file"
    if dist.get_rank() == 0:
        target.write_text("in the way")
    dist.barrier()
    with installed(), pytest.raises(CheckpointError, match="could not be written"):
        trainer.save_checkpoint(str(target / "{batch}.pt"))
    assert target.read_text() == "in the way"


# --- whole or absent ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_has_its_name_before_it_is_whole(kind: str, tmp_path: Path):
    """What is being written over stays loadable until the moment it is replaced."""
    fsdp2 = {"state_dict_type": kind}
    trainer, _ = _run(tmp_path, fsdp2, until=HALF)
    path = tmp_path / FORMATS[kind]
    before = everything(path)
    with no_space(2000), installed(), pytest.raises(CheckpointError):
        trainer.save_checkpoint(str(tmp_path / "ep{epoch}-ba{batch}-rank{rank}.pt"))
    after = everything(path)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with installed():
        trainer.save_checkpoint(str(tmp_path / "ep{epoch}-ba{batch}-rank{rank}.pt"))
    dist.barrier()
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]


@pytest.mark.world_size(2)
def test_checksums_are_of_what_was_written(tmp_path: Path):
    _run(tmp_path, {}, until=HALF)
    folder = tmp_path / FORMATS["sharded"]
    found = json.loads((folder / "checksums.json").read_text())
    assert found["files"] == {
        name: (folder / name).stat().st_size
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
    }
    FolderCheckpoint(folder).check()
    dist.barrier()
    if dist.get_rank() == 0:
        with (folder / ".metadata").open("ab") as file:
            file.write(b"x")  # behind the end of the pickle, where nobody looks
    dist.barrier()
    with pytest.raises(CheckpointError, match="not what was written beside it"):
        FolderCheckpoint(folder).check()


class CountingPlanner(DefaultSavePlanner):
    resolved = 0

    def resolve_data(self, write_item: Any) -> Any:
        type(self).resolved += 1
        return super().resolve_data(write_item)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("background", [False, True])
def test_a_planner_of_the_user_is_used(background: bool, tmp_path: Path):
    CountingPlanner.resolved = 0
    fsdp2 = {"save_planner": CountingPlanner(), "async_save": background}
    _run(tmp_path, fsdp2, until=HALF)
    assert CountingPlanner.resolved > 20


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_ignored_keys_are_left_out_and_the_run_keeps_them(kind: str, tmp_path: Path):
    """The lists in a state dict are those the schedulers go on with."""
    ignored = ["state/schedulers/*", "state/model/net.head*"]
    fsdp2 = {"state_dict_type": kind}
    schedule: dict[str, Any] = {"schedulers": LinearScheduler()}
    left, _ = _run(tmp_path / "a", fsdp2, save_ignore_keys=ignored, **schedule)
    whole, _ = _run(tmp_path / "b", fsdp2, **schedule)
    assert largest_difference(_state(left), _state(whole)) == 0.0
    for ours, theirs in zip(left.state.schedulers, whole.state.schedulers, strict=True):
        assert ours.base_lrs == theirs.base_lrs
    keys = open_checkpoint(tmp_path / "a" / FORMATS[kind]).paths
    assert "state.model.net.embed.weight" in keys
    assert not [key for key in keys if "net.head" in key and ".model." in key]
    assert not [key for key in keys if key.startswith("state.schedulers.")]


# --- autoresume ---


def damage(path: Path) -> None:
    """Flips a bit in the middle of a weight, cuts a file off, or takes the metadata away."""
    if dist.get_rank() == 0:
        file = path / "__1_0.distcp" if path.is_dir() else path
        data = bytearray(file.read_bytes())
        found = open_checkpoint(path)
        value = found.tensor("state.model.net.embed.weight")
        raw = value[-2:].contiguous().numpy().tobytes()
        at = data.find(raw)
        assert at > 0
        data[at] ^= 1
        file.write_bytes(data)
    dist.barrier()


def cut_off(path: Path) -> None:
    if dist.get_rank() == 0:
        file = path / "__1_0.distcp" if path.is_dir() else path
        os.truncate(file, file.stat().st_size // 2)
    dist.barrier()


def no_metadata(path: Path) -> None:
    if dist.get_rank() == 0:
        (path / ".metadata" if path.is_dir() else path).unlink()
        if not path.exists():
            path.write_bytes(b"")
    dist.barrier()


def header(path: Path) -> None:
    """Its bytes are whole, but for two that say where an object's archive begins."""
    if dist.get_rank() == 0:
        file, at = path, 0
        if path.is_dir():
            saved = FolderCheckpoint(path)
            info = saved.metadata.storage_data[saved.indices("state.run_name")[0]]
            file, at = path / info.relative_path, info.offset
        with file.open("r+b") as opened:
            opened.seek(at + 2)
            opened.write(b"xx")
    dist.barrier()


def no_batch(path: Path) -> None:
    """Its timestamp says nothing that could be counted."""
    if dist.get_rank() == 0:
        file = path.with_name("file") if path.is_dir() else path
        torch.save({"state": {"timestamp": {"Timestamp": {"batch": "ten"}}}}, file)
        if path.is_dir():
            shutil.rmtree(path)
            convert_to_sharded(open_checkpoint(file), path, 1_000, lambda *_: None)
            file.unlink()
    dist.barrier()


@pytest.mark.table("no_batch-sharded")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("harm", [damage, cut_off, no_metadata, no_batch, header])
def test_autoresume_passes_over_a_bad_checkpoint(harm: Any, kind: str, tmp_path: Path):
    fsdp2 = {"state_dict_type": kind}
    again = {"autoresume": True, "run_name": "again"}
    whole, _ = _run(tmp_path, fsdp2, **again)
    newest = FORMATS[kind].replace("ba5", "ba10")
    harm(tmp_path / newest)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed, _ = _run(tmp_path, fsdp2, seed=1, **again)
    assert int(resumed.state.timestamp.batch) == STEPS
    assert largest_difference(_state(resumed), _state(whole)) == 0.0
    if dist.get_rank() == 0:
        said = [str(w.message) for w in told if str(w.message).startswith("Autoresume passes over")]
        assert len(said) == 1
        assert f"{newest}.damaged" in said[0]
    assert (tmp_path / f"{newest}.damaged").exists()
    assert (tmp_path / "latest-rank0.pt").resolve().name == newest


class AsksForCode:
    """What a stranger may have put into a checkpoint."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(3)",)


@pytest.mark.table("sharded")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_autoresume_leaves_to_the_user_whom_to_trust(kind: str, tmp_path: Path):
    """It neither executes nor puts aside a checkpoint that asks to run code."""
    again = {"autoresume": True, "run_name": "again"}
    _run(tmp_path, {"state_dict_type": kind}, **again)
    newest = tmp_path / FORMATS[kind].replace("ba5", "ba10")
    dist.barrier()
    if dist.get_rank() == 0:
        if newest.is_dir():
            (newest / ".metadata").write_bytes(pickle.dumps(AsksForCode()))
            (newest / CHECKSUMS).unlink()  # by which it would be called damaged
        else:
            torch.save({"state": AsksForCode()}, newest)
    dist.barrier()
    with pytest.raises(CheckpointError, match="COMPOSER_FSDP2_TRUST"):
        _run(tmp_path, {"state_dict_type": kind}, seed=1, **again)
    assert newest.exists()
    assert not list(tmp_path.glob("*.damaged"))


@pytest.mark.world_size(2)
def test_autoresume_leaves_what_a_newer_torch_has_written(tmp_path: Path):
    again = {"autoresume": True, "run_name": "again"}
    _run(tmp_path, {"state_dict_type": "sharded"}, **again)
    newest = tmp_path / FORMATS["sharded"].replace("ba5", "ba10")
    dist.barrier()
    if dist.get_rank() == 0:
        metadata = FileSystemReader(newest).read_metadata()
        (newest / ".metadata").write_bytes(as_newer_torch(metadata))
        (newest / CHECKSUMS).unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match="newer torch"):
        _run(tmp_path, {"state_dict_type": "sharded"}, seed=1, **again)
    assert newest.exists()
    assert not list(tmp_path.glob("*.damaged"))


@pytest.mark.table("full")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_autoresume_finds_what_no_link_points_to(kind: str, tmp_path: Path):
    """A run that is killed between a save and its link."""
    fsdp2 = {"state_dict_type": kind}
    again = {"autoresume": True, "run_name": "again"}
    whole, _ = _run(tmp_path, fsdp2, **again)
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "latest-rank0.pt").unlink()
    dist.barrier()
    rank0 = dist.get_rank() == 0
    told = pytest.warns(UserWarning, match="newest complete") if rank0 else contextlib.nullcontext()
    with told:
        resumed, _ = _run(tmp_path, fsdp2, until=0, seed=1, **again)
    assert largest_difference(_state(resumed), _state(whole)) == 0.0


@pytest.mark.world_size(2)
def test_autoresume_does_not_start_anew_when_all_are_bad(tmp_path: Path):
    again = {"autoresume": True, "run_name": "again"}
    _run(tmp_path, {}, until=HALF, **again)
    damage(tmp_path / FORMATS["sharded"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="Starting anew would lose"):
            _run(tmp_path, {}, seed=1, **again)


@pytest.mark.world_size(2)
def test_a_misfit_is_not_taken_for_damage(tmp_path: Path):
    again = {"autoresume": True, "run_name": "again"}
    _run(tmp_path, {}, until=HALF, **again)
    model = built(lambda: TinyComposer(layers=4), 1)
    with installed(), pytest.raises(CheckpointError, match="does not fit this run"):
        trainer_for(
            model, torch.optim.AdamW(model.parameters()), samples_of(2, 8),
            save_folder=str(tmp_path), **again,
        )  # fmt: skip
    assert (tmp_path / FORMATS["sharded"]).exists()


# --- another number of ranks ---


def _first_half(folder: str, fsdp2: dict[str, Any]) -> None:
    _run(Path(folder), fsdp2, until=HALF)


def _second_half(folder: str, saved: str, fsdp2: dict[str, Any]) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        resumed, _ = _run(Path(folder, "second"), fsdp2, seed=1, load_path=f"{folder}/{saved}")
    whole, _ = _run(Path(folder, "whole"), fsdp2)
    return largest_difference(_state(resumed), _state(whole))


@pytest.mark.table("sharded-2-1")
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_may_come_and_go(kind: str, before: int, after: int, tmp_path: Path, ranks: Any):
    """Saved by so many ranks with one kind of run, resumed by others with the other kind."""
    other = "full" if kind == "sharded" else "sharded"
    ranks(before, _first_half, str(tmp_path), {"state_dict_type": kind})
    found = ranks(after, _second_half, str(tmp_path), FORMATS[kind], {"state_dict_type": other})
    # Half of the steps were taken by another number of ranks, which sums in another order.
    assert max(found) <= 2e-6


# --- back to FSDP1 ---


@pytest.mark.table("sharded")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_fsdp1_goes_on_from_what_fsdp2_saved(kind: str, tmp_path: Path):
    """Resumed under FSDP2 at batch 3, saved at batch 4, taken back by FSDP1 without us."""
    name = f"{'sharded_dtensor' if kind == 'sharded' else 'full'}_2r"
    trainer, _ = resume(
        name, {"fsdp2": {"state_dict_type": kind}}, save_folder=str(tmp_path), save_interval="4ba"
    )
    with installed():
        trainer.fit(duration="1ba")
    trainer.close()
    saved = tmp_path / ("ep0-ba4" if kind == "sharded" else "ep0-ba4-rank0.pt")
    found = fsdp1_losses(name, {"state_dict_type": kind}, load_path=str(saved))
    wanted = expected(name)["next_losses"][1:]
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 2e-6


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_the_saver_can_be_a_callback(tmp_path: Path):
    """Several savers of one run do not wait for each other's files."""
    savers = [
        CheckpointSaver(folder=str(tmp_path / name), save_interval=f"{n}ba")
        for name, n in (("a", 2), ("b", 3))
    ]
    with installed():
        model = built(TinyComposer)
        trainer = trainer_for(
            model, torch.optim.AdamW(model.parameters()), samples_of(6, 8),
            {"async_save": True}, callbacks=savers,
        )  # fmt: skip
        trainer.fit()
        trainer.close()
    for name, batches in (("a", "246"), ("b", "36")):
        for batch in batches:
            open_checkpoint(tmp_path / name / f"ep0-ba{batch}").check()


@pytest.mark.world_size(1)
def test_two_savers_of_one_folder_are_refused(tmp_path: Path):
    """Sharded checkpoints have the name of the time alone: one saver would remove the other's."""

    def made(kind: str, name: str, keep: int = 1) -> None:
        model = built(TinyComposer)
        savers = [
            CheckpointSaver(folder=str(tmp_path), num_checkpoints_to_keep=keep),
            CheckpointSaver(folder=str(tmp_path), filename=f"{name}{{batch}}.pt"),
        ]
        with installed():
            optimizer, settings = torch.optim.AdamW(model.parameters()), {"state_dict_type": kind}
            trainer = trainer_for(model, optimizer, samples_of(2, 8), settings, callbacks=savers)
        trainer.close()

    with pytest.raises(ConfigError, match=f"Two CheckpointSavers save to '{tmp_path}'"):
        made("sharded", "archive-ba")
    made("sharded", "archive/ba")
    made("sharded", "archive-ba", keep=-1)  # they write the same
    made("full", "archive-ba")


@pytest.mark.world_size(1)
def test_autoresume_searches_the_folder_of_a_callback(tmp_path: Path):
    """Past a checkpoint that was cut off, and without the link that a kill may have taken."""

    def run(until: int) -> int:
        model = built(TinyComposer)
        with installed():
            trainer = trainer_for(
                model,
                torch.optim.AdamW(model.parameters()),
                samples_of(STEPS, 8),
                max_duration=f"{until}ba",
                callbacks=[CheckpointSaver(folder=str(tmp_path), save_interval="2ba")],
                run_name="r",
                autoresume=True,
            )
            began = int(trainer.state.timestamp.batch)
            trainer.fit()
        trainer.close()
        return began

    assert run(4) == 0
    (tmp_path / "ep0-ba4" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "latest-rank0.pt").unlink()
    with pytest.warns(match="Autoresume passes over .*ep0-ba4|does not point to the newest"):
        assert run(6) == 2


@pytest.mark.world_size(1)
def test_a_save_in_the_background_after_fit_is_told_of(tmp_path: Path):
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters()),
            samples_of(3, 8),
            {"async_save": True},
            max_duration="3ba",
            save_folder=str(tmp_path),
            save_interval="2ba",
        )
        trainer.fit()
        trainer.state.timestamp = trainer.state.timestamp.to_next_batch()
        trainer.save_checkpoint_to_save_folder()
        with pytest.warns(match="was in the background when .* complete, but not linked"):
            trainer.close()
    assert (tmp_path / "ep0-ba4" / ".metadata").is_file()


# --- what the planner of a save plans ---


def _planned_state(value: float) -> dict[str, Any]:
    """Rows that do not divide, two replicas, values of all ranks and of one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    hybrid = init_device_mesh("cpu", (2, ranks // 2))
    whole = torch.arange(35.0).view(7, 5) + value
    return {
        "flat": distribute_tensor(whole, flat, [Shard(0)]),
        "columns": distribute_tensor(whole, flat, [Shard(1)]),
        "hybrid": distribute_tensor(whole, hybrid, [Replicate(), Shard(0)]),
        "few": distribute_tensor(torch.arange(2.0) + value, flat, [Shard(0)]),
        "all": {"step": torch.tensor(value), "name": f"epoch {value}"},
        f"own{rank}": torch.full((2,), float(rank)),
    }


@pytest.mark.world_size(4)
def test_torch_and_we_load_what_the_planner_wrote(tmp_path: Path):
    savers = Savers(None, None, writes=True)
    for value in (1.0, 2.0):  # the second save of a run, to another folder
        folder, state_dict = tmp_path / f"ba{value}", _planned_state(value)
        if value == 2.0:
            # The same shapes in another dtype, and a key that came.
            state_dict["few"], state_dict["new"] = state_dict["few"].double(), torch.ones(3)
        write_sharded(state_dict, folder, savers)
        target = _planned_state(0.0)
        if value == 2.0:
            target["few"], target["new"] = target["few"].double(), torch.zeros(3)
        dcp.load(target, storage_reader=FileSystemReader(folder))
        saved = open_checkpoint(folder)
        for key in ("flat", "columns", "hybrid", "few"):
            wanted = state_dict[key].full_tensor()
            assert torch.equal(target[key].to_local(), state_dict[key].to_local())
            assert torch.equal(saved.tensor(key), wanted)
            assert saved.tensor(key).dtype == wanted.dtype
        assert target["all"] == {"step": torch.tensor(value), "name": f"epoch {value}"}
        assert ("new" in saved.tensors) == (value == 2.0)
        for rank in range(4):
            assert saved.tensor(f"own{rank}").tolist() == [rank] * 2


@pytest.mark.world_size(4)
@pytest.mark.parametrize("fault", ["unsharded", "missing"])
def test_pieces_that_do_not_fit_are_refused_on_every_rank(fault: str, tmp_path: Path):
    state_dict = _planned_state(1.0)
    if dist.get_rank() == 1:
        if fault == "missing":
            del state_dict["flat"]
        else:
            state_dict["flat"] = torch.zeros(7, 5)
    with pytest.raises(CheckpointError, match="The pieces of 'flat'"):
        write_sharded(state_dict, tmp_path / "ba1", Savers(None, None, writes=True))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
