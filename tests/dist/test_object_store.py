"""Checkpoints in an object store: a server of S3, and Composer's own client of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from composer import Callback
from composer.callbacks import CheckpointSaver

from composer_fsdp2.errors import CheckpointError, ConfigError
from tests.dist.test_trainer_checkpoints import FORMATS, _run, _state
from tests.support.object_store import BUCKET, URI, store_on_loopback
from tests.support.training import largest_difference

SHARDED = {"state_dict_type": "sharded"}


class LooksOften(Callback):
    """Has rank 0 look twice a second for a checkpoint in the store, not twice a minute."""

    def init(self, state: Any, logger: Any) -> None:
        del logger
        for saver in state.callbacks:
            if isinstance(saver, CheckpointSaver):
                saver._symlink_upload_wait_before_next_try_in_seconds = 0.5


def saved_to_store(folder: str = URI, fsdp2: dict[str, Any] = SHARDED, **kwargs: Any) -> Any:
    return _run(folder, fsdp2, callbacks=[LooksOften()], **kwargs)  # pyright: ignore


@pytest.mark.world_size(2)
def test_a_sharded_save_is_in_the_store_and_loads_from_there(tmp_path: Path):
    """Composer gives each rank a temporary folder of its own for what is uploaded."""
    with store_on_loopback() as store:
        first, _ = saved_to_store(until=5)
        assert store.names("r/ck/") == [
            "r/ck/ep0-ba5/.metadata",
            "r/ck/ep0-ba5/__0_0.distcp",
            "r/ck/ep0-ba5/__1_0.distcp",
            "r/ck/latest-rank0.pt.symlink",
        ]
        path = f"{URI}/ep0-ba5"
        loaded, _ = _run(tmp_path, SHARDED, until=0, seed=1, load_path=path)
        assert largest_difference(_state(loaded), _state(first)) == 0.0
        dist.barrier()
        if dist.get_rank() == 0:
            store.client.delete_object(Bucket=BUCKET, Key="r/ck/ep0-ba5/__1_0.distcp")
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"'__1_0\.distcp' has 0 of [0-9]+ bytes there"):
            _run(tmp_path, SHARDED, until=0, load_path=path)


@pytest.mark.world_size(2)
def test_a_folder_for_each_rank_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rank 1 to '.*/1/ck', which is another folder"):
        _run(tmp_path / "{rank}" / "ck", SHARDED)
    assert not list(tmp_path.glob("*/ck/*"))
    _run(tmp_path / "{rank}" / "ck", {"state_dict_type": "full"}, until=5)
    assert (tmp_path / "0" / "ck" / FORMATS["full"]).is_file()
