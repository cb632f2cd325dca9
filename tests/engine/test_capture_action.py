"""The options of a capture and the values it keeps: attached to the graph, returned by a transform, odd objects."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Gives, mlp, tokens

OPTIONS = "save(clone=True, dtype=torch.float16)"


def test_a_capture_tells_the_options_that_are_not_usual() -> None:
    hooks = hl.Hooks(nn.Identity(), active=False)
    usual = {
        name: one.default
        for name, one in inspect.signature(hl.Hooks.capture).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    for options, text in ((usual, "save()"), ({"clone": True, "dtype": torch.float16}, OPTIONS)):
        hooks.capture("", **options)
        assert [repr(hook.action) for hook in hooks] == [text]
        hooks.remove()


def test_a_transform_may_ask_for_the_call_and_is_called_once_for_each() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(1, 3, requires_grad=True)
    hooks = hl.Hooks(layer)
    acts = hooks.capture(
        "", keep="all", with_call=True, transform=lambda value, call: (call.number, call.args[0].sum())
    )
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    layer(2 * x)
    assert [(number, total.item()) for number, total in acts.calls("")] == [(0, 3.0), (1, 6.0)]
    hooks.remove()


def test_the_call_is_for_a_transform() -> None:
    with pytest.raises(hl.HooklineError, match=says("with_call=True passes the call to")):
        hl.capture(mlp(), "0", with_call=True)


def test_a_transform_of_a_gradient_gets_the_call_to_which_it_belongs() -> None:
    layer = nn.Linear(2, 2)
    numbers: list[int] = []
    with hl.capture(
        layer,
        ":grad_output",
        keep="all",
        with_call=True,
        transform=lambda value, call: numbers.append(call.number) or 1,
    ):
        (layer(torch.ones(1, 2)) + layer(torch.ones(1, 2))).sum().backward()
    assert sorted(numbers) == [0, 1]


@pytest.mark.parametrize("keep", ["last", "all", 2])
def test_a_transform_that_returns_none_keeps_nothing_of_that_call(keep: Any) -> None:
    layer = nn.Identity()
    positive = lambda value: value if value.sum() > 0 else None  # noqa: E731
    with hl.capture(layer, "", keep=keep, transform=positive) as acts:
        layer(-torch.ones(1))
        with pytest.raises(hl.NotCaptured, match=says("the transform has kept nothing")):
            acts[""]
        for value in (1.0, -2.0, 3.0, -4.0):
            layer(torch.tensor([value]))
    assert [value.item() for value in acts.calls("")] == ([3.0] if keep == "last" else [1.0, 3.0])


def test_a_module_that_returns_none_is_captured_as_none() -> None:
    class Nothing(nn.Module):
        def forward(self, _x: Tensor) -> None:
            return None

    _, acts = hl.run(Nothing(), torch.ones(1), capture="")
    assert acts[""] is None


def test_a_value_of_the_graph_is_right_also_after_it_was_overwritten() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.randn(4, 3)
    before = model[0](x)
    with hl.capture(model, "0", "1", detach=False) as acts:
        loss = model(x).sum()
    assert torch.equal(acts["0"], before)
    acts["0"].sum().backward()
    assert torch.equal(model[0].bias.grad, torch.full((3,), 4.0))
    (gradient,) = torch.autograd.grad(loss, acts["1"])
    assert torch.equal(gradient, model[2].weight.expand(4, 3))
    model.zero_grad()


def test_the_graphs_own_value_is_given_while_nobody_overwrote_it() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0", detach=False) as acts:
        output = model(x)
    acts["0"].retain_grad()
    output.sum().backward()
    assert acts["0"].grad is not None
    model.zero_grad()


def test_a_transform_sees_the_graphs_own_value_and_may_not_write_to_it() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0", detach=False, transform=lambda value: value) as acts:
        output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), acts["0"])
    assert gradient.shape == (2, 8)
    with pytest.raises(hl.EditError, match=says("the transform wrote into the", "0")):
        with hl.capture(model, "0", detach=False, transform=lambda value: value.detach().zero_()):
            model(x)


def test_own_values_hold_nothing_once_the_cache_is_gone() -> None:
    model, x = GPT(), tokens()
    with hl.capture(model, "h.*.mlp.0", detach=False) as acts:
        model(x).sum()
    alive = weakref.ref(acts["h.0.mlp.0"])
    del acts
    gc.collect()
    assert alive() is None


class Locked:
    """An object that can't be copied."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.lock = threading.Lock()


def test_a_value_of_the_graph_that_cannot_be_copied_is_the_models_own() -> None:
    for value in (Locked(torch.ones(2)), iter([1, 2]), {torch.ones(2)}):
        model = Gives(value)
        with pytest.raises(hl.HooklineError), hl.capture(model, ""):
            model(0)
        with hl.capture(model, "", detach=False) as acts:
            model(0)
        assert acts[""] is value


def test_an_object_that_is_patched_in_without_the_check_is_that_object() -> None:
    given = Locked(torch.ones(2))
    model = nn.Sequential(Gives(1))
    with hl.patch(model, {"0": given}, check=False):
        assert model(0) is given
    tensor = torch.ones(2)
    with hl.patch(model, {"0": (tensor, given)}, check=False), pytest.raises(hl.HooklineError):
        model(0)
    with hl.patch(model, {"0": tensor}, check=False):
        assert model(0) is not tensor  # The model gets a copy, because it may write into it.
