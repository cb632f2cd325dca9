"""How far two values are from each other."""

from __future__ import annotations

import math

import pytest
import torch

from hookline._compare import apart as module
from hookline._compare.apart import (
    NOTHING_APART,
    OtherShape,
    apart,
    difference,
    in_one_layout,
    largest_element,
    where_apart,
)

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
    with pytest.raises(OtherShape, match=r"output is \(2, 2\) in a, \(2,\) in b"):
        apart(ONE, ONE[0])
    with pytest.raises(OtherShape, match=r"output is .* in a, None in b"):
        apart(ONE, None)
    with pytest.raises(OtherShape, match="no tensors"):
        apart(None, None)


def test_the_largest_element_is_finite():
    assert largest_element((torch.tensor([1.0, -math.inf, math.nan, -2.0]), None)) == 2


def test_the_place_of_the_largest_difference_is_said():
    other = ONE.clone()
    other[1, 0] = -1
    assert where_apart(ONE, other, "") == "at [1, 0] a has 0 and b -1"
    assert where_apart(ONE, ONE, "") == ""


def test_layouts_are_mapped_to_a_or_else_to_b():
    turned = ONE.T.contiguous()[:1]
    ours, theirs = in_one_layout(ONE, turned, lambda tensor: tensor.T[:1], None)
    assert torch.equal(ours, theirs)
    ours, theirs = in_one_layout(ONE, ONE.T, None, lambda tensor: tensor.T)
    assert torch.equal(ours, theirs)


def test_pieces_add_up_to_the_whole(monkeypatch):
    one, two = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    whole = apart(one, two)
    monkeypatch.setattr(module, "_PIECE", 4)
    assert apart(one, two) == pytest.approx(whole)
    assert largest_element(one) == one.abs().max().item()


@pytest.mark.parametrize(
    "changed",
    [
        lambda one: one.to_sparse(),
        lambda one: torch.complex(one, one),
        lambda one: torch.complex(one, -one).conj(),
        lambda one: torch.nested.nested_tensor([one, one[:1]]),
        lambda one: one.to(torch.float8_e4m3fn),
        lambda one: torch.quantize_per_tensor(one, 0.5, 0, torch.qint8),
        lambda one: one.bool(),
    ],
    ids=["sparse", "complex", "conjugate", "nested", "float8", "quantised", "bool"],
)
def test_tensors_of_every_kind_are_compared(changed):
    assert apart(changed(ONE), changed(ONE)).is_none
    assert apart(changed(ONE), changed(ONE * 0)).largest >= 1
    assert largest_element(changed(ONE)) >= 1


def test_values_stay_as_they_are():
    mask = torch.tensor([0.0, torch.finfo(torch.float64).min], dtype=torch.float64)
    kept = mask.clone()
    assert apart(mask, torch.ones(2)).largest == math.inf
    assert largest_element(mask) == 0
    assert torch.equal(mask, kept)


@pytest.mark.parametrize("large", [-1e9, 3e4])
def test_elements_that_others_dwarf_are_measured_by_themselves(large):
    a = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    a[:, 0] = large
    b = a.clone()
    b[3, 4] += 0.01
    parts = difference(a, b).parts
    assert list(parts) == ["", " without its largest elements"]
    assert parts[""].error.relative < 1e-6
    assert parts[" without its largest elements"].error.relative > 1e-4
    assert parts[" without its largest elements"].largest < 5
    assert where_apart(a, b, " without its largest elements").startswith("at [3, 4] a has")


def test_integers_have_to_be_equal():
    ids = torch.arange(8) * 4000
    assert difference(ids, ids + 1).parts[""].largest == 0
    assert difference(ids.float(), ids.float() + 1).parts[""].largest == 28000
