"""Random chains of modules that write in place and return views and aliases: gradients are right or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from tests.support.models import Scaled, loss_of


def double_the_first_half(x: Tensor) -> Tensor:
    x[..., :2].mul_(2)
    return x


# The operation of a module, and the same operation without in-place writes, views and aliases.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu_": (Tensor.relu_, Tensor.relu),
    "mul_": (lambda x: x.mul_(1.5), lambda x: x * 1.5),
    "half_": (double_the_first_half, lambda x: torch.cat([x[..., :2] * 2, x[..., 2:]], -1)),
    "residual_": (lambda x: x.add_(x.tanh()), lambda x: x + x.tanh()),
    "residual": (lambda x: x + x.tanh(), lambda x: x + x.tanh()),
    "identity": (lambda x: x, Tensor.clone),
    "view": (lambda x: x.view(x.shape), Tensor.clone),
    "transpose": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1).clone()),
    "clone": (Tensor.clone, Tensor.clone),
    "tanh": (Tensor.tanh, Tensor.tanh),
}


class Step(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.does, self.means = KINDS[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


def chain_of(kinds: list[str]) -> nn.Sequential:
    """Return a Linear, whose output in three dimensions is a view, and these steps. Discard chains torch refuses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *map(Step, kinds))
    try:
        loss_of(model(torch.randn(3, 2, 4))).backward()
    except RuntimeError:
        assume(False)  # An in-place write to a tensor that the backward needs.
    model.zero_grad()
    return model


def stages(
    model: nn.Sequential, x: Tensor, change: Callable[[str, Tensor], Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Run a chain without in-place writes and with `change` at every site; return the changed values and the output."""
    found: dict[str, Tensor] = {}
    for number, module in enumerate(model):
        if number:
            x = found[f"{number}:grad_input"] = change(f"{number}:grad_input", x.clone())
        x = module.means(x) if isinstance(module, Step) else module(x)
        x = found[f"{number}:grad_output"] = change(f"{number}:grad_output", x.clone())
    return found, x


chains = st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=5)


@settings(deadline=None)
@given(chains, st.data())
def test_every_captured_gradient_is_the_oracles_or_refused(kinds: list[str], data: st.DataObject) -> None:
    model, x = chain_of(kinds), torch.randn(3, 2, 4)
    values, output = stages(model, x, lambda _, value: value)
    expected = dict(zip(values, torch.autograd.grad(loss_of(output), list(values.values())), strict=True))
    sites = data.draw(st.lists(st.sampled_from(list(values)), min_size=1, unique=True))
    refused = False
    try:
        with hl.capture(model, *sites) as acts:
            loss_of(model(x)).backward()
    except hl.NeverFired:
        refused = True
    if refused:
        assert "transpose" in kinds  # Only a write into a transposed view is refused.
        return
    for site in sites:
        torch.testing.assert_close(acts[site], expected[site], msg=lambda text, site=site: f"{site} of {kinds}: {text}")


@settings(deadline=None)
@given(chains, st.data())
def test_every_edited_gradient_acts_where_it_stands_or_is_refused(kinds: list[str], data: st.DataObject) -> None:
    model, x = chain_of(kinds), torch.randn(3, 2, 4)
    sites = list(stages(model, x, lambda _, value: value)[0])
    factors = data.draw(st.dictionaries(st.sampled_from(sites), st.sampled_from([3.0, -1.0, 0.5]), min_size=1))
    changes = {
        site: lambda gradient, factor=factor: (gradient * factor).clamp(-2, 2) for site, factor in factors.items()
    }

    def change(site: str, value: Tensor) -> Tensor:
        return Scaled.apply(value, changes[site]) if site in changes else value

    expected = torch.autograd.grad(loss_of(stages(model, x, change)[1]), list(model.parameters()))
    hooks, refused = hl.Hooks(model), False
    for site, function in changes.items():
        hooks.edit(site, function)
    try:
        loss_of(model(x)).backward()
    except hl.HooklineError:
        refused = True
    hooks.remove()
    if refused:
        assert {"transpose", "residual_"} & set(kinds)  # As above, or a gradient that arrives in two parts.
        return
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda text: f"{factors} of {kinds}: {text}")


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("is_root_hooked", [True, False])
def test_hooks_of_a_container_and_of_its_last_child_stand_a_write_that_follows(
    needs_grad: bool, is_root_hooked: bool
) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.ReLU(inplace=True))
    x = torch.randn(4, 2, requires_grad=needs_grad)
    hidden = model[0](x).detach().requires_grad_()
    hidden.relu().sum().backward()
    owners = [model[0], model[0][1], *([model] if is_root_hooked else [])]
    every = [hl.Hooks(owner) for owner in owners]
    caches = [hooks.capture(":grad_output") for hooks in every]
    model(x).sum().backward()
    for hooks in every:
        hooks.remove()
    assert torch.equal(caches[0][":grad_output"], hidden.grad)
    assert torch.equal(caches[1][":grad_output"], hidden.grad)


def test_the_gradient_of_a_view_written_in_a_model_around_it_is_seen_to_at_that_models_end() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(), nn.ReLU(inplace=True))
    inner, outer = hl.Hooks(model[1]), hl.Hooks(model)
    acts, _ = inner.capture(":grad_output"), outer.capture("0:grad_output")
    x = torch.randn(3, 2)
    model(x).sum().backward()
    inner.remove()
    outer.remove()
    assert torch.equal(acts[":grad_output"], (model[0](x) > 0).float())
