"""Loading checkpoints into Composer's Trainer: any kind, and only exactly.

The functions here stand in for Composer's (see `patches`). Runs under FSDP1 keep Composer's own
loading, with files read safely.

[Note: kind of a checkpoint] Composer decides by `state_dict_type` how to read a checkpoint. Here it
is what the path holds, a folder with `.metadata` or a file, and the run's setting is changed to it
for the duration of the load.
"""

from __future__ import annotations

import ast
import contextlib
import os
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import checkpoint as composers
from composer.utils import dist, reproducibility
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import extract_path_from_symlink, is_tar
from composer.utils.misc import partial_format
from torch.distributed.checkpoint.api import CheckpointException

from composer_fsdp2.checkpoint.load import (
    Fit,
    check_fit,
    check_groups,
    load_sharded,
    read_items,
)
from composer_fsdp2.checkpoint.source import (
    METADATA,
    Checkpoint,
    FileCheckpoint,
    FolderCheckpoint,
    Kind,
    detect_kind,
    flatten,
)
from composer_fsdp2.checkpoint.write import Staging
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.trainer.lion_state import ADAPTIVE_LIONS, lion_as_text

__all__ = [
    "Ignore",
    "StateDict",
    "drop_keys",
    "load_checkpoint",
    "load_sharded_safely",
    "plain_name",
    "read_file",
    "read_folder_data",
    "read_folder_metadata",
    "set_node_rank",
    "unpacking_safely",
    "vet_algorithms",
]

Apply = tuple[Any, list[str] | None, list[Any] | None]
Ignore = Sequence[str] | Callable[[dict[str, Any]], None] | None
StateDict = dict[str, Any]


def set_node_rank() -> None:
    """Composer wants NODE_RANK, which torchrun calls GROUP_RANK. A value that is set stays."""
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    elif "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ.setdefault("NODE_RANK", str(node))


# --- Loading ---


def load_checkpoint(
    path: str,
    state: State,
    logger: Any,
    object_store: Any = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: Ignore = None,
    exclude_algorithms: list[str] | None = None,
    algorithm_passes: list[Any] | None = None,
) -> list[dict[str, Any]] | None:
    """Loads a checkpoint of any kind into a run with FSDP2 or without FSDP.

    Collective: yes. The arguments are those of `composer.utils.checkpoint.load_checkpoint`.

    Returns:
        The random states of the ranks that saved, for Composer to restore; `None` for weights only.

    Raises:
        CheckpointError: on every rank, when it cannot be loaded exactly.
    """
    path = partial_format(path, run_name=state.run_name)
    apply = (logger, exclude_algorithms, algorithm_passes)
    how: Any = {
        "weights_only": load_weights_only,
        "strict": strict_model_weights,
        "ignore": ignore_keys,
    }
    with _fetched(path, object_store, state, progress_bar) as (local, remote):
        kind: Kind = _agreed(lambda: "sharded" if remote is not None else detect_kind(local))
        if kind == "sharded" and state.fsdp_config is not None and not state.fsdp_enabled:
            state._apply_fsdp()  # it waited for one file, to be read on rank 0 alone
        with _state_type(state, kind):
            if kind == "sharded":
                return _ShardedLoad(state, **how).run(local, remote, apply)
            return _FullLoad(state, **how).run(local, apply)


def _agreed(act: Callable[[], Any]) -> Any:
    """Acts, and raises one error on every rank when any rank could not. Collective: yes."""
    found, error = None, None
    try:
        found = act()
    except CheckpointError as failed:
        error = failed
    except (Exception, CheckpointException) as failed:  # the other ranks must hear of it
        error = CheckpointError(f"{type(failed).__name__}: {failed}")
        error.__cause__ = failed
    raise_on_all_ranks({}, error)
    return found


@contextlib.contextmanager
def _state_type(state: State, kind: Kind) -> Generator[None]:
    """Composer's state dicts are of this kind for a while."""
    config: Any = state.fsdp_config
    if config is None:
        yield
        return
    asked = config.state_dict_type
    config.state_dict_type = kind
    try:
        yield
    finally:
        config.state_dict_type = asked


@contextlib.contextmanager
def _fetched(
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
                file, _, _ = _agreed(lambda: fetch(path, folder, object_store, progress_bar))
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
    _agreed(fetch_metadata)
    return composers.DistCPObjectStoreReader(
        source_path=path,
        destination_path=str(Path(folder) / "checkpoint"),
        object_store=object_store,
        device_mesh=state.device_mesh,
    )


class _Load:
    """What loading a folder and loading a file have in common."""

    saved: Checkpoint

    def __init__(self, state: State, *, weights_only: bool, strict: bool, ignore: Ignore) -> None:
        self.state = state
        self.weights_only = weights_only
        self.strict = strict
        self.ignore = ignore
        self.notes: list[str] = []

    @property
    def scaler(self) -> str:
        """The name under which Composer keeps the state of this run's gradient scaler."""
        return type(self.state.scaler).__qualname__

    @property
    def _keeps_adapters_only(self) -> bool:
        """Whether the model leaves its base out, which torch would miss when told to be strict.

        What of the model is in a checkpoint has been compared by then.
        """
        model = getattr(self.state.model, "module", self.state.model)
        return bool(getattr(model, "using_peft", False) and model.should_save_peft_only)

    def wanted(self) -> StateDict:
        """What the run has, as Composer would save it now. Collective: yes."""
        if self.weights_only:
            wanted: StateDict = {"state": {"model": self.state.get_model_state_dict()}}
        else:
            wanted = {"state": self.state.state_dict(), "rng": reproducibility.get_rng_state()}
        return drop_keys(wanted, self.ignore)

    def check_parts(self, wanted: StateDict) -> list[str]:
        """Settles whether it has what a run continues from. Collective: no.

        Returns:
            The run's optimizers whose state is wanted.
        """
        names = list(wanted["state"].get("optimizers", {}))
        if not self.weights_only and names:
            self._check_has_state()
        # Another model differs in its groups too, but that would be an odd way to say so.
        self.check_names({"state": {"model": wanted["state"].get("model", {})}})
        self._check_optimizers(names)
        return names

    def check_names(self, wanted: StateDict) -> Fit:
        """Settles whether names and shapes fit. Collective: no."""
        flat, _ = flatten(wanted)
        globs = () if callable(self.ignore) else tuple(self.ignore or ())
        fit = check_fit(self.saved, flat, strict=self.strict, ignored=globs)
        self.strict = self.strict and not fit.left_out
        self.notes = [*_lossy(self.saved, flat), *_left_out(self.saved, fit)]
        return fit

    def _check_has_state(self) -> None:
        if not self.saved.under("state", "timestamp"):
            raise CheckpointError(
                f"'{self.saved.path}' holds weights only: no optimizer, no schedulers, no "
                "timestamp. Training would start over at batch 0 with the weights of a later one. "
                "Set load_weights_only: true if that is what you want."
            )

    def _check_optimizers(self, names: Sequence[str]) -> None:
        saved = {str(way[0]) for way in self.saved.under("state", "optimizers").values() if way}
        for name in names:
            if name not in saved:
                raise CheckpointError(
                    f"The run's optimizer is {name}, the checkpoint '{self.saved.path}' has the "
                    f"state of {', '.join(sorted(saved)) or 'none'}. One cannot continue "
                    "from the state of the other. Use the same optimizer, or start its state anew "
                    "with load_ignore_keys: [state/optimizers/*], or load_weights_only: true."
                )

    def check_groups(self, saved: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Compares parameter groups by name. Collective: no."""
        for name, groups in saved.items():
            check_groups(groups, _groups_of(self.state, name), str(self.saved.path))

    def _check_schedulers(self, loaded: StateDict) -> None:
        """A schedule has one learning rate for each group; this differs if groups are ignored."""
        groups = sum(len(optimizer.param_groups) for optimizer in self.state.optimizers)
        for name, schedule in (loaded.get("schedulers") or {}).items():
            saved = len(schedule.get("base_lrs", ())) or groups
            if not self.weights_only and saved != groups:
                raise CheckpointError(
                    f"The schedule {name} in '{self.saved.path}' is for {saved} parameter groups, "
                    f"the run has {groups}. Groups would get each other's learning rates, or none. "
                    "Add state/schedulers/* to load_ignore_keys: Composer's schedulers go by the "
                    "timestamp, which stays that of the checkpoint."
                )

    def apply(self, loaded: StateDict, apply: Apply) -> list[dict[str, Any]] | None:
        """Hands what was read to Composer. Collective: yes."""
        _tell(self.notes)
        logger, excluded, passes = apply
        _agreed(lambda: vet_algorithms(loaded["state"]))
        _agreed(lambda: self._check_schedulers(loaded["state"]))
        load = self.state.load_model_state if self.weights_only else self.state.load_state_dict
        load(
            loaded["state"],
            logger,
            strict=self.strict and not self.ignore and not self._keeps_adapters_only,
            exclude_algorithms=excluded,
            algorithm_passes=passes,
        )
        return None if self.weights_only else loaded.get("rng")


class _ShardedLoad(_Load):
    """Every rank reads the pieces it needs of a folder."""

    def run(self, local: Path, remote: Any, apply: Apply) -> list[dict[str, Any]] | None:
        reader: Any = remote or composers.FileSystemReaderWithValidation(str(local))
        saved = _agreed(lambda: FolderCheckpoint(local, incomplete=remote is not None))
        self.saved = reader.checkpoint = saved
        wanted = self.wanted()
        theirs = [way[0] for way in saved.under("state", "scaler").values() if way]
        _rename_scaler(wanted["state"], str(theirs[0]) if theirs else self.scaler)
        ways = list(saved.under("state", "algorithms").values())
        spread = bool(ways) and () not in ways and "algorithms" in wanted["state"]
        if spread:  # as `saving` does with those that hold shards
            wanted["state"]["algorithms"] = dict(wanted["state"]["algorithms"])
        if "rng" in wanted:
            ranks = composers._get_num_ranks_that_saved_rng(saved.metadata)
            wanted["rng"] = wanted["rng"][:ranks]
        names: list[str] = _agreed(lambda: self.check_parts(wanted))
        groups = {name: _read_groups(saved, reader, name) for name in names}
        _agreed(lambda: self.check_groups(groups))
        fit: Fit = _agreed(lambda: self.check_names(wanted))
        _remove(wanted, fit.left_out)
        config: Any = self.state.fsdp_config
        if config is None or self.state.device.name == "cpu":
            # These are the tensors the run computes with; half a load must not reach them.
            wanted = Staging().copy(wanted)
        load_sharded(wanted, reader, None if config is None else config.load_planner)
        _rename_scaler(wanted["state"], self.scaler)
        if spread:
            wanted["state"]["algorithms"] = list(wanted["state"]["algorithms"].items())
        return self.apply(wanted, apply)


def _read_groups(saved: FolderCheckpoint, reader: Any, name: str) -> list[list[str]]:
    """Names in each parameter group. Collective: yes."""
    ways = saved.under("state", "optimizers", name, "param_groups")
    if () in ways.values():  # one object, as before torch 2.4
        groups: list[Any] = []
    else:
        groups = [{"params": []} for _ in {way[0] for way in ways.values()}]
    found = {"state": {"optimizers": {name: {"param_groups": groups}}}}
    load_sharded(found, reader)
    return [group["params"] for group in found["state"]["optimizers"][name]["param_groups"]]


class _FullLoad(_Load):
    """Every rank reads the whole file, or rank 0 alone and the others hear of it."""

    def run(self, local: Path, apply: Apply) -> list[dict[str, Any]] | None:
        alone = self.state.load_monolith_rank0_only
        reads = dist.get_global_rank() == 0 or not alone
        share = (0, 1) if alone else (dist.get_global_rank(), dist.get_world_size())
        wanted = self._wanted_names()
        values = _agreed(lambda: self._read(local, share, wanted) if reads else None)
        if alone:
            values = _from_rank0(values)
        return self.apply(values, apply)

    def _wanted_names(self) -> StateDict:
        """The model and optimizer; of what else a file may lack, nothing is lost without it."""
        with _state_type(self.state, "sharded"):
            if self.state.fsdp_config is not None and not self.state.fsdp_enabled:
                # It is sharded after the load, and its optimizer must not have state before.
                state: StateDict = {"model": dict(self.state.model.state_dict())}
                if not self.weights_only:
                    state["optimizers"] = {type(o).__qualname__: {} for o in self.state.optimizers}
                wanted = drop_keys({"state": state}, self.ignore)
            else:
                wanted = self.wanted()
        parts = {k: v for k, v in wanted["state"].items() if k in ("model", "optimizers")}
        return {"state": parts}

    def _read(self, path: Path, share: tuple[int, int], wanted: StateDict) -> StateDict:
        saved = FileCheckpoint(path)
        for _ in saved.check(share):
            pass
        self.saved = saved
        values = saved.values = drop_keys(saved.values, self.ignore)
        values.setdefault("state", {})
        saved.refresh()
        names = self.check_parts(wanted)
        optimizers = values["state"].get("optimizers", {})
        lions = ADAPTIVE_LIONS.intersection(names)
        optimizers.update({name: lion_as_text(optimizers[name]) for name in lions})
        self.check_groups({n: [g["params"] for g in optimizers[n]["param_groups"]] for n in names})
        self.check_names(wanted)
        _unalias(optimizers, every=self.state.fsdp_config is None)
        _rename_scaler(values["state"], self.scaler)
        return values


def _from_rank0(values: StateDict | None) -> StateDict:
    """Sends everything but weights and optimizer, which stay on rank 0. Collective: yes."""
    kept: StateDict = {}
    if values is not None:
        parts = [name for name in ("model", "optimizers") if name in values["state"]]
        kept = {name: values["state"].pop(name) for name in parts}
    box: list[Any] = [(values, list(kept))]
    dist.broadcast_object_list(box, src=0)
    received, parts = box[0]
    received["state"].update({name: kept.get(name) for name in parts})
    return received


def _rename_scaler(state_dict: StateDict, name: str) -> None:
    """FSDP1 has a scaler of its own, with the same state as all others."""
    scalers = state_dict.get("scaler")
    if isinstance(scalers, dict) and len(scalers) == 1:
        state_dict["scaler"] = {name: next(iter(scalers.values()))}


def _groups_of(state: State, name: str) -> list[list[str]]:
    """Names in each parameter group of the run's optimizer, as a checkpoint has them."""
    names = {
        id(param): plain_name(full)
        for full, param in reversed(list(state.model.named_parameters(remove_duplicate=False)))
    }
    optimizer = next(o for o in state.optimizers if type(o).__qualname__ == name)
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def plain_name(name: str) -> str:
    """The name in the model nobody wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def drop_keys(values: StateDict, ignore: Ignore) -> StateDict:
    """The state dict without the keys a user ignores.

    Containers are copied: they may be the very lists that a scheduler goes on with.
    """
    if not ignore:
        return values
    values = _copied_containers(values)
    (ignore if callable(ignore) else composers.glob_filter(list(ignore)))(values)
    values.setdefault("state", {})
    return values


def _copied_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied_containers(item) for key, item in value.items()}
    return [_copied_containers(item) for item in value] if type(value) is list else value


def _remove(values: StateDict, keys: Sequence[str]) -> None:
    """Takes keys out of a nested state dict, so that nobody asks the checkpoint for them."""
    _, ways = flatten(values)
    for key in keys:
        if key in ways:
            *outer, last = ways[key]
            holder: Any = values
            for part in outer:
                holder = holder[part]
            del holder[last]


def _unalias(optimizers: Mapping[str, Any], *, every: bool) -> None:
    """Gives every parameter its own state.

    FSDP1 with flat parameters saves one `step` under many names; loaded as it is, every parameter
    would count all of them up.

    Args:
        optimizers: as in the file, changed in place.
        every: whether all tensors leave the file: an unsharded optimizer keeps what it is given.
    """
    seen: set[int] = set()
    for optimizer in optimizers.values():
        for state in optimizer.get("state", {}).values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    place = value.untyped_storage().data_ptr()
                    if every or place in seen or value.ndim == 0:
                        state[key] = value.clone()
                    seen.add(place)


def _lossy(saved: Checkpoint, flat: Mapping[str, Any]) -> Iterator[str]:
    keys = [
        key
        for key, value in flat.items()
        if isinstance(value, torch.Tensor) and key in saved.tensors
        if torch.promote_types(saved.tensors[key].dtype, value.dtype) != value.dtype
    ]
    if keys:
        stored, kept = saved.tensors[keys[0]].dtype, flat[keys[0]].dtype
        yield (
            f"{len(keys)} tensors of '{saved.path}' lose precision: '{keys[0]}' is stored in "
            f"{stored} and the run keeps it in {kept}."
        )


def _left_out(saved: Checkpoint, fit: Fit) -> Iterator[str]:
    described = ("state.metadata.", "state.integrations.")  # nobody reads them back
    told = [key for key in fit.left_out if not key.startswith(described)]
    if told:
        more = f" and {len(told) - 20} more" if len(told) > 20 else ""
        yield (
            f"'{saved.path}' and the run do not both have {', '.join(told[:20])}{more}. What the "
            "run has of it stays as it is."
        )


def _tell(notes: Iterable[str]) -> None:
    if dist.get_global_rank() == 0:
        for note in notes:
            warnings.warn(note, stacklevel=2)


@contextlib.contextmanager
def unpacking_safely() -> Generator[None]:
    """Archives are unpacked inside their folder, and hold nothing but files and folders.

    Raises:
        CheckpointError: a member wants to go elsewhere.
    """
    unset = object()
    before = vars(tarfile.TarFile).get("extraction_filter", unset)
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    except tarfile.FilterError as error:
        raise CheckpointError(
            f"The archive has a member that does not belong into a checkpoint: {error}. Unpacking "
            "it could overwrite any file. Do not use this archive."
        ) from None
    finally:
        if before is unset:
            del tarfile.TarFile.extraction_filter
        else:
            tarfile.TarFile.extraction_filter = before


def vet_algorithms(state_dict: Mapping[str, Any]) -> None:
    """Refuses algorithms whose description is more than a call with plain arguments.

    Composer evaluates the description, which comes from the checkpoint.

    Raises:
        CheckpointError: evaluating it could execute code.
    """
    algorithms = state_dict.get("algorithms")
    for entry in algorithms if isinstance(algorithms, list) else ():
        name, value = entry
        text = value.get("repr", "") if isinstance(value, Mapping) else ""
        if not _is_plain_call(str(name), str(text)):
            raise CheckpointError(
                f"The checkpoint describes its algorithm '{name}' as {text[:100]!r}. Composer "
                "would evaluate that, and it is more than a name with plain arguments, so it could "
                "execute code. Leave the algorithms out with load_ignore_keys: [state/algorithms]."
            )


def _is_plain_call(name: str, text: str) -> bool:
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert call.func.id == name
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)
    except (SyntaxError, ValueError, AssertionError, RecursionError):
        # The default `repr` of an object cannot be evaluated; Composer warns and goes on.
        return text.startswith("<") and text.endswith(">")
    return True


# --- Composer's own readers, also under FSDP1: the same files, nothing executed ---


def read_file(path: str | Path, map_location: str) -> Any:
    """Stands in for the function that unpickles a file. `map_location` is always the CPU."""
    del map_location
    return FileCheckpoint(Path(composers._ensure_valid_checkpoint(path))).values


def read_folder_metadata(reader: Any) -> Any:
    """Stands in for `FileSystemReaderWithValidation.read_metadata`."""
    folder = Path(reader.path)
    composers._ensure_valid_checkpoint(folder / METADATA)
    if not hasattr(reader, "checkpoint"):
        reader.checkpoint = FolderCheckpoint(folder, incomplete=True)
    return reader.checkpoint.metadata


def read_folder_data(reader: Any, plan: Any, planner: Any) -> Any:
    """Stands in for `FileSystemReaderWithValidation.read_data`."""
    folder: FolderCheckpoint = reader.checkpoint
    specs: dict[str, list[tuple[int, int]]] = {}
    for item in plan.items:
        info = folder.metadata.storage_data[item.storage_index]
        specs.setdefault(info.relative_path, []).append((info.offset, info.length))
    for name, spec in specs.items():
        composers._ensure_valid_checkpoint(folder.path / name, spec)
    read_items(folder, plan, planner)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


def load_sharded_safely(
    state_dict: StateDict, storage_reader: Any, load_planner: Any = None
) -> None:
    """Stands in for `dist_cp_load`, which meets one missing key by asking for no key at all.

    Raises:
        CheckpointError: it does not fit, or executes code.
    """
    saved = FolderCheckpoint(Path(storage_reader.path), incomplete=True)
    flat, _ = flatten(state_dict)
    fit = _agreed(lambda: check_fit(saved, flat, strict=False))
    _tell(_left_out(saved, fit))
    _remove(state_dict, [key for key in fit.left_out if not key.startswith("state.model.")])
    load_sharded(state_dict, storage_reader, load_planner)
    _agreed(lambda: vet_algorithms(state_dict.get("state", {})))
