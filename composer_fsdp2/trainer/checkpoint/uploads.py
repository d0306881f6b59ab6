"""Takes a save to its end: the link to it, its upload, the removal of old checkpoints.

Composer does all of that. One rank may fail at it, and Composer's own exchange would wait for it;
here all ranks hear of the failure.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakSet

from composer.callbacks import CheckpointSaver, checkpoint_saver
from composer.core import State
from composer.utils import checkpoint as composers
from composer.utils import dist
from composer.utils.remote_uploader import RemoteFilesExistingCheckStatus

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import on_all_ranks, raise_on_all_ranks
from composer_fsdp2.trainer.dist_views import View
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "GathersErrors",
    "check_uploads",
    "failed_after_save",
    "failed_upload",
    "file_of_rank",
    "save_and_upload",
    "upload_link",
]


_checks: WeakSet[Future[Any]] = WeakSet()
"""looks of rank 0 whether all files of a checkpoint are in the store, which wait for all ranks"""


class GathersErrors(View):
    """Wraps Composer's `dist` for the saver: a gather of file names meets errors of other ranks."""

    errors = False
    """whether a rank that fails on its way there tells the others so, as `save_and_upload` does"""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks. Collective: yes."""
        if not self.errors:
            return self.wrapped.all_gather_object(value)
        try:
            facts = raise_on_all_ranks({"~value": value})
        except CheckpointError as error:
            raise _ToldError(error) from error
        return [fact["~value"] for fact in facts]


class _ToldError(RuntimeError):
    """Carries an error that all ranks raise."""


def save_and_upload(
    original: Callable[[CheckpointSaver, Any, Any], None],
    saver: CheckpointSaver,
    state: Any,
    logger: Any,
) -> None:
    """Has Composer save, or finish a save in the background. Collective: yes.

    Raises:
        CheckpointError: on every rank, wherever one of them failed.
    """
    checkpoints, saves = list(saver.saved_checkpoints), saver.symlink_count

    def save() -> None:
        # Composer names files by the rank at its import, which a program that forks has not yet.
        name = "_TORCH_DISTRIBUTED_CHECKPOINTS_FILENAME"
        with (
            override_attribute(composers, name, file_of_rank()),
            override_attribute(vars(checkpoint_saver)["dist"], "errors", True),
        ):
            original(saver, state, logger)

    def explain(error: BaseException) -> BaseException:
        if isinstance(error, _ToldError):
            # By the exchange that the rank which failed has taken for its last.
            raise error.args[0] from error
        if isinstance(error, CheckpointError):
            return error
        if saver.symlink_count == saves and not isinstance(error, OSError):
            raise error  # before the save: of a user's state dict, on every rank
        return failed_after_save(saver.folder, error)

    on_all_ranks(save, explain)
    if saver.remote_uploader is not None:
        _checks.update(task[0] for task in saver.symlink_upload_tasks)
    if saver.num_checkpoints_to_keep == 0:
        checkpoints += list(saver.all_saved_checkpoints_to_timestamp)[-1:]  # the one just saved
    # Rank 0 has removed old checkpoints by now, from the folder that it sees. Ranks of other
    # replicas write nothing, and Composer notes no checkpoint there: the newest has to stay.
    for path in set(checkpoints) - set(saver.saved_checkpoints):
        if state.fsdp_sharded_state_dict_enabled:
            shutil.rmtree(Path(path).parent, ignore_errors=True)


def failed_after_save(path: object, error: BaseException) -> CheckpointError:
    """Returns the error of an upload or a link after the checkpoint itself is complete."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"A checkpoint in '{path}' is complete, and what comes after a save (the link to the "
        f"latest one, the removal of old ones, an upload) could not be written: {reason}. A run "
        "that resumes would not find it by its link. Make room there, or give another save_folder."
    )


def check_uploads(saver: CheckpointSaver, *, wait: bool = False) -> None:
    """Raises on every rank when an upload of any rank has failed.

    Collective: yes, where the saver uploads.

    Args:
        saver: the Trainer's callback that saves.
        wait: for all uploads, and not only for those that have ended.

    Raises:
        CheckpointError: naming the first error.
    """
    uploader = saver.remote_uploader
    if uploader is None:
        return
    # A look at the store waits for uploads of other ranks: only those are waited for.
    ended = (f for f in uploader.futures if f.done() or (wait and f not in _checks))
    errors = (_failure(future) for future in ended)
    failed = next((error for error in errors if error is not None), None)
    try:
        raise_on_all_ranks({}, None if failed is None else failed_upload(saver, failed))
    except CheckpointError:
        uploader.is_remote_upload_failed.set()  # nobody goes on looking for the files
        raise


def _failure(future: Future[Any]) -> BaseException | None:
    error = future.exception()
    looked = None if error is not None else future.result()
    if isinstance(looked, RemoteFilesExistingCheckStatus) and looked.name != "EXIST":
        return TimeoutError("not all files of a checkpoint were there in time.")
    return error


def failed_upload(saver: CheckpointSaver, error: BaseException) -> CheckpointError:
    """Returns the error for an upload that has failed."""
    store = "the store" if saver.remote_uploader is None else saver.remote_uploader.remote_folder
    cure = "Look at the store and at the credentials"
    if isinstance(error, FileExistsError):
        cure = "Give another save_folder, or set save_overwrite: true"
    return CheckpointError(
        f"A checkpoint could not be uploaded to '{store}': {type(error).__name__}: "
        f"{str(error).rstrip('.')}. A resumed run would not find it there. {cure}, and start the "
        "run again: it goes on from the last checkpoint that is whole."
    )


def upload_link(
    original: Callable[[CheckpointSaver, State, Any], None],
    saver: CheckpointSaver,
    state: State,
    logger: Any,
) -> None:
    """Replaces `CheckpointSaver.batch_end`, which uploads the link to a checkpoint that is whole.

    Collective: no. An upload that has failed is told by the next save, on every rank.
    """
    futures = [] if saver.remote_uploader is None else saver.remote_uploader.futures
    if not any(_failure(future) for future in futures if future.done()):
        original(saver, state, logger)


def file_of_rank() -> str:
    """Returns the name of this rank's file in a sharded checkpoint. Collective: no."""
    return f"__{dist.get_global_rank()}_0.distcp"
