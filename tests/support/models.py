"""Small models that many tests use. Each shows one way in which real models are built."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    """What a model may return instead of a tuple."""

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Returns(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Overwrites(nn.Module):
    """Passes its input through a module, then writes into every tensor that came out."""

    def __init__(self, function: Callable[[Tensor], Any], write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.source = Returns(function)
        self.write = write

    def forward(self, x: Tensor) -> Any:
        value = self.source(x)
        self.write(value)
        return value


class WritesThenReads(nn.Module):
    """Uses its input, overwrites it, and uses it again; its caller uses the same tensor before and after."""

    def forward(self, x: Tensor) -> Tensor:
        before = x * 3
        x.mul_(5)
        return before + x


class Autoencoder(nn.Module):
    """A sparse autoencoder of bare parameters."""

    def __init__(self, width: int = 4, features: int = 8) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(width, features) / 2)
        self.W_dec = nn.Parameter(torch.randn(features, width) / 2)
        self.b_enc = nn.Parameter(torch.zeros(features))
        self.b_dec = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.tensor(2.0))

    def encode(self, x: Tensor) -> Tensor:
        return F.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.W_dec * self.scale + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Uses(nn.Module):
    """Does with its parameter `W` what it is told to."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.W, x)


class Shares(nn.Module):
    """One matrix for the embedding and the head, which has its own name for it, and a third use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        return self.head(x) + F.linear(x, self.emb.weight)


class Encoder(nn.Module):
    """A model with methods: one goes through forward, one around it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.h[2](self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.h[1](self.h[0](x))

    def generate(self, x: Tensor, steps: int = 4) -> Tensor:
        for _ in range(steps):
            x = self(x)
            self.steps += 1
        return x
