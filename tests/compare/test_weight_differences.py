"""How two weights differ, in words."""

from __future__ import annotations

import pytest
import torch

from hookline._compare.weight_differences import EQUAL, ROUNDED, SHAPE, difference_of

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.arange(16).reshape(4, 4)


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
    kind, said = difference_of(W, other)
    assert said == words
    assert kind not in (EQUAL, ROUNDED)


def test_interleaved_rows_are_named():
    order = torch.arange(16).reshape(2, 8).T.flatten()
    assert "interleaved by 8" in difference_of(W, W[order])[1]


def test_equal_and_rounded_weights():
    assert difference_of(W, W.clone()) == (EQUAL, "")
    assert difference_of(W, W.bfloat16())[0] == ROUNDED
    assert difference_of(W, W[:4])[0] == SHAPE
    share = W.clone()
    share[0, :8] += 1
    assert difference_of(W, share)[1] == "3.12 % of its elements differ, up to 1"


def test_numbers_that_are_not_finite_are_said():
    other = W.clone()
    other[0, :8] = torch.nan
    assert difference_of(W, other)[1] == "3.12 % of its elements are not finite in b"
    assert difference_of(other, other.clone()) == (EQUAL, "")
    assert difference_of(torch.zeros(4), torch.ones(4))[1] == "b's is a's plus 1"


def test_a_weight_in_a_coarser_dtype_is_only_rounded_if_every_number_is():
    weight = 0.02 * W
    weight[0, 0] = 10.0
    assert difference_of(weight, weight.bfloat16())[0] == ROUNDED
    other = weight.clone()
    other[1:] = 0
    assert difference_of(weight, other.bfloat16())[0] not in (EQUAL, ROUNDED)
