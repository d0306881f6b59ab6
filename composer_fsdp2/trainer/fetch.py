"""Where a checkpoint is on this machine: fetched from an object store, or there already."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from composer.core import State
from composer.utils import checkpoint as composers
from composer.utils import dist
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import extract_path_from_symlink, is_tar

from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.trainer.load_steps import run_on_all_ranks

__all__ = ["fetched", "set_node_rank"]


def set_node_rank() -> None:
    """Composer wants NODE_RANK, which torchrun calls GROUP_RANK. A value that is set stays."""
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    elif "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ.setdefault("NODE_RANK", str(node))


@contextlib.contextmanager
def fetched(
    path: str, object_store: Any, state: State, progress_bar: bool
) -> Generator[tuple[Path, Any]]:
    """Where the checkpoint is on this machine; for a folder elsewhere a reader that fetches it."""
    set_node_rank()
    path = composers._format_path_with_rank_zero(path) if "{" in path else path
    if object_store is None and not is_tar(path) and not is_compressed_pt(path):
        yield Path(path), None
        return
    with tempfile.TemporaryDirectory() as own:
        folder = composers._get_local_rank_zero_path(own)
        try:
            if object_store is not None and path.endswith(".symlink"):
                path = extract_path_from_symlink(path, object_store=object_store)
            reader = _remote_folder(path, folder, object_store, state)
            if reader is not None:
                yield Path(reader.path), reader
            else:
                fetch = composers.download_checkpoint
                file, _, _ = run_on_all_ranks(
                    lambda: fetch(path, folder, object_store, progress_bar)
                )
                yield Path(file), None
        finally:
            dist.barrier()  # the folder is shared by the ranks of a node


def _remote_folder(path: str, folder: str, object_store: Any, state: State) -> Any:
    """A reader of a sharded checkpoint in an object store; `None` if it is one file."""
    if object_store is None or Path(path).suffix in (".pt", ".tar", ".gz", ".tgz"):
        return None

    def fetch_metadata() -> None:
        if dist.get_local_rank() == 0:
            target = Path(folder) / METADATA
            composers.download_object_or_file(f"{path}/{METADATA}", target, object_store)

    # The reader fetches it too, but on one rank alone, and the others would wait for its failure.
    run_on_all_ranks(fetch_metadata)
    return composers.DistCPObjectStoreReader(
        source_path=path,
        destination_path=str(Path(folder) / "checkpoint"),
        object_store=object_store,
        device_mesh=state.device_mesh,
    )
