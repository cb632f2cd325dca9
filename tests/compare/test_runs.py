"""The runs of a comparison: what b's modules get, and in which order levels are measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._compare.runs import Runs

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.factor = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x) * self.factor)


def runs_of(a: nn.Module, b: nn.Module, **options: Any) -> Runs:
    given = {"match": None, "to_b": None, "to_a": None, "tolerance": None, **options}
    dtype = next(b.parameters()).dtype
    return Runs((a, b), (((X,), {}), ((X.to(dtype),), {})), **given)


def test_levels_are_those_of_b_without_the_model_itself():
    runs = runs_of(Scaled(1), Scaled(2))
    assert runs.levels() == [{"first": "first", "block": "block"}, {"block.0": "block.0", "block.1": "block.1"}]
    assert runs.all_levels()[0] == {"": ""}


def test_seen_errors_are_inherited_and_local_ones_are_not():
    runs = runs_of(Scaled(1), Scaled(2))
    places = {path: runs.seen(path, other) for path, other in runs.matching.pairs.items()}
    for pairs in runs.levels():
        runs.measure_local(pairs, places)
    assert places["block.0"].seen.relative > 0.1
    assert all(places[path].local.is_none for path in ("first", "block", "block.0", "block.1"))
    assert not places[""].local.is_none


def test_b_gets_what_a_got_in_its_own_form():
    runs = runs_of(Scaled(1), Scaled(2).double(), to_b=lambda tensor: tensor)
    given = runs.given("block.0", 0)
    assert given["input"].dtype == torch.float64
    torch.testing.assert_close(given["input"].float(), runs.of_a.calls["block.0"][0].inputs["input"])
    assert runs.given("block.0", 1) is None


def test_a_module_inside_may_return_what_a_s_does():
    a = Scaled(1)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.block[0].bias.add_(1)
    runs = runs_of(a, b)
    pairs = {"block": "block"}
    error, _ = runs.measure_with_outputs({"block": ["block.0"]}, pairs)["block"]
    assert error.is_none
    error, _ = runs.measure_with_outputs({"block": []}, pairs)["block"]
    assert error.relative > 0.1


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
    with pytest.raises(hl.HooklineError, match="writes to its parameter 'parameter'"):
        hl.compare(a, copy.deepcopy(a), run=(X,))
