"""Values as codes: the values read back are within the stated error."""

from __future__ import annotations

import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline._plot.plot_data import dense
from tests.support.explorer_pages import data_of, pixels, shown

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
SHAPES = st.lists(st.integers(0, 7), max_size=5)


@st.composite
def values(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    seed, scale = draw(st.integers(0, 9999)), 10.0 ** draw(st.integers(-30, 20))
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    odd = draw(st.lists(st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e30, 5e-324, 1.0])))
    flat = value.reshape(-1)
    for place, number in zip(torch.randperm(len(flat), generator=generator).tolist(), odd, strict=False):
        flat[place] = number
    if dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        value = (
            value.nan_to_num(0, 1, -1).clamp(0, 100)
            if dtype is torch.uint8
            else value.nan_to_num(0, 9, -9).clamp(-99, 99)
        )
    return value.to(dtype)


def picture_of(value, minus=None):
    """Return the picture of a value, or of its difference to another, and the numbers that it shows."""
    more = {} if minus is None else {"against": {"h": minus}}
    with tempfile.TemporaryDirectory() as folder:
        page = data_of(hl.explore({"h": value}, to=f"{folder}/page.html", **more))
    picture = page["sites"][0]["picture"][0 if minus is None else 2]
    return picture, None if picture is None else pixels(picture)


@settings(max_examples=60, deadline=None)
@given(values())
def test_any_value_is_read_back_within_its_error(value):
    picture, again = picture_of(value)
    if picture is None:
        assert value.numel() == 0
        return
    whole = dense(value).double()
    whole = whole.float().double() if value.dtype is torch.float64 else whole  # The levels are float32.
    piece = shown(whole, picture)
    finite = piece.isfinite()
    assert again.shape == piece.shape
    assert torch.equal(again.isnan(), piece.isnan())
    assert torch.equal(again[piece.isinf()], piece[piece.isinf()])
    assert not finite.any() or (again - piece)[finite].abs().max().item() <= picture["error"] * (1 + 1e-6) + 1e-45


def test_few_different_numbers_are_exact():
    value = torch.randint(-100, 100, (50, 50))
    picture, again = picture_of(value)
    assert picture["error"] == 0
    assert torch.equal(again, value.double())


def test_the_error_is_a_small_part_of_the_range_whatever_the_numbers():
    for value in (torch.randn(10_000), torch.rand(10_000) ** 9, torch.randn(10_000).exp()):
        assert 0 < picture_of(value)[0]["error"] <= (value.max() - value.min()) / 250


def test_an_outlier_does_not_drown_the_rest():
    value = torch.randn(10_000)
    value[0] = 1e6
    _, again = picture_of(value)
    usual = (again - value.double())[1:].abs().median()
    assert again[0] == 1e6
    assert usual < 0.05


def test_what_is_not_finite_has_codes_of_its_own():
    _, again = picture_of(torch.tensor([float("nan"), float("inf"), float("-inf")]))
    assert again[0].isnan()
    assert again[1:].tolist() == [float("inf"), float("-inf")]
