"""The tensors of two values side by side: which have a counterpart, and what is said of the others."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.compared_blocks import compared

X, Y = torch.ones(2, 3), torch.full((2, 3), 0.3)
Both = namedtuple("Both", "x y")
Swapped = namedtuple("Swapped", "p q")


@pytest.mark.parametrize(
    ("a", "b", "besides"),
    [
        (X, X.clone(), ""),
        ((X, Y), [X, Y], ""),
        ({"x": X, "y": Y}, {"y": Y, "x": X}, ""),
        (Both(X, Y), Swapped(X, Y), ""),
        (X, (X, Y), "output[1] is only in b"),
        ({"loss": X.sum(), "logits": Y}, Y, 'output["loss"] is only in a'),
        (X.numpy(), X, ""),
        (3, torch.tensor(3), ""),
        ({"x": X, "past_key_values": (Y,)}, {"x": X, "past_key_values": (X,)}, ""),
        ({"x": X, "hidden_states": [Y]}, {"x": X}, 'output["hidden_states"] is only in a'),
        ({"x": X}, {"x": X, "cache": SimpleNamespace(keys=[Y])}, ""),
    ],
    ids=range(11),
)
def test_values_are_the_same_if_all_that_is_paired_is(a: Any, b: Any, besides: str):
    report = compared(lambda x: a, lambda x: b, X)
    assert report.ok, report.verdict
    assert report.verdict.count("is only in") == bool(besides)
    assert besides in report.verdict


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((X, Y), [X, X], "The outputs at [1] differ"),
        ({"x": X, "y": Y}, {"y": Y, "x": Y}, 'The outputs at ["x"] differ'),
        (Both(X, Y), Swapped(Y, Y), "The outputs at [0] differ"),
        (X, (Y, X), "The outputs differ"),
        ({"loss": X.sum(), "logits": X}, Y, 'The outputs at ["logits"] differ'),
        ((X, Y), (X,), "output[1] is only in a"),
        ({"x": X}, {"x": X, "y": Y}, 'output["y"] is only in b'),
        ((X, [Y, Y]), (X,), "output[1] is only in a"),
        (X, None, "output is float32 (2, 3) in a, None in b"),
        ((X, "left"), (X, "right"), "output[1] is 'left' in a, 'right' in b"),
        (X, Y[:1], "output is (2, 3) in a, (1, 3) in b"),
        (X[None], X, "output is (1, 2, 3) in a, (2, 3) in b"),
        ({"x": X, "cache": Y}, {"x": X}, 'output["cache"] is only in a'),
    ],
    ids=range(13),
)
def test_values_are_not_the_same_if_a_pair_differs_or_one_has_no_counterpart(a: Any, b: Any, words: str):
    report = compared(lambda x: a, lambda x: b, X)
    assert not report.ok
    assert words in report.verdict
