"""Compare a sweep whose places share runs with one that runs each place alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import leaves


def total(output: Any) -> Tensor:
    """Return one number that depends on each element of the first tensor."""
    first = next(tensor for tensor in leaves(output) if tensor.is_floating_point())
    return (first.double() * torch.arange(first.numel()).cos().view(first.shape)).sum()


def both(model: nn.Module, where: Any, run: Any, metric: Any = total, batch: int | None = None, **options: Any) -> Any:
    """Sweep in packs and place by place; compare, and return the packed sweep."""
    packed = hl.sweep(model, where, metric, run=run, batch=batch, **options)
    alone = hl.sweep(model, where, metric, run=run, batch=1, **options)
    assert list(packed) == list(alone)
    largest = max(float(torch.as_tensor(value).abs().max()) for value in alone.values())
    for site, value in alone.items():
        torch.testing.assert_close(packed[site], value, rtol=1e-5, atol=1e-5 * largest, msg=site)
    torch.testing.assert_close(packed.base, alone.base)
    assert len({str(value) for value in alone.values()}) > 1, "nothing was changed"
    return packed


def is_packed(found: Any) -> bool:
    return any("an unchanged copy in each" in note for note in found.notes)
