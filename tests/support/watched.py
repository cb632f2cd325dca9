"""Models that make bad values, and the error that a watch raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

NAN, INF = float("nan"), float("inf")


class Root(nn.Module):
    """A module that makes NaN of what is negative, in its own forward, after a child that is fine."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sqrt(self.first(x)) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.root = Root()
        self.b = nn.Linear(4, 2)

    def forward(self, x, between=False):
        x = self.a(x)
        return self.b(torch.log(x) if between else self.root(x))


class Gives(nn.Module):
    """Gives what it is told to."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def bad(model: nn.Module, *args, **options) -> hl.BadValue:
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model, **options):
            model(*args)
    assert all("forward" not in vars(module) for module in model.modules())
    return raised.value


X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Bursts(nn.Module):
    def forward(self, x):
        return x / (x - x)
