"""Whether the pieces of a tensor are the tensor: every element in one of them, none in two."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

__all__ = ["Box", "covers_exactly"]

Box = tuple[Sequence[int], Sequence[int]]
"""where a piece begins, and its sizes"""


def covers_exactly(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Returns whether boxes fill a shape without a gap, an overlap, or anything outside.

    Collective: no. It takes as long for a thousand pieces as a thousand times one.

    [Note: signed corners] Let f(x) be the number of boxes that x is in. Its mixed difference over
    all dimensions is 0 but at corners of boxes, where it is +1 or -1 by the number of ends among
    the corner's coordinates. Summing that difference up gives f back, so f is that of the whole,
    1 inside and 0 outside, exactly if the signed corners of all boxes add up to those of the whole.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(tuple(starts), tuple(sizes)) for starts, sizes in boxes]
    if any(len(starts) != len(shape) or len(sizes) != len(shape) for starts, sizes in boxes):
        return False
    # Dimensions that nobody cuts say nothing, and each of them would double the corners.
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any((starts[dim], sizes[dim]) != (0, size) for starts, sizes in boxes)
    ]
    for starts, sizes in boxes:
        _add(corners, [(starts[dim], starts[dim] + sizes[dim]) for dim in cut], 1)
    if 0 in shape and not any(corners.values()):
        return True  # it has no elements, and neither have its pieces
    _add(corners, [(0, shape[dim]) for dim in cut], -1)
    return not any(corners.values())


def _add(corners: Counter[tuple[int, ...]], spans: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(spans)):
        place = tuple(span[end] for span, end in zip(spans, ends, strict=True))
        corners[place] += sign * (-1) ** sum(ends)
