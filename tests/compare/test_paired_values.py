"""The tensors of two values side by side."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline._compare.paired_values import Paired

X, Y = torch.ones(2, 3), torch.zeros(2, 3)
Both = namedtuple("Both", "x y")


@pytest.mark.parametrize(
    ("a", "b", "pairs", "odd", "besides"),
    [
        (X, Y, {"": (X, Y)}, [], []),
        ((X, Y), [X, Y], {"[0]": (X, X), "[1]": (Y, Y)}, [], []),
        ({"x": X, "y": Y}, {"y": Y, "x": X}, {'["x"]': (X, X), '["y"]': (Y, Y)}, [], []),
        (Both(X, Y), {"p": X, "q": Y}, {"[0]": (X, X), "[1]": (Y, Y)}, [], []),
        ((X, Y), (X,), {"[0]": (X, X)}, ["output[1] is only in a"], []),
        ({"x": X}, {"x": X, "y": Y}, {'["x"]': (X, X)}, ['output["y"] is only in b'], []),
        ((X, [Y, Y]), (X,), {"[0]": (X, X)}, ["output[1] is only in a"], []),
        (X, (X, Y), {"": (X, X)}, [], ["output[1] is only in b"]),
        ({"loss": X.sum(), "logits": X}, Y, {'["logits"]': (X, Y)}, [], ['output["loss"] is only in a']),
        (X, None, {}, ["output is float32 (2, 3) in a, None in b"], []),
        ((X, "left"), (X, "right"), {"[0]": (X, X)}, ["output[1] is 'left' in a, 'right' in b"], []),
        (X, Y[:1], {}, ["output is (2, 3) in a, (1, 3) in b"], []),
        (X[None], Y, {"": (X[None], Y)}, [], []),
        (None, None, {}, [], []),
        (2, 3, {"": (torch.tensor(2), torch.tensor(3))}, [], []),
        (X.numpy(), X, {"": (X, X)}, [], []),
        ({"x": X, "past_key_values": (Y,)}, {"x": X, "past_key_values": (X,)}, {'["x"]': (X, X)}, [], []),
        ({"x": X, "hidden_states": [Y]}, {"x": X}, {'["x"]': (X, X)}, [], ['output["hidden_states"] is only in a']),
        ({"x": X, "cache": Y}, {"x": X}, {'["x"]': (X, X)}, ['output["cache"] is only in a'], []),
        ({"x": X}, {"x": X, "cache": SimpleNamespace(keys=[Y])}, {'["x"]': (X, X)}, [], []),
    ],
    ids=range(20),
)
def test_the_tensors_of_two_values_are_paired(a: Any, b: Any, pairs: dict, odd: list, besides: list):
    found = Paired(a, b)
    assert {place: (one.tolist(), two.tolist()) for place, (one, two) in found.pairs.items()} == {
        place: (one.tolist(), two.tolist()) for place, (one, two) in pairs.items()
    }
    assert found.odd == odd
    assert found.besides == besides
