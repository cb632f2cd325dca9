"""Simple relations between two outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from tests.support.compared_blocks import Computes, compared

X = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
GIVEN = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))
SCALE = torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.mark.parametrize(
    ("of_a", "of_b", "words"),
    [
        (lambda x: X / 8, lambda x: X, "0.125 (= 1/√64) times b's"),
        (lambda x: X * 768**0.5, lambda x: X, "27.7128 (= √768) times b's"),
        (lambda x: X + x, lambda x: X, "b's plus the input: b leaves out the residual connection"),
        (lambda x: X - x, lambda x: X, "b's minus the input: b adds it, and a does not"),
        (lambda x: X, lambda x: X.mT, "b's transposed"),
    ],
    ids=range(5),
)
def test_a_relation_is_named(of_a, of_b, words):
    assert words in compared(of_a, of_b, GIVEN).first.hint


@pytest.mark.parametrize(
    ("of_a", "of_b", "words"),
    [
        (lambda w, x: x * (1 + w), lambda w, x: x * w, "b leaves out the offset of the norm"),
        (lambda w, x: x * w, lambda w, x: x * (1 + w), "b adds an offset to the norm"),
    ],
    ids=["no offset", "offset"],
)
def test_a_relation_through_the_weight_of_a_norm_is_named(of_a, of_b, words):
    a, b = (
        nn.Sequential(Computes(lambda w, x, f=f: f(w, F.layer_norm(x, (8,))), SCALE)) for f in (of_a, of_b)
    )  # fmt: skip
    assert words in hl.compare(a, b, run=(5 * GIVEN,)).first.hint


@pytest.mark.parametrize("of_b", [lambda x: GIVEN.sin(), lambda x: GIVEN[0]], ids=["unrelated", "another shape"])
def test_unrelated_outputs_have_no_relation(of_b):
    first = compared(lambda x: X, of_b, GIVEN).first
    assert (first.site, first.hint) == ("", "")
