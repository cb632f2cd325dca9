"""`backward=`: gradients of places and parameters, and the module that makes a wrong one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.planted_faults import model_and_inputs

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Detached(nn.Linear):
    """A linear layer whose input gets no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.detach())


class Scaled(torch.autograd.Function):
    """The identity, with a backward that is wrong."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WrongBackward(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(Scaled.apply(input))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def test_equal_models_have_equal_gradients():
    a = stack()
    report = hl.compare(a, copy.deepcopy(a), run=(X,), backward=squares)
    assert report.ok
    assert "so do the gradients" in report.verdict
    assert report.gradients["0.weight:grad"].seen.is_none
    assert report.gradients["2:grad_output"].local.is_none
    assert a[0].weight.grad is None


def test_a_wrong_backward_is_found_though_the_forward_is_right():
    a = stack()
    b = copy.deepcopy(a)
    b[1] = WrongBackward()
    report = hl.compare(a, b, run=(X,), backward=squares)
    assert not report.ok
    assert report.first.site == "1:grad_output"
    assert "the backward of '1' gives other gradients" in report.verdict
    assert report.gradients["0.weight:grad"].seen.relative == pytest.approx(1)
    assert not report.gradients["0:grad_output"].is_off
    with pytest.raises(hl.Diverged, match="backward of '1'"):
        report.check()
    assert "1:grad_output" in str(report)


def test_a_gradient_that_does_not_come_is_found():
    a = stack()
    b = copy.deepcopy(a)
    b[2][0].__class__ = Detached
    first = hl.compare(a, b, run=(X,), backward=squares).first
    assert first.site == "2.0:grad_output"
    assert first.note == "b gives no gradient to 'input', and a does"


def test_gradients_of_a_transformer_are_equal_in_another_attention():
    a, run = model_and_inputs("llama")
    b = copy.deepcopy(a)
    b.set_attn_implementation("sdpa")
    report = hl.compare(a, b, run=run, backward=lambda output: output.logits.float().logsumexp(-1).mean())
    assert report.ok, report.verdict
    assert len(report.gradients) == 52


def test_a_loss_that_is_none_is_refused():
    with pytest.raises(hl.HooklineError, match="backward= takes a function from the output"):
        hl.compare(stack(), stack(), run=(X,), backward=lambda output: output)
    with pytest.raises(hl.HooklineError, match="none"):
        hl.compare(nn.GELU(), nn.GELU(), run=(X,), backward=squares)
