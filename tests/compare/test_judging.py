"""A difference that the module around makes good is no fault, and one that rounding hides from it still is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import counted_calls
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
    assert "; 2 more places differ, and the modules around agree; 3 weights are not equal" in report.verdict


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
    for pair in ((plain, a), (a, plain)):
        assert hl.compare(*pair, run=run).first.site == "model.layers.0.self_attn.q_proj"


def fused_convnet(pairs: int) -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """Return convolutions and norms one after the other, the same with the norms fused, and an image."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(pairs):
        norm = nn.BatchNorm2d(4)
        for one in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
            one.add_(torch.rand_like(one))
        layers += [nn.Conv2d(4, 4, 3, padding=1), norm, nn.GELU()]
    a = nn.Sequential(*layers).eval()
    b = copy.deepcopy(a)
    for number in range(0, len(b), 3):
        b[number], b[number + 1] = torch.nn.utils.fuse_conv_bn_eval(b[number], b[number + 1]), nn.Identity()
    return a, b, torch.randn(2, 4, 8, 8)


def test_norms_fused_in_one_flat_model_cost_few_forwards():
    a, b, image = fused_convnet(20)
    with counted_calls() as runs:
        report = hl.compare(a, b, run=(image,))
    assert report.ok, report.verdict
    assert sum(place.is_made_good for place in report.values()) == 40
    assert runs["Sequential"] <= 5  # One of a, one of b, and three of b with other inputs and outputs.


@pytest.mark.parametrize(
    ("site", "note", "fault"),
    [
        ("11", "", lambda b: b.__setitem__(11, nn.Tanh())),
        ("31", "what it gets comes from '30', where b differs too", lambda b: b[30].weight.data.mul_(1.1)),
    ],
    ids=["between", "in a fused weight"],
)
def test_a_fault_among_what_is_made_good_is_named(site, note, fault):
    a, b, image = fused_convnet(20)
    fault(b)
    first = hl.compare(a, b, run=(image,)).first
    assert (first.site, first.note) == (site, note)


@pytest.mark.parametrize("count", [6, 24])
def test_reordered_units_in_a_deep_stack_are_made_good_and_a_fault_there_is_found(count):
    torch.manual_seed(0)
    a = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(count)])
    b, x = copy.deepcopy(a), torch.randn(8, 32)
    with torch.no_grad():
        for block in b:
            order = torch.randperm(64)
            for one in block[0].parameters():
                one.copy_(one[order])
            block[2].weight.copy_(block[2].weight[:, order])
    assert hl.compare(a, b, run=(x,)).ok
    with torch.no_grad():
        b[3][2].bias[0] += 0.01
    first = hl.compare(a, b, run=(x,)).first
    assert (first.site, first.note) == ("3.2", "what it gets comes from '3.0', where b differs too")


def test_a_place_that_could_not_be_compared_does_not_make_good():
    class Picks(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return x[: 1 + bool(x.sum() > 0)] * self.factor

    class Unused(nn.Module):
        """A model whose output does not depend on what it picks, so nothing but `picks` itself is wrong."""

        def __init__(self, number: float, factor: float) -> None:
            super().__init__()
            self.number, self.picks = nn.Threshold(9, number), Picks(factor)

        def forward(self, x: Tensor) -> Tensor:
            self.picks(self.number(x))
            return x * 2

    report = hl.compare(Unused(1, 1), Unused(-1, 2), run=(torch.ones(2, 4),))
    assert report["picks"].seen is None
    assert report["picks"].is_off
    assert not report["picks"].is_made_good


def test_what_is_made_good_is_so_with_a_tolerance_and_a_fault_is_not():
    a, b, x = pair()
    reorder(b[0])
    assert hl.compare(a, b, run=(x,), tolerance=1e-3).ok
    with torch.no_grad():
        b[1].down.bias.add_(1.0)
    assert hl.compare(a, b, run=(x,), tolerance=1e-3).first.site == "1.down"
