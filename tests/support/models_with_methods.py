"""A model that does most of its work in methods."""

from __future__ import annotations

from torch import Tensor, nn


class Attention(nn.Module):
    """Most of its work is in methods."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query = self.split_heads(self.proj(x))
        key = self.split_heads(x, scale=0.5)
        return self.merge_heads(self.pattern(query, key=key) @ key)

    def split_heads(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2) * scale

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def pattern(self, query: Tensor, key: Tensor, temperature: float = 2.0) -> Tensor:
        return ((query @ key.transpose(-1, -2)) / temperature).softmax(-1)

    def unused(self, x: Tensor) -> Tensor:
        return x


class Layer(nn.Module):
    """Attention on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class Model(nn.Module):
    """A method does most of its forward."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))
