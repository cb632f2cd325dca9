"""Weights that are found by their numbers at another place than the names say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._compare.moved import moved

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("pairs", "in_b", "found"),
    [
        ({"q": "query", "k": "key", "v": "value"}, ["query", "key", "value"], {}),
        ({"q": "value", "v": "query"}, ["query", "value"], {"q": "query", "v": "value"}),
        ({"h.0.x": "l.1.y", "h.1.x": "l.0.y"}, ["l.0.y", "l.1.y"], {"h.0.x": "l.0.y", "h.1.x": "l.1.y"}),
        ({"norm": "b", "up": "a"}, ["a", "b"], {}),  # b only has them in another order.
    ],
)
def test_pairs_that_cross_against_their_names_are_moved(pairs, in_b, found):
    assert moved(pairs, in_b, dict.fromkeys(pairs, 1)) == found
    assert moved(pairs, in_b, {name: name for name in pairs}) == {}  # All are of other sizes.


class Attention(nn.Module):
    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, name)(x) for name in self.names)
        return torch.softmax(q @ k.mT, -1) @ v


def port(*swapped: str) -> Attention:
    b = Attention(("query", "key", "value"))
    if swapped:
        one, two = (getattr(b, name) for name in swapped)
        kept = copy.deepcopy(one.state_dict())
        one.load_state_dict(two.state_dict())
        two.load_state_dict(kept)
    return b


def test_swapped_weights_under_other_names_are_named():
    a = Attention(("q", "k", "v"))
    assert hl.compare(a, port()).ok
    assert hl.compare(a, port(), run=(X,)).ok
    report = hl.compare(a, port("key", "value"))
    assert not report.ok
    assert report.verdict == "k.weight: its numbers are in 'value.weight' of b, and not in 'key.weight'"
    report = hl.compare(a, port("key", "value"), run=(X,))
    assert not report.ok
    assert "the numbers of 'k.weight' are in 'value.weight' of b" in report.verdict or "it is that of" in report.verdict
