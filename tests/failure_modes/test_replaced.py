"""Modules and forwards that are replaced while they are hooked: hooks that act no more say so."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(x + self.mlp(x))

    def widen(self, x: Tensor) -> Tensor:
        return x * 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        x = self.body(x)
        return x if cut else self.head(x)


def _replace_block(model: Model) -> None:
    model.body.h[0] = Block()


def _replace_list(model: Model) -> None:
    model.body.h = nn.ModuleList(Block() for _ in range(3))


def _replace_body(model: Model) -> None:
    model.body = Stack()


def _shorten(model: Model) -> None:
    model.body.h = model.body.h[1:2]


REPLACED = [_replace_block, _replace_list, _replace_body, _shorten]


@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("runs_before", [False, True])
def test_hooks_say_when_what_holds_their_module_is_replaced(
    replace: Callable[[Model], None], runs_before: bool
) -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    if runs_before:
        model(X)
    replace(model)
    with pytest.warns(hl.HooklineWarning, match="'body.h.0.mlp' was replaced by another Linear while hooked, and its"):
        model(X)
    model(X)  # It is said once.
    hooks.remove()


@pytest.mark.parametrize(
    "name", ["body.h.2.mlp", "body.h.2.mlp.weight:param", "body.h.2.widen()", "body.h.2.mlp/linear"]
)
def test_hooks_say_when_their_module_is_in_the_model_no_more(name: str) -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({name: 0.0})
    model(X)
    model.body.h = model.body.h[:2]
    with pytest.warns(hl.HooklineWarning, match="was taken out of the model while hooked, and its hooks act no more"):
        model(X)
    hooks.remove()


def test_hooks_by_a_pattern_say_nothing_of_a_layer_that_is_taken_out() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.edit("body.h.*.mlp", torch.neg)
    hooks.capture("body.h.*")
    model(X)
    model.body.h = model.body.h[:2]
    model(X)
    hooks.remove()


@pytest.mark.parametrize("model", [nn.Sequential(*map(nn.Linear, [4] * 3, [4] * 3)), Model().body])
def test_hooks_say_when_their_layer_is_deleted_from_a_list(model: nn.Module) -> None:
    layers = model if isinstance(model, nn.Sequential) else model.h
    hooks = hl.Hooks(model)
    hooks.patch({layers[0]: 0.0})
    model(X)
    del layers[0]
    with pytest.warns(hl.HooklineWarning, match="0' was replaced by another (Linear|Block) while hooked"):
        model(X)
    hooks.remove()


def test_many_hooks_that_are_lost_are_told_of_together() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("body.h.*.mlp")
    hooks.edit("body.h.*.mlp", torch.neg)
    model(X)
    model.body = Stack()
    with pytest.warns(hl.HooklineWarning) as said:
        model(X)
    assert [str(one.message) for one in said] == [
        "'body.h.0.mlp' and 2 more were replaced by other modules while hooked, and their hooks act no more; make the "
        "hooks again"
    ]
    with pytest.raises(hl.NotCaptured, match="'body.h.1.mlp' was replaced by another Linear; make the hooks again"):
        acts["body.h.1.mlp"]
    hooks.remove()


def test_hooks_say_where_they_act_when_their_module_is_elsewhere_in_the_model() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    model(X)
    model.body.h[0].mlp = nn.Sequential(model.body.h[0].mlp, nn.Tanh())
    with pytest.warns(hl.HooklineWarning, match="act on what was there, which is now 'body.h.0.mlp.0'; make"):
        model(X)
    hooks.remove()
    hooks.edit("body.h.*", torch.neg)
    model.body.h[0], model.body.h[1] = model.body.h[1], model.body.h[0]
    with pytest.warns(hl.HooklineWarning, match="'body.h.0' and 1 more .* their hooks act on what was there, which is"):
        model(X)
    hooks.remove()


def test_hooks_that_are_added_to_one_on_the_model_itself_say_when_theirs_is_replaced() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.capture("")
    model(X)
    hooks.patch({"body.h.0.mlp": 0.0})
    model(X)
    _replace_block(model)
    with pytest.warns(hl.HooklineWarning, match="'body.h.0.mlp' was replaced"):
        model(X)
    hooks.remove()


def test_hooks_that_rested_while_their_block_was_replaced_say_so_when_they_act_again() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    hooks.deactivate()
    _replace_block(model)
    model(X)
    hooks.activate()
    with pytest.warns(hl.HooklineWarning, match="'body.h.0.mlp' was replaced"):
        model(X)
    hooks.remove()


def test_hooks_whose_module_is_still_in_the_model_say_nothing() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0, "body.h.1.mlp": 0.0})
    model(X)
    model.body.h = model.body.h[:2]  # Another list with the same blocks.
    model(X)
    model.body.h[0] = nn.Sequential(model.body.h[0])  # Wrapped: it runs all the same.
    model(X)
    model.body.h = nn.ModuleList(reversed(model.body.h))
    model(X)
    assert all(tap.fired for tap in hooks._lifecycle.taps)
    hooks.remove()


def test_an_edit_that_is_lost_with_the_block_around_it_is_an_error_at_the_end() -> None:
    model = Model()
    with pytest.raises(hl.HooklineError, match="'body.h.0.mlp' was replaced while hooked: it is another Linear now"):
        with hl.edit(model, "body.h.0.mlp", torch.neg):
            model(X)
            _replace_block(model)
            model(X)


def test_a_module_that_was_taken_out_before_it_was_called_is_named_so() -> None:
    model = Model()
    with pytest.raises(hl.NeverFired, match="'body.h.2.mlp' was not called .*: it was taken out of the model"):
        with hl.capture(model, "body.h.2.mlp"):
            model.body.h = model.body.h[:2]
            model(X)


def test_a_block_that_was_replaced_is_not_held() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.*.mlp": 0.0})
    hooks.patch({"head": 0.0})
    model(X)
    old = weakref.ref(model.body.h)
    model.body.h = model.body.h[:]
    model(X)
    gc.collect()
    assert old() is None
    hooks.remove()


def other(x: Tensor) -> Tensor:
    return x + 1


METHODS = {"head": ("head", "forward"), "body.h.0.widen()": ("body.h.0", "widen"), "head/linear": ("head", "forward")}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("captures", [False, True])
def test_hooks_say_when_the_method_they_are_on_is_replaced(name: str, runs_before: bool, captures: bool) -> None:
    model = Model()
    path, method = METHODS[name]
    hooks = hl.Hooks(model)
    _ = hooks.capture(name) if captures else hooks.patch({name: 0.0})
    if runs_before:
        model(X)
    setattr(model.get_submodule(path), method, other)
    with pytest.warns(
        hl.HooklineWarning, match=f"nothing passed '{re.escape(name)}': '{method}' of this .* on the instance"
    ):
        model(X)
    model(X)  # It is said once.
    hooks.remove()
    delattr(model.get_submodule(path), method)


@pytest.mark.parametrize("name", METHODS)
def test_a_block_gives_the_method_that_was_replaced_as_the_reason(name: str) -> None:
    model = Model()
    path, method = METHODS[name]
    with pytest.raises(hl.NeverFired, match=f"'{method}' of this .* was replaced on the instance after the hooks were"):
        with hl.capture(model, name):
            setattr(model.get_submodule(path), method, other)
            model(X)
    delattr(model.get_submodule(path), method)


def test_a_forward_that_fails_after_it_was_replaced_is_told_of_when_it_does_not() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    model.body.h[0].mlp.forward = other
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'body.h.0.mlp'"):
        model(X)
    hooks.remove()
    del model.body.h[0].mlp.forward


def test_hooks_that_may_miss_say_nothing_of_a_forward_that_was_replaced() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.capture("head")
    hooks.when_missing("ignore")
    model.head.forward = other
    model(X)
    hooks.remove()
    del model.head.forward


def test_a_forward_that_is_wrapped_by_one_that_calls_it_says_nothing() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("head")
    hooks.patch({"body.h.0.mlp": 0.0})
    for layer in (model.head, model.body.h[0].mlp):
        layer.forward = lambda x, before=layer.forward: before(x) + 1
    assert torch.equal(model(X) - 1, acts["head"])
    model(X, cut=True)
    hooks.capture("body.h.1")  # All is looked through again.
    model(X, cut=True)
    hooks.remove()
    del model.head.forward, model.body.h[0].mlp.forward


def test_a_forward_that_is_compiled_after_it_was_hooked_says_nothing() -> None:
    """A compiled graph counts nothing."""
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("head")
    hooks.edit("body.h.0.mlp", torch.zeros_like)
    hooks.skip("body.h.1.mlp")
    for layer in (model.head, model.body.h[0].mlp, model.body.h[1].mlp):
        layer.forward = torch.compile(layer.forward, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X), acts["head"])
    assert all(tap.fired for tap in hooks._lifecycle.taps)
    hooks.remove()
    del model.head.forward, model.body.h[0].mlp.forward, model.body.h[1].mlp.forward


def test_hooks_that_are_put_on_again_are_on_the_forward_that_is_there_now() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"head": 0.0})
    model.head.forward = other
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'head'"):
        model(X)
    hooks.deactivate()
    hooks.activate()
    assert not model(X).any()
    hooks.remove()
    assert model.head.forward is other
    del model.head.forward


def test_other_hooks_and_copies_are_not_taken_for_replaced_forwards() -> None:
    model = Model()
    hooks, others = hl.Hooks(model), hl.Hooks(model)
    acts = hooks.capture("head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        others.edit("head", torch.neg)
        model(X)
        copy.deepcopy(model)(X)
        others.remove()
        model(X)
    assert "head" in acts
    hooks.remove()
