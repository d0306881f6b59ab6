"""Pieces cover a tensor exactly, or a load is refused: checked against counting every element."""

from __future__ import annotations

import itertools
import random

import pytest

from composer_fsdp2.checkpoint.metadata import covers_exactly

Box = tuple[tuple[int, ...], tuple[int, ...]]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether every element is in one box, and nothing of a box is outside."""
    times = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for starts, sizes in boxes:
        spans = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        for place in itertools.product(*spans):
            if place not in times:
                return False
            times[place] += 1
    return set(times.values()) <= {1}


def tiled(choose: random.Random, starts: list[int], sizes: list[int], depth: int) -> list[Box]:
    """Cuts a box in two at a place and in a dimension of chance, again and again."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not depth or not dims:
        return [(tuple(starts), tuple(sizes))]
    dim = choose.choice(dims)
    first = choose.randrange(1, sizes[dim])
    left, right, behind = [*sizes], [*sizes], [*starts]
    left[dim], right[dim], behind[dim] = first, sizes[dim] - first, starts[dim] + first
    return [
        *tiled(choose, starts, left, depth - choose.randrange(1, 3) if depth > 1 else 0),
        *tiled(choose, behind, right, depth - 1),
    ]


def moved(choose: random.Random, boxes: list[Box]) -> list[Box]:
    """One box is somewhere else, has another size, is missing, or is there twice."""
    changed = list(boxes)
    number = choose.randrange(len(boxes))
    starts, sizes = map(list, boxes[number])
    part = choose.choice([starts, sizes])
    dim = choose.randrange(len(starts))
    match choose.randrange(4):
        case 0:
            del changed[number]
        case 1:
            changed.append(boxes[number])
        case 2:
            part[dim] = max(0, part[dim] + choose.choice([-1, 1, 4]))
            changed[number] = (tuple(starts), tuple(sizes))
        case _:
            starts[dim] ^= 1 << choose.randrange(4)  # a flipped bit
            changed[number] = (tuple(starts), tuple(sizes))
    return changed


def test_as_counting_says():
    choose, said = random.Random(1), {True: 0, False: 0}
    for _ in range(1_500):
        shape = tuple(choose.randrange(1, 7) for _ in range(choose.randrange(1, 4)))
        boxes = tiled(choose, [0] * len(shape), list(shape), choose.randrange(4))
        assert covers_exactly(shape, boxes)
        boxes = moved(choose, boxes)
        exact = counted(shape, boxes)
        assert covers_exactly(shape, boxes) is exact, (shape, boxes)
        said[exact] += 1
    assert said[False] > 1_000


@pytest.mark.parametrize(
    ("shape", "boxes", "exact"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((), [((), ()), ((), ())], False),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((0, 3), [], True),
        ((4,), [((0,), (4,)), ((4,), (0,))], True),
        ((4,), [((0, 0), (4, 1))], False),
        # As many elements as there are, one of them twice.
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], False),
    ],
)
def test_corner_cases(shape: tuple[int, ...], boxes: list[Box], exact: bool):
    assert covers_exactly(shape, boxes) is exact


def test_a_thousand_pieces_take_a_moment():
    boxes = [((row, column), (1, 8)) for row in range(512) for column in range(0, 64, 8)]
    assert covers_exactly((512, 64), boxes)
    assert not covers_exactly((512, 64), boxes[1:] + boxes[:1] + boxes[:1])
