"""Checkpoints in an object store: a server of S3, and Composer's own client of it."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from composer import Callback
from composer.callbacks import CheckpointSaver

from composer_fsdp2.errors import CheckpointError, ConfigError
from tests.dist.test_fsdp1_checkpoints import check_state, resume
from tests.dist.test_trainer_checkpoints import FORMATS, _run, _state
from tests.support.fsdp1_fixtures import path_of
from tests.support.object_store import (
    BUCKET,
    URI,
    QuickUploads,
    found_by_composer,
    names_in,
    served,
)
from tests.support.training import largest_difference

SHARDED: dict[str, Any] = {"state_dict_type": "sharded"}


@pytest.fixture
def url() -> Generator[str]:
    with served() as found:
        yield found


def run(folder: Any, fsdp2: dict[str, Any], callbacks: tuple[Callback, ...] = (), **kwargs: Any):
    uploads = QuickUploads()
    kwargs = {"load_progress_bar": False, "callbacks": [uploads, *callbacks]} | kwargs
    try:
        return _run(folder, fsdp2, **kwargs)
    finally:
        uploads.end()


def said_everywhere(error: BaseException) -> str:
    """The text of an error, which is that of every rank."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(error))
    assert len(set(said)) == 1, said
    return said[0]


@pytest.mark.world_size(2)
def test_a_sharded_save_is_in_the_store_and_loads_from_there(url: str, tmp_path: Path):
    """Composer gives each rank a temporary folder of its own for what is uploaded."""
    with found_by_composer(url) as client:
        first, _ = run(URI, SHARDED, until=5)
        files = ["ep0-ba5/.metadata", "ep0-ba5/__0_0.distcp", "ep0-ba5/__1_0.distcp"]
        assert names_in(client) == [*files, "latest-rank0.pt.symlink"]
        path = f"{URI}/ep0-ba5"
        loaded, _ = _run(tmp_path, SHARDED, until=0, seed=1, load_path=f"{path}/")
        assert largest_difference(_state(loaded), _state(first)) == 0.0
        dist.barrier()
        if dist.get_rank() == 0:
            client.delete_object(Bucket=BUCKET, Key="r/ck/ep0-ba5/__1_0.distcp")
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"'__1_0\.distcp' has 0 of [0-9]+ ") as caught:
            _run(tmp_path, SHARDED, until=0, load_path=path)
        assert "Upload it again" in said_everywhere(caught.value)


@pytest.mark.matrix
@pytest.mark.new_python
@pytest.mark.world_size(2, timeout=300)
def test_processes_upload(url: str):
    """As users have it, without what makes tests quick."""
    with found_by_composer(url) as client:
        _run(URI, SHARDED, until=5)
        assert len(names_in(client)) == 4


@pytest.mark.world_size(2)
def test_a_folder_for_each_rank_is_refused(tmp_path: Path):
    """Nothing is trained that could not be found again."""
    with pytest.raises(ConfigError, match=r"rank 1 to '.*/1/ck', which is another ") as caught:
        _run(tmp_path / "{rank}" / "ck", SHARDED)
    assert "state_dict_type: full" in said_everywhere(caught.value)
    assert not list(tmp_path.glob("*/ck/*"))
    _run(tmp_path / "{rank}" / "ck", {"state_dict_type": "full"}, until=5)
    assert (tmp_path / "0" / "ck" / FORMATS["full"]).is_file()


KINDS = {
    "sharded": {},
    "in the background": {"async_save": True},
    "full": {"state_dict_type": "full"},
    "full, in the background": {"state_dict_type": "full", "async_save": True},
}


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_autoresume_from_the_store(kind: str, keep: int, url: str, tmp_path: Path):
    """Twice: what the first resume has fetched is not the newest checkpoint at the second."""
    fsdp2 = SHARDED | KINDS[kind]
    full = "full" in kind
    whole, _ = _run(tmp_path / "whole", fsdp2)
    kwargs = {"save_num_checkpoints_to_keep": keep, "autoresume": True, "run_name": "r"}
    with found_by_composer(url) as client, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        first, _ = run(URI, fsdp2, until=4, **kwargs)
        folder = Path(first._checkpoint_saver.folder)
        if not full or dist.get_rank() == 0:
            # As with Composer: the number is of this machine's disk, and the store keeps all.
            assert len(list(folder.glob("ep0*"))) == (keep != 0)
        second, _ = run(URI, fsdp2, seed=1, until=7, **kwargs)
        assert int(second.state.timestamp.batch) == 7
        third, _ = run(URI, fsdp2, seed=2, **kwargs)
        assert largest_difference(_state(third), _state(whole)) == 0.0
        saved = {name.replace("/", "-").split("-")[1] for name in names_in(client)}
        assert saved - {"rank0.pt.symlink"} == {"ba4", "ba5", "ba7", "ba10"}


@pytest.mark.matrix
@pytest.mark.world_size(4)
def test_hsdp_over_two_nodes(url: str, tmp_path: Path):
    """Replicas, and ranks of which two are on each machine."""
    fsdp2 = SHARDED | {"data_parallel_replicate_degree": 2}
    whole, _ = _run(tmp_path, fsdp2)
    with found_by_composer(url) as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(dist.get_rank() % 2))
        patch.setenv("NODE_RANK", str(dist.get_rank() // 2))
        run(URI, fsdp2, until=5)
        assert len(names_in(client)) == 4
        resumed, _ = run(f"{URI}2", fsdp2, seed=1, load_path=f"{URI}/ep0-ba5")
    assert largest_difference(_state(resumed), _state(whole)) == 0.0


def _first_half(url: str) -> None:
    with found_by_composer(url):
        run(URI, SHARDED, until=5)


def _second_half(url: str, folder: str) -> float:
    with found_by_composer(url), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        resumed, _ = run(URI, SHARDED, seed=1, autoresume=True, run_name="r")
    whole, _ = _run(Path(folder), SHARDED)
    return largest_difference(_state(resumed), _state(whole))


@pytest.mark.matrix
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1)])
def test_ranks_may_come_and_go(before: int, after: int, url: str, tmp_path: Path, ranks: Any):
    ranks(before, _first_half, url)
    found = ranks(after, _second_half, url, str(tmp_path))
    assert max(found) <= 2e-6  # half of the steps are sums in another order


# --- What goes wrong ---


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("wrong", ["bucket", "credentials", "address"])
def test_a_store_that_takes_nothing_is_refused_at_the_start(wrong: str, url: str):
    with found_by_composer("http://127.0.0.1:9" if wrong == "address" else url):
        folder = "s3://no-such-bucket/r/ck" if wrong == "bucket" else URI
        if wrong == "credentials":
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                del os.environ[name]
            os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        with pytest.raises(CheckpointError, match="does not take a file") as caught:
            run(folder, SHARDED)
        assert folder in said_everywhere(caught.value)


class StopsServer(Callback):
    """Stops the server of rank 0 before the first checkpoint is saved.

    Args:
        server: of rank 0.
        back: has the server return after half a second, with all that it held.
    """

    def __init__(self, server: contextlib.ExitStack, port: int, *, back: bool) -> None:
        self.server, self.port, self.back = server, port, back

    def batch_start(self, state: Any, logger: Any) -> None:
        del logger
        if int(state.timestamp.batch) == 4 and dist.get_rank() == 0:
            self.server.close()
            if self.back:
                threading.Timer(0.5, self._return).start()

    def _return(self) -> None:
        self.server.enter_context(served(self.port))


@pytest.mark.matrix
@pytest.mark.world_size(2, timeout=300)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_server_that_dies(background: bool, back: bool):
    fsdp2 = SHARDED | {"async_save": background}
    with contextlib.ExitStack() as server:
        address = [server.enter_context(served()) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(address)
        port = int(address[0].rpartition(":")[2])
        stops = StopsServer(server, port, back=back)
        with found_by_composer(address[0]) as client:
            if back:
                os.environ["AWS_MAX_ATTEMPTS"] = "12"
                run(URI, fsdp2, (stops,))
                assert len(names_in(client)) == 7
                dist.barrier()  # rank 0 has the server
                return
            with pytest.raises(CheckpointError, match="could not be uploaded") as caught:
                run(URI, fsdp2, (stops,))
        assert URI in said_everywhere(caught.value)


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_after_a_save_is_told_on_every_rank(rank: int, url: str):
    """The copy for the upload does not fit, where Composer exchanges names of files next."""

    class NoStaging(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            del logger
            for saver in state.callbacks:
                if isinstance(saver, CheckpointSaver) and dist.get_rank() == rank:
                    assert saver.remote_uploader is not None
                    saver.remote_uploader._upload_staging_folder = "/proc/self/staging"

    with (
        found_by_composer(url),
        pytest.raises(CheckpointError, match="what comes after a save") as caught,
    ):
        run(URI, SHARDED, (NoStaging(),))
    assert f"On rank {rank}: " in said_everywhere(caught.value)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_a_run_that_died_in_an_upload_goes_on(url: str, tmp_path: Path):
    kwargs = {"autoresume": True, "run_name": "r"}
    with found_by_composer(url) as client:
        run(URI, SHARDED, until=5, **kwargs)
        if dist.get_rank() == 0:
            client.put_object(Bucket=BUCKET, Key="r/ck/ep0-ba10/__1_0.distcp", Body=b"begun")
        dist.barrier()
        with pytest.raises(CheckpointError, match="of a later time") as caught:
            run(URI, SHARDED)
        assert "autoresume: true" in said_everywhere(caught.value)
        resumed, _ = run(URI, SHARDED, **kwargs)
        path = f"{URI}/ep0-ba10"
        loaded, _ = _run(tmp_path, SHARDED, until=0, seed=1, load_path=path)
        assert largest_difference(_state(loaded), _state(resumed)) == 0.0


# --- Checkpoints of FSDP1 ---


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded_dtensor_hsdp_2x2", "full_2r"])
def test_of_fsdp1(name: str, url: str):
    path = path_of(name)
    with found_by_composer(url) as client:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            client.upload_file(str(file), BUCKET, f"old/{file.relative_to(path.parent)}")
        trainer, _ = resume(name, {"fsdp2": {}}, load_path=f"s3://{BUCKET}/old/{path.name}")
    check_state(trainer, name)
