"""What the dtypes of two models explain."""

from __future__ import annotations

import torch
from torch import nn

from hookline._compare.rounding import Rounding, dtype_of_model, run_alone, run_in

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def test_the_coarser_dtype_explains_more():
    module = nn.Linear(64, 64)
    output = module(X)
    allowed = [
        Rounding(nn.Linear(64, 64).to(dtype), module, None).allowed(module, {"input": X}, output)
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
    output = module(X)
    allowed = Rounding(module, module, 0.01).allowed(module, {"input": X}, output)
    assert allowed == 0.01 * output.abs().max().item()


def test_a_module_that_knows_no_other_dtype_gets_a_guess():
    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert input.dtype == torch.float32
            return super().forward(input)

    module = Picky(64, 64)
    assert run_in(module, {"input": X}, torch.float64) is None
    assert Rounding(module, module, None).allowed(module, {"input": X}, module(X)) > 0


def test_the_dtype_of_a_model_is_that_of_most_parameters():
    assert dtype_of_model(nn.Sequential(nn.Linear(9, 9).bfloat16(), nn.LayerNorm(9))) == torch.bfloat16
    assert dtype_of_model(nn.ReLU()) == torch.float32


def test_a_module_runs_alone_with_its_arguments_by_name():
    class Many(nn.Module):
        def forward(self, x, *more, scale=1, **named):
            return (x + sum(more)) * scale + named["shift"]

    given = {"x": X, "more": (X, X), "scale": 2, "shift": 1}
    torch.testing.assert_close(run_alone(Many(), given), 6 * X + 1)
