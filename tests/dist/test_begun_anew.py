"""A run that begins anew where checkpoints of another one are: refused, and nothing is changed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Timestamp
from composer.utils import S3ObjectStore
from moto.server import ThreadedMotoServer

from composer_fsdp2 import installed
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.trainer.checkpoint.save_folder import check_save_folder
from tests.dist.test_trainer_checkpoints import FORMATS, HALF, STEPS, _run, _state
from tests.support.saved import save_folder
from tests.support.training import largest_difference


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Collective: yes. What is there, with times of change and where links lead."""
    dist.barrier()
    found = {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            os.readlink(path) if path.is_symlink() else "",
        )
        for path in folder.rglob("*")
    }
    dist.barrier()
    return found


def _refused(folder: Path, fsdp2: dict[str, Any], **kwargs: Any) -> str:
    """Collective: yes. The one sentence of all ranks."""
    before = _contents(folder)
    with pytest.raises(CheckpointError) as caught:
        _run(folder, fsdp2, seed=1, **kwargs)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    assert _contents(folder) == before
    return said[0]


@pytest.mark.table("sharded-sharded", "sharded-full", "full-sharded")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("before", FORMATS)
def test_a_run_that_begins_anew_is_refused(before: str, kind: str, tmp_path: Path):
    _run(tmp_path, {"state_dict_type": before})
    said = _refused(tmp_path, {"state_dict_type": kind, "async_save": kind == "sharded"})
    assert f"'{FORMATS[before]}', '{FORMATS[before].replace('5', '10')}'" in said
    for cure in (
        "autoresume: true",
        "load_path",
        "run_name",
        "save_folder",
        "save_overwrite: true",
    ):
        assert cure in said


@pytest.mark.world_size(2)
def test_the_ways_out(tmp_path: Path):
    whole, _ = _run(tmp_path / "whole", {})
    old, runs = tmp_path / "old", str(tmp_path / "{run_name}")
    _run(Path(runs), {}, until=HALF, run_name="old")
    _refused(old, {}, run_name="old")
    for folder, name in ((runs, "new"), (str(tmp_path / "elsewhere"), "old")):
        anew, _ = _run(Path(folder), {}, run_name=name)
        assert largest_difference(_state(anew), _state(whole)) == 0.0
    # A link in the folder of the run; then the newest, which is that of its end.
    ways: tuple[dict[str, Any], ...] = (
        {"until": STEPS, "load_path": str(old / "latest-rank0.pt")},
        {"until": 0, "autoresume": True},
    )
    for way in ways:
        resumed, _ = _run(Path(runs), {}, seed=1, run_name="old", **way)
        assert largest_difference(_state(resumed), _state(whole)) == 0.0
    said = _refused(old, {}, load_path=str(old / "ep0-ba5"))
    assert "begins at, which is batch 5" in said
    assert "has a checkpoint of a later time" in said
    _run(old, {}, until=HALF, save_overwrite=True)
    assert (old / "latest-rank0.pt").resolve().name == "ep0-ba5"


@pytest.mark.world_size(2)
def test_a_run_that_autoresume_finds_at_its_end_is_complete(tmp_path: Path):
    first, _ = _run(tmp_path, {}, until=HALF, run_name="r", autoresume=True)
    before = _contents(tmp_path)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        again, _ = _run(tmp_path, {}, seed=1, until=HALF, run_name="r", autoresume=True)
    assert largest_difference(_state(again), _state(first)) == 0.0
    assert _contents(tmp_path) == before
    assert said.getvalue().count("The run is complete: ") == (dist.get_rank() == 0)
    # A call that the user wrote wrongly is a mistake all the same.
    with installed(), pytest.raises(ValueError, match="Please provide the `duration`"):
        again.fit()
    longer, _ = _run(tmp_path, {}, seed=1, run_name="r", autoresume=True)
    assert int(longer.state.timestamp.batch) == STEPS


NOW = Timestamp(epoch=1, batch=12, sample=96, batch_in_epoch=2)
# filename, prefix of folders, what is there, whether it is later
NAMES = {
    "equal": ("f{batch}", "ep{epoch}-ba{batch}", "ep1-ba12", False),
    "an epoch later": ("f{batch}", "ep{epoch}-ba{batch}", "ep2-ba12", True),
    "filled with zeros": ("f{batch}", "ba{batch:06d}", "ba000013", True),
    "twice the same": ("f{batch}", "{batch}-ba{batch}", "13-ba13", True),
    "in this epoch": ("f{batch}", "ep{epoch}-{batch_in_epoch}", "ep1-3", True),
    "in an earlier epoch": ("f{batch}", "ep{epoch}-{batch_in_epoch}", "ep0-9", False),
    "in folders": ("a/f{batch}.pt", "ba{batch}", "a/ba13", True),
    "in other folders": ("a/f{batch}.pt", "ba{batch}", "ba13", False),
    "of another name": ("f{batch}", "ep{epoch}-ba{batch}", "ep2-ba20.damaged", False),
    "a file": ("f{batch}", "ba{batch}", "f13", True),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names(names: tuple[str, str, str, bool], tmp_path: Path):
    filename, prefix, there, later = names
    (tmp_path / there).mkdir(parents=True)
    given = str(tmp_path), filename, prefix, "run", NOW
    if not later:
        check_save_folder(*given)
        return
    with pytest.raises(CheckpointError, match=f"'{there}'"):
        check_save_folder(*given)


@pytest.mark.parametrize("batch", [11, 12, 13, None])
def test_a_name_without_a_time(batch: int | None, tmp_path: Path):
    """The checkpoint itself has the time; one of weights alone has none."""
    timestamp = {} if batch is None else {"timestamp": {"Timestamp": {"batch": batch}}}
    save_folder(tmp_path / "last", {"state": {"model": {"w": torch.ones(2)}, **timestamp}})
    given = str(tmp_path), "f{batch}", "last", "run", NOW
    if batch in (11, 12):
        check_save_folder(*given)
        return
    with pytest.raises(CheckpointError, match="'last'"):
        check_save_folder(*given)


# --- In an object store. ---


@contextlib.contextmanager
def _bucket(address: str, name: str = "runs") -> Generator[S3ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(key, "test")
        patch.setenv("S3_ENDPOINT_URL", address)
        yield S3ObjectStore(name)


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server of S3, with a bucket in which a run has saved."""
    server = ThreadedMotoServer(port=0)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    with _bucket(address) as bucket:
        bucket.client.create_bucket(Bucket="runs")
        for name in ("r/ck/ep0-ba5/.metadata", "r/ck/ep0-ba5/__0_0.distcp", "r/ck2/ep0-ba90/x"):
            bucket.client.put_object(Bucket="runs", Key=name, Body=b"")
    yield address
    server.stop()


def test_objects(server: str):
    name, prefix = "r/ck/ep{epoch}-ba{batch}-rank{rank}.pt", "ep{epoch}-ba{batch}"
    with _bucket(server) as bucket, _bucket(server, "gone") as gone:
        check_save_folder("s3://runs/r/ck", name, prefix, "r", Timestamp(batch=5), bucket)
        with pytest.raises(CheckpointError) as caught:
            check_save_folder("s3://runs/r/ck", name, prefix, "r", Timestamp(batch=4), bucket)
        assert "'s3://runs/r/ck' has a checkpoint of a later time" in str(caught.value)
        assert "is batch 4; the latest: 'r/ck/ep0-ba5'" in str(caught.value)
        check_save_folder("s3://runs/r/new", "r/new/ba{batch}", "ba", "r", Timestamp(), bucket)
        with pytest.raises(CheckpointError, match=r"cannot be listed: .*NoSuchBucket"):
            check_save_folder("s3://gone", name, prefix, "r", Timestamp(), gone)


@pytest.mark.world_size(2)
def test_a_run_that_begins_anew_over_objects_is_refused(server: str):
    with _bucket(server) as bucket:
        before = bucket.list_objects("r/")
        with pytest.raises(CheckpointError, match="On rank 0: 's3://runs/r/ck' has a checkpoint"):
            _run("s3://runs/r/ck", {})  # pyright: ignore[reportArgumentType]
        assert bucket.list_objects("r/") == before
