"""The oracle, compared with values computed by hand, without hookline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties.composites import Recursive
from tests.properties.memories import Twice, Writer
from tests.properties.modules import SHAPE
from tests.properties.oracle import Oracle
from tests.properties.scripts import Script
from tests.properties.under_oracle import kept
from tests.properties.watches import Spot, Watch


def script(*steps: str, tied: bool = False, children: tuple[nn.Module, ...] = ()) -> Script:
    torch.manual_seed(0)
    return Script(*children, steps=steps, tied=tied)


def watched(oracle: Oracle, spot: Spot, port: str = "output", number: int | None = None, **rest: Any) -> Watch:
    """Capture every value at a spot."""
    given: dict[str, Any] = {"kind": "capture", "function": lambda part, _: part, **rest}
    watch = Watch("", spot, port, (), (), number, active=True, **given)
    watch.family = [watch]
    oracle.watches.append(watch)
    return watch


def edited(oracle: Oracle, spot: Spot, function: Callable[[Any, int], Any], port: str = "output") -> None:
    watched(oracle, spot, port, kind="edit", function=function)


def all_of(watch: Watch) -> list[Any]:
    return kept(watch, "all")


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


x = torch.linspace(-1, 1, 24).view(SHAPE)


def test_functions_are_those_of_the_modules_own_forward_by_name() -> None:
    model = script("adding_thrice", "children", children=(script("adding_thrice"),))
    oracle = Oracle(model)
    every = watched(oracle, Spot(model, "/add"))
    second = watched(oracle, Spot(model, "/add"), number=1)
    oracle.forward(model, "", x)
    first = x * 0.5 + x
    assert_equal(all_of(every), [first, first + 0.5, first + 0.5 + x * 0.1])
    assert_equal(all_of(second), [first + 0.5])


def test_each_call_of_a_recursive_module_counts_its_own_functions() -> None:
    model = Recursive(nn.Identity())
    oracle = Oracle(model)
    watch = watched(oracle, Spot(model, "/mul"), number=1)
    last = watched(oracle, Spot(model, "/mul"), number=1, within=1)
    oracle.forward(model, "", x, 2)
    assert_equal(all_of(watch), [x * 0.9, x * 0.9 * 0.9])
    assert_equal(all_of(last), [x * 0.9 * 0.9])


def test_methods_are_seen_where_the_instance_is_asked_for_them() -> None:
    model = script("overridden_method", "bypassing_the_instance")
    oracle = Oracle(model)
    mixed = watched(oracle, Spot(model, "mixed()"))
    damped = watched(oracle, Spot(model, "damped()"))
    other = watched(oracle, Spot(model, "mixed()"), "inputs")
    oracle.forward(model, "", x)
    assert_equal(all_of(mixed), [torch.tanh(x * 0.5) + x * 0.3])
    assert all_of(damped) == []
    assert list(all_of(other)[0]) == ["value", "other", "share"]


def test_a_parameter_is_followed_through_views_and_copies() -> None:
    model = script("parameter_transposed", "parameter_looked_up")
    oracle = Oracle(model)
    product = watched(oracle, Spot(oracle.holders[model, "V"], "/matmul"))
    found = watched(oracle, Spot(oracle.holders[model, "W"], "/getitem"))
    transposed = watched(oracle, Spot(oracle.holders[model, "V"], "/T"))
    oracle.forward(model, "", x)
    assert_equal(all_of(product), [(x * 0.5) @ model.V.T])
    assert_equal(all_of(found), [model.W[torch.tensor([2, 0, 1])]])
    assert all_of(transposed) == []


def test_a_tied_parameter_is_one_under_every_name() -> None:
    model = script("parameter_linear", tied=True)
    oracle = Oracle(model)
    assert oracle.holders[model, "U"] == oracle.holders[model, "W"]
    edited(oracle, Spot(oracle.holders[model, "W"], ":param"), lambda value, _: value * 2)
    output = oracle.forward(model, "", x)
    assert torch.equal(output, F.linear(x * 0.5, model.U * 2, model.row))


def test_what_is_made_of_a_function_in_place_is_seen_by_all_who_hold_the_tensor() -> None:
    model = script("in_place")
    oracle = Oracle(model)
    before = watched(oracle, Spot(model, "/relu_"), "input")
    edited(oracle, Spot(model, "/relu_"), lambda value, _: value + 1)
    output = oracle.forward(model, "", x)
    assert_equal(all_of(before), [x * 0.5 * 1.5 + x])
    assert torch.equal(output, torch.relu(x * 0.5 * 1.5 + x) + 1)


def test_gradients_go_through_edits_and_are_seen_where_they_pass() -> None:
    model = script("parameter_product")
    oracle = Oracle(model)
    spot = Spot(model, "/matmul")
    gradient = watched(oracle, spot, "grad_output", number=0)
    edited(oracle, spot, lambda value, number: value * (number + 2))
    oracle.backward(oracle.forward(model, "", x).sum(), retain=False)
    weight = model.W.detach().requires_grad_()
    first = (x * 0.5) @ weight
    first.retain_grad()
    ((first * 2) @ weight * 3).sum().backward()
    assert torch.allclose(model.W.grad, weight.grad)
    assert torch.allclose(all_of(gradient)[0], first.grad)


def writer(how: str, what: str, beside: bool = True) -> Writer:
    torch.manual_seed(0)
    return Writer(("list", how, what, beside, False))


def test_a_call_gets_another_part_in_a_list_and_the_caller_keeps_the_old_one_and_what_was_written() -> None:
    model = writer("append", "new")
    oracle = Oracle(model)
    watch = watched(oracle, Spot(model), "inputs", kind="edit", function=lambda part, _: part * 2)
    watch.keys = ("memory", 0)
    held = x * 0.1
    memory = [held]
    output, returned = oracle.forward(model, "", x, memory)
    assert returned is memory
    assert memory[0] is held
    assert_equal(memory[1:], [(x * 0.5 + held * 2 * 0.3) * 0.2])
    assert torch.equal(output, (x * 0.5 + held * 2 * 0.3) * model.scale)


def test_a_change_of_an_output_passes_a_copy_of_the_list_on() -> None:
    model = writer("append", "returned")
    oracle = Oracle(model)
    watch = watched(oracle, Spot(model), kind="edit", function=lambda part, _: part * 2)
    watch.keys = (1, 0)
    memory = [x * 0.1]
    _, returned = oracle.forward(model, "", x, memory)
    assert returned is not memory
    assert_equal(memory[:1], [x * 0.1])
    assert_equal(returned[:1], [x * 0.1 * 2])


def test_a_tensor_that_is_given_twice_has_one_gradient_and_stays_one() -> None:
    model = Twice("positional")
    oracle = Oracle(model)
    gradient = watched(oracle, Spot(model), "grad_input")
    given = x.clone().requires_grad_()
    oracle.backward((oracle.forward(model, "", given, given) + given).sum(), retain=False)
    assert torch.allclose(all_of(gradient)[0], torch.full(SHAPE, 0.7 + 0.4 + 0.2))


def test_what_is_returned_and_written_into_a_list_has_one_gradient() -> None:
    model = writer("append", "returned")
    oracle = Oracle(model)
    gradient = watched(oracle, Spot(model), "grad_output")
    memory = [x * 0.1]
    output, returned = oracle.forward(model, "", x.clone().requires_grad_(), memory)
    assert returned is memory
    assert output is memory[1]
    oracle.backward((output * 2 + memory[1] * 3 + memory[0]).sum(), retain=False)
    assert_equal([all_of(gradient)[0][0], all_of(gradient)[0][1][1]], [torch.full(SHAPE, 5.0)] * 2)
    assert all_of(gradient)[0][1][0] is None
