"""A module's backward pass as one event: one call of the hook with the gradients of all inputs and outputs."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat.registrar import BackwardCall, register


class Residual(nn.Module):
    """A residual branch with an in-place activation, for which torch's own backward hooks raise."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Two(nn.Module):
    """Takes two tensors, and returns two."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * y


def followed(module: nn.Module, keep_values: bool = False) -> tuple[list[BackwardCall], hl.Hooks]:
    passes: list[BackwardCall] = []

    def note(one: BackwardCall) -> None:
        passes.append(one)

    return passes, register(module, "backward_values" if keep_values else "backward", note)


@pytest.mark.parametrize("name", ["", "0", "1", "1.linear", "1.act", "2"])
@pytest.mark.parametrize("is_leaf_followed", [False, True])
def test_the_gradients_are_those_of_torchs_own_backward_hooks(name: str, is_leaf_followed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Residual(inplace=True), nn.Linear(3, 1))
    x = torch.randn(2, 3, requires_grad=is_leaf_followed)
    passes, hooks = followed(model.get_submodule(name))
    model(x).sum().backward()
    hooks.remove()
    model[1].act.inplace = False  # Otherwise torch's own backward hooks raise.
    expected: list[Any] = []
    handle = model.get_submodule(name).register_full_backward_hook(
        lambda module, grad_input, grad_output: expected.append((grad_input, grad_output))
    )
    with (
        pytest.warns(UserWarning, match="no inputs require")
        if not is_leaf_followed and name in ("", "0")
        else nullcontext()
    ):
        model(x).sum().backward()
    handle.remove()
    (found,) = passes
    for mine, theirs in zip((found.grad_inputs, found.grad_outputs), expected[0], strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_each_call_of_a_module_has_a_pass_of_its_own() -> None:
    layer = nn.Linear(2, 2)
    passes, hooks = followed(layer, keep_values=True)
    x = torch.randn(1, 2)
    layer(layer(x)).sum().backward()
    hooks.remove()
    assert len(passes) == 2
    torch.testing.assert_close(passes[0].inputs[0], layer(x).detach())
    torch.testing.assert_close(passes[1].inputs[0], x)
    assert passes[1].grad_inputs == (None,)
    torch.testing.assert_close(passes[0].grad_inputs[0], passes[1].grad_outputs[0])


def test_inputs_are_those_given_by_position() -> None:
    module = nn.Bilinear(2, 3, 4)
    passes, hooks = followed(module, keep_values=True)
    one, two = torch.randn(1, 2, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    module(one, input2=two).sum().backward()
    hooks.remove()
    (found,) = passes
    torch.testing.assert_close(found.grad_inputs, (one.grad,))
    assert [value.requires_grad for value in (*found.inputs, *found.outputs)] == [False] * 2


def test_what_has_no_gradient_is_none_and_keeps_its_place() -> None:
    lstm = nn.LSTM(3, 2)
    passes, hooks = followed(lstm)
    _, (_, cell) = lstm(torch.randn(4, 3))
    cell.sum().backward()
    hooks.remove()
    (found,) = passes
    assert found.grad_inputs == (None,)
    output, (hidden, cell_gradient) = found.grad_outputs
    assert output is hidden is None
    assert cell_gradient.equal(torch.ones(1, 2))


def test_an_input_that_gets_no_gradient_is_not_waited_for() -> None:
    module = Two()
    passes, hooks = followed(module)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    module(x, y)[0].sum().backward()
    hooks.remove()
    (found,) = passes
    assert found.grad_inputs[0].equal(torch.full((2,), 2.0))
    assert found.grad_inputs[1] is None
    assert found.grad_outputs[1] is None


def test_each_backward_through_one_graph_is_a_pass() -> None:
    layer = nn.Linear(2, 2)
    passes, hooks = followed(layer)
    output = layer(torch.ones(1, 2, requires_grad=True)).sum()
    output.backward(retain_graph=True)
    output.backward()
    hooks.remove()
    assert len(passes) == 2
    torch.testing.assert_close(passes[0].grad_inputs, passes[1].grad_inputs)


def test_a_recomputed_call_has_one_pass() -> None:
    layer = nn.Linear(2, 2)
    passes, hooks = followed(layer)
    checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
    hooks.remove()
    assert len(passes) == 1


def test_what_takes_any_number_of_arguments_has_each_in_its_place() -> None:
    class Sum(nn.Module):
        def forward(self, *values: Tensor, scale: float = 1.0) -> Tensor:
            return sum(values) * scale  # type: ignore[return-value]

    module = Sum()
    passes, hooks = followed(module)
    module(torch.ones(1), torch.ones(1, requires_grad=True), scale=3.0).sum().backward()
    hooks.remove()
    assert passes[0].grad_inputs == (None, torch.tensor([3.0]))


def test_a_parameter_named_args_is_one_argument() -> None:
    class Named(nn.Module):
        def forward(self, args: Tensor) -> Tensor:
            return args * 2

    module = Named()
    passes, hooks = followed(module)
    module(torch.ones(3, requires_grad=True)).sum().backward()
    hooks.remove()
    assert [gradient.tolist() for gradient in passes[0].grad_inputs] == [[2.0, 2.0, 2.0]]


def test_a_forward_on_the_instance_has_the_names_of_its_own() -> None:
    module = nn.Module()  # The forward of the class takes `*input`.
    module.forward = lambda input: input * 2  # type: ignore[method-assign, assignment]
    passes, hooks = followed(module)
    module(torch.ones(3, requires_grad=True)).sum().backward()
    hooks.remove()
    assert [gradient.tolist() for gradient in passes[0].grad_inputs] == [[2.0, 2.0, 2.0]]


def test_one_tensor_at_two_places_has_the_gradient_of_each() -> None:
    class Weighted(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return one * 2 + other * 3

    module = Weighted()
    passes, hooks = followed(module)
    x = torch.ones(1, requires_grad=True)
    module(x, x).sum().backward()
    hooks.remove()
    assert passes[0].grad_inputs == (torch.tensor([2.0]), torch.tensor([3.0]))
    assert x.grad is not None
    assert x.grad.item() == 5


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    layer = nn.Linear(2, 2)
    passes, hooks = followed(layer, keep_values=True)
    with torch.no_grad():
        layer(torch.ones(1, 2))
    output = layer(torch.ones(1, 2, requires_grad=True))
    kept = weakref.ref(output)
    gc.disable()
    try:
        del output
        assert kept() is None
    finally:
        gc.enable()
    hooks.remove()
    assert passes == []


def test_a_method_has_a_backward_pass_too() -> None:
    class Model(nn.Module):
        def inner(self, x: Tensor) -> Tensor:
            return x * 3

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    model = Model()
    passes: list[BackwardCall] = []
    hooks = hl.Hooks(model)
    register(hooks, "backward", passes.append, site=hl.Site.parse("inner()"))
    model(torch.ones(1, requires_grad=True)).sum().backward()
    hooks.remove()
    assert passes[0].grad_inputs == (torch.tensor([3.0]),)


def test_an_output_that_is_there_twice_has_its_gradient_at_both_places() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y

    module = Doubled()
    passes, hooks = followed(module)
    one, other = module(torch.ones(1, requires_grad=True))
    (one + 3 * other).sum().backward()
    hooks.remove()
    assert passes[0].grad_outputs == (torch.tensor([4.0]), torch.tensor([4.0]))


def test_a_nested_value_of_which_no_gradient_came_is_none() -> None:
    lstm = nn.LSTM(3, 2)
    passes, hooks = followed(lstm)
    lstm(torch.randn(4, 3))[0].sum().backward()
    hooks.remove()
    assert passes[0].grad_outputs[1] is None
