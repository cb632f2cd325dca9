"""A transformer whose attention is written with operators, functions and methods, and the same by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attention of two heads, written with operators, functions, tensor methods and a helper method."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, part: Tensor) -> Tensor:
        return part.unflatten(-1, (2, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(part) for part in self.qkv(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1) / 2
        mixed = F.softmax(scores, dim=-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a linear layer on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + F.gelu(self.mlp(x))


class Transformer(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.mean(1)


ORDER = (
    ["chunk#0"]
    + [f"{name}#{number}" for number in range(3) for name in ("unflatten", "transpose")]
    + ["transpose#3", "matmul#0", "div#0", "softmax#0", "matmul#1", "transpose#4", "flatten#0"]
)


def stages_of_attention(attention: Attention, x: Tensor) -> dict[str, Tensor]:
    """The forward of Attention by hand, every value of interest as a tensor of its own."""
    parts = F.linear(x, attention.qkv.weight, attention.qkv.bias).unflatten(-1, (3, 2, -1))
    query, key, value = (parts[:, :, number].transpose(1, 2) for number in range(3))
    stages = {"transpose#0": query, "transpose#1": key, "transpose#2": value}
    stages["matmul#0"] = torch.matmul(query, key.mT)
    stages["div#0"] = stages["matmul#0"] / 2
    stages["softmax#0"] = torch.softmax(stages["div#0"], -1)
    stages["matmul#1"] = torch.matmul(stages["softmax#0"], value)
    stages["flatten#0"] = stages["matmul#1"].transpose(1, 2).flatten(2)
    stages[""] = F.linear(stages["flatten#0"], attention.out.weight, attention.out.bias)
    return stages


def words(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randn(batch, length, 8)
