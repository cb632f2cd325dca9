"""What the dtypes of two models explain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._compare.apart import NOTHING_APART, MeasuredPart
from hookline._compare.recording import ModuleCall, paths_of, record
from hookline._compare.rounding import Rounding, dtype_of_model, dtype_of_run, run_alone, run_in

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
PART = {"": MeasuredPart(NOTHING_APART, 2.0, 2.0)}


def call(module: nn.Module) -> ModuleCall:
    return ModuleCall(0, module, {"input": X}, module(X))


def test_the_coarser_dtype_explains_more():
    module = nn.Linear(64, 64)
    output = module(X)
    allowed = [
        Rounding(dtype, torch.float32, None).measured(call(module), PART)[""].largest
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert allowed == sorted(allowed)
    assert allowed[2] > 1000 * allowed[0]
    exact = module.double()(X.double())
    module.float()
    assert (exact - output).abs().max() < allowed[0]
    assert (module.bfloat16()(X.bfloat16()) - output).abs().max() < allowed[2]


def test_a_tolerance_is_a_share_of_the_largest_element():
    module = nn.Linear(64, 64)
    allowed = Rounding(torch.float32, torch.float32, 0.01).measured(call(module), PART)
    assert allowed == {"": (0.01 * 2, float("inf"))}


def test_a_module_that_knows_no_other_dtype_gets_a_guess():
    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert input.dtype == torch.float32
            return super().forward(input)

    module = Picky(64, 64)
    assert run_in(call(module), torch.float64) is None
    assert Rounding(torch.float32, torch.float32, None).measured(call(module), PART)[""].largest > 0


def test_the_dtype_of_a_model_is_that_of_most_parameters():
    assert dtype_of_model(nn.Sequential(nn.Linear(9, 9).bfloat16(), nn.LayerNorm(9))) == torch.bfloat16
    assert dtype_of_model(nn.ReLU()) == torch.float32


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
    ran = record(model, ((ids,), {}), paths_of(model))
    assert dtype_of_model(model) == torch.float32
    assert dtype_of_run(model, ran) == torch.bfloat16
    plain = copy.deepcopy(model)
    plain.__class__ = type("Plain", (Auto,), {"forward": lambda self, ids: self.norm(self.linear(self.words(ids)))})
    assert hl.compare(plain, model, run=(ids,)).ok
    model.norm.eps = 1.0
    assert hl.compare(plain, model, run=(ids,)).first.hint == "eps is 1e-05 in a and 1.0 in b"


def test_a_module_runs_alone_with_its_arguments_by_name():
    class Many(nn.Module):
        def forward(self, x, *more, scale=1, **named):
            return (x + sum(more)) * scale + named["shift"]

    given = {"x": X, "more": (X, X), "scale": 2, "shift": 1}
    torch.testing.assert_close(run_alone(Many(), given), 6 * X + 1)


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
