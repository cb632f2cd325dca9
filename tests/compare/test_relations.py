"""Simple relations between two outputs."""

from __future__ import annotations

import pytest
import torch

from hookline._compare.relations import relation
from hookline._compare.rounding import Limit

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
GIVEN = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
LIMIT = Limit(1e-5, 1e-5)
SCALE = torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (X / 8, X, "0.125 (= 1/√64) times b's"),
        (X * 768**0.5, X, "27.7128 (= √768) times b's"),
        (X + GIVEN, X, "b's plus the input: b leaves out the residual connection"),
        (X + 2 * GIVEN, X, "b's plus 2 times the input"),
        (X - GIVEN / 2, X, "b's minus 0.5 times the input"),
        (X - GIVEN, X, "b's minus the input: b adds it, and a does not"),
        (X * (1 + SCALE), X * SCALE, "b leaves out the offset of the norm"),
        (X * SCALE, X * (1 + SCALE), "b adds an offset to the norm"),
        (X * SCALE, X, "b leaves out the weight of the norm"),
        (2 * torch.tanh(X / 2), X, "b's with a soft cap of 2"),
        (X, 30 * torch.tanh(X / 30), "b's without its soft cap of 30"),
        (X + torch.arange(8), X, "b's plus a constant vector"),
        (X[..., [4, 5, 6, 7, 0, 1, 2, 3]], X, "b's in another order of dimension 2, in blocks of 4"),
        (X, X.transpose(-1, -2), "b's transposed"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_relation_is_named(ours, theirs, words):
    assert words in relation(ours, theirs, {"the input": GIVEN}, [SCALE], LIMIT)


def test_unrelated_outputs_have_no_relation():
    assert relation(X, GIVEN, {}, (), LIMIT) == ""
    assert relation(X, GIVEN[0], {}, (), LIMIT) == ""
