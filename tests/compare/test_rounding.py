"""What the dtypes of two models explain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def linear(**changes: float) -> nn.Linear:
    """Return a linear layer that always has the same numbers, some multiplied by a factor."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        for name, factor in changes.items():
            getattr(layer, name).mul_(factor)
    return layer


def test_the_coarser_dtype_explains_more():
    allowed = []
    for of_a, of_b in [
        (torch.float64, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.bfloat16)
    ]:  # fmt: skip
        options = {"run": (X.to(of_a),), "run_b": (X.to(of_b),)}
        report = hl.compare(linear().to(of_a), linear().to(of_b), **options)
        assert report.ok
        assert report[""].local.largest > 0
        assert not hl.compare(linear().to(of_a), linear(weight=1.1).to(of_b), **options).ok
        allowed.append(report[""].rounding.largest)
    assert allowed == sorted(allowed)
    assert allowed[2] > 1000 * allowed[0]


class Picky(nn.Linear):
    """Knows no other dtype."""

    halves = False

    def forward(self, input: Tensor) -> Tensor:
        assert input.dtype == torch.float32
        if self.halves:
            return input[..., 32:] @ self.weight[:, 32:].T + (input[..., :32] @ self.weight[:, :32].T + self.bias)
        return super().forward(input)


def test_a_module_that_knows_no_other_dtype_gets_a_guess():
    a = Picky(64, 64)
    b = copy.deepcopy(a)
    b.halves = True
    report = hl.compare(a, b, run=(10 * X,))
    assert report.ok
    assert report[""].local.largest > 0
    with torch.no_grad():
        b.bias.add_(1e-2)
    assert not hl.compare(a, b, run=(10 * X,)).ok


def test_the_dtype_of_a_model_is_that_of_most_parameters():
    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear, self.norm = linear().to(dtype), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x.to(self.linear.weight.dtype)).float())

    report = hl.compare(Mixed(torch.float32), Mixed(torch.bfloat16), run=(X,))
    assert report.ok
    assert (
        report["norm"].rounding.relative
        > 1e-3
        > hl.compare(Mixed(torch.float32), Mixed(torch.float32), run=(X,))["norm"].rounding.relative
    )
    assert not hl.compare(nn.ReLU(), nn.ReLU6(), run=(10 * X,)).ok


def test_the_dtype_of_a_run_under_autocast_is_that_of_its_results():
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.linear = nn.Embedding(1000, 8), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.norm(self.linear(self.words(ids)))

    model, ids = Auto(), torch.arange(4)
    plain = copy.deepcopy(model)
    plain.__class__ = type("Plain", (Auto,), {"forward": lambda self, ids: self.norm(self.linear(self.words(ids)))})
    assert hl.compare(plain, model, run=(ids,)).ok
    model.norm.eps = 1.0
    assert hl.compare(plain, model, run=(ids,)).first.hint == "eps is 1e-05 in a and 1.0 in b"


class Many(nn.Module):
    """Takes arguments of every kind."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor, /, *more: Tensor, scale: int = 1, **named: Any) -> Tensor:
        return (x**self.power + sum(more)) * scale + named["shift"]


def test_a_module_runs_alone_with_arguments_of_every_kind():
    a, b = (nn.ModuleDict({"many": Many(power)}) for power in (1, 2))
    for model in (a, b):
        model.forward = lambda x, model=model: model["many"](x, x, 2 * x, scale=2, shift=1)
    assert hl.compare(a, b, run=(X,)).first.hint == "power is 1 in a and 2 in b"  # Tested with a run of its own.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fault_of_a_few_per_cent_shows_in_half_precision_however_deep_the_model(dtype):
    class Deep(nn.Module):
        def __init__(self, factor: float = 1.0) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(24)
            )
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return self.factor * x

    x = torch.randn(8, 32)
    options = {"run": (x.to(dtype),), "run_b": (x.bfloat16(),)}
    assert hl.compare(Deep().to(dtype), Deep().bfloat16(), **options).ok
    assert not hl.compare(Deep().to(dtype), Deep(1.05).bfloat16(), **options).ok
