"""A small block with a norm, an attention and an MLP, and pairs of it, for the tests of `hl.compare`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block, in which a linear layer stands for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = x + self.attn(self.norm(x)) * self.scale
        return x + self.mlp(x)


def pair(other: type[Block] = Block) -> tuple[Block, Block]:
    """Return a block, and another one with the same weights."""
    torch.manual_seed(0)
    a, b = Block(), other()
    b.load_state_dict(a.state_dict())
    return a, b
