"""How two weights differ, in words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hookline as hl
from tests.support.compared_blocks import Computes

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.arange(16).reshape(4, 4)


def compared_weights(one: Tensor, other: Tensor) -> hl.Comparison:
    """Compare two models that hold these weights."""
    return hl.compare(*(Computes(torch.matmul, weight) for weight in (one, other)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (W.T, "transposed"),
        (W.flip(0), "reversed along dimension 0"),
        (W.flip(1), "reversed along dimension 1"),
        (W[HEADS[[2, 0, 3, 1]].flatten()], "its rows are in another order, in blocks of 4, as heads are"),
        (W[:, torch.randperm(16, generator=torch.Generator().manual_seed(1))], "its columns are in another order"),
        (W + 1, "b's is a's plus 1"),
        (W - 1, "b's is a's minus 1"),
        (torch.zeros(16, 16), "all zeros in b"),
        (W / 2, "a's is 2 times b's"),
        (W.bfloat16().float(), "rounded to bfloat16 in b"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_difference_is_named(other, words):
    report = compared_weights(W, other)
    assert not report.ok
    assert report.verdict == f"weight: {words}"


def test_interleaved_rows_are_named():
    order = torch.arange(16).reshape(2, 8).T.flatten()
    assert "interleaved by 8" in compared_weights(W, W[order]).verdict


def test_weights_that_are_equal_or_only_rounded_are_ok_and_others_are_measured():
    assert compared_weights(W, W.clone()).weights == []
    assert compared_weights(W, W.bfloat16()).ok
    assert compared_weights(W, W.bfloat16()).weights != []
    assert compared_weights(W, W[:, :4].contiguous().view(4, 16)).verdict.startswith("weight: (16, 16) in a, (4, 16)")
    share = W.clone()
    share[0, :8] += 1
    assert compared_weights(W, share).verdict == "weight: 3.12 % of its elements differ, up to 1"


def test_numbers_that_are_not_finite_are_said():
    other = W.clone()
    other[0, :8] = torch.nan
    assert compared_weights(W, other).verdict == "weight: 3.12 % of its elements are not finite in b"
    assert compared_weights(other, other.clone()).weights == []
    assert compared_weights(torch.zeros(4), torch.ones(4)).verdict == "weight: b's is a's plus 1"


def test_a_weight_in_a_coarser_dtype_is_only_rounded_if_every_number_is():
    weight = 0.02 * W
    weight[0, 0] = 10.0
    assert compared_weights(weight, weight.bfloat16()).ok
    other = weight.clone()
    other[1:] = 0
    assert not compared_weights(weight, other.bfloat16()).ok
