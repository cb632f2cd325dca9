"""Blocks and hooks that end in every possible way: exceptions, Ctrl-C, garbage collection, any order."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.states import state_of


class Boom(Exception):
    """Raised on purpose by a model or a user's function."""


class Breaking(nn.Module):
    """Raises `error`, or returns its input if that is None."""

    error: BaseException | None = Boom("broken layer")

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


def breaking_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Breaking(), nn.Linear(4, 4))


def boom(_value: Any) -> None:
    raise Boom("broken function")


EVERY_KIND = {
    "capture": lambda model: hl.capture(model, "*", "0:input", ":inputs", "2:grad_output", "0:grad_inputs"),
    "patch": lambda model: hl.patch(model, {"0": 0.0, "2:input": 1.0}),
    "edit": lambda model: hl.edit(model, "*", lambda value: value + 1),
    "gradient edit": lambda model: hl.edit(model, "*:grad_output", lambda value: value * 2),
    "skip": lambda model: hl.skip(model, "0"),
    "stop": lambda model: hl.capture(model, "2", stop=True),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_exception_in_a_forward_leaves_the_model_as_it_was_found(kind: str) -> None:
    """A01"""
    model = breaking_mlp()
    model[0].register_forward_hook(lambda *_: None)
    before = state_of(model)
    with pytest.raises(Boom, match="broken layer"), EVERY_KIND[kind](model):
        model(torch.ones(2, 4, requires_grad=True))
    assert state_of(model) == before
    assert len(hl.attached(model)) == 1


def test_an_exception_in_the_block_itself_leaves_the_model_as_it_was_found() -> None:
    """A01"""
    model = mlp()
    before = state_of(model)
    with pytest.raises(Boom), hl.capture(model, "*"), hl.edit(model, "0", lambda value: value):
        model(torch.ones(2, 4))
        raise Boom
    assert state_of(model) == before


@pytest.mark.parametrize("site", ["1", "1:input", "1[:, 0]"])
def test_the_exception_of_an_edit_comes_through_unchanged_and_names_the_site(site: str) -> None:
    """A02"""
    model = mlp()
    before = state_of(model)
    error = Boom("mine")

    def fail(_value: Tensor) -> Tensor:
        raise error

    with pytest.raises(Boom) as caught, hl.edit(model, site, fail):
        model(torch.ones(2, 4))
    assert caught.value is error
    if hasattr(error, "__notes__"):
        assert any(f"'{site}'" in note for note in error.__notes__)
    assert state_of(model) == before


def test_the_exception_of_a_transform_names_the_site_it_was_called_for() -> None:
    """A02"""
    model = mlp()
    with pytest.raises(Boom) as caught, hl.capture(model, "0", "1", transform=boom):
        model(torch.ones(2, 4))
    if hasattr(caught.value, "add_note"):
        assert any("'0'" in note for note in caught.value.__notes__)


def test_after_a_failed_edit_earlier_values_are_there_and_later_ones_say_why_not() -> None:
    """A02"""
    model = mlp()
    with pytest.raises(Boom), hl.capture(model, "0", "2") as acts, hl.edit(model, "1", boom):
        model(torch.ones(2, 4))
    assert torch.equal(acts["0"], model[0](torch.ones(2, 4)))
    with pytest.raises(hl.NotCaptured, match=says("nothing passed before Boom", "2")):
        acts["2"]


def test_a_failed_forward_does_not_leave_the_values_of_the_one_before_it_for_its_own() -> None:
    """A02"""
    model = breaking_mlp()
    with hl.capture(model, "0", "2") as acts:
        model[1].error = None
        model(torch.ones(2, 4))
        model[1].error = Boom()
        with pytest.raises(Boom):
            model(torch.zeros(2, 4))
        assert torch.equal(acts["0"], model[0](torch.zeros(2, 4)))
        with pytest.raises(hl.NotCaptured, match=says("nothing passed before", "2", "…fail…")):
            acts["2"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_what_is_no_exception_leaves_the_model_as_it_was_found_too(kind: str, error: type[BaseException]) -> None:
    """A03"""
    model = breaking_mlp()
    model[1].error = error()
    before = state_of(model)
    with pytest.raises(error), EVERY_KIND[kind](model):
        model(torch.ones(2, 4, requires_grad=True))
    assert state_of(model) == before


@pytest.mark.usefixtures("listening_to_ctrl_c")
def test_ctrl_c_in_a_forward_leaves_the_model_as_it_was_found() -> None:
    """A03"""
    model = mlp()
    before = state_of(model)

    def press_ctrl_c(_value: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), hl.capture(model, "*") as acts, hl.edit(model, "1", press_ctrl_c):
        model(torch.ones(2, 4))
    assert state_of(model) == before
    assert "0" in acts
    with pytest.raises(hl.NotCaptured, match="'2' before KeyboardInterrupt"):
        acts["2"]


def test_an_interrupted_forward_is_not_taken_for_one_that_never_called_the_site() -> None:
    """A03"""
    model = breaking_mlp()
    model[1].error = KeyboardInterrupt()
    with hl.capture(model, "2") as acts, pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    with pytest.raises(hl.NotCaptured, match=says("nothing passed before", "2")):
        acts["2"]


def test_a_generator_that_is_abandoned_inside_a_block_takes_its_hooks_along() -> None:
    """A04"""
    model = mlp()
    before = state_of(model)

    def steps() -> Iterator[Tensor]:
        with hl.capture(model, "0") as acts:
            while True:
                model(torch.ones(2, 4))
                yield acts["0"]

    running = steps()
    next(running)
    assert state_of(model) != before
    del running
    assert state_of(model) == before


def test_a_block_that_is_dropped_while_open_warns_and_takes_its_hooks_along() -> None:
    """A04"""
    model = mlp()
    before = state_of(model)
    block = hl.capture(model, "0")
    block.__enter__()
    with pytest.warns(ResourceWarning, match=says("block was open")):
        del block
        gc.collect()
    assert state_of(model) == before


def test_a_block_that_was_dropped_while_open_does_not_keep_the_model_alive() -> None:
    """A04"""
    model = mlp()
    block = hl.capture(model, "0")
    block.__enter__()
    with pytest.warns(ResourceWarning, match=says("block was open")):
        del block
        gc.collect()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


BROKEN_REQUESTS = {
    "a typing error": (lambda hooks: hooks.capture("0", "1", "3"), "'3' matches nothing"),
    "a typing error in a patch": (lambda hooks: hooks.patch({"0": 0.0, "nope": 0.0}), "'nope' matches nothing"),
    "a bad subscript": (lambda hooks: hooks.capture("0", "1[x]"), "not a subscript"),
    "no such port": (lambda hooks: hooks.capture("0", "1:inptu"), says("is not a port did", "input")),
    "a bad option": (lambda hooks: hooks.capture("0", keep=0), "keep=0"),
    "a site twice": (lambda hooks: hooks.capture("0", "2"), says("is captured by these hooks", "2")),
    "a stop that gradients can't survive": (lambda hooks: hooks.capture("0:grad_output", stop=True), "stop=True"),
    "a part to skip": (lambda hooks: hooks.skip(["0", "1[0]"]), says("a module is skipped as", "1[0]")),
    "no function": (lambda hooks: hooks.edit("0", 3.0), says("edit takes a function of")),
}


@pytest.mark.parametrize("request_", BROKEN_REQUESTS)
def test_a_request_that_is_refused_adds_nothing_at_all(request_: str) -> None:
    """A05"""
    ask, message = BROKEN_REQUESTS[request_]
    model = mlp()
    hooks = hl.Hooks(model)
    acts = hooks.capture("2")
    before = state_of(model)
    with pytest.raises(hl.HooklineError, match=message):
        ask(hooks)
    assert len(hooks) == 1
    assert state_of(model) == before
    model(torch.ones(2, 4))
    assert list(acts) == ["2"]
    hooks.remove()


def test_attaching_that_fails_half_way_is_undone() -> None:
    """A05"""

    class Bomb(dict):  # type: ignore[type-arg]
        def __setitem__(self, key: str, value: object) -> None:
            raise Boom(key)

    model = mlp()
    before = state_of(model)
    model[2].__dict__ = Bomb(model[2].__dict__)
    with pytest.raises(Boom), hl.capture(model, "0", "1", "2"):
        pass
    model[2].__dict__ = dict(model[2].__dict__)
    assert {key: value for key, value in state_of(model).items() if not key.startswith("2 ")} == {
        key: value for key, value in before.items() if not key.startswith("2 ")
    }


def test_a_capture_sees_the_edits_that_were_added_before_it_and_no_others() -> None:
    """A06"""
    model, x = mlp(), torch.ones(2, 4)
    plain = model[0](x)
    hooks = hl.Hooks(model)
    hooks.edit("0", lambda value: value + 1)
    hooks.capture("0")
    hooks.edit("0", lambda value: value * 10)
    with hl.capture(model, "0") as last:
        model(x)
    assert torch.equal(hooks.cache["0"], plain + 1)
    assert torch.equal(last["0"], (plain + 1) * 10)
    hooks.remove()


@pytest.mark.parametrize("capture_first", [True, False])
def test_blocks_act_in_the_order_in_which_they_were_entered(capture_first: bool) -> None:
    """A06"""
    model, x = mlp(), torch.ones(2, 4)
    plain = model[0](x)
    change = hl.edit(model, "0", lambda value: value + 1)
    see = hl.capture(model, "0")
    with see if capture_first else change, change if capture_first else see:
        model(x)
    assert torch.equal(see.cache["0"], plain if capture_first else plain + 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_be_left_in_any_order(order: tuple[int, ...]) -> None:
    """A07"""
    model, x = mlp(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    blocks = [
        hl.edit(model, "2", lambda value: value + 1),
        hl.edit(model, "2", lambda value: value + 10),
        hl.edit(model, "2", lambda value: value + 100),
    ]
    for block in blocks:
        block.__enter__()
    left = [1, 10, 100]
    for position in order:
        assert torch.allclose(model(x), plain + sum(left))
        blocks[position].__exit__(None, None, None)
        left[position] = 0
    assert torch.equal(model(x), plain)
    assert state_of(model) == before


def test_somebody_elses_wrapper_put_on_meanwhile_stays_and_works() -> None:
    """A07"""
    model, x = mlp(), torch.ones(2, 4)
    plain = model[0](x)
    with hl.edit(model, "0", lambda value: value + 1):
        inside = model[0].forward
        model[0].forward = lambda *args: inside(*args) * 10
        assert torch.equal(model[0](x), (plain + 1) * 10)
    assert torch.equal(model[0](x), plain * 10)
    with hl.capture(model, "0") as acts:
        model(x)
    assert torch.equal(acts["0"], plain * 10)
    assert torch.equal(model[0](x), plain * 10)
    del model[0].forward
    assert torch.equal(model[0](x), plain)
