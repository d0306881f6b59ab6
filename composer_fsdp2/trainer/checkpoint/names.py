"""Names of a run's checkpoints, as patterns, and the batch after which one was saved."""

from __future__ import annotations

import re

from composer.utils.file_helpers import format_name_with_dist

from composer_fsdp2.checkpoint.source import Checkpoint
from composer_fsdp2.errors import CheckpointError

__all__ = ["COUNTS", "pattern_of", "saved_batch", "without_times"]

_PLACEHOLDER = re.compile(r"\\\{([^{}]*)\\\}")


COUNTS = ("epoch", "batch", "sample", "token")


COUNTS_IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
"""counts that names of checkpoints may have, as Composer's `Timestamp` calls them"""


def without_times(name: str, run_name: str) -> str:
    """Fills in what stays the same in names of a run, and leaves the placeholders of times."""
    # Their braces are doubled.
    same = "run_name|rank|local_rank|world_size|local_world_size|node_rank"
    name = re.sub(rf"\{{(?!(?:{same})\}})([^{{}}]*)\}}", r"{{\1}}", name)
    return format_name_with_dist(name, run_name)


def pattern_of(name: str, run_name: str) -> re.Pattern[str]:
    """Returns a pattern of the names that saves of a run give, with a group for each count."""
    groups = set[str]()

    def number(placeholder: re.Match[str]) -> str:
        unit = re.split("[:!]", placeholder[1])[0]  # of `batch:06d`
        if unit in groups or unit not in (*COUNTS, *COUNTS_IN_EPOCH):
            return "[0-9]+"
        groups.add(unit)
        return f"(?P<{unit}>[0-9]+)"

    return re.compile(_PLACEHOLDER.sub(number, re.escape(without_times(name, run_name))))


def saved_batch(saved: Checkpoint) -> int | None:
    """Returns the batch a checkpoint was saved after; None if it holds weights only."""
    key = next((k for k in saved.under("state", "timestamp") if k.endswith(".batch")), None)
    batch = None if key is None else saved.object(key)
    if batch is not None and type(batch) is not int:
        raise CheckpointError(
            f"'{saved.path}' was saved after batch {ascii(batch)[:100]}, which is no number. Its "
            "timestamp is damaged. Take another checkpoint."
        )
    return batch
