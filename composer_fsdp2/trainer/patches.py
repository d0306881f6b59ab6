"""What of Composer is replaced while the plugin is installed: one table, the only such place."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from composer_fsdp2.errors import PatchError

__all__ = [
    "PATCHES",
    "PatchPoint",
    "PatchState",
    "describe_patches",
    "install",
    "installed",
    "patch_states",
    "uninstall",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPoint:
    """One attribute of another package that is replaced."""

    target: str
    """`package.module:attribute` or `package.module:Class.attribute`"""
    replacement: Callable[..., Any]
    """gets the original as its first argument, before those of the call"""
    why: str
    fingerprints: frozenset[str]
    """of the sources it was read and tested for"""
    versions: str
    """of the package, for the message when none fits"""


def _parse_parallelism_config(_original: Any, _self: Any, parallelism_config: Any) -> Any:
    from composer_fsdp2.trainer.config import parse_parallelism_config

    return parse_parallelism_config(parallelism_config)


def _parallelize_composer_model(
    _original: Any, composer_model: Any, optimizer: Any, config: Any, precision: Any = None
) -> None:
    from composer_fsdp2.trainer.prepare import prepare_fully_shard

    prepare_fully_shard(composer_model, optimizer, config, precision)


def _init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    from composer_fsdp2.trainer.autoresume import note_autoresume

    note_autoresume(original, trainer, *args, **kwargs)


def _wrap_model(original: Any, trainer: Any, model: Any, optimizers: Any) -> None:
    from composer_fsdp2.trainer.autoresume import settle_autoresume

    settle_autoresume(original, trainer, model, optimizers)


def _load_checkpoint(original: Any, path: str, state: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.autoresume import load_newest_good

    if _uses_fsdp1(state):
        return original(path, state, *args, **kwargs)
    return load_newest_good(path, state, *args, **kwargs)


def _save_checkpoint(original: Any, state: Any, save_filename: str, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.saving import save_checkpoint

    if _uses_fsdp1(state):
        return original(state, save_filename, **kwargs)
    return save_checkpoint(state, save_filename, **kwargs)


def _uses_fsdp1(state: Any) -> bool:
    from composer.utils.parallelism import FSDPConfig

    return isinstance(state.fsdp_config, FSDPConfig)


def _write_checkpoint_file(original: Any, state_dict: Any, filename: str) -> None:
    from composer_fsdp2.trainer.saving import write_whole_file

    write_whole_file(original, state_dict, filename)


def _read_file(_original: Any, checkpoint_filepath: Any, map_location: str) -> Any:
    from composer_fsdp2.trainer.loading import read_file

    return read_file(checkpoint_filepath, map_location)


def _load_resumption(original: Any, state: Any, load_path: str) -> Any:
    from pathlib import Path

    from composer_fsdp2.checkpoint.pickles import check_pickle

    check_pickle(Path(load_path))
    return original(state, load_path)


def _read_metadata(_original: Any, reader: Any) -> Any:
    from composer_fsdp2.trainer.loading import read_folder_metadata

    return read_folder_metadata(reader)


def _read_data(_original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    from composer_fsdp2.trainer.loading import read_folder_data

    return read_folder_data(reader, plan, planner)


def _dist_cp_load(
    _original: Any, state_dict: Any, storage_reader: Any, load_planner: Any = None
) -> None:
    from composer_fsdp2.trainer.loading import load_sharded_safely

    load_sharded_safely(state_dict, storage_reader, load_planner)


def _download_checkpoint(original: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.loading import unpacking_safely

    with unpacking_safely():
        return original(*args, **kwargs)


def _apply_required_algorithms(
    original: Any, state: Any, state_dict: Any, *args: Any, **kwargs: Any
) -> None:
    from composer_fsdp2.trainer.loading import vet_algorithms

    vet_algorithms(state_dict)
    original(state, state_dict, *args, **kwargs)


def _saver_save(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.saving import save_in_background

    save_in_background(original, saver, state, logger)


def _saver_fit_end(original: Any, saver: Any, state: Any, logger: Any) -> None:
    from composer_fsdp2.trainer.saving import finish_background_save

    finish_background_save(_originals[_SAVER_SAVE], saver, logger)
    original(saver, state, logger)


def _saver_post_close(original: Any, saver: Any) -> None:
    from composer_fsdp2.trainer.saving import leave_background_save

    leave_background_save(saver)
    original(saver)


_CHECKPOINT = "composer.utils.checkpoint"
_SAVER = "composer.callbacks.checkpoint_saver:CheckpointSaver"
_SAVER_SAVE = f"{_SAVER}._save_checkpoint"
_READ = "mosaicml 0.32.1"


def _point(target: str, replacement: Callable[..., Any], fingerprint: str, why: str) -> PatchPoint:
    return PatchPoint(
        target=target,
        replacement=replacement,
        why=why,
        fingerprints=frozenset({fingerprint}),
        versions=_READ,
    )


PATCHES: tuple[PatchPoint, ...] = (
    _point(
        "composer.trainer.trainer:Trainer._parse_parallelism_config",
        _parse_parallelism_config,
        "7042fa346599943f",
        "reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
    ),
    _point(
        "composer.distributed.prepare_distributed:parallelize_composer_model",
        _parallelize_composer_model,
        "dc721528ec14d5a0",
        "wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
    ),
    _point(
        "composer.trainer.trainer:Trainer.__init__",
        _init,
        "9cb451145a150898",
        "tells nobody that autoresume was asked for (and needs NODE_RANK, which torchrun lacks)",
    ),
    _point(
        "composer.trainer.trainer:Trainer._wrap_model_for_distributed",
        _wrap_model,
        "dc2164ce81ec821e",
        "is the last step before autoresume follows a link that may point to a damaged checkpoint",
    ),
    _point(
        f"{_CHECKPOINT}:load_checkpoint",
        _load_checkpoint,
        "e399245a5531caa7",
        "takes the kind of a checkpoint from a setting, and loads some kinds wrongly in silence",
    ),
    _point(
        f"{_CHECKPOINT}:_save_checkpoint",
        _save_checkpoint,
        "d1acbd0a8dc88793",
        "writes into the place of the last checkpoint, which is lost if the run dies meanwhile",
    ),
    _point(
        f"{_CHECKPOINT}:_write_checkpoint_file",
        _write_checkpoint_file,
        "527c2b767751f3c6",
        "writes under the final name, so that a killed run leaves half a file to resume from",
    ),
    _point(
        f"{_CHECKPOINT}:_torch_load_with_validation",
        _read_file,
        "61e2e6db892a6bb2",
        "executes code that a file contains",
    ),
    _point(
        "composer.checkpoint.load:_torch_load_with_validation",
        _read_file,
        "61e2e6db892a6bb2",
        "executes code that a file contains (a second name of the same function)",
    ),
    _point(
        "composer.checkpoint.load:load_resumption_checkpoint",
        _load_resumption,
        "266c4978add1ca4a",
        "executes code that a resumption.pkl contains",
    ),
    _point(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_metadata",
        _read_metadata,
        "8b55e1977dc3a705",
        "executes code that a .metadata contains",
    ),
    _point(
        f"{_CHECKPOINT}:FileSystemReaderWithValidation.read_data",
        _read_data,
        "9e3e2260a6d6a7b3",
        "executes code that an entry contains, and does not compare checksums",
    ),
    _point(
        f"{_CHECKPOINT}:dist_cp_load",
        _dist_cp_load,
        "1d34a881ba414fae",
        "meets one missing key with a second try in which any key may be missing",
    ),
    _point(
        f"{_CHECKPOINT}:download_checkpoint",
        _download_checkpoint,
        "89aee44e9b52ec3b",
        "unpacks archives without looking where their members want to go",
    ),
    _point(
        "composer.core.state:State._apply_required_algorithms",
        _apply_required_algorithms,
        "d36696ae3338309a",
        "evaluates text that comes from the checkpoint",
    ),
    _point(
        _SAVER_SAVE,
        _saver_save,
        "2f1b5899b0e325bd",
        "stops training until a checkpoint is written",
    ),
    _point(
        f"{_SAVER}.fit_end",
        _saver_fit_end,
        "997a8a59b4107a15",
        "does not wait for a checkpoint that is being written in the background",
    ),
    _point(
        f"{_SAVER}.post_close",
        _saver_post_close,
        "dc6f64dc9974189d",
        "does not wait for a checkpoint that is being written in the background",
    ),
)

_originals: dict[str, Any] = {}


def install() -> None:
    """Replaces every target of the table, or none. Calling it again does nothing.

    Collective: no.

    Raises:
        PatchError: when a target's source is not one the replacement was written for.
    """
    if _originals:
        return
    found = [(point, *_locate(point.target)) for point in PATCHES]
    for point, owner, name in found:
        _check(point, inspect.getattr_static(owner, name))
    for point, owner, name in found:
        original = inspect.getattr_static(owner, name)
        _originals[point.target] = original
        setattr(owner, name, _replaced(point, original))


def _replaced(point: PatchPoint, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return point.replacement(original, *args, **kwargs)

    return call


def uninstall() -> None:
    """Puts every original back. Without `install()` before it, it does nothing."""
    for point in PATCHES:
        if point.target in _originals:
            owner, name = _locate(point.target)
            setattr(owner, name, _originals.pop(point.target))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Installs for the duration of a block, and leaves things as they were."""
    before = bool(_originals)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """What has become of one row of the table."""

    target: str
    why: str
    versions: str
    state: Literal["installed", "fits", "does not fit"]
    problem: str | None = None
    """why it cannot be installed"""


def patch_states() -> tuple[PatchState, ...]:
    """The state of every row. Collective: no. It imports Composer and changes nothing."""
    return tuple(_state(point) for point in PATCHES)


def describe_patches(states: Sequence[PatchState] | None = None) -> str:
    """The table with the state of every row.

    Args:
        states: what `patch_states` returned; looked up when not given.
    """
    shown = {"installed": "installed", "fits": "fits, not installed"}
    lines: list[str] = []
    for row in patch_states() if states is None else states:
        state = shown.get(row.state, f"cannot be installed: {row.problem}")
        lines += [row.target, f"  {state}", f"  because it {row.why}"]
    return "\n".join(lines)


def _state(point: PatchPoint) -> PatchState:
    row = {"target": point.target, "why": point.why, "versions": point.versions}
    if point.target in _originals:
        return PatchState(**row, state="installed")
    try:
        owner, name = _locate(point.target)
        _check(point, inspect.getattr_static(owner, name))
    except (ImportError, PatchError) as error:
        return PatchState(**row, state="does not fit", problem=str(error))
    return PatchState(**row, state="fits")


def _locate(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        raise PatchError(f"'{target}' does not exist in this version. {_advice()}")
    return owner, name


def _check(point: PatchPoint, original: Any) -> None:
    fingerprint = _fingerprint(original)
    if fingerprint not in point.fingerprints:
        raise PatchError(
            f"The source of '{point.target}' (fingerprint {fingerprint}) is not one the "
            f"replacement was written for ({point.versions}: {', '.join(point.fingerprints)}). "
            f"Replacing it could change the run in ways nobody tested. {_advice()}"
        )


@functools.cache
def _fingerprint(original: Any) -> str:
    """Of the source; finding the sources takes most of the time of an installation."""
    return hashlib.sha256(inspect.getsource(original).encode()).hexdigest()[:16]


def _advice() -> str:
    version = importlib.metadata.version("mosaicml")
    return f"Installed is mosaicml {version}; install a version this package was tested with."
