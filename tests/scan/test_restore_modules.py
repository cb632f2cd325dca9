"""A run's changes to the modules of a model are undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Counting(nn.Module):
    """A model that writes to its attributes, to a list in a dict of them, and to its BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: dict[str, list[int]] = {"sizes": [1]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["sizes"].append(len(x))
        self.latest = x
        result: Tensor = self.norm(x)
        return result


def test_attributes_and_their_contents_are_put_back() -> None:
    model = Counting()
    sizes = model.seen["sizes"]
    hl.scan(model, torch.ones(3, 4))
    assert model.calls == 0
    assert not hasattr(model, "latest")
    assert model.seen["sizes"] is sizes == [1]


def test_they_are_put_back_also_after_an_error() -> None:
    class Failing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("afterwards")

    model = Failing()
    with pytest.raises(RuntimeError, match="afterwards"):
        hl.compare(model, Failing(), run=(torch.ones(3, 4),))
    assert (model.calls, model.seen) == (0, {"sizes": [1]})
    assert model.norm.num_batches_tracked == 0


def test_hooks_that_are_attached_stay() -> None:
    model = Counting()
    hooks = hl.Hooks(model)
    hooks.edit("norm", torch.zeros_like)
    hl.scan(model, torch.ones(3, 4))
    hl.compare(model, Counting(), run=(torch.ones(3, 4),))
    assert model(torch.randn(3, 4)).count_nonzero() == 0
    hooks.remove()


def test_buffers_that_a_run_wrote_to_are_put_back_and_others_are_not_touched() -> None:
    model, other = Counting(), Counting()
    model.register_buffer("mask", torch.ones(2))
    before: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mask = model.get_buffer("mask")
    version = mask._version
    hl.compare(model, other, run=(torch.randn(8, 4),))
    assert other.norm.num_batches_tracked == 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert mask._version == version
