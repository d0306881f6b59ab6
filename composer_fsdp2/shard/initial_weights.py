"""Gives every rank the same initial weights, one unit at a time, just before it is sharded.

[Note: initial weights] What rank 0 holds is what the run starts from: values it has are broadcast,
values nobody has (everything on meta) are created by the model's own initialisers on full tensors
with one seed and then broadcast. Full tensors because initialisers are written for them: padding
rows, fan-in, rotary tables. The weights therefore do not depend on the number of ranks, and no rank
ever holds more than one full unit beside its shards, and a bucket of 64 MiB in which small tensors
are broadcast together. A layer that tensor parallelism divides is full for that while as well.

Transformers calls `_init_weights` with every module, children first, and some models set a layer's
weights from a module around it: GPT-2 scales its residual projections, T5 sets nearly all weights.
Modules of one unit are initialised in this way; a module that sets weights of a unit inside of it
is refused. A `param_init_fn` is called as FSDP1 called it: only with modules that have parameters
or buffers of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.plan.module_tree import ModuleTree, own_parameters
from composer_fsdp2.ranks import (
    any_rank,
    broadcast_all_from_rank0,
    is_fake,
    raise_on_all_ranks,
)
from composer_fsdp2.shard.layout import Slot, replace_parameter, slot_of
from composer_fsdp2.shard.weight_source import SourcedWeights, WeightSource
from composer_fsdp2.text import child_name, listed
from composer_fsdp2.torch_private.tensors import is_namedtuple

__all__ = [
    "InitialWeights",
    "MetaDeviceReport",
    "check_meta_device_reports",
    "shared_seed",
]

Initialiser = Callable[[nn.Module], object]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MetaDeviceReport:
    """Says which part of a model is on meta on one rank."""

    on_meta: Literal["none", "all", "some"]
    digest: str
    """SHA-256 of the names that are on meta"""
    attributes: str
    """plain tensors in attributes; ranks need the same ones only when some rank is on meta"""

    @classmethod
    def read(cls, tree: ModuleTree, sourced: Container[str] = ()) -> MetaDeviceReport:
        """Looks at every parameter, buffer and tensor attribute. Collective: no.

        Args:
            tree: the model before sharding.
            sourced: names that are left out, because a source has their values.
        """
        tensors = [(ref.name, ref.param, True) for ref in tree.params]
        for path, module in tree.modules():
            tensors += [
                (child_name(path, name), tensor, name in module._buffers)
                for name, tensor in _unlearned_tensors(module)
            ]
        tensors = [item for item in tensors if item[0] not in sourced]
        names = [name for name, tensor, _ in tensors if tensor.is_meta]
        attributes = [f"{n} {tensor.shape}" for n, tensor, is_learned in tensors if not is_learned]
        on_meta = "none" if not names else "all" if len(names) == len(tensors) else "some"
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        return cls(on_meta, digest, "\n".join(attributes))


def check_meta_device_reports(everyone: Sequence[MetaDeviceReport]) -> None:
    """Checks that rank 0 holds every value that any rank holds.

    Collective: no.

    Args:
        everyone: the report of each rank, in the order of the ranks.

    Raises:
        PlanError: when a rank holds values where rank 0 is on meta, or other tensor attributes.
    """
    first = everyone[0]
    for rank, report in enumerate(everyone):
        if first.on_meta != "none" and report.digest != first.digest:
            raise PlanError(
                f"Rank 0 holds the model on meta ({first.on_meta} of it) and rank {rank} does not "
                f"({report.on_meta} of it). Rank 0's values are the ones every rank starts from, "
                "and it has none. Build the model on cpu on rank 0 and on meta elsewhere "
                "(`init_device: mixed`), or on meta everywhere (`init_device: meta`)."
            )
        if report.on_meta != "none" and report.attributes != first.attributes:
            raise PlanError(
                f"Modules on rank {rank}, which is on meta, hold other tensor attributes than on "
                f"rank 0 ({report.attributes or 'none'} against {first.attributes or 'none'}). "
                "They could not be given rank 0's values. Set the same attributes on every rank."
            )


class InitialWeights:
    """Fills modules with rank 0's values, or with new values where rank 0 has none.

    Records the slots of parameters and who initialises them. Drops values that a source replaces;
    see [Note: weights from a source].
    """

    def __init__(
        self,
        tree: ModuleTree,
        device: torch.device,
        seed: int,
        *,
        rank0_has_values: bool,
        some_on_meta: bool,
        source: WeightSource | None = None,
        shards_on: torch.device | None = None,
    ) -> None:
        self._device, self._seed = device, seed
        self._rank0_has_values, self._some_on_meta = rank0_has_values, some_on_meta
        # There, meta tensors only show the structure, and nothing is filled.
        self._is_fake = is_fake()
        self.sourced = SourcedWeights(
            tree, None if self._is_fake else source, device, shards_on or device
        )
        self._ready: set[int] = set()
        self._parts: dict[int, nn.Parameter] = {}
        """id of a full parameter -> this rank's part of it, on meta"""
        self._slots: dict[int, list[Slot]] = {}
        for ref in tree.params:
            self._slots.setdefault(id(ref.param), []).append(slot_of(tree, ref))
        self._failure: Exception | None = None
        """the first error of an initialiser on this rank"""
        self._initialisers = {} if rank0_has_values else _initialisers(tree)

    @contextlib.contextmanager
    def seeded(self) -> Generator[None, None, None]:
        """Draws everything that is created from one random stream; the caller's is untouched."""
        kind = self._device.type
        devices = [] if kind == "cpu" else [self._device]
        # Named, because torch forks the state of every GPU of the machine by default.
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.manual_seed(self._seed)
            yield

    @torch.no_grad()
    def fill(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Makes the modules' own parameters and buffers real and equal on every rank.

        Collective: yes (broadcasts), in the order given. Modules already filled are skipped. Under
        the `fake` backend nothing happens. An error is kept for `agree_on_failure`, because other
        ranks go on to the broadcasts.
        """
        if self._is_fake:
            return
        todo: list[tuple[str, nn.Module]] = []
        for path, module in modules:
            if id(module) not in self._ready:  # a module registered twice comes under both names
                self._ready.add(id(module))
                todo.append((path, module))
        blank = {id(module): self._materialise(path, module) for path, module in todo}
        if not self._rank0_has_values and self._failure is None:
            self._initialise_all(todo, blank)
        sent: dict[int, torch.Tensor] = {}
        for path, module in todo:
            for name, tensor in _own_tensors(module).items():
                learned = name in module._parameters or name in module._buffers
                # Ranks hold different parts of a DTensor, and a broadcast would make them equal.
                stays = isinstance(tensor, DTensor) or child_name(path, name) in self.sourced
                if not stays and (learned or self._some_on_meta):
                    sent[id(tensor)] = tensor  # once, if it is tied
        broadcast_all_from_rank0(sent.values(), self._device)
        for _, module in todo:
            self._shard_again(module)

    def _shard_again(self, module: nn.Module) -> None:
        """Puts back this rank's parts of parameters that tensor parallelism divides."""
        for full in list(module._parameters.values()):
            like = self._parts.pop(id(full), None)
            if full is not None and isinstance(like, DTensor):
                slots = self._slots.pop(id(full))
                new = replace_parameter(slots, like, form_of(like).shard(full, like))
                self._slots[id(new)] = slots

    def _initialise_all(self, todo: list[tuple[str, nn.Module]], blank: dict[int, Tensors]) -> None:
        """Initialises modules; keeps an error for `agree_on_failure`."""
        missing: list[str] = []
        try:
            for _, module in todo:
                by_model, _ = self._initialisers.get(id(module), (None, False))
                unwritten = _unwritten(module, blank[id(module)])
                for initialiser in (by_model, _reset_parameters, _rebuild):
                    if unwritten and initialiser is not None:
                        _fill_only(module, unwritten, initialiser)
                        unwritten = _unwritten(module, blank[id(module)])
            self._initialise_from_around(todo, blank)
            for path, module in todo:
                unwritten = _unwritten(module, blank[id(module)])
                missing += [child_name(path, name) for name in unwritten]
            if missing:
                self._failure = PlanError(
                    f"Nothing initialises {listed(missing, 20)}. The model is on meta on every "
                    "rank, so training would start from uninitialised memory. Give the module a "
                    "`reset_parameters()` that sets them, handle it in the model's "
                    "`param_init_fn`, keep the arguments of its constructor in attributes of the "
                    "same names, or build the model on cpu on rank 0 (`init_device: mixed`)."
                )
        except Exception as error:  # an initialiser is the user's code, and other ranks go on
            self._failure = error

    def _initialise_from_around(
        self, todo: list[tuple[str, nn.Module]], blank: dict[int, Tensors]
    ) -> None:
        """Calls Transformers' function with modules that have children, the innermost first."""
        outer: list[tuple[str, nn.Module, Initialiser]] = []
        for path, module in reversed(todo):
            initialiser, takes_all = self._initialisers.get(id(module), (None, False))
            if initialiser is not None and takes_all and next(module.children(), None) is not None:
                outer.append((path, module, initialiser))
        new = {id(tensor) for tensors in blank.values() for tensor in tensors.values()}
        at = ""
        try:
            with _stand_ins([(path, module) for path, module, _ in outer], new, self._device):
                for path, module, initialiser in outer:
                    at = path
                    with contextlib.suppress(NotImplementedError):
                        initialiser(module)
        except RuntimeError as error:
            if _OVERLAP not in str(error):
                raise
            raise PlanError(
                f"`_init_weights` sets weights below {at!r} that belong to a unit inside of it. "
                f"{_BY_UNIT}"
            ) from error

    def agree_on_failure(self) -> None:
        """Raises on every rank the first error of an initialiser on any rank, and of a source.

        Collective: yes, where the model initialises weights or there is a source.

        Raises:
            PlanError: for tensors that nothing initialises.
            CheckpointError: as the source raised it.
        """
        initialises = not self._rank0_has_values and not self._is_fake
        if initialises and any_rank(self._failure is not None, self._device):
            raise_on_all_ranks({}, self._failure)
        self.sourced.agree_on_failure()

    def _materialise(self, path: str, module: nn.Module) -> Tensors:
        """Replaces the module's meta tensors by marked memory, which is returned.

        Parameters that a source has stay on meta. Buffers that it has get their values.
        """
        blank: Tensors = {}
        for name, param in list(module._parameters.items()):
            if param is None or child_name(path, name) in self.sourced:
                continue
            if not param.is_meta:
                if param.device != self._device:
                    # `fully_shard` moves it too, but only after the broadcast, which needs it here.
                    param.data = param.data.to(self._device)
                continue
            like: torch.Tensor = param
            if isinstance(param, DTensor):  # divided by tensor parallelism: the full tensor
                shape = form_of(param).model_shape(param.shape)
                like = torch.empty(shape, dtype=param.dtype, device="meta")
            data = self._blank_like(like)
            blank[name] = replace_parameter(self._slots[id(param)], param, data)
            # The new parameter takes over the slots: a tied one is looked up again elsewhere.
            self._slots[id(blank[name])] = self._slots[id(param)]
            if isinstance(param, DTensor):
                self._parts[id(blank[name])] = param
        return blank | self._materialise_unlearned(path, module)

    def _materialise_unlearned(self, path: str, module: nn.Module) -> Tensors:
        blank: Tensors = {}
        # Plain tensor attributes too, such as a copy of a rotary table kept beside the buffer.
        new: dict[int, Any] = {}
        for name, value in _unlearned_tensors(module):
            full_name, is_buffer = child_name(path, name), name in module._buffers
            if full_name in self.sourced:
                new[id(value)] = self.sourced.read_buffer(full_name, value)
            elif value.is_meta:
                blank[name] = new.setdefault(id(value), self._blank_like(value))
            elif is_buffer and value.device != self._device:
                new[id(value)] = value.to(self._device)
        if new:
            for attribute, content in vars(module).items():
                vars(module)[attribute] = _exchanged(content, new)
        return blank

    def _blank_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory with a value no initialiser leaves, so that gaps can be found."""
        return torch.empty_like(tensor, device=self._device).fill_(_mark_of(tensor.dtype))


def _unwritten(module: nn.Module, blank: Tensors) -> Tensors:
    """Returns tensors of a module that nobody has written yet."""
    unwritten: Tensors = {}
    for name, tensor in _own_tensors(module).items():
        if name not in blank or isinstance(tensor, DTensor) or tensor.numel() == 0:
            continue
        if tensor.dtype is torch.bool:
            # No value is free to serve as a mark; a write in place raises the version.
            # The first write was that of the mark.
            is_marked = tensor is blank[name] and tensor._version <= 1
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            is_marked = bool(torch.isnan(tensor).any())
        else:
            is_marked = bool((tensor == _mark_of(tensor.dtype)).any())
        if is_marked:
            unwritten[name] = tensor
    return unwritten


def _own_tensors(module: nn.Module) -> Tensors:
    """Returns parameters, buffers and plain tensor attributes of a module, without children."""
    tensors: Tensors = {n: p for n, p in module._parameters.items() if p is not None}
    tensors.update(_unlearned_tensors(module))
    return tensors


def _unlearned_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns buffers and tensors in attributes, in containers too: `tables['a'][1]`."""
    tensors = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    registered = ("_parameters", "_buffers", "_modules")
    todo = [
        (name, value)
        for name, value in vars(module).items()
        # Most attributes are flags, and dicts of hooks that are empty.
        if type(value) is not bool and (type(value) is not OrderedDict or value)
        if name not in registered
    ]
    opened: set[int] = set()
    for name, value in todo:  # which grows by the contents of containers
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            tensors.append((name, value))
        elif (contents := _opened(value)) is not None and id(contents) not in opened:
            opened.add(id(contents))
            items = contents.items() if isinstance(contents, dict) else enumerate(contents)
            todo += [
                (f"{name}[{key!r}]", item)
                for key, item in items
                if isinstance(item, torch.Tensor) or _opened(item) is not None
            ]
    return tensors


def _opened(value: Any) -> Any:
    """Returns the container that a value is or has; `None` if its tensors are not to be filled."""
    if isinstance(value, list | tuple | dict | deque):
        return value
    holds = isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(type(value))
    return getattr(value, "__dict__", None) if holds else None


def _exchanged(value: Any, new: dict[int, Any]) -> Any:
    """Exchanges tensors in a value of an attribute, and returns the value.

    Lists, dictionaries and objects are changed in place, so that other references to them stay.

    Args:
        value: a tensor, a container, or anything else, which is returned as it is.
        new: id of a tensor -> the tensor that replaces it. Gets the containers that were opened.
    """
    contents = _opened(value)
    if id(value) in new or contents is None:
        return new.get(id(value), value)
    if isinstance(value, tuple):
        items = [_exchanged(item, new) for item in value]
        if any(item is not old for item, old in zip(items, value, strict=True)):
            new[id(value)] = type(value)(*items) if is_namedtuple(value) else type(value)(items)
        return new.get(id(value), value)
    new[id(value)] = value
    for key, old in list(contents.items() if isinstance(contents, dict) else enumerate(contents)):
        if (item := _exchanged(old, new)) is not old:
            contents[key] = item
    return value


def _initialisers(tree: ModuleTree) -> dict[int, tuple[Initialiser | None, bool]]:
    """Finds who initialises each module: `param_init_fn` or `_init_weights`, maybe inherited.

    Returns:
        id of a module -> the function, and whether it takes modules without tensors of their own
        too, as Transformers calls its `_init_weights`.
    """
    initialisers: list[tuple[Initialiser | None, bool]] = []
    for node in tree.paths:
        initialiser, takes_all = initialisers[node.parent] if node.parent >= 0 else (None, False)
        of_model = getattr(node.module, "_init_weights", None)
        is_pretrained = callable(of_model) and hasattr(node.module, "post_init")
        of_user = getattr(node.module, "param_init_fn", None)
        if callable(of_user):
            # LLM Foundry's calls the `_init_weights` of its model of Transformers.
            is_foundry = getattr(of_user, "__module__", "") == "llmfoundry.models.hf.hf_base"
            initialiser, takes_all = of_user, is_foundry
        elif callable(of_model) and (
            initialiser is None
            # A model inside of a model is initialised by its own.
            or (is_pretrained and getattr(initialiser, "__name__", "") == "_init_weights")
        ):
            initialiser, takes_all = of_model, is_pretrained
        initialisers.append((initialiser, takes_all))
    return {key: initialisers[index] for key, index in tree.first_path.items()}


_OVERLAP = "refers to a single memory location"
"""what torch says of a write into a tensor whose elements share memory"""
_BY_UNIT = (
    "Weights are created one unit at a time, so they would keep other values than the model gives "
    "them. Let one unit hold the module with its layers, or build the model on cpu on rank 0 "
    "(`init_device: mixed`)."
)


@contextlib.contextmanager
def _stand_ins(
    outer: Iterable[tuple[str, nn.Module]], new: Container[int], device: torch.device
) -> Generator[None, None, None]:
    """Keeps initialisers from parameters that have their values, with stand-ins in their place.

    A random write to the stand-in of a sharded parameter raises torch's error about shared memory.
    Writes to the stand-ins of others are lost.

    Args:
        outer: modules and their paths; all parameters below them are exchanged.
        new: ids of parameters that initialisers may write, which stay.
        device: the device of stand-ins for sharded parameters; the others are on meta.

    Raises:
        PlanError: a sharded parameter would have been given a constant that it does not hold.
    """
    below = {
        id(module): (path, module)
        for prefix, top in outer
        for path, module in top.named_modules(prefix=prefix)
    }
    kept: list[tuple[dict[str, Any], str, str, nn.Parameter]] = []
    for path, module in below.values():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta and id(param) not in new:
                kept.append((module._parameters, name, child_name(path, name), param))
    try:
        for parameters, name, _, param in kept:
            at, mark = device if isinstance(param, DTensor) else "meta", _mark_of(param.dtype)
            marked = torch.empty((1,) * param.ndim, dtype=param.dtype, device=at).fill_(mark)
            parameters[name] = nn.Parameter(marked.expand(param.shape), requires_grad=False)
        yield
        for parameters, name, full_name, param in kept:
            if isinstance(param, DTensor) and param.numel():
                written = parameters[name]
                value = written[(0,) * written.ndim].item()  # all elements share this memory
                is_marked = value != value or value == _mark_of(param.dtype)  # NaN is not itself
                if not is_marked and not (param.to_local() == value).all():
                    raise PlanError(
                        f"`_init_weights` sets '{full_name}', which belongs to a unit inside of "
                        f"the module that is initialised. {_BY_UNIT}"
                    )
    finally:
        for parameters, name, _, param in kept:
            parameters[name] = param


def _mark_of(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max - 7


def _fill_only(module: nn.Module, unwritten: Tensors, source: Initialiser) -> None:
    """Runs an initialiser, and puts back tensors that had their values already."""
    values = {
        name: tensor.clone()
        for name, tensor in _own_tensors(module).items()
        if name not in unwritten and tensor.numel() and not isinstance(tensor, DTensor)
    }
    with contextlib.suppress(NotImplementedError):
        source(module)
    now = _own_tensors(module)
    for name, value in values.items():
        if name in now:  # a list may be shorter now
            now[name].copy_(value)


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):  # of the class, or set on this module
        reset()


def _rebuild(module: nn.Module) -> None:
    """Copies tensors that the constructor sets: norm weights, rotary tables, masks.

    Leaves modules alone that have children, those whose constructor takes arguments that are
    neither attributes of the same name nor the one size of a vector, and those whose tensors
    depend on an argument that may have had another value than its default.
    """
    if next(module.children(), None) is not None:
        return
    arguments: dict[str, Any] = {}
    sizes = {tuple(p.shape) for p in own_parameters(module)}
    for parameter in _constructor_parameters(module):
        value = vars(module).get(parameter.name)
        if value is not None:
            arguments[parameter.name] = value
        elif parameter.default is parameter.empty:
            if arguments or len(sizes) != 1 or len(next(iter(sizes))) != 1:
                return
            arguments[parameter.name] = next(iter(sizes))[0]
    fresh = _constructed(module, arguments)
    if fresh is None or _depends_on_unknown(module, arguments):
        return
    tensors = _own_tensors(module)
    for name, value in fresh.items():
        if (
            name in tensors
            and tensors[name].shape == value.shape
            and not isinstance(tensors[name], DTensor)
        ):
            tensors[name].copy_(value)


def _constructed(module: nn.Module, arguments: dict[str, Any]) -> Tensors | None:
    """Returns tensors of a new module of the same class; `None` if it cannot be made."""
    try:
        # Goes before a default device around the caller: under meta the copy would have no values.
        with torch.device("cpu"):
            return _own_tensors(type(module)(**arguments))
    except Exception:  # a guess that does not construct is no source; the caller names what is left
        return None


def _depends_on_unknown(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Tells whether tensors depend on an argument that the module does not keep."""
    trials: list[dict[str, Any]] = []
    for parameter in _constructor_parameters(module):
        default = parameter.default
        # Of another kind there is no other value that is safe to try.
        if parameter.name not in arguments and isinstance(default, bool | int | float):
            other = not default if isinstance(default, bool) else 2 * default + 1
            trials.append(arguments | {parameter.name: other})
    made: list[Tensors] = []
    with torch.random.fork_rng(devices=[]):
        for trial in (arguments, *trials) if trials else ():
            # Not `torch.manual_seed`, which would set the generators of GPUs too.
            torch.default_generator.manual_seed(0)
            made.append(_constructed(module, trial) or {})
    return any(
        other[name].shape == value.shape
        and not torch.allclose(other[name], value, 0, 0, equal_nan=True)
        for other in made[1:]
        for name, value in made[0].items()
        if name in other
    )


def _constructor_parameters(module: nn.Module) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(type(module).__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.kind not in kinds and p.name != "device"]


def shared_seed() -> int:
    """Draws a seed from the default generator.

    Collective: no; ranks exchange it and take rank 0's. Every rank draws, so that ranks with the
    same random state keep it.
    """
    return int(torch.randint(2**31, (1,)).item())
