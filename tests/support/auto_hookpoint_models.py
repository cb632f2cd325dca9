"""Models for the tests of auto_hookpoint."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.compat.auto_hookpoint import (
    auto_hook,
)


class Mixed(nn.Module):
    """Parameters, a container, a point of its author's, and a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.relu_hook = hl.HookPoint()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        return F.dropout(self.relu_hook(self.layers(self.fc(x))) @ self.W, training=self.training)


class Child(nn.Module):
    """Returns whatever it was told."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@auto_hook
class Decorated(nn.Module):
    """What it is for."""

    def __init__(self, width=4):
        super(Decorated, self).__init__()  # noqa: UP008  # With a class that was replaced this fails.
        self.fc1 = nn.Linear(width, width)
        self.W = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return self.fc1(x) @ self.W
