"""The forward that replaces a module's while it has one plain capture, and while it has other hooks as well."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

x = torch.ones(2, 4)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


class Forked(nn.Module):
    """Calls one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor, one: bool = True) -> Tensor:
        return self.one(value) if one else self.other(value)  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache, 0))])
def test_a_copied_cache_has_nothing_where_nothing_passed(again: Any) -> None:
    hooks = hl.Hooks(model := Forked())
    acts = hooks.capture("*")
    model(x)
    copied = again(acts)
    assert list(copied) == ["one"]
    with pytest.raises(hl.NotCaptured):
        copied["other"]


def test_a_capture_goes_on_when_another_hook_leaves_before_the_call() -> None:
    model = make()
    kept, leaving = hl.Hooks(model), hl.Hooks(model)
    acts = kept.capture("0")
    leaving.edit("0", lambda value: value * 2)

    def leave(_module: nn.Module, _args: Any) -> None:
        if len(leaving):
            leaving.remove()

    with model[0].register_forward_pre_hook(leave):  # Torch has already looked up the forward when it calls this hook.
        model(x)
    assert acts["0"].equal(model[0](x))


def test_a_short_form_that_was_activated_says_what_did_not_pass_in_its_block() -> None:
    hooks = hl.capture(model := Forked(), "one")
    hooks.activate()
    model(x)
    with pytest.raises(hl.NeverFired), hooks as acts:
        model(x, False)
        assert "one" not in acts
    hooks.remove()


def test_an_active_hook_holds_nothing_of_the_blocks_it_acted_in() -> None:
    hooks = hl.Hooks(model := make())
    hooks.capture("0")
    with hl.capture(model, "1") as acts:
        model(x)
    value = weakref.ref(acts["1"])
    del acts
    gc.collect()
    assert value() is None


@pytest.mark.parametrize("while_edited", [False, True])
def test_a_copy_holds_nothing_of_the_model_it_was_made_of(while_edited: bool) -> None:
    model = make()
    with hl.capture(model, "0") as acts:
        copied = None if while_edited else copy.deepcopy(model)
        with hl.edit(model, "0", lambda value: value + 1):
            copied = copied or copy.deepcopy(model)
            model(x)
        model(x)
    module, value = weakref.ref(model[0]), weakref.ref(acts["0"])
    del model, acts
    gc.collect()
    assert module() is None
    assert value() is None
    assert copied(x).shape == (2, 4)


def test_a_forward_that_was_looked_up_before_is_edited_by_a_later_hook() -> None:
    model = make()
    first, second = hl.Hooks(model), hl.Hooks(model)
    first.capture("0")
    forward = model[0].forward
    second.edit("0", torch.zeros_like)
    with first:
        assert not forward(x).any()


def test_what_is_kept_is_of_the_call_that_began_last() -> None:
    class Inner(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            if value[0, 0] == 1:
                model(value * 5)
                model(value, False)
            return value

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, value: Tensor, inside: bool = True) -> Tensor:
            return self.inner(value) if inside else value  # type: ignore[no-any-return]

    model = Outer()
    with hl.capture(model, "inner") as acts:
        model(x)
    assert acts["inner"][0, 0] == 5


def test_a_reference_of_an_eager_run_says_nothing_of_a_compiled_one() -> None:
    class Writing(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return (value + 1).mul_(2)

    hooks = hl.Hooks(model := nn.Sequential(Writing()))
    acts = hooks.capture("0", clone=False)
    model(x)
    output = torch.compile(model, backend="eager")(x * 3)
    assert acts["0"].equal(output)
