"""A difference that the module around makes good is no fault, and one that rounding hides from it still is."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.planted_faults import SAME, model_and_inputs


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return 1000 * x + self.down(self.act(self.up(x / x.norm())))


def pair() -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    torch.manual_seed(0)
    a = nn.Sequential(Mlp(), Mlp())
    return a, copy.deepcopy(a), torch.randn(4, 8)


@torch.no_grad()
def reorder(mlp: Mlp) -> None:
    for one in (mlp.up.weight, mlp.up.bias):
        one.copy_(one.flip(0).clone())
    mlp.down.weight.copy_(mlp.down.weight.flip(1).clone())


def test_reordered_units_are_made_good():
    a, b, x = pair()
    reorder(b[0])
    report = hl.compare(a, b, run=(x,))
    assert report.ok, report.verdict
    made_good = [site for site, place in report.items() if place.is_made_good]
    assert made_good == ["0.up", "0.down"]
    assert report["0.up"].note == "made good in '0'"
    assert "; what differs at 2 more is made good by the modules around; 3 weights are not equal" in report.verdict


def test_a_fault_behind_what_is_made_good_is_found():
    a, b, x = pair()
    reorder(b[0])
    with torch.no_grad():
        b[1].down.bias.add_(1.0)
    assert hl.compare(a, b, run=(x,)).first.site == "1.down"


def test_units_reordered_on_one_side_only_are_a_fault():
    a, b, x = pair()
    with torch.no_grad():
        b[0].up.weight.copy_(b[0].up.weight.flip(0).clone())
    first = hl.compare(a, b, run=(x,)).first
    assert first.site == "0.up"
    assert "another order" in first.hint or "reversed" in first.hint


def test_a_fault_too_small_to_show_in_the_module_around_is_found():
    a, b, x = pair()
    with torch.no_grad():
        b[1].up.bias.add_(1e-4)
    report = hl.compare(a, b, run=(x,))
    assert not report["1"].is_off
    assert report.first.site == "1.up"


def test_merged_adapters_do_the_same_and_those_that_were_not_added_are_named():
    a, b, options = SAME["merged_adapters"](*model_and_inputs("qwen2"))
    assert hl.compare(a, b, **options).ok
    assert hl.compare(b, a, **options).ok
    plain, run = model_and_inputs("qwen2")
    assert hl.compare(plain, a, run=run).first.hint == "a's output is b's minus 0.5 times 'up'"
    assert hl.compare(a, plain, run=run).first.hint == "a's output is b's plus 0.5 times 'up'"
