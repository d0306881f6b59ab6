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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.wrapping import PrecisionSpec, UnitSettings
from composer_fsdp2.plan.module_tree import (
    ModuleTree,
    ParamRef,
    is_packed,
    is_wrapper,
    may_be_unit,
)
from composer_fsdp2.plan.wrap_plan import Decision, WrapPlan

__all__ = [
    "FROZEN_MAY_DIFFER",
    "NO_BOUNDS",
    "WORTH_A_UNIT_BYTES",
    "UnitSizes",
    "divide_units",
    "frozen_elements",
    "is_small_end",
    "name_joined",
    "small_units",
]

WORTH_A_UNIT_BYTES = 2**20
"""smaller ends of a model are not worth a collective of their own"""

FROZEN_MAY_DIFFER = hasattr(FSDPModule, "set_gradient_divide_factor")
"""whether frozen parameters may have another dtype than the trained ones of their unit; torch took
that up before it had the method"""

Owned = Mapping[int, Sequence[ParamRef]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """Holds bounds of the bytes that one collective gathers; `None` is no bound."""

    least: int | None = None
    most: int | None = None
    gathered_in: torch.dtype | None = None
    """dtype in which units are gathered; `None` is the parameters' own"""

    def bytes_of(self, refs: Iterable[ParamRef]) -> int:
        """Returns the bytes of the weights behind the names, each once."""
        total = 0
        for param in {id(ref.param): ref.param for ref in refs}.values():
            is_cast = param.dtype.is_floating_point and not is_packed(param)
            cast = self.gathered_in if is_cast else None
            total += param.numel() * (cast or param.dtype).itemsize
        return total

    def warn_of_large(self, unit: str, refs: Sequence[ParamRef]) -> None:
        """Says which parameter keeps a unit above the bound."""
        if self.most is not None and (size := self.bytes_of(refs)) > self.most:
            largest = max(refs, key=lambda ref: ref.param.numel())
            warnings.warn(
                f"The unit '{unit or '<root>'}' gathers {size:,} bytes, more than max_unit_bytes "
                f"({self.most:,}), and cannot be divided further: its largest parameter, "
                f"'{largest.name}', has {self.bytes_of([largest]):,}. That much is gathered at "
                "once. Raise max_unit_bytes, or split the parameter in the model.",
                stacklevel=2,
            )


NO_BOUNDS = UnitSizes()


def is_small_end(module: nn.Module) -> bool:
    """Whether a module is a small norm or embedding; see [Note: small ends]."""
    params = list(module.parameters())
    is_end = isinstance(module, nn.Embedding) or all(param.ndim < 2 for param in params)
    return is_end and 0 < sum(param.nbytes for param in params) < WORTH_A_UNIT_BYTES


def small_units(
    tree: ModuleTree,
    owned: Owned,
    around: Mapping[int, int],
    chosen: Mapping[int, Decision],
    sizes: UnitSizes,
) -> tuple[set[int], list[int]]:
    """Returns id(module) of units that join the unit around them, and of their small ends.

    Settings of a unit's own keep it apart, and those of an end that differ from the unit's around.
    """
    size = defaultdict(int, {unit: sizes.bytes_of(refs) for unit, refs in owned.items()})
    joining: set[int] = set()
    ends: list[int] = []
    for key in (key for key in tree.postorder if key in chosen and tree.first_path[key] in around):
        unit, settings = tree.first_path[key], chosen[key].settings
        outer = around[unit]
        if settings == UnitSettings() and 0 < size[unit] < (sizes.least or 0):
            size[outer] += size[unit]
            joining.add(key)
        if chosen[key].joins and unit in owned and chosen[tree.key_of(outer)].settings == settings:
            ends.append(key)
    return joining.union(ends), ends


def name_joined(
    tree: ModuleTree, ends: Iterable[int], units: Sequence[int], chosen: dict[int, Decision]
) -> None:
    """Adds the small ends that a unit took in to its reason."""
    for index in (tree.first_path[key] for key in ends if key not in chosen):
        # The others have become units again, for their dtype.
        host = tree.key_of(units[index])
        reason, name = chosen[host].reason, tree.paths[index].path.rpartition(".")[2]
        joined = f"{reason} and {name}" if ", with " in reason else f"{reason}, with {name}"
        chosen[host] = replace(chosen[host], reason=joined)


def divide_units(
    tree: ModuleTree,
    owned: Owned,
    chosen: Mapping[int, Decision],
    unavailable: Container[int],
    sizes: UnitSizes,
) -> dict[int, Decision]:
    """Returns decisions that split units with several dtypes, else units that are too large."""
    added: dict[int, Decision] = {}
    for parts_of in (_other_dtypes, _largest_parts):
        for unit, refs in owned.items():
            settings = chosen[tree.key_of(unit)].settings
            if isinstance(precision := settings.mixed_precision, PrecisionSpec):
                # The output dtype is that of what leaves the whole unit.
                settings = replace(settings, mixed_precision=replace(precision, output_dtype=None))
            for key, reason in parts_of(tree, unit, refs, unavailable, sizes):
                added[key] = Decision(wrap=True, reason=reason, settings=settings, is_block=False)
        if added:
            break
    return added


def _largest_parts(
    tree: ModuleTree,
    unit: int,
    refs: Sequence[ParamRef],
    unavailable: Container[int],
    sizes: UnitSizes,
) -> Iterator[tuple[int, str]]:
    """Yields the largest modules directly inside, until the unit without them fits."""
    if sizes.most is None or (size := sizes.bytes_of(refs)) <= sizes.most:
        return
    outermost: dict[int, set[int | None]] = defaultdict(set)
    for ref in refs:
        line = tree.line_to(ref.path_index, unit)
        part = next((tree.key_of(index) for index in line if _fits(tree, index, unavailable)), None)
        outermost[id(ref.param)].add(part)
    inside: dict[int, list[ParamRef]] = defaultdict(list)
    for ref in refs:
        part, *others = outermost[id(ref.param)]
        if part is not None and not others:  # a weight shared between two of them stays
            inside[part].append(ref)
    for part in sorted(inside, key=lambda part: -sizes.bytes_of(inside[part])):
        if size <= sizes.most:
            break
        size -= sizes.bytes_of(inside[part])
        yield part, "max_unit_bytes"


def _other_dtypes(
    tree: ModuleTree,
    unit: int,
    refs: Sequence[ParamRef],
    unavailable: Container[int],
    _sizes: UnitSizes,
) -> Iterator[tuple[int, str]]:
    """Yields modules to take out so that the unit has one dtype.

    What cannot leave stays, else the dtype of which there is most.
    """
    bound = [ref for ref in refs if ref.param.requires_grad or not FROZEN_MAY_DIFFER]
    if len({ref.param.dtype for ref in bound}) < 2:
        return
    elements: Counter[torch.dtype] = Counter()
    for param in {id(ref.param): ref.param for ref in bound}.values():
        elements[param.dtype] += param.numel()
    lines = [(ref.param.dtype, tree.line_to(ref.path_index, unit)) for ref in bound]
    inside: dict[int, set[torch.dtype]] = defaultdict(set)
    for dtype, line in lines:
        for index in line:
            inside[index].add(dtype)
    leaving: dict[torch.dtype, dict[int, None]] = defaultdict(dict)
    stuck: set[torch.dtype] = set()
    for dtype, line in lines:
        pure = (i for i in line if len(inside[i]) == 1 and _fits(tree, i, unavailable))
        if (first := next(pure, None)) is None:
            stuck.add(dtype)
        else:
            leaving[dtype][tree.key_of(first)] = None
    main_dtype = max(stuck or elements, key=lambda dtype: elements[dtype])
    for dtype in elements:
        for key in leaving[dtype] if dtype != main_dtype else ():
            yield key, f"dtype {str(dtype).removeprefix('torch.')}"


def _fits(tree: ModuleTree, index: int, unavailable: Container[int]) -> bool:
    free = tree.key_of(index) not in unavailable and not is_wrapper(tree.paths[index].module)
    return free and may_be_unit(tree, index)


def frozen_elements(model: nn.Module, plan: WrapPlan) -> dict[str, int]:
    """Counts the elements of frozen parameters in the units that have any.

    Collective: no. A tied parameter counts once.

    Args:
        model: on any device, before it is sharded.
        plan: made for `model`.

    Returns:
        The number of elements over all ranks, by the name of a unit (its first module).
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    counts: dict[str, int] = {}
    for unit in plan.units:
        unit_params = {id(params[name]): params[name] for name in unit.params}
        count = sum(param.numel() for param in unit_params.values() if not param.requires_grad)
        if count:
            counts[unit.module] = count
    return counts
