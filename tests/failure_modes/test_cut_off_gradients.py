"""Changes of gradients that no gradient reaches, though a backward runs: they say so at the end of their block."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import mlp

X = torch.ones(3, 4)
CHANGES: dict[str, Callable[[nn.Module, str], Any]] = {
    "patch": lambda model, site: hl.patch(model, {site: 0.0}),
    "edit": lambda model, site: hl.edit(model, site, torch.zeros_like),
}
WARNED = r"'{}' changed nothing: a backward ran in this block, and no gradient came here"


class Detached(nn.Module):
    """Lets no gradient back into its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).detach())


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.parametrize("site", ["first:grad_output", "first:grad_output[:, 0]", "first/linear:grad_output"])
def test_a_gradient_that_is_cut_off_is_told_of(verb: str, site: str) -> None:
    model = Detached()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format(site.replace("[", r"\[").replace("]", r"\]"))):
        with CHANGES[verb](model, site):
            model(X).sum().backward()


@pytest.mark.parametrize("verb", CHANGES)
def test_so_is_one_that_autograd_was_not_asked_for(verb: str) -> None:
    model = mlp()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format("0:grad_output")):
        with CHANGES[verb](model, "0:grad_output"):
            torch.autograd.grad(model(X).sum(), model[2].weight)


def test_so_is_one_in_a_model_whose_parameters_get_no_gradient() -> None:
    model = Detached().requires_grad_(False)
    model.last.bias.requires_grad_()
    with pytest.warns(hl.HooklineWarning, match=WARNED.format("first:grad_output")):
        with hl.patch(model, {"first:grad_output": 0.0}):
            torch.autograd.grad(model(X.clone().requires_grad_()).sum(), model.last.bias)


class TestNothingIsSaid:
    @pytest.fixture(autouse=True)
    def _as_errors(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_where_the_backward_comes_after_the_block(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            loss = model(X).sum()
        loss.backward()
        assert not model[0].weight.grad.any()  # type: ignore[union-attr]

    def test_where_a_later_backward_reaches_it(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            loss = model(X).sum()
            torch.autograd.grad(loss, model[2].weight, retain_graph=True)
            loss.backward()

    def test_where_no_backward_runs(self) -> None:
        model = mlp()
        with hl.patch(model, {"0:grad_output": 0.0}):
            model(X)

    def test_of_a_backward_of_an_earlier_block(self) -> None:
        model = mlp()
        hooks = hl.Hooks(model, active=False).patch({"0:grad_output": 0.0})
        with hooks:
            earlier = model(X).sum()
        with hooks:
            loss = model(X).sum()
            torch.autograd.grad(earlier, model[2].weight)
        loss.backward()

    def test_when_missing_leaves_it_unsaid(self) -> None:
        model = Detached()
        with hl.patch(model, {"first:grad_output": 0.0}).when_missing("ignore"):
            model(X).sum().backward()


def test_a_part_that_the_loss_does_not_depend_on_is_told_of_as_such() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 1)
            self.second = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    model = TwoHeads()
    with pytest.warns(hl.HooklineWarning, match=r"'second:grad_output' .*: the loss may not depend on this value"):
        with hl.patch(model, {"*:grad_output": 0.0}):
            model(X)[0].sum().backward()
