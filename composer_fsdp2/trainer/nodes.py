"""Numbers the nodes of a run, and gives each of them files of its own in a shared folder.

Composer and LLM Foundry let the first rank of every node prepare something, while the other ranks
of the node wait for a file. The functions here replace those that name the files; see `patches`.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

from composer.utils import checkpoint as composers
from composer.utils import dist

__all__ = ["build_evaluators", "node_rank", "signal_file_name"]


def node_rank(original: Callable[[], int]) -> int:
    """Replaces `get_node_rank`: asks the launcher. Collective: no.

    Composer's own launcher sets NODE_RANK, torchrun GROUP_RANK, which its RANK follows, and srun
    SLURM_NODEID.
    """
    environ = os.environ
    if "GROUP_RANK" in environ:
        return int(environ["GROUP_RANK"])
    if "NODE_RANK" in environ or "RANK" not in environ:
        return original()
    if environ["RANK"] == environ.get("SLURM_PROCID"):  # or the task is a launcher of several ranks
        return int(environ["SLURM_NODEID"])
    if "LOCAL_WORLD_SIZE" in environ:
        return int(environ["RANK"]) // int(environ["LOCAL_WORLD_SIZE"])
    return original()


def signal_file_name(
    original: Callable[[random.Random | None], str], rng: random.Random | None = None
) -> str:
    """Replaces `get_node_signal_file_name`, whose name rank 0 chooses for all nodes.

    Collective: yes.
    """
    return f"{original(rng)}_of_node{dist.get_node_rank()}"


def build_evaluators(
    original: Callable[..., Any],
    icl_tasks: Any,
    tokenizer: Any,
    default_max_seq_len: int,
    default_batch_size: int,
    destination_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `build_icl_evaluators`: every node copies the tasks to its own new folder.

    Collective: yes.
    """
    if destination_dir is None:
        made = tempfile.mkdtemp() if dist.get_local_rank() == 0 else None
        destination_dir = composers._get_local_rank_zero_path(made)
    arguments = (icl_tasks, tokenizer, default_max_seq_len, default_batch_size, destination_dir)
    return original(*arguments, *args, **kwargs)
