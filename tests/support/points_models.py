"""Models for hook points, and hook functions."""

from __future__ import annotations

import torch
from torch import nn

import hookline as hl


class AutoEncoder(nn.Module):
    """A sparse autoencoder of bare parameters, with a buffer."""

    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(width, hidden))
        self.W_dec = nn.Parameter(torch.randn(hidden, width))
        self.b_enc = nn.Parameter(torch.zeros(hidden))
        self.b_dec = nn.Parameter(torch.zeros(width))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        acts = torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)
        return acts @ self.W_dec + self.b_dec


class Base(nn.Module):
    def describe(self):
        return "base"


@hl.auto_hook
class Decorated(Base):
    """What it is for."""

    scale = 2

    def __init__(self, width: int = 4) -> None:
        super(Decorated, self).__init__()  # noqa: UP008  # Fails if auto_hook replaces the class.
        self.fc1 = nn.Linear(width, width)
        self.W = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return self.fc1(x) @ self.W

    def describe(self):
        return "decorated " + super().describe()


def add_one(tensor, hook):
    return tensor + 1


def double(tensor, hook):
    return tensor * 2


class Several(nn.Module):
    """Returns tensors in a dict, a list and a tuple, beside values that are not tensors."""

    def forward(self, x):
        return {"first": x + 1, "rest": [x + 2, None, (3, x + 3)]}


class Nothing(nn.Module):
    def forward(self, x):
        return None


class Around(nn.Module):
    """Calls another module, and returns its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Manual(nn.Module):
    """A model whose author put a hook point into it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.mid_hook = hl.HookPoint()

    def forward(self, x):
        return self.mid_hook(self.fc(x)) * 2
