"""`backward=`: gradients of places and parameters, and the module that makes a wrong one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.planted_faults import SAME, main_tensor, model_and_inputs

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
    with pytest.raises(hl.HooklineError, match=says("backward= takes a function from")):
        hl.compare(stack(), stack(), run=(X,), backward=lambda output: output)
    with pytest.raises(hl.HooklineError, match="none"):
        hl.compare(nn.GELU(), nn.GELU(), run=(X,), backward=squares)


def test_a_cache_that_is_given_is_the_same_for_both():
    transformers = pytest.importorskip("transformers")
    a, run = model_and_inputs("llama")
    cache = transformers.DynamicCache()
    with torch.no_grad():
        a(**{**run, "use_cache": True}, past_key_values=cache)
    given = {"input_ids": run["input_ids"], "past_key_values": cache, "use_cache": True}
    report = hl.compare(a, copy.deepcopy(a), run=given, backward=lambda output: output.logits.logsumexp(-1).mean())
    assert report.ok, report.verdict


def test_gradients_of_what_is_made_good_are_not_counted():
    a = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 2))
    b = copy.deepcopy(a)
    with torch.no_grad():
        for one in b[0][0].parameters():
            one.copy_(one.flip(0).clone())
        b[0][2].weight.copy_(b[0][2].weight.flip(1).clone())
    report = hl.compare(a, b, run=(X,), backward=squares)
    assert report.ok, report.verdict
    assert report.gradients["0.0.weight:grad"].seen.relative > 0.1


class OnlyHere(nn.Module):
    """A linear layer that knows whether its model runs, and whose weight gets another gradient there."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor, self.given = nn.Parameter(torch.eye(8)), factor, None

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.given, Tensor):
            raise RuntimeError("not by itself")
        weight = self.weight * self.factor - self.weight.detach() * (self.factor - 1)
        return x @ weight


class Gives(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(4, 8), OnlyHere(factor)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.given = x
        return self.inner(self.first(x))


def test_a_gradient_that_no_module_explains_is_not_ok():
    report = hl.compare(Gives(1.0), Gives(3.0), run=(X,), backward=squares)
    assert not report.ok
    assert hl.compare(Gives(1.0), Gives(1.0), run=(X,), backward=squares).ok


def test_a_parameter_without_a_gradient_is_not_ok():
    a = stack()
    b = copy.deepcopy(a)
    b[3].weight.requires_grad_(False)
    report = hl.compare(a, b, run=(X,), backward=squares)
    assert report.first.note == "b computes no gradient for it, and a does"
    assert "the gradient of '3.weight' differs" in report.verdict


def test_gradients_of_weights_that_one_model_holds_transposed_are_turned():
    class Turned(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(linear.weight.detach().T.clone())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    torch.manual_seed(0)
    linear = nn.Linear(4, 4, bias=False)
    a, b = nn.Sequential(linear, nn.GELU()), nn.Sequential(Turned(linear), nn.GELU())
    report = hl.compare(a, b, run=(X,), backward=squares)
    assert report.ok, report.verdict
    assert report.gradients["0.weight:grad"].seen.relative < 1e-6


class Tied(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if is_tied:
            self.head.weight = self.words.weight
        else:
            self.head.load_state_dict(self.words.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_that_only_one_model_ties_are_named(is_tied):
    ids = torch.arange(5)
    assert hl.compare(Tied(is_tied), Tied(is_tied), run=(ids,), backward=squares).ok
    first = hl.compare(Tied(is_tied), Tied(not is_tied), run=(ids,), backward=squares).first
    assert first.site == "head.weight:grad"
    side, other = "ab" if is_tied else "ba"
    assert first.note == f"{side} has one weight as 'head.weight' and 'words.weight', and {other} does not"


@pytest.mark.parametrize("kind", ["other_order_of_sums", "in_float64", "in_half"])
def test_a_gradient_that_is_nothing_but_rounding_is_no_fault(kind):
    def mean(output) -> Tensor:
        return main_tensor(output).float().square().mean()

    a, b, options = SAME[kind](*model_and_inputs("distilbert"))
    report = hl.compare(a, b, **options, backward=mean)
    assert report.ok, report.verdict
    biases = [place for site, place in report.gradients.items() if site.endswith("k_lin.bias:grad")]
    assert max(place.seen.relative for place in biases) > 1e-2


def test_a_wrong_gradient_in_half_precision_is_found_in_a_deep_model():
    class Deep(nn.Module):
        def __init__(self, turn: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.turn = nn.ModuleList(nn.Linear(16, 16) for _ in range(80)), turn

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + 0.1 * layer(x)
            return Scaled.apply(x) if self.turn else x

    x = torch.randn(8, 16).bfloat16()
    a, b = Deep(turn=False).bfloat16(), Deep(turn=True).bfloat16()
    assert hl.compare(a, copy.deepcopy(a), run=(x,), backward=lambda output: output.float().square().mean()).ok
    assert not hl.compare(a, b, run=(x,), backward=lambda output: output.float().square().mean()).ok
