"""Parameters and buffers side by side, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline._compare.weights import EQUAL, EXTRA, MISSING, ROUNDED, SHAPE, compare_weights, difference_of

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


def test_what_one_has_alone_is_said():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    assert [(one.kind, one.what) for one in compare_weights(a, b, {"": ""})] == [
        (MISSING, "b has no bias, which is (4,) in a")
    ]
    assert [(one.kind, one.what) for one in compare_weights(b, a, {"": ""})] == [
        (EXTRA, "a has no bias, which is (4,) in b")
    ]


def test_another_name_is_matched_by_its_shape():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))

    other = nn.RMSNorm(8)
    assert compare_weights(other, Scaled(), {"": ""}) == []
