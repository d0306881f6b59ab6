"""How large units are: small ones join the unit around them, large and mixed ones are divided.

[Note: small ends] A final norm has some hundred elements. As a unit of its own it is gathered twice
and reduced once in every step, and each of these takes as long as a message without content. The
unit around it is gathered and reduced in any case, so the norm goes with that. So do embeddings of
less than a megabyte, such as a table of positions. A dtype or settings of its own keep one apart,
and so does whoever names it in `wrap_policy` or `fsdp_wrap_fn`.

Units are given as the index of their first path, what they own as references to parameters.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.plan.module_tree import ModuleTree, ParamRef, is_wrapper, may_be_unit
from composer_fsdp2.plan.wrap_plan import Decision

__all__ = [
    "FROZEN_MAY_DIFFER",
    "NO_BOUNDS",
    "WORTH_A_UNIT_BYTES",
    "UnitSizes",
    "divide_by_dtype",
    "divide_by_size",
    "is_small_end",
    "name_joined",
    "to_join",
    "too_small",
]

WORTH_A_UNIT_BYTES = 2**20
"""smaller ends of a model are not worth a collective of their own"""

FROZEN_MAY_DIFFER = hasattr(FSDPModule, "set_gradient_divide_factor")
"""whether frozen parameters may have another dtype than the trained ones of their unit; torch took
that up before it had the method"""

Owned = Mapping[int, list[ParamRef]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """Bounds of what one collective gathers, in bytes; `None` is no bound."""

    least: int | None = None
    most: int | None = None
    gathered_in: torch.dtype | None = None
    """dtype in which units are gathered; `None` is the parameters' own"""

    def bytes_of(self, refs: Iterable[ParamRef]) -> int:
        """Bytes of the weights behind the names, each once."""
        return sum(self._bytes(param) for param in {id(u.param): u.param for u in refs}.values())

    def _bytes(self, param: nn.Parameter) -> int:
        cast = self.gathered_in if param.dtype.is_floating_point else None
        return param.numel() * (cast or param.dtype).itemsize

    def warn_of_large(self, unit: str, refs: list[ParamRef]) -> None:
        """Says which parameter keeps a unit above the bound."""
        if self.most is None or (size := self.bytes_of(refs)) <= self.most:
            return
        largest = max(refs, key=lambda ref: ref.param.numel())
        warnings.warn(
            f"The unit '{unit or '<root>'}' gathers {size:,} bytes, more than max_unit_bytes "
            f"({self.most:,}), and cannot be divided further: its largest parameter, "
            f"'{largest.name}', has {self.bytes_of([largest]):,}. That much is gathered at once. "
            "Raise max_unit_bytes, or split the parameter in the model.",
            stacklevel=2,
        )


NO_BOUNDS = UnitSizes()


def too_small(
    tree: ModuleTree,
    owned: Owned,
    enclosing_of: Mapping[int, int],
    may_merge: Callable[[nn.Module], bool],
    sizes: UnitSizes,
) -> set[int]:
    """id(module) of the units that are to join the unit around them."""
    if sizes.least is None:
        return set()
    size = {unit: sizes.bytes_of(refs) for unit, refs in owned.items()}
    merged: set[int] = set()
    for key in tree.postorder:
        unit = tree.first_path[key]
        mergeable = unit in enclosing_of and may_merge(tree.paths[unit].module)
        if mergeable and 0 < size.get(unit, 0) < sizes.least:
            around = enclosing_of[unit]
            size[around] = size.get(around, 0) + size[unit]
            merged.add(key)
    return merged


def is_small_end(module: nn.Module) -> bool:
    """Whether it is a small norm or embedding; see [Note: small ends]."""
    params = list(module.parameters())
    is_end = isinstance(module, nn.Embedding) or all(param.ndim < 2 for param in params)
    return is_end and 0 < sum(param.nbytes for param in params) < WORTH_A_UNIT_BYTES


def to_join(
    tree: ModuleTree,
    owned: Owned,
    enclosing_of: Mapping[int, int],
    chosen: Mapping[int, Decision],
) -> list[int]:
    """id(module) of the small ends that the unit around them takes in, precision being the same."""
    found: list[int] = []
    for key, decision in chosen.items():
        unit = tree.first_path[key]
        if decision.joins and unit in owned and unit in enclosing_of:
            around = chosen[_key(tree, enclosing_of[unit])]
            if around.settings == decision.settings:
                found.append(key)
    return found


def name_joined(
    tree: ModuleTree, joined: Iterable[int], units: Sequence[int], chosen: dict[int, Decision]
) -> None:
    """Has the reasons of units say which small ends they took in."""
    names: dict[int, list[str]] = defaultdict(list)
    for key in joined:
        if key not in chosen:  # it may have become a unit again, for its dtype
            index = tree.first_path[key]
            names[_key(tree, units[index])].append(tree.paths[index].path.rpartition(".")[2])
    for key, ends in names.items():
        reason = f"{chosen[key].reason}, with {' and '.join(ends)}"
        chosen[key] = replace(chosen[key], reason=reason)


def divide_by_size(
    tree: ModuleTree, unit: int, refs: list[ParamRef], taken: Container[int], sizes: UnitSizes
) -> list[nn.Module]:
    """The largest modules directly inside a unit, as many as must leave for the rest to fit."""
    if sizes.most is None or (left := sizes.bytes_of(refs)) <= sizes.most:
        return []
    outermost: dict[int, set[int]] = defaultdict(set)
    for ref in refs:
        line = (i for i in tree.line_to(ref.path_index, unit) if _fits(tree, i, taken))
        top = next(line, None)
        outermost[id(ref.param)].add(-1 if top is None else tree.first_path[_key(tree, top)])
    inside: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in refs:
        # A weight shared between two of them stays here.
        if len(outermost[id(ref.param)]) == 1 and -1 not in outermost[id(ref.param)]:
            inside[next(iter(outermost[id(ref.param)]))].append(ref)
    leaving: list[nn.Module] = []
    for index in sorted(inside, key=lambda index: -sizes.bytes_of(inside[index])):
        if left <= sizes.most:
            break
        left -= sizes.bytes_of(inside[index])
        leaving.append(tree.paths[index].module)
    return leaving


def divide_by_dtype(
    tree: ModuleTree, unit: int, refs: list[ParamRef], taken: Container[int]
) -> list[tuple[nn.Module, torch.dtype]]:
    """Modules to take out of a unit so that what is left in it has one dtype.

    What cannot leave stays, else the dtype of which there is most.
    """
    if len({ref.param.dtype for ref in refs}) < 2:
        return []
    bound = [ref for ref in refs if ref.param.requires_grad or not FROZEN_MAY_DIFFER]
    elements: Counter[torch.dtype] = Counter()
    for param in {id(ref.param): ref.param for ref in bound}.values():
        elements[param.dtype] += param.numel()
    if len(elements) < 2:
        return []
    inside: dict[int, set[torch.dtype]] = defaultdict(set)
    for ref in bound:
        for index in tree.line_to(ref.path_index, unit):
            inside[index].add(ref.param.dtype)
    leaving: dict[torch.dtype, dict[int, nn.Module]] = defaultdict(dict)
    stuck: set[torch.dtype] = set()
    for ref in bound:
        line = tree.line_to(ref.path_index, unit)
        pure = [i for i in line if len(inside[i]) == 1 and _fits(tree, i, taken)]
        if pure:
            leaving[ref.param.dtype][_key(tree, pure[0])] = tree.paths[pure[0]].module
        else:
            stuck.add(ref.param.dtype)
    kept = max(stuck or elements, key=lambda dtype: elements[dtype])
    return [(m, dtype) for dtype in elements if dtype != kept for m in leaving[dtype].values()]


def _key(tree: ModuleTree, index: int) -> int:
    return id(tree.paths[index].module)


def _fits(tree: ModuleTree, index: int, taken: Container[int]) -> bool:
    entry = tree.paths[index]
    parent = tree.paths[entry.parent].module if entry.parent >= 0 else None
    free = id(entry.module) not in taken and not is_wrapper(entry.module)
    return free and may_be_unit(entry.module, parent)
