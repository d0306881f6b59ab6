"""Puts names, lists of names, ranks and sizes into messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "child_name",
    "divisors",
    "listed",
    "plain_name",
    "quoted",
    "rank_text",
    "ranks_by",
    "size_text",
    "unit_text",
]


Value = TypeVar("Value")


def listed(names: Iterable[object], most: int = 5, quote: str = "'") -> str:
    """Returns the first names, and how many there are besides: `'a', 'b' and 3 more`."""
    quoted = [f"{quote}{name}{quote}" for name in names]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more


def quoted(path: str, root: str = "the model") -> str:
    """Returns the name of a module in quotes; `root` where the path is empty."""
    return f"'{path}'" if path else root


def child_name(path: str, name: str) -> str:
    """Returns the full name of a child; the path of the root is empty."""
    return f"{path}.{name}" if path else name


def divisors(*numbers: int, step: int = 1) -> str:
    """Returns the multiples of `step` that divide all numbers: `1, 2, 4`."""
    candidates = range(step, min(numbers) + 1, step)
    return ", ".join(str(n) for n in candidates if not any(number % n for number in numbers))


def plain_name(name: str) -> str:
    """Returns the name of a parameter or module in the model without wrappers."""
    # Of activation checkpointing, `torch.compile` and FSDP1.
    wrappers = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def size_text(size: float) -> str:
    """Returns bytes with their unit, in three digits or more."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        value = size / 1024**power
        if value >= 0.9995:
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.4g} {unit}"
    return f"{size:.0f} B"


def unit_text(name: str) -> str:
    """Names a unit in the text of an error."""
    return f"'{name}'" if name else "the root"


def ranks_by(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Returns the ranks that have each value; `values` has an item for each rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def rank_text(ranks: Iterable[int]) -> str:
    """Returns numbers of ranks in ascending order, such as `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
