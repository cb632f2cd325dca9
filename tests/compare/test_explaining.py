"""What is noted of a place that is off: the element that differs most, the reason, and the function."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Soft(nn.Module):
    dim = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.inner(x), self.dim)


class OtherSoft(Soft):
    dim = 0


def test_the_element_that_differs_most_and_the_function_are_noted():
    model = nn.Sequential(Soft(), nn.Identity())
    other = nn.Sequential(OtherSoft(), nn.Identity())
    first = hl.compare(model, other, run=(X,)).first
    assert first.site == "0"
    assert first.hint == "in /softmax#0, dim is -1 in a and 0 in b"
    assert first.function == "0/softmax#0"
    index = tuple(int(part) for part in first.worst.partition("[")[2].partition("]")[0].split(", "))
    assert (model(X) - other(X)).abs().argmax() == index[0] * 8 + index[1]


def test_the_owner_of_a_weight_is_named_as_in_a():
    a = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    b = copy.deepcopy(a)
    b[0].weight.data = a[1].weight.data.clone()
    assert hl.compare(a, b, run=(X,)).first.hint == "weight: it is that of '1.weight' in a"
