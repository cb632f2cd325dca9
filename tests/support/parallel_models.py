"""A model, and copies of it that are sharded over two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HIDDEN = 4, 8


class MLP(nn.Module):
    """Two layers that tensor parallelism shards, with an activation between them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.act = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(bias) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


def cut(bare: nn.Module, down: Any = None, **options: Any) -> nn.Module:
    """Return a copy of a Net whose layers are sharded over the two ranks by tensor parallelism."""
    model = copy.deepcopy(bare)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"h.*.mlp.up": ColwiseParallel(**options), "h.*.mlp.down": down or RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def shard(bare: nn.Module, **options: Any) -> nn.Module:
    """Return a copy of a Net that FSDP2 shards."""
    model = copy.deepcopy(bare)
    for block in model.h:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(samples: int = 2) -> Tensor:
    return torch.randn(samples, 6, WIDTH)
