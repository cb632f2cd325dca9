"""Models on a CUDA device, functions that write into their values, and the memory in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import GPT, tokens

DEVICE = "cuda"


class Overwrites(nn.Module):
    """Passes its first layer's output to a function that writes into it, then on to its second layer."""

    def __init__(self, write: Callable[[Tensor], object], width: int = 8) -> None:
        super().__init__()
        self.write = write
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.write(y)
        return self.second(y)


def small_gpt(depth: int = 2) -> tuple[GPT, Tensor]:
    return GPT(depth=depth).to(DEVICE), tokens().to(DEVICE)


def stages_of(model: GPT, x: Tensor) -> list[Tensor]:
    """Return the output of each block, computed by hand."""
    stages = []
    for block in model.h:
        x = block(x, scale=0.5)
        stages.append(x)
    return stages


def is_right_or_told(read: Callable[[], Tensor], expected: Tensor, told: str) -> bool:
    """Return True if the value read is right, or if reading it raises an error with the text `told`."""
    try:
        value = read()
    except RuntimeError as error:
        return told in str(error)
    return torch.allclose(value, expected, rtol=1e-5, atol=1e-5)


def rows(y: Tensor) -> Tensor:
    """Return an index of zeros, one for each row of a matrix."""
    return torch.zeros(y.shape[0], dtype=torch.long, device=y.device)


def through_a_view_made_before(y: Tensor) -> object:
    return y.view(-1)[::2].neg_()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "relu_": lambda y: y.relu_(),
    "add_": lambda y: y.add_(1),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "copy_ from the CPU": lambda y: y.copy_(torch.ones(y.shape)),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(3),
    "a random fill": lambda y: y.normal_(),
    "in-place dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "setitem": lambda y: y.__setitem__((slice(None), 0), 7.0),
    "a slice": lambda y: y[1:].mul_(2),
    "a strided view": through_a_view_made_before,
    ".data": lambda y: y.data.mul_(2),
    "detach()": lambda y: y.detach().mul_(2),
    "index_add_": lambda y: y.index_add_(0, rows(y), torch.ones_like(y)),
    "index_put_": lambda y: y.index_put_((rows(y),), torch.ones_like(y), accumulate=True),
    "index_copy_": lambda y: y.index_copy_(0, rows(y)[:1], torch.ones_like(y[:1])),
    "scatter_": lambda y: y.scatter_(0, rows(y)[None].expand(1, -1)[:, :1], 9.0),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 9.0),
    "masked_scatter_": lambda y: y.masked_scatter_(y > 0, torch.ones_like(y)),
    "cumsum_": lambda y: y.cumsum_(0),
    "triu_": lambda y: y.triu_(),
    "addmm_": lambda y: y.addmm_(y[:, :3], torch.ones(3, y.shape[1], device=y.device)),
    "add(out=)": lambda y: torch.add(y, 1, out=y),
    "mm(out=)": lambda y: torch.mm(torch.ones(y.shape[0], 2, device=y.device), torch.ones_like(y[:2]), out=y),
    "sort(out=)": lambda y: torch.sort(y.clone(), out=(y, torch.empty_like(y, dtype=torch.long))),
    "cumsum(out=)": lambda y: torch.cumsum(y.clone(), 0, out=y),
    "softmax(out=)": lambda y: torch.softmax(y.clone(), -1, out=y),
    "cat(out=)": lambda y: torch.cat([torch.ones_like(y[:1]), y[1:].clone()], out=y),
    "resize_": lambda y: y.resize_(y.shape[0], y.shape[1]).mul_(2),
}


def foreach_add(y: Tensor) -> None:
    torch._foreach_add_([y], 1.0)


def held() -> float:
    """Return the mebibytes that tensors hold on the device."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**20


def about(mebibytes: float) -> Any:
    """Match a number of mebibytes, with some slack for memory that the allocator leaves unused in a block."""
    return pytest.approx(mebibytes, abs=1)


def wide_model(*layers: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """Return a model whose activations are 16 MiB each, and an input."""
    linear = [nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    model = nn.Sequential(linear[0], *layers, linear[1]).to(DEVICE)
    x = torch.randn(4096, 1024, device=DEVICE)
    # Libraries allocate their workspaces once for each thread: this one and autograd's.
    with torch.enable_grad():
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    return model, x
