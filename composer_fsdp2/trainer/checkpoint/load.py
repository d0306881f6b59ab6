"""Loading checkpoints into Composer's Trainer: any kind, and only exactly.

The functions here replace Composer's (see `patches`). Runs without FSDP2 keep Composer's own
loading, with files read safely; but for folders of shards, which Composer cannot read without FSDP.

[Note: kind of a checkpoint] Composer decides by `state_dict_type` how to read a checkpoint. Here it
is what the path holds, a folder with `.metadata` or a file, and the run's setting is changed to it
for the duration of the load.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.algorithms import EMA
from composer.core import State
from composer.utils import checkpoint as composers
from composer.utils import dist, reproducibility
from composer.utils.misc import partial_format
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.algorithms import ACTIVE, holds_averages, vet_algorithms
from composer_fsdp2.checkpoint.contents import Kind, detect_kind
from composer_fsdp2.checkpoint.expert_names import ExpertNames, RenamedFolder
from composer_fsdp2.checkpoint.load import STATE_SETTINGS, check_fit, check_groups, load_sharded
from composer_fsdp2.checkpoint.muon_from_adamw import MuonFromAdamW
from composer_fsdp2.checkpoint.source import (
    Checkpoint,
    FileCheckpoint,
    FolderCheckpoint,
    flatten,
    open_checkpoint,
    open_on_all_ranks,
)
from composer_fsdp2.checkpoint.write import Staging
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.optim.lion_state import ADAPTIVE_LIONS, lion_as_text
from composer_fsdp2.optim.local import MatrixOptimizer
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.ranks import of_rank0, on_all_ranks, raise_on_all_ranks
from composer_fsdp2.step.run import run_of
from composer_fsdp2.text import plain_name
from composer_fsdp2.trainer.checkpoint.load_optimizer import (
    States,
    asking_for,
    load_optimizers,
    saved_states,
)
from composer_fsdp2.trainer.checkpoint.load_steps import (
    Ignore,
    StateDict,
    as_checkpoint_error,
    check_objects,
    drop_keys,
    fetched,
    notes_of,
    remove_keys,
    restore_keys,
    set_rates_by_schedules,
    shape_as_saved,
    warn_on_rank_0,
)
from composer_fsdp2.trainer.override_attribute import override_attribute

__all__ = ["check_checkpoint", "load_checkpoint"]

_MUON = "Muon"
"""name of the class, under which Composer keeps the state of Muon"""


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
    with fetched(path, object_store, state, progress_bar) as (local, remote):
        kind: Kind = on_all_ranks(
            lambda: "sharded" if remote is not None else detect_kind(local), as_checkpoint_error
        )
        if kind == "sharded" and state.fsdp_config is not None and not state.fsdp_enabled:
            state._apply_fsdp()  # it waited for one file, to be read on rank 0 alone
        chosen = _ShardedLoad if kind == "sharded" else _FullLoad
        load = chosen(state, load_weights_only, strict_model_weights, ignore_keys)
        with _state_type(state, kind):
            return load.apply(
                load.read(local, remote), logger, exclude_algorithms, algorithm_passes
            )


def check_checkpoint(
    path: Path, state: State, weights_only: bool, strict: bool, ignore: Ignore
) -> None:
    """Compares a checkpoint with a run that is not sharded yet, and reads no tensor.

    Collective: no. The arguments are those of `load_checkpoint`.

    Raises:
        CheckpointError: names or shapes of the model differ, or it lacks what the run goes on with.
    """
    load = _Load(state, weights_only, strict, ignore)
    saved = open_checkpoint(path)
    names = ExpertNames(saved, _names_of(state.model))
    if names and isinstance(saved, FolderCheckpoint):
        saved = RenamedFolder(saved, names)
    elif names and isinstance(saved, FileCheckpoint):
        model = saved.values["state"]["model"].items()
        # On meta, where tensors are put together without memory.
        saved.values["state"]["model"] = names.renamed({k: v.to("meta") for k, v in model})
        saved.refresh()
    load.saved = saved
    target: StateDict = {"model": dict(state.model.state_dict())}
    if not weights_only:
        # Muon may take its state from another optimizer, once it has chosen its matrices.
        others = (other for other in state.optimizers if not isinstance(other, MatrixOptimizer))
        target["optimizers"] = {type(optimizer).__qualname__: {} for optimizer in others}
    load.check_parts(drop_keys({"state": target}, ignore))


def _state_type(state: State, kind: Kind) -> contextlib.AbstractContextManager[None]:
    """Has Composer make state dicts of a kind while a block runs."""
    config: Any = state.fsdp_config
    if config is None:
        return contextlib.nullcontext()
    return override_attribute(config, "state_dict_type", kind)


class _Load:
    """Common steps of loading a folder and loading a file."""

    saved: Checkpoint

    def __init__(self, state: State, weights_only: bool, strict: bool, ignore: Ignore) -> None:
        self.state, self.weights_only, self.strict = state, weights_only, strict
        self.ignore = ignore
        self.ignored_of_run = ignore
        """what is taken out of the run's own state dict"""
        self.scaler = type(state.scaler).__qualname__
        """the name under which Composer keeps the state of this run's gradient scaler"""
        self.notes: list[str] = []
        self.averages = False
        """whether the checkpoint's model is averages, where this rank has read that"""
        self._without_state = [optimizer for optimizer in state.optimizers if not optimizer.state]
        self.states: States = {}
        self.carried: MuonFromAdamW | None = None
        """source of Muon's state, if the checkpoint has the state of another optimizer"""

    def target_state(self) -> StateDict:
        """Returns the state dict to fill, as Composer would save it now. Collective: yes."""
        if self.weights_only:
            target: StateDict = {"state": {"model": self.state.get_model_state_dict()}}
        else:
            with asking_for(self.state.model, self.state.optimizers, self.states):
                target = {"state": self.state.state_dict(), "rng": reproducibility.get_rng_state()}
        target = drop_keys(target, self.ignored_of_run)
        # Nothing reads them back, and another version of transformers writes other ones.
        target["state"].pop("integrations", None)
        return target

    def carry(self, target: StateDict) -> None:
        """Settles whether Muon continues from another optimizer's state. Collective: no."""
        name = _MUON
        if name not in target["state"].get("optimizers", {}):
            return
        if self.saved.under("state", "optimizers", name):
            return
        names: dict[str, list[str]] = {"muon": [], "adamw": []}
        optimizer = _optimizer_of(self.state, name)
        groups = zip(optimizer.param_groups, _groups_of(self.state, name), strict=True)
        for group, named in groups:
            pairs = zip(group["params"], named["params"], strict=True)
            names[group["algorithm"]] += [name for param, name in pairs if param.requires_grad]
        carried = MuonFromAdamW(self.saved, **names)
        self.carried = carried if carried.source else None

    def check_parts(self, target: StateDict) -> list[str]:
        """Checks that the checkpoint has every part that a run continues from. Collective: no.

        Returns:
            The run's optimizers whose state is wanted.
        """
        names = list(target["state"].get("optimizers", {}))
        if not self.weights_only and names and not self.saved.under("state", "timestamp"):
            raise CheckpointError(
                f"'{self.saved.path}' holds weights only: no optimizer, no schedulers, no "
                "timestamp. Training would start over at batch 0 with the weights of a later one. "
                "Set load_weights_only: true if that is what you want."
            )
        # Another model differs in its groups too, but that would be an odd way to say so.
        self.check_names({"state": {"model": target["state"].get("model", {})}})
        saved = {str(keys[0]) for keys in self.saved.under("state", "optimizers").values() if keys}
        for name in names:
            if name not in saved:
                raise CheckpointError(
                    f"The run's optimizer is {name}, the checkpoint '{self.saved.path}' has the "
                    f"state of {', '.join(sorted(saved)) or 'none'}. One cannot continue "
                    "from the state of the other. Use the same optimizer, or start its state anew "
                    "with load_ignore_keys: [state/optimizers/*], or load_weights_only: true."
                )
        return names

    def check_names(self, target: StateDict) -> list[str]:
        """Compares names and shapes; returns keys that are left out. Collective: no."""
        flat, _ = flatten(target)
        globs = () if callable(self.ignore) else tuple(self.ignore or ())
        globs += tuple(self.carried.ignored) if self.carried else ()
        globs += tuple(f"state/optimizers/*/state/{name}" for name in _frozen_names(self.state))
        left_out = check_fit(self.saved, flat, strict=self.strict, ignored=globs)
        self.notes = [*notes_of(self.saved, flat, left_out)]
        self.notes += [self.carried.note] if self.carried else []
        return left_out

    def check_groups(self, saved: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Compares parameter groups, with names for parameters. Collective: no."""
        if self.carried:
            return  # the groups are the run's own
        frozen = _frozen_names(self.state)
        for name, groups in saved.items():
            theirs, ours = (
                [{**group, "params": set(group["params"]) - frozen} for group in side]
                for side in (groups, _groups_of(self.state, name))
            )
            check_groups(theirs, ours, str(self.saved.path))

    def _check_loaded(self, loaded: StateDict) -> None:
        """Refuses values that Composer would execute or mix up. Collective: no."""
        vet_algorithms(loaded)
        # A schedule has one learning rate for each group; this differs if groups are ignored.
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

    def apply(
        self, loaded: StateDict, logger: Any, excluded: list[str] | None, passes: list[Any] | None
    ) -> list[dict[str, Any]] | None:
        """Hands the values to Composer, and returns the random states. Collective: yes."""
        warn_on_rank_0(self.notes)
        values = loaded["state"]
        on_all_ranks(lambda: self._check_loaded(values), as_checkpoint_error)
        averages = self.averages and str(self.saved.path)
        facts = raise_on_all_ranks({"~averages": averages, "~carried": self.carried is not None})
        path = next((fact["~averages"] for fact in facts if fact["~averages"]), None)
        # Averages beside an optimizer's state that is not theirs: right for evaluation alone.
        has_ema = any(isinstance(algorithm, EMA) for algorithm in self.state.algorithms)
        mixed = not self.weights_only and "optimizers" in values
        mixed = mixed and not ("algorithms" in values and has_ema)
        if values.get("model"):
            values["model"] = _divided(self.state.model, values["model"])
        state = self.state
        load = state.load_model_state if self.weights_only else state.load_state_dict

        def load_optim_state(state_dict: StateDict, strict: bool = True) -> None:
            original = type(state).load_optim_state.__get__(state)
            load_optimizers(
                original, state.model, state.optimizers, self.states, state_dict, strict
            )

        with override_attribute(state, "load_optim_state", load_optim_state):
            load(
                values,
                logger,
                # All names are compared by now, with those that the model's state dict has: it may
                # leave out a base, or a frozen part of a module inside.
                strict=False,
                exclude_algorithms=excluded,
                algorithm_passes=passes,
            )
        if (run := run_of(self.state.model)) is not None:
            run.averages_from = path if mixed else None
        if self.weights_only:
            return None
        optimizers = values.get("optimizers", {})  # None: rank 0 holds it
        classes = {type(optimizer).__qualname__ for optimizer in self.state.optimizers}
        anew = optimizers is not None and classes.isdisjoint(optimizers)
        for optimizer in self._without_state if anew else ():
            # To ask for its state torch makes it, by a step that its counters remember.
            optimizer.state.clear()
        if anew or any(fact["~carried"] for fact in facts):
            set_rates_by_schedules(self.state.schedulers)
        return loaded.get("rng")


class _ShardedLoad(_Load):
    """Reads a folder: every rank reads the pieces it needs."""

    def read(self, local: Path, remote: Any) -> StateDict:
        """Returns the run's own state, filled. Collective: yes."""
        reader: Any = remote or composers.FileSystemReaderWithValidation(str(local))
        saved, target = self._opened(local, remote, reader)
        state = target["state"]
        theirs = [keys[0] for keys in saved.under("state", "scaler").values() if keys]
        _rename_scaler(state, str(theirs[0]) if theirs else self.scaler)
        key_paths = list(saved.under("state", "algorithms").values())
        # Ranks have callbacks of their own state, and one may have something odd.
        on_all_ranks(lambda: shape_as_saved(state.get("callbacks"), saved), as_checkpoint_error)
        spread = bool(key_paths) and () not in key_paths and "algorithms" in state
        if spread:  # as `saving` does with those that hold shards
            state["algorithms"] = dict(state["algorithms"])
        if "rng" in target:
            ranks = composers._get_num_ranks_that_saved_rng(saved.metadata)
            # The list has one entry for each rank of this run, and a load asks for all of them.
            target["rng"] = target["rng"][:ranks]
        names, muon_state = on_all_ranks(lambda: self._settle(target), as_checkpoint_error)
        groups = {name: self.experts.renamed(_read_groups(saved, reader, name)) for name in names}

        def compare() -> list[str]:
            self.check_groups(groups)
            return self.check_names(target)

        remove_keys(target, on_all_ranks(compare, as_checkpoint_error))
        config: Any = self.state.fsdp_config
        # On a GPU Composer asks torch for a state dict in CPU memory, which is a copy.
        if config is None or self.state.device.name == "cpu":
            # These are the tensors the run computes with; half a load must not reach them.
            target = Staging().copy(target)
        load_sharded(target, reader, None if config is None else config.load_planner)
        # Whether the model is averages; see [Note: EMA in checkpoints].
        active: dict[Any, Any] = {
            keys[0]: {ACTIVE: None} for keys in key_paths if keys[1:] == (ACTIVE,)
        }
        if active:
            load_sharded({"state": {"algorithms": active}}, reader)
        self.averages = holds_averages(active)
        state = target["state"]
        restore_keys(state.get("callbacks"))
        if "optimizers" in state:  # names in groups are those that were saved
            state["optimizers"] = self.experts.renamed(state["optimizers"])
        _rename_scaler(state, self.scaler)
        if self.carried:
            saved_state = state["optimizers"][self.carried.source]["state"]
            muon_state["state"] = self.carried.from_saved(saved_state)
            state["optimizers"] = {_MUON: muon_state}
        if spread:
            state["algorithms"] = list(state["algorithms"].items())
        return target

    def _opened(self, local: Path, remote: Any, reader: Any) -> tuple[FolderCheckpoint, StateDict]:
        """Returns the folder with the names of the run, and what the run loads. Collective: yes."""
        saved = reader.checkpoint = open_on_all_ranks(
            local, as_checkpoint_error, incomplete=remote is not None
        )
        if remote is not None:
            on_all_ranks(lambda: check_objects(saved, remote), as_checkpoint_error)
        self.experts = ExpertNames(saved, _names_of(self.state.model))
        shown = RenamedFolder(saved, self.experts) if self.experts else saved
        self.states = saved_states(shown, self.state.optimizers)
        target = self.target_state()
        if isinstance(shown, RenamedFolder):
            shown.check_values_of_all(reader, target)
        self.saved = reader.checkpoint = shown
        return shown, target

    def _settle(self, target: StateDict) -> tuple[list[str], StateDict]:
        """Asks for the state under the checkpoint's names, where Muon takes it from another.

        Collective: no.

        Returns:
            The optimizers whose state is wanted, and Muon's own part of `target`.
        """
        muon_state: StateDict = {}
        self.carry(target)
        if self.carried:
            muon_state = dict(target["state"]["optimizers"][_MUON])
            source_state = {"state": self.carried.to_saved(muon_state["state"])}
            target["state"]["optimizers"] = {self.carried.source: source_state}
            target["state"].pop("schedulers", None)
        return self.check_parts(target), muon_state


def _read_groups(saved: FolderCheckpoint, reader: Any, name: str) -> list[dict[str, Any]]:
    """Reads the parameter groups of an optimizer, with names. Collective: yes."""
    key_paths = saved.under("state", "optimizers", name, "param_groups")
    if () in key_paths.values():  # one object, as before torch 2.4
        groups: list[dict[str, Any]] = []
    else:
        groups = [{"params": []} for _ in {keys[0] for keys in key_paths.values()}]
        for number, setting in (keys for keys in key_paths.values() if keys[1] in STATE_SETTINGS):
            groups[int(number)][str(setting)] = None
    # For a value that is no tensor, torch puts what was saved in the place of what is there.
    target = {"state": {"optimizers": {name: {"param_groups": groups}}}}
    load_sharded(target, reader)
    return target["state"]["optimizers"][name]["param_groups"]


class _FullLoad(_Load):
    """Reads one file: on every rank, or on rank 0, which sends the values."""

    saved: Any

    def __init__(self, state: State, weights_only: bool, strict: bool, ignore: Ignore) -> None:
        super().__init__(state, weights_only, strict, ignore)
        self.removed: list[str] = []
        """keys that a function has taken out of the file"""
        if callable(ignore):
            self.ignored_of_run = None  # it is for the file, which may have other keys

    def read(self, local: Path, remote: Any) -> StateDict:
        """Returns the values of the file. Collective: yes."""
        rank, alone = dist.get_global_rank(), self.state.load_monolith_rank0_only
        share = (0, 1) if alone else (rank, dist.get_world_size())
        reads = rank == 0 or not alone
        on_all_ranks(lambda: self._open(local, share) if reads else None, as_checkpoint_error)
        self.states = saved_states(self.saved, self.state.optimizers) if reads else {}
        self.states = of_rank0(self.states) if alone else self.states
        # As shards, because `full` gathers every weight, and only names and shapes are wanted.
        with _state_type(self.state, "sharded"):
            if self.state.fsdp_config is not None and not self.state.fsdp_enabled:
                # It is sharded after the load, and its optimizer must not have state before.
                for optimizer in self.state.optimizers:
                    if isinstance(optimizer, MatrixOptimizer):
                        optimizer.decide(self.state.model)
                state: StateDict = {"model": dict(self.state.model.state_dict())}
                if not self.weights_only:
                    state["optimizers"] = {type(o).__qualname__: {} for o in self.state.optimizers}
                target = drop_keys({"state": state}, self.ignored_of_run)
            else:
                target = self.target_state()
        # Model and optimizer alone: nothing is lost without the rest of a file.
        heavy = ("model", "optimizers")
        names = {"state": {k: v for k, v in target["state"].items() if k in heavy}}
        values: Any = on_all_ranks(
            lambda: self._read(names) if reads else None, as_checkpoint_error
        )
        if not alone:
            return values
        tensors: StateDict = {}
        if values is not None:
            tensors = {k: values["state"].pop(k) for k in heavy if k in values["state"]}
        # Weights and optimizer stay on rank 0; the others hear of everything else.
        received, parts = of_rank0((values, list(tensors)))
        received["state"].update({name: tensors.get(name) for name in parts})
        return received

    def _open(self, path: Path, share: tuple[int, int]) -> None:
        saved = self.saved = FileCheckpoint(path)
        saved.check(share)
        self.averages = holds_averages(saved.values.get("state", {}).get("algorithms"))
        before = list(saved.paths)
        saved.values = drop_keys(saved.values, self.ignore)
        saved.values.setdefault("state", {})
        saved.refresh()
        if callable(self.ignore):
            self.removed = [key for key in before if key not in saved.paths]
        if self.weights_only:
            saved.values.get("state", {}).pop("optimizers", None)
        if experts := ExpertNames(saved, _names_of(self.state.model)):
            saved.values = experts.renamed(saved.values, str(path))
            saved.refresh()

    def _read(self, target: StateDict) -> StateDict:
        saved, values = self.saved, self.saved.values
        remove_keys(target, self.removed)
        self.carry(target)
        if self.carried:
            name, state = _MUON, values["state"]
            param_groups = _groups_of(self.state, name)
            muon_state = self.carried.from_saved(state["optimizers"][self.carried.source]["state"])
            state["optimizers"] = {name: {"state": muon_state, "param_groups": param_groups}}
            state.pop("schedulers", None)
            saved.refresh()
        groups, optimizers = {}, values["state"].get("optimizers", {})
        for name in self.check_parts(target):
            theirs, ours = optimizers[name]["param_groups"], _optimizer_of(self.state, name)
            for saved_group, group in zip(theirs, ours.param_groups, strict=False):
                if "initial_lr" not in group:  # noted by a scheduler, and this run has none
                    saved_group.pop("initial_lr", None)
            groups[name] = theirs
            if name in ADAPTIVE_LIONS:
                optimizers[name] = lion_as_text(optimizers[name])
        self.check_groups(groups)
        self.check_names(target)
        # FSDP1 with flat parameters saves one `step` under many names; loaded as it is, every
        # parameter would count all of them up. All tensors leave the file for an unsharded
        # optimizer, which keeps what it is given.
        every, seen = self.state.fsdp_config is None, set[int]()
        all_states = [optimizer.get("state", {}).values() for optimizer in optimizers.values()]
        for own_state in itertools.chain.from_iterable(all_states):
            for key, value in own_state.items():
                if isinstance(value, torch.Tensor):
                    address = value.untyped_storage().data_ptr()
                    if every or address in seen or value.ndim == 0:
                        own_state[key] = value.clone()
                    seen.add(address)
        _rename_scaler(values["state"], self.scaler)
        return values


def _rename_scaler(state_dict: StateDict, name: str) -> None:
    """Renames the state of a scaler: FSDP1 has a class of its own, with the same state."""
    scalers = state_dict.get("scaler")
    if isinstance(scalers, dict) and len(scalers) == 1:
        state_dict["scaler"] = {name: next(iter(scalers.values()))}


def _optimizer_of(state: State, name: str) -> torch.optim.Optimizer:
    return next(o for o in state.optimizers if type(o).__qualname__ == name)


def _names_of(model: nn.Module) -> dict[str, None]:
    """Returns FQNs of parameters and buffers, in the order of the model."""
    named = (model.named_parameters, model.named_buffers)
    return {plain_name(name): None for each in named for name, _ in each(remove_duplicate=False)}


def _frozen_names(state: State) -> set[str]:
    """Returns names of parameters that are not trained: a run has no use for their saved state."""
    params = state.model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, param in params if not param.requires_grad}


def _groups_of(state: State, name: str) -> list[dict[str, Any]]:
    """Returns the groups of the run's optimizer with the names that a checkpoint has."""
    names = {
        id(param): plain_name(full)
        # Reversed, so that a tied parameter gets its first name, as in torch's state dicts.
        for full, param in reversed(list(state.model.named_parameters(remove_duplicate=False)))
    }
    optimizer = _optimizer_of(state, name)
    return [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def _divided(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights of a file, with this rank's shard of padded parameters.

    Torch divides a full tensor by the placements of the parameter, which may have another shape:
    rows of padding, or the experts of this rank alone; see the notes of `parallel.form`.
    """
    divided = dict(weights)
    for name, param in model.named_parameters(remove_duplicate=False):
        form, full = form_of(param), weights.get(plain_name(name))
        if not isinstance(full, torch.Tensor) or isinstance(full, DTensor):
            continue
        if full.shape == form.model_shape(param.shape) != param.shape:
            divided[plain_name(name)] = form.shard(full.detach(), param)
    return divided
