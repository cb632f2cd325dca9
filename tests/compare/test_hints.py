"""Hints are tested before they are given."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import Block, pair

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class AddsNoise(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.sin(1000 * x)


def test_a_reason_that_does_not_explain_the_whole_error_is_not_given():
    a, b = pair(AddsNoise)
    b.scale = 0.25
    first = hl.compare(a, b, run=(X,)).first
    assert "scale" not in first.hint


class Alone(nn.Module):
    """Can't run by itself: it needs what its model does before."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.ready = factor, []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.ready.pop() else x


class Around(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = Alone(factor)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.ready.append(True)
        return self.inner(x)


def test_a_module_that_can_not_run_by_itself_gets_the_hints_that_need_no_run():
    first = hl.compare(Around(1.0), Around(3.0), run=(X,)).first
    assert first.site == "inner"
    assert first.hint == "a's output is 0.333333 times b's"


def test_the_models_stay_as_they_are_when_hints_are_tested():
    a, b = pair()
    with torch.no_grad():
        b.attn.weight.mul_(2)
    b.norm.eps = 0.5
    before = copy.deepcopy(b.state_dict())
    assert not hl.compare(a, b, run=(X,)).ok
    assert all(torch.equal(one, before[name]) for name, one in b.state_dict().items())
    assert (b.norm.eps, b.scale) == (0.5, 0.5)


def test_a_hint_with_a_tolerance_has_to_lower_the_error():
    torch.manual_seed(0)
    a = nn.Linear(48, 10)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.weight.add_(0.02 * torch.randn(10, 48))
    first = hl.compare(a, b, run=(torch.randn(16, 48),), tolerance=0.01).first
    assert first.hint.startswith("weight: ")
    c = nn.Linear(48, 10)
    c.forward = lambda x: b(x)
    assert hl.compare(a, c, run=(torch.randn(16, 48),), tolerance=0.01).first.hint == ""
