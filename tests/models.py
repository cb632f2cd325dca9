"""Small models that many tests use. Each shows one way in which real models are built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer-like block: a residual stream, keywords, an in-place activation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        h = x + self.attn(self.norm(x)) * scale
        return h + self.mlp(h if mask is None else h * mask)


class GPT(nn.Module):
    """Blocks in a ModuleList, called by keyword, and a head."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x, scale=0.5)
        return self.head(x)


class Nested(nn.Module):
    """Returns a dict with a tuple, None and a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"logits": y * 2, "hidden": (x, y), "loss": None, "steps": 3}


def mlp() -> nn.Sequential:
    """Two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def tokens(batch: int = 2, length: int = 5, width: int = 8) -> Tensor:
    """A batch of token vectors for GPT."""
    return torch.randn(batch, length, width)
