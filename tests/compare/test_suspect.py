"""A module that is off, and what a change of it explains."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hookline._compare.apart import difference
from hookline._compare.rounding import Limit
from hookline._compare.suspect import Suspect, passing_inside, results_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def suspect(b: nn.Module, **more: Any) -> Suspect:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    in_a, in_b = a(X).detach(), b(X).detach()
    limits = dict.fromkeys(difference(in_a, in_b).parts, Limit(1e-5, 1e-5))
    return Suspect(a, b, {"input": X}, {"input": X}, in_a, in_b, limits, lambda output: (in_a, output), **more)


def test_a_change_explains_if_the_output_is_then_that_of_a():
    torch.manual_seed(0)
    b = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    one = suspect(b)
    assert one.can_run_alone
    assert not one.explained_by(one.changeable)
    one.changeable[1] = nn.Tanh()
    assert one.explained_by(one.changeable)
    assert isinstance(b[1], nn.ReLU)


def test_a_change_that_leaves_most_of_the_error_explains_nothing():
    torch.manual_seed(0)
    b = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with torch.no_grad():
        b[0].bias.add_(1e-3)
    one = suspect(b)
    one.limits = dict.fromkeys(one.limits, Limit(9e-4, 1.0))
    nearly = copy.deepcopy(b)
    with torch.no_grad():
        nearly[0].bias.sub_(2e-4)
    assert not one.explained_by(nearly)
    with torch.no_grad():
        nearly[0].bias.sub_(8e-4)
    assert one.explained_by(nearly)


def test_places_that_are_paired_have_the_names_of_a():
    one = suspect(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), names={"0": "1", "1": "0"})
    assert one.as_in_a("1:inputs") == "0:inputs"
    assert one.as_in_b("0") == "1"
    assert suspect(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), names={"1": "0"}).as_in_a("1") == "1 of b"


def test_what_passes_inside_and_what_functions_return_is_seen():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

    module = Twice()
    inside = passing_inside(module, {"x": X})
    assert set(inside) == {"inner:inputs", "inner"}
    results = results_of(module, {"x": X}, None)
    assert torch.equal(results["/tanh#0"]["inputs"]["input"], inside["inner"])
