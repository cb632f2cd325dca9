"""Models that produce bad values, and the error that a watch raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import hookline as hl
from tests.support.models import mlp

NAN, INF = float("nan"), float("inf")


class Root(nn.Module):
    """A module that turns negative values into NaN in its own forward, after a child without bad values."""

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


class Rows(Dataset):
    """Rows of numbers, of which one may be bad."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.full((4,), index / 8)
        return {"x": x * NAN if index == self.bad else x, "labels": torch.ones(2)}


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels=None):
        output = self.body(x)
        return {"loss": (output - labels).square().mean(), "logits": output}
