"""Writing by several nodes at once."""

from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from composer_fsdp2.checkpoint.contents import CHECKSUMS, write_checksums
from composer_fsdp2.checkpoint.staging import locked, remove_leftovers, staged
from composer_fsdp2.errors import CheckpointError
from tests.support.limits import scaled


def test_nodes_of_one_disk_clear_the_same_folder(tmp_path: Path):
    """Each of them does, because a disk of its own has to be cleared as well."""
    folder = tmp_path / "saved" / ".incomplete.ep0-ba2"
    together = Barrier(4)

    def clear(node: int) -> bool:
        remove_leftovers(folder.with_name("ep0-ba2"))
        together.wait(timeout=scaled(60))
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, shared=True):
            together.wait(timeout=scaled(60))  # as a save's nodes do before they write
            (folder / f"__{node}_0.distcp").touch()
            return folder.is_dir()

    with ThreadPoolExecutor(4) as nodes:
        for _ in range(300):
            assert all(nodes.map(clear, range(4)))
            assert len(list(folder.iterdir())) == 4


def test_nodes_of_one_disk_write_the_same_checksums(tmp_path: Path):
    (tmp_path / "__0_0.distcp").write_bytes(b"values")
    found = []
    for _ in range(2):
        write_checksums(tmp_path)
        found.append((tmp_path / CHECKSUMS).read_text())
    assert found[0] == found[1]
    assert json.loads(found[0])["files"] == {"__0_0.distcp": 6}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_force_folders_keeps_the_checkpoint(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forced = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        forced(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    destination = tmp_path / "ep1.pt"
    if number == errno.EIO:  # the disk says that the name may be lost
        written = staged(destination, folder=False)
        with pytest.raises(CheckpointError, match="Input/output"), written as new:
            new.write_text("weights")
        return
    with staged(destination, folder=False) as new:
        new.write_text("weights")
    assert destination.read_text() == "weights"
