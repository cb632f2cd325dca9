"""Models for the tests of nice_hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.compat.nice_hooks import expand_module_path


class Model(nn.Module):
    """Children called as the README calls them; the ReLU writes in place, `unused` never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mod1 = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True))
        self.mod2 = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.blocks[0](self.mod2(self.mod1(x))) * scale  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def paths(model: nn.Module, path: Any) -> list[str]:
    return [str(found) for found, _ in expand_module_path(model, path)]
