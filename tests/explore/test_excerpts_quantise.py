"""Values as codes: the values read back are within the stated error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline._explore.excerpts import MOST_LEVELS, FullValue, kind_of_source, levels_of, quantise, read
from hookline._plot.plot_data import dense

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
SHAPES = st.lists(st.integers(0, 7), max_size=5)


@st.composite
def values(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    seed, scale = draw(st.integers(0, 9999)), 10.0 ** draw(st.integers(-30, 30))
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    odd = draw(st.lists(st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e300, 5e-324, 1.0])))
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


@settings(max_examples=200, deadline=None)
@given(values())
def test_any_value_is_read_back_within_its_error(value):
    whole = FullValue(dense(value), kind_of_source(value))
    for piece in whole.pieces():
        quantised = quantise(piece)
        again, finite = read(quantised), piece.isfinite()
        assert again.shape == piece.shape
        assert torch.equal(again.isnan(), piece.isnan())
        assert torch.equal(again[piece.isinf()], piece[piece.isinf()])
        assert not finite.any() or (again - piece)[finite].abs().max().item() <= quantised.error
        assert (quantised.levels.diff() > 0).all()
        assert len(quantised.levels) <= MOST_LEVELS


def test_few_different_numbers_are_exact():
    value = torch.randint(-100, 100, (50, 50))
    quantised = quantise(value)
    assert quantised.error == 0
    assert torch.equal(read(quantised), value.double())


def test_the_error_is_a_small_part_of_the_range_whatever_the_numbers():
    for value in (torch.randn(10_000), torch.rand(10_000) ** 9, torch.randn(10_000).exp()):
        assert 0 < quantise(value).error <= (value.max() - value.min()) / 250


def test_an_outlier_does_not_drown_the_rest():
    value = torch.randn(10_000)
    value[0] = 1e6
    again = read(quantise(value))
    usual = (again - value.double())[1:].abs().median()
    assert again[0] == 1e6
    assert usual < 0.05


def test_levels_of_nothing_are_none():
    assert len(levels_of(torch.zeros(0))) == 0
    assert quantise(torch.tensor([float("nan"), float("inf")])).codes.tolist() == [255, 254]


@pytest.mark.parametrize("most", [16, 100])
def test_fewer_levels_can_be_asked_for(most):
    assert len(quantise(torch.randn(5000), most).levels) <= most
