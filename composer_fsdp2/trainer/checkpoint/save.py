"""Saving checkpoints of Composer's Trainer: whole or absent, and on request in the background.

The functions here replace Composer's (see `patches`). Runs without FSDP2 keep Composer's own
saving.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import secrets
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import checkpoint as composers
from composer.utils import (
    dist,
    format_name_with_dist,
    format_name_with_dist_and_time,
    reproducibility,
)
from composer.utils.misc import ParallelismType
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.checkpoint.metadata import MESH
from composer_fsdp2.checkpoint.staging import Publications, hidden, staged
from composer_fsdp2.checkpoint.write import (
    Savers,
    Staging,
    point_to,
    together,
    write_sharded,
)
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.plan.mesh_shape import TENSOR_AXIS
from composer_fsdp2.plan.module_tree import is_packed
from composer_fsdp2.prepare.settings import TrainerFSDP2Config
from composer_fsdp2.ranks import of_rank0, on_all_ranks, raise_on_all_ranks
from composer_fsdp2.step.agreement import Agreement, connected
from composer_fsdp2.step.run import run_of
from composer_fsdp2.text import plain_name
from composer_fsdp2.trainer.checkpoint.load_steps import Ignore, StateDict, drop_keys
from composer_fsdp2.trainer.checkpoint.uploads import (
    check_uploads,
    failed_after_save,
    failed_upload,
    file_of_rank,
    save_and_upload,
)
from composer_fsdp2.trainer.extensions.algorithms import spread_averages, whole_averages
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = [
    "check_saved_adapters",
    "check_saved_names",
    "finish_at_fit_end",
    "leave_background_save",
    "make_save_folder",
    "note_start",
    "own_class",
    "save_checkpoint",
    "save_in_background",
    "save_monolith",
]

_LEAVE_SECONDS = 60.0
_backgrounds: WeakKeyDictionary[CheckpointSaver, _Background | None] = WeakKeyDictionary()
"""saves while training goes on; `None` where the ranks have no group for them"""
_written: WeakKeyDictionary[State, Publications] = WeakKeyDictionary()
"""checkpoints that a run has written"""


def check_saved_adapters(state: State) -> None:
    """Refuses checkpoints of adapters alone where more than the adapters is trained.

    Collective: no. Every rank has the same model and callbacks.

    Raises:
        ConfigError: a resumed run would go on from other weights.
    """
    model: Any = state.model
    if not (getattr(model, "using_peft", False) and model.should_save_peft_only):
        return
    trained = (plain_name(name) for name, p in model.named_parameters() if p.requires_grad)
    saved = set(model.state_dict())
    lost = [name for name in trained if name not in saved]
    if lost:
        raise ConfigError(
            f"should_save_peft_only is on, and its checkpoints leave out {len(lost)} weights that "
            f"are trained: {', '.join(repr(name) for name in lost[:5])}. A resumed run would go on "
            "from other values. Write should_save_peft_only: false, or train adapters only (no "
            "modules_to_save)."
        )


def check_saved_names(state: State) -> None:
    """Refuses names in state dicts that no module has, which torch's checkpoints cannot save.

    Collective: no. Every rank has the same model and callbacks. The model's own `state_dict` may
    name its values as it likes; torch looks up those of the modules inside.

    Raises:
        ConfigError: the first save would stop the run.
    """
    saved = set(state.model.state_dict())
    # Once they are prepared, state dicts leave them out; see [Note: packed weights].
    params = state.model.named_parameters()
    packed = tuple(f"{name}." for name, param in params if is_packed(param))
    for child_name, child in state.model.named_children():
        for key in child.state_dict():
            path, _, attribute = key.rpartition(".")
            name = f"{child_name}.{key}"
            if name not in saved or attribute == "_extra_state" or name.startswith(packed):
                continue
            try:
                exists = hasattr(child.get_submodule(path), attribute)
            except AttributeError:
                exists = False
            if not exists:
                raise ConfigError(
                    f"The state dict of the model has '{plain_name(name)}', and no module has a "
                    "parameter or buffer of that name: a `state_dict` of one's own or a hook adds "
                    "it. The first save would fail. Register it with register_buffer, or return "
                    "it from get_extra_state."
                )


def save_checkpoint(
    _original: Callable[..., str | None],
    state: State,
    save_filename: str,
    *,
    weights_only: bool = False,
    ignore_keys: Ignore = None,
) -> str | None:
    """Replaces `_save_checkpoint`: returns when the checkpoint is complete.

    Collective: yes.

    Returns:
        The file this rank wrote, if it is one of those that write.

    Raises:
        CheckpointError: it could not be written; nothing appears then. On every rank.
    """
    if isinstance(state, _Written):
        return state.saved_path
    check_saved_adapters(state)
    return _SavedState(state, save_filename, weights_only, ignore_keys).write(_savers(state))


def write_whole_file(
    state_dict: StateDict, path: Path, publications: Publications | None = None
) -> None:
    """Writes one file as Composer does, under a hidden name until it is complete.

    Collective: no.

    Raises:
        CheckpointError: the file could not be written; what had its name is as it was.
    """
    with staged(path, folder=False, replace=True, publications=publications) as temporary:
        composers._write_checkpoint_file(state_dict, str(temporary))


class _SavedState:
    """The state to save, and the place for it. Collective: yes.

    Args:
        state: Composer's state of the run.
        save_filename: the file this rank writes, or would.
        weights_only: leaves out all but the model.
        ignore_keys: left out, as in Composer's `save_ignore_keys`.
    """

    def __init__(
        self, state: State, save_filename: str, weights_only: bool, ignore_keys: Ignore
    ) -> None:
        if weights_only:
            values: StateDict = {
                "state": {
                    "model": state.get_model_state_dict(),
                    "integrations": state._get_integrations_state_dict(),
                    "metadata": state._get_state_metadata(),
                }
            }
        else:
            stateless = [optimizer for optimizer in state.optimizers if not optimizer.state]
            values = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
            for optimizer in stateless:
                # torch has made state to ask for it, by a step that counters remember.
                optimizer.state.clear()
                values["state"]["optimizers"].get(type(optimizer).__qualname__, {})["state"] = {}
        saved, first = values["state"], dist.get_global_rank() == 0
        described = saved.get("integrations", {}).get("huggingface", {}).get("model", {})
        inner = getattr(state.model, "model", None)
        if "class" in described.get("config", {}) and isinstance(inner, nn.Module):
            kind = own_class(inner)  # as it was before FSDP2 made another class of it
            described["config"]["class"] = f"{kind.__module__}.{kind.__qualname__}"
        run = run_of(state.model)
        if run is not None and run.shape.tensor > 1:
            saved["metadata"][MESH] = run.shape.describe()  # for people: no load reads it
        self.sharded = state.fsdp_sharded_state_dict_enabled
        if "algorithms" in saved:
            algorithms = saved["algorithms"]
            form = (
                spread_averages(algorithms)
                if self.sharded
                else whole_averages(algorithms, keep=first)
            )
            saved["algorithms"] = form
        self.values = drop_keys(values, ignore_keys) if self.sharded or first else values
        if self.sharded and not first:
            self.values.pop("rng", None)  # rank 0 has those of all ranks
        self.path = Path(save_filename)
        if self.sharded:
            self.path = self.path.with_name(file_of_rank())
        self.planner = getattr(state.fsdp_config, "save_planner", None)
        self.own = note_start(state)

    def write(self, savers: Savers, publish: Callable[[], None] | None = None) -> str | None:
        """Writes it. Collective: yes, over `savers.everyone`."""
        first = dist.get_global_rank() == 0
        if self.sharded:
            write_sharded(self.values, self.path.parent, savers, self.planner, publish, self.own)
            return str(self.path) if savers.writes else None
        together(
            savers.everyone,
            lambda: write_whole_file(self.values, self.path, self.own),
            self.path,
            when=first,
        )
        if publish is not None:
            together(savers.everyone, publish, self.path)
        return str(self.path) if first else None


def own_class(module: nn.Module) -> type[Any]:
    """Returns the class that a module had before FSDP2 gave it another one, `FSDP...`."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def make_save_folder(
    original: Callable[[CheckpointSaver, Any, Any], None],
    saver: CheckpointSaver,
    state: State,
    logger: Any,
) -> None:
    """Replaces `CheckpointSaver.init`, which makes the folder and tries the object store.

    Collective: yes.

    Raises:
        CheckpointError: nothing could be saved there, or in parts that no load would find; on every
            rank.
    """
    uploader = saver.remote_uploader
    path = saver.folder if uploader is None else uploader.remote_folder

    def make() -> Path:
        original(saver, state, logger)
        folder = Path(format_name_with_dist(saver.folder, state.run_name))
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return folder

    def explain(error: BaseException) -> CheckpointError:
        if isinstance(error, OSError):
            return CheckpointError(
                f"Nothing can be written to the save_folder '{path}': {error.strerror or error}. "
                "The run would train and keep nothing. Give a save_folder that can be made and "
                "written to on every node."
            )
        # Of the client of an object store, on rank 0 alone.
        return CheckpointError(
            f"The save_folder '{path}' does not take a file: {type(error).__name__}: {error}. "
            "The run would train and keep nothing. Look at the name of the bucket, at the "
            "credentials, and at the address of the store."
        )

    folder = on_all_ranks(make, explain)
    uploads = saver.remote_file_name is not None and (
        uploader is not None or any(item.can_upload_files() for item in logger.destinations)
    )
    config: Any = state.fsdp_config
    if config.state_dict_type != "sharded" or uploads:
        return
    # No load would find all parts of a checkpoint that ranks save into different folders. A name
    # that nobody has asked for yet is no name that a file system remembers.
    probe = hidden(folder / "probe", of_rank0(secrets.token_hex(6)))
    first = dist.get_global_rank() == 0
    together(None, probe.touch, folder, when=first)
    sees = probe.exists()
    facts = raise_on_all_ranks({"~folder": str(folder), "~sees": sees})
    together(None, probe.unlink, folder, when=first)
    blind = next((rank for rank, fact in enumerate(facts) if not fact["~sees"]), None)
    if blind is not None:
        raise ConfigError(
            f"Rank 0 saves to '{facts[0]['~folder']}', and rank {blind} to "
            f"'{facts[blind]['~folder']}', which is another folder or on another disk. A sharded "
            "checkpoint would lie in parts, and no load would find all of them. Give a save_folder "
            "without '{rank}', '{local_rank}' and '{node_rank}' on a disk that all nodes see, or "
            "in an object store, or write state_dict_type: full."
        )


def note_start(state: State) -> Publications:
    """Returns the record of paths that the run has written. Collective: no."""
    return _written.setdefault(state, Publications())


def _savers(state: State) -> Savers:
    """Returns who saves: all ranks, on the default group; with HSDP the first replica writes.

    Collective: yes, the first time, with HSDP and tensor parallelism.
    """
    mesh, writes, group = state.device_mesh, True, None
    replicate = ParallelismType.DATA_PARALLEL_REPLICATE.value
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and replicate in names:
        writes = mesh.get_local_rank(replicate) == 0
        if TENSOR_AXIS not in names:
            group = mesh.get_group(ParallelismType.DATA_PARALLEL_SHARD.value)
        else:
            run = run_of(state.model)
            assert run is not None
            group = run.first_copy
    node = dist.get_global_rank() - dist.get_local_rank()
    writers = Agreement((group,)) if writes and group is not None else None
    return Savers(None, writers, writes=writes, node=node)


# --- Saving while training goes on ---


class _Written:
    """Holds the state at the moment of a save, which Composer reads after the save."""

    def __init__(self, state: State, saved_path: str | None) -> None:
        self._state = state
        # Composer replaces the Timestamp of a State with every batch, and changes none.
        self.timestamp = state.timestamp
        self.saved_path = saved_path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class _Background:
    """Runs the saves of one CheckpointSaver in a thread, one at a time.

    Its ranks talk on process groups of their own, so that training's collectives keep their order.
    """

    def __init__(self, savers: Savers) -> None:
        self.savers = savers
        self.staging = Staging()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.written: _Written | None = None

    def start(self, snapshot: _SavedState, link: Path | None, state: State) -> None:
        """Copies the state to save, and writes the copy in a thread. Collective: no."""
        snapshot.values = self.staging.copy(snapshot.values)
        target = snapshot.path.parent if snapshot.sharded else snapshot.path
        self.error, self.written = None, _Written(state, None)
        written = self.written

        def publish() -> None:
            if link is not None and dist.get_global_rank() == 0:
                try:
                    point_to(link, target)
                except OSError as failed:
                    raise failed_after_save(target, failed) from failed

        device = _device_of(state)

        def write() -> None:
            # A new thread begins on the first device, and torch's writer asks for streams there.
            torch.get_device_module(device).set_device(device)
            try:
                written.saved_path = snapshot.write(self.savers, publish)
            except Exception as error:  # told by `finish_background_save`
                self.error = error

        # A daemon: a rank that is lost must not keep the others from ending.
        self.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self.thread.start()


def save_in_background(
    original: Callable[[CheckpointSaver, Any, Any], None],
    saver: CheckpointSaver,
    state: State,
    logger: Any,
) -> None:
    """Replaces `CheckpointSaver._save_checkpoint`.

    Collective: yes. With `async_save` it returns when the state has been copied. What Composer does
    after a save (links, uploads, removal of old checkpoints) is done before the next one starts.
    Where gloo does not connect the ranks it warns, and returns when the checkpoint is complete.

    Raises:
        CheckpointError: this save failed, or the one before that was still being written.
    """
    if state.fsdp_config_version != 2:
        original(saver, state, logger)
        return
    check_uploads(saver)
    background = None
    if getattr(state.fsdp_config, "async_save", False):
        finish_background_save(original, saver, logger)
        if saver not in _backgrounds:
            savers, device = _savers(state), _device_of(state)
            ranks = [r for r, writes in enumerate(dist.all_gather_object(savers.writes)) if writes]
            lost = (
                "Training waits while a checkpoint is written, as without async_save. Set "
                "GLOO_SOCKET_IFNAME to the interface they share."
            )
            # Groups of their own, of gloo, because the copies are in CPU memory.
            everyone = writers = connected(default_pg_timeout, device, lost)
            if everyone is not None and len(ranks) < dist.get_world_size():
                writers = connected(default_pg_timeout, device, lost, ranks)
            _backgrounds[saver] = None
            if everyone is not None and writers is not None:
                writers = writers if savers.writes else None
                _backgrounds[saver] = _Background(
                    replace(savers, everyone=everyone, writers=writers)
                )
        background = _backgrounds[saver]
    if background is None:
        save_and_upload(original, saver, state, logger)
        return
    saver.last_checkpoint_batch = state.timestamp.batch
    name = composers.get_save_filename(state, saver.filename.format(state, keep_placeholders=True))
    # The checkpoint lists itself, as it does without a background.
    saver.all_saved_checkpoints_to_timestamp[name] = state.timestamp
    snapshot = _SavedState(state, name, saver.weights_only, saver.ignore_keys)
    latest = saver.latest_filename if saver.num_checkpoints_to_keep != 0 else None
    link = None if latest is None else Path(latest.format(state))
    background.start(snapshot, link, state)


def _device_of(state: State) -> torch.device:
    return state.device.tensor_to_device(torch.empty(0)).device


def finish_background_save(
    original: Callable[[CheckpointSaver, Any, Any], None], saver: CheckpointSaver, logger: Any
) -> None:
    """Waits for a save that is being written and has Composer finish it.

    Collective: yes.

    Raises:
        CheckpointError: the save failed; on every rank.
    """
    background = _backgrounds.get(saver)
    if background is None or background.thread is None:
        return
    background.thread.join()
    background.thread, error = None, background.error
    if error is not None and not isinstance(error, CheckpointError):
        error = CheckpointError(f"A save in the background failed: {error}")
    raise_on_all_ranks({}, error)
    latest = saver.last_checkpoint_batch
    save_and_upload(original, saver, background.written, logger)
    background.written = None  # whose State would keep the saver, the key of this background
    saver.last_checkpoint_batch = latest


def finish_at_fit_end(
    original: Callable[[CheckpointSaver, State, Any], None],
    saver: CheckpointSaver,
    state: State,
    logger: Any,
) -> None:
    """Replaces `CheckpointSaver.fit_end`: returns when the last checkpoint is in its folder.

    Collective: yes.

    Raises:
        CheckpointError: a save or an upload failed; on every rank.
    """
    if state.fsdp_config_version != 2:
        original(saver, state, logger)
        return
    # Composer's own method, which `functools.wraps` keeps in `__wrapped__` of the replacement.
    finish_background_save(inspect.unwrap(CheckpointSaver._save_checkpoint), saver, logger)
    check_uploads(saver, wait=True)
    # The client of an object store fails on rank 0 alone.
    on_all_ranks(lambda: original(saver, state, logger), lambda error: failed_upload(saver, error))


def leave_background_save(
    original: Callable[[CheckpointSaver], None], saver: CheckpointSaver
) -> None:
    """Replaces `CheckpointSaver.post_close`: gives a save in flight a minute, after an error too.

    Collective: no.
    """
    background = _backgrounds.get(saver)
    if background is not None and background.thread is not None:
        background.thread.join(_LEAVE_SECONDS)
        outcome = "complete, but not linked as the latest one"
        if background.thread.is_alive():
            outcome = f"not complete after {_LEAVE_SECONDS} seconds, and is lost"
        elif background.error is not None:
            outcome = f"not written: {background.error}"
        elif saver.remote_uploader is not None:
            outcome = "not uploaded"
        if dist.get_global_rank() == 0:
            warnings.warn(
                f"A save to '{saver.folder}' was in the background when the Trainer was closed, "
                f"and is {outcome}. `fit` waits for saves that it has begun; after it, or where it "
                "ends with an error, save with async_save: false.",
                stacklevel=2,
            )
    _backgrounds.pop(saver, None)
    original(saver)


# --- LLM Foundry's. ---


def save_monolith(original: Callable[..., None], saver: Any, state: State, logger: Any) -> None:
    """Replaces `MonolithicCheckpointSaver._save_checkpoint`.

    Collective: yes.

    Raises:
        CheckpointError: the file could not be written; what had its name is as it was.
    """
    if not isinstance(state.fsdp_config, TrainerFSDP2Config):
        original(saver, state, logger)
        return
    values = state.state_dict()
    del values["model"], values["optimizers"]
    # Whole weights, which rank 0 alone holds.
    with override_attribute(state.fsdp_config, "state_dict_type", "full"):
        values["model"] = state.get_model_state_dict()
        if saver.keep_optimizers:
            values["optimizers"] = state.get_optim_state_dict()
    contents = {"state": values, "rng": reproducibility.get_rng_state()}
    folder, name = (
        format_name_with_dist_and_time(text, state.run_name, state.timestamp)
        for text in (saver.save_dir_format_str, saver.filename_format_str)
    )
    with contextlib.ExitStack() as stack:
        uploads = saver.remote_ud is not None
        local = stack.enter_context(tempfile.TemporaryDirectory()) if uploads else folder
        path, first = Path(local, name), dist.get_global_rank() == 0

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole_file(contents, path)

        together(None, write, path, when=first)
        if first and uploads:
            saver.remote_ud.upload_file(
                state=state,
                remote_file_name=str(Path(folder, name)),
                file_path=path,
                overwrite=saver.overwrite,
            )
