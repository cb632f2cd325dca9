"""How far two values are from each other."""

from __future__ import annotations

import math

import pytest
import torch

from hookline._compare.apart import NOTHING_APART, OtherShape, apart, in_one_layout, largest_element, where_apart

ONE = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def test_every_measure():
    found = apart(ONE, ONE + torch.tensor([[0.0, 0.5], [0.0, 0.0]]))
    assert (found.largest, found.mean, found.relative) == (0.5, 0.125, 0.1)
    assert found.sqnr == pytest.approx(20)
    assert found.exact == 0.75
    assert found.cosine == pytest.approx(0.998, abs=1e-3)


def test_equal_values_are_not_apart():
    nan = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert apart(nan, nan.clone()) == NOTHING_APART
    assert apart(nan, torch.ones(4)).largest == math.inf


def test_the_smallest_number_of_a_dtype_is_minus_infinity():
    masks = [torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype) for dtype in (torch.float32, torch.float16)]
    assert apart(*masks).is_none
    assert apart(masks[0], torch.zeros(2)).largest == math.inf


def test_the_main_tensors_of_two_structures_are_compared():
    assert apart((ONE, ONE), (ONE,)).is_none
    with pytest.raises(OtherShape, match=r"\(2, 2\) and \(2,\)"):
        apart(ONE, ONE[0])
    with pytest.raises(OtherShape, match="no tensors"):
        apart(ONE, None)


def test_the_largest_element_is_finite():
    assert largest_element((torch.tensor([1.0, -math.inf, math.nan, -2.0]), None)) == 2


def test_the_place_of_the_largest_difference_is_said():
    other = ONE.clone()
    other[1, 0] = -1
    assert where_apart(ONE, other) == "at [1, 0] a has 0 and b -1"
    assert where_apart(ONE, ONE) == ""


def test_layouts_are_mapped_to_a_or_else_to_b():
    turned = ONE.T.contiguous()[:1]
    ours, theirs = in_one_layout(ONE, turned, lambda tensor: tensor.T[:1], None)
    assert torch.equal(ours, theirs)
    ours, theirs = in_one_layout(ONE, ONE.T, None, lambda tensor: tensor.T)
    assert torch.equal(ours, theirs)
