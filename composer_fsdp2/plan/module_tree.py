"""Reads a model once, as a tree of paths, parameters and the weights that names share.

[Note: two kinds of ties] Usually two modules hold the same `Parameter` object. Two different
`Parameter` objects over the same memory are a tie as well: an optimizer step through one moves the
other. FSDP2 only sees identity, so sharding would silently untie the second kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from composer_fsdp2.errors import PlanError
from composer_fsdp2.text import child_name, quoted
from composer_fsdp2.torch_private.tensors import is_plain, storage_id

__all__ = [
    "ModulePath",
    "ModuleTree",
    "ParamRef",
    "Recall",
    "attribute_of",
    "canonical_param_ids",
    "group_ties",
    "has_forward",
    "inside_wrappers",
    "is_packed",
    "is_wrapper",
    "may_be_unit",
    "memory_of",
    "own_parameters",
    "packing_text",
    "tied_groups",
    "without_wrappers",
]

Recall = Callable[[], AbstractContextManager[None]]

_WRAPPED = "_checkpoint_wrapped_module"
"""attribute of torch's activation wrappers with the module they run"""


# Not frozen: setting the fields of a frozen one takes most of the time of reading a large model.
@dataclass(slots=True, eq=False)
class ModulePath:
    """Holds one path to a module; a module registered twice has two paths."""

    path: str
    module: nn.Module
    parent: int
    """index of the parent's entry, -1 for the root"""


@dataclass(slots=True, eq=False)
class ParamRef:
    """Holds one name of a parameter; a tied parameter has several."""

    name: str
    param: nn.Parameter
    path_index: int


@dataclass(slots=True, eq=False)
class ModuleTree:
    """Every path through a model, read once; planning works on this and not on the model."""

    paths: list[ModulePath] = field(default_factory=list[ModulePath])
    params: list[ParamRef] = field(default_factory=list[ParamRef])
    first_path: dict[int, int] = field(default_factory=dict[int, int])
    """id(module) -> index of its first path"""
    postorder: list[int] = field(default_factory=list[int])
    """id(module) of every module, children before parents on every path"""
    recall: Recall | None = None
    """makes the context that a block enters when it runs again in backward"""
    _once: list[tuple[str, nn.Module]] = field(default_factory=list[tuple[str, nn.Module]])
    _weights: tuple[list[int], dict[int, int]] | None = None
    """id(parameter) -> result of `canonical_param_ids`"""

    @classmethod
    def read(cls, model: nn.Module | ModuleTree) -> ModuleTree:
        """Walks the model; linear in the number of paths.

        A tree is returned as it is, so that whoever has one can hand it on.

        Raises:
            PlanError: for a module that contains itself.
        """
        if isinstance(model, ModuleTree):
            return model
        tree, postorder = cls(), dict[int, None]()
        tree._enter("", model, -1, set(), postorder)
        tree.postorder = list(postorder)
        first = tree.first_path.values()
        tree._once = [(tree.paths[index].path, tree.paths[index].module) for index in first]
        return tree

    # No function inside `read`: one that calls itself would keep the tree, and with it full
    # parameters, until Python collects its cycles.
    def _enter(
        self, path: str, module: nn.Module, parent: int, on_path: set[int], done: dict[int, None]
    ) -> None:
        key = id(module)
        if key in on_path:
            outer = self.paths[self.first_path[key]].path
            raise PlanError(
                f"'{path}' is {quoted(outer, 'the whole model')} again: the module contains "
                "itself. torch's own train(), to() and state_dict() would never end. Hold it "
                f"outside registration: `self.__dict__['{path.rpartition('.')[2]}'] = module`."
            )
        index = len(self.paths)
        self.paths.append(ModulePath(path, module, parent))
        self.first_path.setdefault(key, index)
        for name, param in module._parameters.items():
            if param is not None:
                self.params.append(ParamRef(child_name(path, name), param, index))
        on_path.add(key)
        for name, child in module._modules.items():
            if child is not None:
                # Activation wrappers do not appear in names, as they do not in `state_dict()`.
                below = path if name == _WRAPPED else child_name(path, name)
                self._enter(below, child, index, on_path, done)
        on_path.discard(key)
        done.setdefault(key)

    @property
    def root(self) -> nn.Module:
        """Returns the whole model."""
        return self.paths[0].module

    @property
    def weight_of(self) -> Mapping[int, int]:
        """Maps id(parameter) to the id of the first parameter over the same memory.

        Raises:
            PlanError: as `canonical_param_ids`.
        """
        # Dividing layers gives names other parameters, made while the old ones are there.
        ids = [id(ref.param) for ref in self.params]
        if self._weights is None or self._weights[0] != ids:
            self._weights = ids, canonical_param_ids(self.params)
        return self._weights[1]

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        """Returns every module once, under its first path, parents before children."""
        return self._once

    def key_of(self, index: int) -> int:
        """Returns id(module) of a path."""
        return id(self.paths[index].module)

    def lowest_common_parent(self, paths: Iterable[int]) -> int:
        """Returns the deepest path above all of `paths` whose module has a `forward`."""
        # The deepest has the highest number: parents come before their children.
        common = max(set.intersection(*(set(self.line_to(index)) for index in paths)))
        while common > 0 and not has_forward(self.paths[common].module):
            common = self.paths[common].parent
        return common

    def line_to(self, index: int, below: int = -1) -> list[int]:
        """Returns the paths from the root, or from below another path, down to a path."""
        line: list[int] = []
        while index not in (below, -1):
            line.append(index)
            index = self.paths[index].parent
        return line[::-1]


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is an activation wrapper, whose name is that of the module inside."""
    return _WRAPPED in module._modules


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Returns the module inside of activation wrappers, or the module itself."""
    while is_wrapper(module):
        module = module.get_submodule(_WRAPPED)
    return module


@contextmanager
def without_wrappers(model: nn.Module) -> Generator[None]:
    """Puts modules in the place of their activation wrappers, while a block runs.

    For libraries that compare names of modules with those of a state dict. Collective: no.
    """
    slots = [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and is_wrapper(child)
    ]
    try:
        for children, name, child in slots:
            children[name] = inside_wrappers(child)
        yield
    finally:
        for children, name, child in slots:
            children[name] = child


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module runs something; containers such as `ModuleList` do not.

    Not for classes derived from those two either: `fully_shard` takes none of them.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    if isinstance(module, torch.jit.ScriptModule):  # has no forward until it is asked for one
        return True
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that a module itself holds. Collective: no.

    Not by its method `parameters`, which a class may have made its own.
    """
    return [param for param in module._parameters.values() if param is not None]


def is_packed(param: nn.Parameter) -> bool:
    """Whether a parameter has a weight that bitsandbytes has packed in 4 bits."""
    return getattr(param, "quant_state", None) is not None


def packing_text(param: Any) -> str:
    """Returns how a weight is packed, and nothing for any other."""
    if not is_packed(param):
        return ""
    state = param.quant_state
    return f"{state.quant_type} {state.blocksize} nested={state.nested} of {tuple(state.shape)}"


def attribute_of(module: nn.Module, name: str, default: object = None) -> Any:
    """Reads an attribute as `getattr` does, but quickly where a module has none of the name.

    torch then looks in three places and formats an error, which takes longer than all else that is
    asked about a module here. Not for parameters and buffers.
    """
    kind, attributes = type(module), vars(module)
    looks_elsewhere = kind.__getattr__ is not nn.Module.__getattr__
    if (
        looks_elsewhere
        or name in attributes
        or name in attributes["_modules"]
        or hasattr(kind, name)
    ):
        return getattr(module, name, default)
    return default


def may_be_unit(tree: ModuleTree, index: int) -> bool:
    """Whether the parameters of a path's module are read in its own forward only.

    `MultiheadAttention` reads its projection's weight without calling it. Parts of a
    parametrization belong to the module whose weight they compute.
    """
    module_path = tree.paths[index]
    parent = tree.paths[module_path.parent].module if module_path.parent >= 0 else None
    reads_parts = isinstance(parent, nn.MultiheadAttention | parametrize.ParametrizationList)
    return has_forward(module_path.module) and not reads_parts


def tied_groups(model: nn.Module | ModuleTree) -> tuple[tuple[str, ...], ...]:
    """Finds the names of tied parameters.

    Collective: no. Two parameters over the same memory are one weight.

    Args:
        model: on any device, sharded or not, or its tree.

    Returns:
        Groups of two or more names, in the order of their first names.

    Raises:
        PlanError: when two parameters overlap in memory without being the same view of it, and for
            a module that contains itself.

    Source: `fully_shard` keeps a tie inside one call only:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L691

    Example:
        >>> from torch import nn
        >>> from composer_fsdp2 import tied_groups
        >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
        >>> model["head"].weight = model["embed"].weight
        >>> tied_groups(model)
        (('embed.weight', 'head.weight'),)
    """
    tree = ModuleTree.read(model)
    groups = group_ties(tree.params, tree.weight_of)
    return tuple(tuple(ref.name for ref in group) for group in groups)


def group_ties(refs: Iterable[ParamRef], weight_of: Mapping[int, int]) -> list[list[ParamRef]]:
    """Returns the names of each weight that has several; `weight_of` as `canonical_param_ids`."""
    uses: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in refs:
        uses[weight_of[id(ref.param)]].append(ref)
    return [group for group in uses.values() if len(group) > 1]


def canonical_param_ids(refs: Iterable[ParamRef]) -> dict[int, int]:
    """Maps id(parameter) to the id of the first parameter over the same memory.

    Raises:
        PlanError: when two parameters overlap in memory without being the same view of it.
    """
    first: dict[int, ParamRef] = {}
    for ref in refs:
        first.setdefault(id(ref.param), ref)
    by_storage: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in first.values():
        # Tensor subclasses (DTensor, quantized weights) keep their data elsewhere.
        # `data` is asked last: for a fake tensor that is an operation.
        param = ref.param
        plain = type(param) is nn.Parameter or is_plain(param) or is_plain(param.data)
        if plain and param.numel():
            by_storage[storage_id(param)].append(ref)
    representative = {key: key for key in first}
    for group in (refs for refs in by_storage.values() if len(refs) > 1):
        # Many parameters may share a file mapping without touching each other.
        extents = sorted(
            ((*_extent(ref.param), ref) for ref in group), key=lambda extent: extent[0]
        )
        holder_start, holder_end, holder = extents[0]
        for start, end, ref in extents[1:]:
            if start >= holder_end:
                holder_start, holder_end, holder = start, end, ref
            elif start == holder_start and _layout(ref.param) == _layout(holder.param):
                representative[id(ref.param)] = id(holder.param)
            else:
                raise PlanError(
                    f"'{holder.name}' and '{ref.name}' share memory but are different views of it "
                    f"(bytes {holder_start} to {holder_end} and {start} to {end} of one storage). "
                    "Sharding would cut them apart, and an update of one would no longer move the "
                    "other. Give one of them its own memory (`.clone()`), or hold one parameter "
                    "and take the view in forward."
                )
    return representative


def _layout(param: nn.Parameter) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return param.dtype, param.shape, param.stride()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns first and past-the-end byte of a tensor in its storage."""
    if tensor.is_contiguous():
        reach = tensor.numel() - 1
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * step for size, step in steps)
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def memory_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Returns id of a tensor's storage, and its first and past-the-end byte there.

    `None` for one without elements or without a memory of the usual kind. Strides are not looked
    at, so that two tensors whose bytes overlap here may have none in common.
    """
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (storage_id(tensor), *_extent(tensor)) if is_plain and tensor.numel() else None
