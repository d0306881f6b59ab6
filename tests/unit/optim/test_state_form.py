"""State in few bits: what is kept, that keeping it again is the same, and that chance is fair."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_fsdp2.optim.codec import BLOCK, ShardPosition, StateFormat, Stored, decode, encode

FORMS: tuple[StateFormat, ...] = ("bf16", "signed", "unsigned")


def values(rows: int, row: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, row, generator=generator).mul(spread).exp()
    return torch.randn(rows, row, generator=generator) * sizes


def given_to(form: StateFormat, found: torch.Tensor) -> torch.Tensor:
    return found.abs() if form == "unsigned" else found


def kept(
    form: StateFormat, value: torch.Tensor, first: int = 0, step: int = 1, key: str = "k"
) -> Stored:
    return encode(form, value, place_of(value, first), step, key)


def place_of(value: torch.Tensor, first: int = 0) -> ShardPosition:
    return ShardPosition(len(value), value.shape[1], first, value.shape[1])


def back(stored: Stored) -> torch.Tensor:
    return decode(stored, place_of(stored.values))


@pytest.mark.table("signed", "unsigned")
@pytest.mark.parametrize("form", FORMS)
@given(
    st.integers(1, 9),
    st.integers(1, 600),
    st.integers(0, 10),
    st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e30]),
)
def test_kept_again_it_is_the_same(form: StateFormat, rows: int, row: int, seed: int, size: float):
    value = given_to(form, values(rows, row, seed) * size).clamp(-3e38, 3e38)
    found = back(kept(form, value, step=seed))
    for step in range(3):
        again = kept(form, found, step=step, key="other")
        assert torch.equal(back(again), found)


@pytest.mark.parametrize("form", FORMS)
def test_it_goes_to_one_of_two_neighbours(form: StateFormat):
    value = given_to(form, values(20, 700, spread=1.0))
    found = torch.stack([back(kept(form, value, step=step)) for step in range(64)])
    spacing = 2.0**-7 if form == "bf16" else 2.0**-3
    # Far below the largest of a block a sign has no neighbour but zero.
    least = value.abs().amax() * 2**-15 if form == "signed" else 0.0
    assert ((found - value).abs() <= spacing * value.abs() + least).all()
    assert (found.unique(dim=0).shape[0]) > 32
    for element in (0, 300, 699):
        assert len(found[:, 0, element].unique()) <= 2


@pytest.mark.parametrize("form", FORMS)
def test_on_average_nothing_is_lost(form: StateFormat):
    value = given_to(form, values(40, 512, spread=0.5))
    mean = sum(back(kept(form, value, step=step)).double() for step in range(256)) / 256
    where = value.abs() < 0.9 * value.abs().amax(dim=1, keepdim=True)
    ratio = (mean[where] / value[where].double() - 1).mean().item()
    assert abs(ratio) < 2e-4


def test_small_changes_add_up():
    """Rounded to the nearest, a moment that loses a thousandth a step would stay where it is."""
    for form in FORMS:
        value = torch.full((64, 256), 0.7)
        place = place_of(value)
        stored = encode(form, value, place, 0, "k")
        for step in range(1, 501):
            stored = encode(form, decode(stored, place) * 0.999, place, step, "k")
        assert decode(stored, place).mean().item() == pytest.approx(0.7 * 0.999**500, rel=0.03)


@pytest.mark.table("unsigned")
@pytest.mark.parametrize("form", FORMS)
@given(st.lists(st.integers(0, 30), max_size=4), st.sampled_from([1, 7, 256, 257, 600]))
def test_parts_of_rows_are_kept_as_in_the_whole(form: StateFormat, cuts: list[int], row: int):
    value = given_to(form, values(30, row))
    whole = kept(form, value)
    edges = [0, *sorted(cuts), 30]
    for start, end in itertools.pairwise(edges):
        part = kept(form, value[start:end], first=start * row)
        assert torch.equal(part.values, whole.values[start:end])
        assert torch.equal(part.exponents, whole.exponents[start:end])


@pytest.mark.parametrize("form", FORMS)
def test_chance_differs_by_place_step_and_key(form: StateFormat):
    value = torch.full((8, 512), 1.03)
    one = back(kept(form, value))
    for other in (
        kept(form, value, first=4096),
        kept(form, value, step=2),
        kept(form, value, key="l"),
    ):
        assert 0.05 < (back(other) != one).float().mean() < 0.6
    counted = encode(form, value, place_of(value), torch.tensor(1.0), "k")
    assert torch.equal(back(counted), one)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_none(form: StateFormat):
    value = given_to(form, values(6, 40, spread=0.1))
    value[1, 3] = math.nan
    # The NaN that a GPU makes has all bits set.
    value[2, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    value[3, 7] = math.inf
    if form != "unsigned":
        value[3, 8] = -math.inf
    found = back(kept(form, value))
    assert found[1, 3].isnan()
    assert found[2, 5].isnan()
    assert torch.equal(found[3].isinf(), value[3].isinf())
    assert found[[0, 4, 5]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_zero_is_zero_and_nothing_that_is_divided_by_becomes_it(form: StateFormat):
    value = given_to(form, values(4, 300))
    value[0] = 0.0
    value[1, :5] = 0.0
    value[2] = 0.0
    value[2, 0], value[2, 1] = 1.0, 1e-25
    found = back(kept(form, value))
    assert (found[0] == 0).all()
    assert (found[1, :5] == 0).all()
    if form == "unsigned":
        assert 0 < found[2, 1] <= 2.0**-30
        assert ((found > 0) == (value > 0)).all()


@pytest.mark.parametrize(("rows", "row"), [(5, 1), (3, 256), (3, 257), (7, 1000), (0, 10)])
def test_bytes(rows: int, row: int):
    value = torch.zeros(rows, row)
    stored = kept("bf16", value)
    assert (stored.values.nbytes, stored.exponents.nbytes) == (2 * rows * row, 0)
    for form in ("signed", "unsigned"):
        stored = kept(form, value)
        assert stored.values.nbytes == rows * row
        assert stored.exponents.nbytes == rows * math.ceil(row / BLOCK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes(form: StateFormat, dtype: torch.dtype):
    value = given_to(form, values(3, 50, spread=0.1)).to(dtype)
    found = back(kept(form, value))
    assert found.dtype is dtype
    assert (found - value).abs().max() <= 2**-3 * value.abs().max()


def test_one_own_form_is_a_copy():
    value = values(3, 5)
    stored = kept("own", value)
    found = back(stored)
    assert torch.equal(found, value)
    found.zero_()
    assert torch.equal(back(stored), value)


def test_an_accelerator_converts_many_elements_at_a_time():
    place = ShardPosition(2**13, 2**10, 0, 2**10)
    counts = {kind: len([*place.chunks(torch.device(kind))]) for kind in ("cpu", "cuda", "xpu")}
    assert counts == {"cpu": 128, "cuda": 1, "xpu": 1}
