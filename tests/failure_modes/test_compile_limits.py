"""What a compiled graph can't do: counting, stopping, gradients. Right all the same, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import GPT, tokens

# Dynamo asks every tensor that enters a graph for its `.grad`.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def refusal(function: Callable[[], None]) -> str:
    """Return how hookline refuses to do this, or nothing if it does it."""
    try:
        function()
    except hl.HooklineError as error:
        return str(error)
    return ""


def zero(gradient: Tensor) -> Tensor:
    return gradient * 0


COUNTING = {
    "every call": {"keep": "all"},
    "some calls": {"keep": 3},
    "stop": {"stop": True},
}


@pytest.mark.parametrize("options", COUNTING.values(), ids=COUNTING)
def test_what_a_graph_cannot_count_is_right_all_the_same(options: dict[str, Any]) -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1", **options) as expected:
        model(x), model(x * 2)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    with hl.capture(compiled, "h.1", **options) as acts:
        outputs = [compiled(x), compiled(x * 2)]
    assert all((output is None) == ("stop" in options) for output in outputs)
    assert len(acts.calls("h.1")) == len(expected.calls("h.1")) > 0
    assert all(torch.equal(*pair) for pair in zip(acts.calls("h.1"), expected.calls("h.1"), strict=True))
    assert torch.equal(compiled(x), plain)


@pytest.mark.parametrize("where", ["h.1#1", "h.1[*]", "h.1[0, *]"])
def test_call_numbers_and_stars_are_right_on_a_compiled_model(where: str) -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, where) as expected:
        model(x), model(x * 2)
    compiled = torch.compile(model, backend="eager")
    with hl.capture(compiled, where) as acts:
        compiled(x), compiled(x * 2)
    assert list(acts) == list(expected)
    assert all(torch.equal(acts[site], expected[site]) for site in expected)


def test_a_whole_graph_that_cannot_be_kept_whole_is_an_error() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(x)
    with pytest.raises(Exception, match="hookline"), hl.capture(compiled, "h.1", keep="all"):
        compiled(x)
    assert torch.equal(compiled(x), plain)


@pytest.mark.parametrize("options", COUNTING.values(), ids=COUNTING)
def test_counting_in_a_function_compiled_around_the_model_is_right_or_loud(options: dict[str, Any]) -> None:
    """E03: the model does not know that it runs in a graph."""
    model, x = GPT(depth=2), tokens()
    step = torch.compile(lambda value: model(value), backend="eager")

    def count() -> None:
        with hl.capture(model, "h.1", **options) as acts:
            outputs = [step(x), step(x * 2)]
        assert all((output is None) == ("stop" in options) for output in outputs)
        assert len(acts.calls("h.1")) == (1 if "stop" in options else 2)

    refused = refusal(count)
    assert not refused or ("'h.1'" in refused and "compiled" in refused)


def test_an_edit_that_wants_its_call_works_in_a_graph_or_is_refused_in_words() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")

    def scale(value: Tensor, call: Any) -> Tensor:
        return value * (2.0 if isinstance(call.module, nn.Linear) else 3.0)

    with hl.edit(model, "head", scale, with_call=True):
        expected = model(x)

    def edit() -> None:
        with hl.edit(compiled, "head", scale, with_call=True):
            assert torch.equal(compiled(x), expected)

    refused = refusal(edit)
    assert not refused or "compiled" in refused


def test_a_value_kept_with_its_graph_can_be_differentiated_on_a_compiled_model_or_is_refused() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1", detach=False) as eager:
        (expected,) = torch.autograd.grad(model(x).sum(), eager["h.1"])
    compiled = torch.compile(model, backend="aot_eager")

    def differentiate() -> None:
        with hl.capture(compiled, "h.1", detach=False) as acts:
            loss = compiled(x).sum()
        assert torch.allclose(torch.autograd.grad(loss, acts["h.1"])[0], expected)

    refused = refusal(differentiate)
    assert not refused or ("'h.1'" in refused and "compiled" in refused)


def test_a_value_captured_in_a_graph_in_inference_mode_can_be_used_with_autograd_later() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    with torch.inference_mode(), hl.capture(compiled, "h.1") as acts:
        compiled(x)
    model.head(acts["h.1"]).sum().backward()
    assert model.head.weight.grad is not None


def test_a_value_that_does_not_fit_in_a_graph_names_the_site() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(hl.EditError, match="'h.1'.*5, 2"), hl.edit(compiled, "h.1", lambda value: value[..., :2]):
        compiled(x)
    assert torch.equal(compiled(x), model(x))


def test_the_table_of_a_compiled_capture_does_not_say_that_nothing_was_called() -> None:
    """E03"""
    model, x = GPT(depth=2), tokens()
    compiled = torch.compile(model, backend="eager")
    _, acts = hl.run(compiled, x, capture="h.1")
    row = repr(acts).splitlines()[-1].split()
    assert row[0] == "h.1"
    assert row[1] != "0"


GRADIENTS: dict[str, Callable[[Any], hl.Hooks]] = {
    "capture": lambda model: hl.capture(model, "h.1:grad_output"),
    "edit": lambda model: hl.edit(model, "h.1:grad_output", zero),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("around", ["model", "function"])
def test_a_gradient_hook_on_a_compiled_model_is_right_or_refused(kind: str, around: str) -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1:grad_output") as eager:
        model(x).sum().backward()
    model.zero_grad()
    compiled = torch.compile(model if around == "model" else lambda value: model(value), backend="aot_eager")
    compiled(x)
    target = compiled if around == "model" else model

    def hook() -> None:
        with GRADIENTS[kind](target) as acts:
            compiled(x).sum().backward()
        if kind == "capture":
            assert torch.allclose(acts["h.1:grad_output"], eager["h.1:grad_output"])
        else:
            assert model.h[0].attn.weight.grad.count_nonzero() == 0

    refused = refusal(hook)
    assert not refused or ("'h.1:grad_output'" in refused and "force_eager" in refused)


def test_the_way_round_a_refused_gradient_works() -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1:grad_output") as eager:
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with torch.compiler.set_stance("force_eager"), hl.capture(compiled, "h.1:grad_output") as acts:
        compiled(x).sum().backward()
    assert torch.equal(acts["h.1:grad_output"], eager["h.1:grad_output"])


def test_a_kept_gradient_edit_is_not_dropped_by_a_function_compiled_around_the_model() -> None:
    """E23"""
    model, x = GPT(depth=2), tokens()
    step = torch.compile(lambda value: model(value), backend="eager")

    def hook() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("h.1:grad_output", zero)
        step(x).sum().backward()
        hooks.remove()
        assert model.h[0].attn.weight.grad.count_nonzero() == 0

    refused = refusal(hook)
    assert not refused or "'h.1:grad_output'" in refused
