"""Modules that are not called, or in a way that torch's hooks would miss; and the errors and warnings about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import tokens
from tests.support.states import state_of


class Branching(nn.Module):
    """Calls one of two layers; a third one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.dead = nn.Linear(4, 4)

    def forward(self, x: Tensor, way: str = "left") -> Tensor:
        return self.left(x) if way == "left" else self.right(x)


def test_a_module_that_is_not_called_is_an_error_when_named() -> None:
    """B05"""
    model = Branching()
    capture = hl.capture(model, "left", "dead")
    with pytest.raises(hl.NeverFired, match=says("was not called in forward of Branching", "dead", 1)), capture:
        model(torch.ones(2, 4))
    with pytest.raises(hl.NotCaptured, match=says("was not called in", "dead", 1)):
        capture.cache["dead"]
    assert capture.cache["left"].shape == (2, 4)


@pytest.mark.parametrize("where", [["*", "dead"], ["dead", "*"], ["**", nn.Linear, "dead"]])
def test_a_module_that_is_not_called_is_an_error_when_named_beside_a_pattern(where: list[Any]) -> None:
    """B05"""
    with pytest.raises(hl.NeverFired, match=says("was not called in", "dead")):
        hl.run(Branching(), torch.ones(2, 4), capture=where)


class Catches(nn.Module):
    """Continues without `inner` if that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            self.inner(x)
        return x


def test_a_module_that_did_not_return_is_not_said_to_have_no_arguments() -> None:
    model = Catches()
    with pytest.raises(hl.NeverFired, match=says("was called and did not", "inner")):
        with hl.capture(model, "inner"), hl.capture(model.inner, "0", stop=True):
            model(torch.ones(2, 4))
    with pytest.raises(hl.NeverFired, match=says("was called and did not", "inner")):
        hl.run(model, torch.ones(2, 3), patch={"inner": 0.0})


@pytest.mark.parametrize("kind", ["edit", "patch", "skip"])
def test_a_change_that_never_took_place_is_an_error_when_named(kind: str) -> None:
    """B05"""
    model = Branching()
    blocks = {
        "edit": lambda: hl.edit(model, "dead", lambda value: value),
        "patch": lambda: hl.patch(model, {"dead": 0.0}),
        "skip": lambda: hl.skip(model, "dead"),
    }
    with pytest.raises(hl.NeverFired, match=says("was not called in", "dead")), blocks[kind]():
        model(torch.ones(2, 4))


def test_modules_that_are_not_called_give_one_warning_when_a_pattern_found_them() -> None:
    """B05"""
    model = Branching()
    with (
        pytest.warns(hl.HooklineWarning, match=says("was not called more", "right", "1 more")) as said,
        hl.capture(model, "*") as acts,
    ):
        model(torch.ones(2, 4))
    assert len(said) == 1
    assert list(acts) == ["left"]
    with pytest.raises(hl.NotCaptured, match=says("was not called in", "dead")):
        acts["dead"]


def test_a_module_that_is_not_called_in_this_block_has_no_value_of_an_earlier_one() -> None:
    """B05"""
    model = Branching()
    capture = hl.capture(model, "left", "right")
    with pytest.raises(hl.NeverFired, match="'right'"), capture:
        model(torch.ones(2, 4), "left")
    with pytest.raises(hl.NeverFired, match="'left'"), capture as acts:
        model(torch.ones(2, 4), "right")
    assert "right" in acts
    with pytest.raises(hl.NotCaptured, match=says("was not called in", "left")):
        acts["left"]


def test_no_forward_no_complaint() -> None:
    """B05"""
    with hl.capture(Branching(), "dead") as acts:
        pass
    with pytest.raises(hl.NotCaptured, match=says("its block is over", "dead")):
        acts["dead"]


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def test_the_fast_path_of_a_transformer_layer_is_named_with_the_way_to_turn_it_off() -> None:
    """B06"""
    layer = encoder_layer()
    fix = re.escape("torch.backends.mha.set_fastpath_enabled(False)")
    with pytest.raises(hl.NeverFired, match=f"'linear1'.*fast path.*{fix}"):
        with torch.no_grad(), hl.capture(layer, "linear1"):
            layer(tokens())
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), hl.capture(layer, "linear1") as acts:
            layer(tokens())
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert acts["linear1"].shape == (2, 5, 16)


def test_hooks_do_not_turn_the_fast_path_off() -> None:
    """B06"""
    model = nn.Sequential(encoder_layer(), nn.Linear(8, 8))
    x = tokens()
    with torch.no_grad():
        plain = model(x)
        with hl.capture(model, "0", "1") as acts:
            output = model(x)
    assert torch.equal(output, plain)
    assert torch.equal(model[1](acts["0"]), plain)


def test_weights_that_attention_reads_without_a_call_are_explained() -> None:
    """B07"""
    layer = encoder_layer().train()
    expected = (
        r"'self_attn\.out_proj' was not called in 1 forward of TransformerEncoderLayer: MultiheadAttention reads its "
    )
    with pytest.raises(hl.NeverFired, match=expected + r"weight directly\. Capture 'self_attn' instead"):
        hl.run(layer, tokens(), capture="self_attn.out_proj")
    _, acts = hl.run(layer, tokens(), capture="self_attn")
    assert acts["self_attn"][0].shape == (2, 5, 8)


class Functional(nn.Module):
    """Calls one layer's forward directly, and reads another layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Linear(4, 4)
        self.read = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.direct.forward(x), self.read.weight)


def test_a_forward_that_is_called_directly_is_seen() -> None:
    """B08"""
    model, x = Functional(), torch.ones(2, 4)
    _, acts = hl.run(model, x, capture=["direct", "direct:input"])
    assert torch.equal(acts["direct"], model.direct(x))
    assert torch.equal(acts["direct:input"], x)
    assert torch.equal(hl.run(model, x, patch={"direct": 0.0}), torch.zeros(2, 4))


def test_a_weight_that_is_read_without_a_call_is_explained() -> None:
    """B08"""
    with pytest.raises(hl.NeverFired, match=says("was not called Functional", "read")):
        hl.run(Functional(), torch.ones(2, 4), capture="read")


class Static(nn.Module):
    """Has a forward that takes no self."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2


class Builtin(nn.Module):
    """Has a forward that is not a Python function."""

    forward = torch.relu


@pytest.mark.parametrize("kind", [Static, Builtin])
def test_a_forward_that_takes_no_self_is_called_as_python_would(kind: Callable[[], nn.Module]) -> None:
    """B08"""
    model = nn.Sequential(kind())
    x = torch.tensor([-1.0, 1.0])
    plain = model(x)
    output, acts = hl.run(model, x, capture=["0", "0:input"])
    assert torch.equal(output, plain)
    assert torch.equal(acts["0"], plain)
    assert torch.equal(acts["0:input"], x)


class OwnCall(nn.Module):
    """Has a `__call__` that does not use forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.shift(x.float())

    def shift(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("never called")


class CallThroughForward(nn.Module):
    """Has a `__call__` that bypasses torch's hooks, but calls forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_class_whose_own_call_does_without_forward_is_explained() -> None:
    """B10"""
    with pytest.raises(hl.NeverFired, match=says("was not called OwnCall", "0")):
        hl.run(nn.Sequential(OwnCall()), torch.ones(2), capture="0")


class CallAlone(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_class_with_a_call_and_no_forward_is_not_said_to_be_never_called() -> None:
    with pytest.raises(hl.SiteError, match=says("is a CallAlone", "0")):
        hl.capture(nn.Sequential(CallAlone()), "0")


def test_a_class_whose_own_call_uses_forward_is_seen() -> None:
    """B10"""
    output, acts = hl.run(nn.Sequential(CallThroughForward()), torch.ones(2), capture="0")
    assert output.tolist() == [3.0, 3.0]
    assert acts["0"].tolist() == [2.0, 2.0]


class CallThroughSuper(nn.Linear):
    """Has a `__call__` that does something and calls super, as the layers of transformers do."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x + 1)


class CallThroughFunction(nn.Linear):
    """Has a `__call__` that calls forward in an inner function."""

    def __call__(self, x: Tensor) -> Tensor:
        def run() -> Tensor:
            return self.forward(x)

        return run()


class CallThroughMethod(nn.Linear):
    """Has a `__call__` that calls forward through another method."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return super().__call__(x)


@pytest.mark.parametrize("kind", [CallThroughSuper, CallThroughFunction, CallThroughMethod])
def test_a_call_that_leads_to_forward_is_not_given_as_the_reason(kind: type[nn.Linear]) -> None:
    model = Branching()
    model.right = kind(4, 4)
    with pytest.raises(hl.NeverFired, match=says("was not called in forward of Branching", "right", 1)) as error:
        hl.run(model, torch.ones(2, 4), capture="right")
    assert "__call__" not in str(error.value)
    assert hl.run(model, torch.ones(2, 4), "right", capture="right")[1]["right"].shape == (2, 4)


class Guarded(nn.Module):
    """Records reads of missing attributes, refuses to set any, and has slots."""

    __slots__ = ("scratch",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "locked", True)

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("locked"):
            raise AttributeError(f"{name} was set")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in ("_compiled_call_impl",):  # Torch reads this one.
            self.asked.append(name)
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_modules_that_guard_their_attributes_are_neither_set_nor_probed() -> None:
    """B11"""
    model = nn.Sequential(Guarded())
    before = state_of(model)
    with hl.capture(model, "0", "0:input") as acts, hl.edit(model, "0", lambda value: value + 1):
        output = model(torch.ones(2))
        hl.attached(model)
        hl.sites(model)
    assert output.tolist() == [3.0, 3.0]
    assert acts["0"].tolist() == [2.0, 2.0]
    assert model[0].asked == []
    assert state_of(model) == before


class Hidden(nn.Module):
    """Returns a forward that can't be replaced."""

    def __getattribute__(self, name: str) -> Any:
        if name == "forward":
            return lambda x: x * 5
        return super().__getattribute__(name)


def test_a_forward_that_cannot_be_shadowed_is_found_out() -> None:
    """B11"""
    model = nn.Sequential(Hidden())
    with pytest.raises((hl.NeverFired, hl.SiteError), match="'0'"):
        hl.run(model, torch.ones(2), capture="0")
    assert model(torch.ones(2)).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("first", ["capture", "skip"])
def test_a_skip_above_a_capture_is_named_whichever_comes_first(first: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    blocks = [hl.capture(model, "0.1"), hl.skip(model, "0")]
    with pytest.raises(hl.NeverFired, match=says("was not called which", "0.1", "0")):
        with ExitStack() as stack:
            for block in blocks if first == "capture" else reversed(blocks):
                stack.enter_context(block)
            model(torch.ones(2, 4))


def test_a_skip_that_was_removed_in_the_block_is_named() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    hooks = hl.Hooks(model)
    hooks.skip("0")
    with pytest.raises(hl.NeverFired, match=says("was not called which", "0.1", "0")):
        with hl.capture(model, "0.1"):
            model(torch.ones(2, 4))
            hooks.remove()
