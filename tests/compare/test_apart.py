"""How far two values are from each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.compared_blocks import Computes, compared

ONE = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
SHIFT = torch.tensor([[0.0, 0.5], [0.0, 0.0]])


def test_every_measure():
    found = compared(lambda x: x, lambda x: x + SHIFT, ONE)[""].local
    assert (found.largest, found.mean, found.relative) == (0.5, 0.125, 0.1)
    assert found.sqnr == pytest.approx(20)
    assert found.exact == 0.75
    assert found.cosine == pytest.approx(0.998, abs=1e-3)


def test_equal_values_are_not_apart_even_if_they_are_not_finite():
    given = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    report = compared(lambda x: x, lambda x: x.clone(), given)
    assert report.ok
    assert report[""].local.is_none
    assert compared(lambda x: x, torch.ones_like, given)[""].local.largest == math.inf


def test_the_smallest_number_of_a_dtype_is_minus_infinity_and_the_values_stay_as_they_are():
    masks = [torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype) for dtype in (torch.float32, torch.float16)]
    assert compared(lambda x: masks[0], lambda x: masks[1], ONE)[""].local.is_none
    assert compared(lambda x: masks[0], lambda x: torch.zeros(2), ONE)[""].local.largest == math.inf
    assert masks[0].tolist() == [0, torch.finfo(torch.float32).min]


def test_a_tolerance_is_a_share_of_the_largest_finite_element():
    given = torch.tensor([1.0, -math.inf, math.nan, -2.0])
    assert compared(lambda x: x, lambda x: x + 0.9, given, tolerance=0.5).ok
    assert not compared(lambda x: x, lambda x: x + 1.1, given, tolerance=0.5).ok


def test_the_place_of_the_largest_difference_is_said():
    first = compared(lambda x: x, lambda x: x - torch.tensor([[0.0, 0.5], [1.0, 0.0]]), ONE).first
    assert first.worst == "at [1, 0] a has 0 and b -1"
    first = compared(lambda x: x, lambda x: x - SHIFT, ONE).first
    assert first.worst == "at [0, 1] a has 4 and b 3.5"


def test_outputs_are_mapped_to_the_layout_of_a():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1]

    report = compared(function, lambda x: function(x).T, ONE, to_a=lambda tensor: tensor.T)
    assert report.ok
    assert report[""].local.is_none
    assert not compared(function, lambda x: 2 * function(x).T, ONE, to_a=lambda tensor: tensor.T).ok


def test_values_of_more_than_a_million_elements_are_measured_whole():
    given = torch.zeros(1 << 20, 2)
    given[0], given[-1] = 3, 4
    report = hl.compare({"0": given}, nn.Sequential(Computes(lambda x: x + (x == 4))), run=(given,))
    found = report["0"].seen
    assert (found.largest, found.mean) == (1, 2 / given.numel())
    assert found.relative == pytest.approx(math.sqrt(2 / 50))


@pytest.mark.parametrize(
    "changed",
    [
        lambda one: one.to_sparse(),
        lambda one: torch.complex(one, one),
        lambda one: torch.complex(one, -one).conj(),
        lambda one: torch.nested.nested_tensor([one, one[:1]]),
        pytest.param(
            lambda one: one.to(torch.float8_e4m3fn),
            marks=pytest.mark.xfail(raises=NotImplementedError, strict=True, reason="torch has no isfinite of float8"),
        ),
        lambda one: torch.quantize_per_tensor(one, 0.5, 0, torch.qint8),
        lambda one: one.bool(),
    ],
    ids=["sparse", "complex", "conjugate", "nested", "float8", "quantised", "bool"],
)
def test_tensors_of_every_kind_are_compared(changed):
    assert compared(changed, changed, ONE).ok
    report = compared(changed, lambda one: changed(one * 0), ONE)
    assert not report.ok
    assert report.first.local.largest >= 1


@pytest.mark.parametrize("large", [-1e9, 3e4])
def test_elements_that_others_dwarf_are_measured_by_themselves(large):
    given = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    given[:, 0] = large
    change = torch.zeros(64, 8)
    change[3, 4] = 0.01
    report = compared(lambda x: x, lambda x: x + change, given)
    assert report.first.local.relative > 1e-4
    assert report.first.worst.startswith("at [3, 4] a has")
    assert "The outputs without their largest elements differ by" in report.verdict


def test_a_difference_of_one_between_large_integers_is_no_rounding():
    ids = torch.arange(8) * 4000
    assert not compared(lambda x: ids, lambda x: ids + 1, ONE).ok
    assert compared(lambda x: ids * 1e4, lambda x: ids * 1e4 + 1, ONE).ok


def test_models_that_return_no_tensors_are_not_compared():
    with pytest.raises(hl.HooklineError, match=says("none returned tensors")):
        compared(lambda x: None, lambda x: None, ONE)
