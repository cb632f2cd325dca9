"""What passes in a run of a model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 4), shift
        self.unused = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x) + self.shift).add_(1)


def test_the_outputs_of_each_call_are_compared_and_not_what_is_written_there_later():
    a = Twice(0)
    b = copy.deepcopy(a)
    b.shift = 1
    report = hl.compare(a, b, run=(X,))
    assert list(report) == ["", "layer"]  # Containers and what never ran are no places.
    place = report["layer"]
    for value, shift in zip(place.seen_values, (0, 1), strict=True):  # Of the call with the largest error: the second.
        torch.testing.assert_close(value, a.layer(a.layer(X) + shift))
    assert not place.local.relative > 1e-6
    assert report.first.site == ""
