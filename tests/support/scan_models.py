"""Models for which a run on fake tensors does not suffice, and a scan's notes about its run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FAKE = "on fake tensors"
REAL = "on a real run"


class DataDependent(nn.Module):
    """Reads its values to decide what to run, so that shapes alone don't suffice; and has state that a run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.a(x)))
        x = self.b(x) if x.abs().sum().item() > 0 else self.c(x)
        return x[x[..., 0] > 0]


class Stateful(nn.Module):
    """Keeps state in every possible way; `look` makes it need the real run."""

    def __init__(self, look: bool) -> None:
        super().__init__()
        self.look = look
        self.body = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)
        self.scale = torch.ones(8)
        self.counted = 0
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.counted += 1
        self.steps += 1
        self.hidden.add_(1)
        self.scale.mul_(2)
        with torch.no_grad():
            self.body.bias.add_(1)
        x.add_(1)
        y = self.drop(self.norm(self.body(x)))
        self.last = y
        self.seen.append(y)
        self.by_name["y"] = y
        if self.look:
            y.sum().item()
        return y * self.scale
