"""Both models draw the same random numbers, and those of the process go on as if nothing had run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hookline as hl
from tests.errors.wording import says
from tests.support.compared_blocks import compared

X = torch.ones(2, 3)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(3)


def test_both_models_draw_the_same_numbers_and_those_of_the_process_go_on():
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    report = compared(noisy, noisy, X)
    assert torch.equal(torch.rand(2), expected)
    assert report.ok
    assert report[""].seen.exact == 1
    assert torch.equal(compared(noisy, noisy, X)[""].seen_values[0], report[""].seen_values[0])


def test_they_go_on_after_an_error_too():
    def fails(x: Tensor) -> Tensor:
        raise ValueError(f"no {noisy(x).shape}")

    before = torch.get_rng_state()
    with pytest.raises((ValueError, hl.HooklineError), match=says("no torch Size")):
        compared(noisy, fails, X)
    assert torch.equal(torch.get_rng_state(), before)
