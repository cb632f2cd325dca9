"""Small models that many tests use, each built like some real models; ways to copy a model, and a loss."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
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
    """A model that returns a dict with a tuple, None and a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"logits": y * 2, "hidden": (x, y), "loss": None, "steps": 3}


def mlp() -> nn.Sequential:
    """Return two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def tokens(batch: int = 2, length: int = 5, width: int = 8) -> Tensor:
    """Return a batch of token vectors for GPT."""
    return torch.randn(batch, length, width)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    """A dataclass that a model may return instead of a tuple."""

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


class Gives(nn.Module):
    """A module that returns the value it was constructed with, whatever its input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, _x: Any) -> Any:
        return self.value


class Overwrites(nn.Module):
    """Passes its input through a module, then writes into every tensor of the output."""

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
    """A module that applies a function to its parameter `W` and its input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.W, x)


class Shares(nn.Module):
    """One matrix is the weight of the embedding and of the head, and the forward uses it a third time."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        return self.head(x) + F.linear(x, self.emb.weight)


class Encoder(nn.Module):
    """A model with two methods: one calls forward, the other bypasses it."""

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


class AttentionInMethods(nn.Module):
    """Attention that does most of its work in methods."""

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


class LayerInMethods(nn.Module):
    """Attention on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = AttentionInMethods()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class ModelInMethods(nn.Module):
    """A model that does most of its forward in a method."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.h = nn.ModuleList(LayerInMethods() for _ in range(depth))
        self.head = nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


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


class AttentionBlock(nn.Module):
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
        self.h = nn.ModuleList(AttentionBlock() for _ in range(2))

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
    """Compute the forward of Attention by hand, with every value of interest as a separate tensor."""
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


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


class Scaled(torch.autograd.Function):
    """The identity, with a function applied to its gradient: the reference for an edited gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.function(gradient), None


def loss_of(output: Tensor) -> Tensor:
    return (output**2).sum()


def plus(number: float) -> Any:
    return lambda value: value + number
