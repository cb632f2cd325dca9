"""The runs of a comparison: what b's modules get, and what a forward may write."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.factor = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x) * self.factor)


def test_seen_errors_are_inherited_and_local_ones_are_not():
    report = hl.compare(Scaled(1), Scaled(2), run=(X,))
    assert report["block.0"].seen.relative > 0.1
    assert all(report[path].local.is_none for path in ("first", "block", "block.0", "block.1"))
    assert not report[""].local.is_none


def test_b_gets_what_a_got_in_its_own_dtype():
    report = hl.compare(Scaled(1), Scaled(2).double(), run=(X,), run_b=(X.double(),), to_b=lambda tensor: tensor)
    assert report["block.0"].seen.relative > 0.1
    assert report["block.0"].local.relative < 1e-6


class Counts(nn.Module):
    """Writes to a plain tensor, a buffer or a parameter in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.plain = nn.Linear(4, 4), torch.zeros(4)
        self.register_buffer("buffer", torch.zeros(4))
        self.parameter, self.kind = nn.Parameter(torch.zeros(4)), kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            getattr(self, self.kind).add_(1)
        return self.linear(x) + getattr(self, self.kind)


@pytest.mark.parametrize("kind", ["plain", "buffer"])
def test_what_a_forward_writes_is_undone(kind):
    a = Counts(kind)
    b = copy.deepcopy(a)
    report = hl.compare(a, b, run=(X,))
    assert report.ok
    assert not any(place.is_made_good for place in report.values())
    assert not getattr(a, kind).any()
    assert not getattr(b, kind).any()


def test_a_forward_that_writes_to_a_parameter_is_refused():
    a = Counts("parameter")
    with pytest.raises(hl.HooklineError, match=says("writes to its parameter", "parameter")):
        hl.compare(a, copy.deepcopy(a), run=(X,))
