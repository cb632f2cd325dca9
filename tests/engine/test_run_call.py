"""The Call that a hook's function gets with `with_call=True`, its other arguments, and hooks that may stay unused."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._kernel import Call
from tests.errors.wording import says
from tests.support.models import mlp


def test_the_hooks_of_one_call_share_its_notes_in_the_backward_too() -> None:
    model, x = nn.Sequential(*[nn.Linear(3, 3)] * 2), torch.ones(1, 3)
    found: list[Any] = []

    def note(value: Tensor, call: Call) -> None:
        call.notes["output"] = value.detach()

    def read(_gradient: Tensor, call: Call) -> None:
        found.append((call.number, call.notes["output"]))

    with hl.edit(model, "0", note, with_call=True), hl.edit(model, "0:grad_output", read, with_call=True):
        output = model(x)
        output.sum().backward()
    assert [number for number, _ in found] == [1, 0]
    torch.testing.assert_close(found[0][1], output.detach())
    torch.testing.assert_close(found[1][1], model[0](x).detach())


def test_the_notes_of_a_call_are_those_of_its_recomputation() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(1, 3, requires_grad=True)
    found: list[int] = []
    hooks = hl.Hooks(layer)
    hooks.edit("", lambda value, call: call.notes.update(sum=value.sum().item()), with_call=True)
    hooks.edit(":grad_output", lambda gradient, call: found.append(call.notes["sum"]), with_call=True)
    output = checkpoint(layer, x, use_reentrant=False)
    output.sum().backward()
    assert found == [output.sum().item()]
    hooks.remove()


def test_notes_go_with_the_graph() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(1, 3)

    class Thing: ...

    alive: list[weakref.ref[Thing]] = []

    def note(_value: Tensor, call: Call) -> None:
        call.notes["thing"] = thing = Thing()
        alive.append(weakref.ref(thing))

    hooks = hl.Hooks(layer)
    hooks.edit("", note, with_call=True)
    hooks.edit(":grad_output", lambda gradient: None)
    output = layer(x)
    assert alive[0]() is not None
    del output
    assert alive[0]() is None
    hooks.remove()


def test_an_edit_may_be_given_the_models_own_tensor() -> None:
    model, x = mlp(), torch.ones(2, 4)
    kept: list[Tensor] = []

    def zero(value: Tensor) -> None:
        value.data.zero_()

    with hl.edit(model, "0", zero, clone=False), hl.edit(model, "1", kept.append, clone=False):
        output = model(x)
    assert torch.equal(output, model[2].bias.expand(2, 2))
    (gradient,) = torch.autograd.grad(output.sum(), kept[0])
    assert torch.equal(gradient, model[2].weight.sum(0).expand(2, 8))


def test_what_an_edit_of_the_models_own_tensor_returns_is_checked_like_any_other() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with (
        pytest.raises(hl.EditError, match=says("given where passes", "0", "(2, 8)")),
        hl.edit(model, "0", lambda value: value[:1], clone=False),
    ):
        model(x)
    with hl.edit(model, "0", lambda value: value[:1], clone=False, check=False):
        assert model(x).shape == (1, 2)
    with hl.edit(model, "0[:, 0]", lambda value: 7.0, clone=False), hl.capture(model, "0") as acts:
        model(x)
    assert acts["0"][:, 0].eq(7).all()


def test_any_object_can_be_patched_in_without_the_check() -> None:
    class Takes(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    model = Takes()
    hooks = hl.Hooks(model)
    hooks.patch({":input": None}, check=False)
    assert model(torch.ones(2)) is None
    hooks.remove()
    with pytest.raises(hl.EditError), hl.patch(model, {":input": None}):
        model(torch.ones(2))


def test_a_gradient_of_which_torch_gives_none_is_passed_over() -> None:
    lstm, x = nn.LSTM(3, 2), torch.randn(4, 3, requires_grad=True)
    with hl.capture(lstm, ":grad_output") as acts:
        _, (_, cell) = lstm(x)
        cell.sum().backward()
    output, (hidden, cell_gradient) = acts[":grad_output"]
    assert output is None
    assert hidden is None
    assert torch.equal(cell_gradient, torch.ones(1, 2))


def test_functions_of_one_factory_are_not_taken_for_the_same() -> None:
    model = mlp()

    def times(number: float) -> Any:
        return lambda value: value * number

    first, second = hl.Hooks(model), hl.Hooks(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.edit("0", times(2))
        second.edit("0", times(3))
        second.edit("0", lambda value: value * 4)
        first.edit("0", lambda value: value * 5)
    first.remove()
    second.remove()


def sae() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def test_hooks_on_another_model_act_when_a_function_calls_it() -> None:
    model, inner, x = mlp(), sae(), torch.ones(2, 4)
    with hl.capture(inner, "1") as acts, hl.edit(model, "0", inner):
        output = model(x)
    hidden = inner[1](inner[0](model[0](x)))
    assert torch.equal(acts["1"], hidden)
    with hl.edit(model, "0", inner), hl.patch(inner, {"1[:, 3]": 50.0}):
        assert not torch.allclose(model(x), output)
    hooks = hl.Hooks(inner)
    hooks.patch({"1": 0.0})
    with hl.edit(model, "0", inner):
        torch.testing.assert_close(model(x), model[2](inner[2].bias.relu()).expand(2, 2))
    with hl.capture(model, "0", transform=inner) as kept:
        model(x)
    assert torch.equal(kept["0"], inner[2].bias.expand(2, 8))
    hooks.remove()


def test_hooks_on_the_model_itself_rest_while_a_function_of_one_runs() -> None:
    model, x = mlp(), torch.ones(2, 4)
    bare = model(x)
    seen: list[Tensor] = []

    def again(value: Tensor) -> None:
        seen.append(model(x))
        seen.append(model[2](value.relu()))

    others = hl.Hooks(model)
    acts = others.capture("*", keep="all")
    with hl.edit(model, "0", again), hl.edit(model, "2", lambda value: value + 1):
        assert torch.equal(model(x), bare + 1)
    assert all(torch.equal(one, bare) for one in seen)
    assert [len(acts.calls(name)) for name in "012"] == [1, 1, 1]
    others.remove()


def test_a_block_that_a_function_opens_acts_on_the_model_itself() -> None:
    model, x = mlp(), torch.ones(2, 4)
    found: list[Tensor] = []

    def look(_value: Tensor) -> None:
        with hl.patch(model, {"0": 0.0}):
            found.append(hl.run(model, x, capture="1")[1]["1"])

    with hl.edit(model, "0", look):
        model(x)
    assert not found[0].any()


def test_an_edit_may_make_a_value_require_grad() -> None:
    frozen = mlp().requires_grad_(False)
    ids = torch.ones(2, 4)
    with (
        hl.edit(frozen, "0", Tensor.requires_grad_),
        hl.capture(frozen, "0:grad_output", "2:grad_output") as acts,
    ):
        frozen(ids).sum().backward()
    assert acts["0:grad_output"].shape == (2, 8)
    with (
        pytest.raises(hl.EditError, match=says("the function wrote into its")),
        hl.edit(frozen, "0", lambda value: value.requires_grad_() is None or None),
    ):
        frozen(ids)


def test_the_call_knows_the_model() -> None:
    model = mlp()
    found: list[Any] = []
    with hl.edit(model, "2", lambda value, call: found.append(call.model), with_call=True):
        model(torch.ones(2, 4))
    assert found == [model]


def test_a_module_that_is_no_child_has_the_name_of_its_attribute() -> None:
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.__dict__["second"] = self.first
            self.__dict__["hidden"] = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(self.first(x))

    model = nn.Sequential(Second())
    _, acts = hl.run(model, torch.ones(1, 2), capture=["0.second", "0.hidden"])
    assert torch.equal(acts["0.second"], model[0].first(torch.ones(1, 2)))
    assert torch.equal(acts["0.first"], acts["0.second"])
    assert torch.equal(acts["0.hidden"], model(torch.ones(1, 2)))
    assert [str(site) for site in hl.sites(model, "0.*")] == ["0.first"]


def test_a_place_that_says_output_means_no_other_port() -> None:
    hooks = hl.Hooks(mlp())
    hooks.edit("0", torch.relu)
    hooks.edit("0:input", torch.relu)
    hooks.edit("0:grad_output", torch.relu)
    assert len(hooks.at("0")) == 3
    assert [str(hook.site) for hook in hooks.at("0:output")] == ["0"]
    assert [str(hook.site) for hook in hooks.at((nn.Linear, ":output"))] == ["0"]
    hooks.remove()


def test_objects_that_are_called_are_not_taken_for_the_same() -> None:
    model = mlp()
    first, second = hl.Hooks(model), hl.Hooks(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.edit("1", nn.Linear(8, 8))
        second.edit("1", nn.Linear(8, 8))
    first.remove()
    second.remove()


def test_hooks_that_rested_whenever_something_passed_are_told() -> None:
    model = mlp()
    model.add_module("inner", sae())
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    with pytest.raises(hl.NeverFired, match=says("was passed over it ran", "1")):
        with hl.capture(model.inner, "1") as acts, hl.edit(model, "0", model.inner):
            model(torch.ones(2, 4))
    with pytest.raises(hl.NotCaptured, match=says("open the block inside that")):
        acts["1"]
    del model.forward
