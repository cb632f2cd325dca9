"""Events during a forward or backward: hooks added and removed, hook functions that run the model, early stops."""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Block, mlp, tokens
from tests.support.states import state_of


class Boom(Exception):
    """Raised on purpose by a model or a user's function."""


@pytest.mark.parametrize(("site", "seen"), [("body.0", []), ("body:input", []), ("body", ["body.2"])])
def test_an_edit_may_remove_all_hooks_while_their_modules_run(site: str, seen: list[str]) -> None:
    """A09"""
    model = nn.Sequential()
    model.add_module("body", mlp())
    x = torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)

    def remove(_value: Tensor) -> None:
        hooks.remove()

    hooks.edit(site, remove)
    acts = hooks.capture("body", "body.2", "")
    hooks.edit("body", lambda value: value * 0)
    assert torch.equal(model(x), plain)
    assert list(acts) == seen
    with pytest.raises(hl.NotCaptured, match=says("nothing passed before", "body", "…removed…")):
        acts["body"]
    assert state_of(model) == before


@pytest.mark.parametrize("deactivate", [True, False])
def test_a_capture_that_is_taken_away_while_its_module_runs_keeps_nothing(deactivate: bool) -> None:
    """A09"""
    model = nn.Sequential()
    model.add_module("body", mlp())
    hooks = hl.Hooks(model)
    acts = hooks.capture("body")

    def take_away(_value: Tensor) -> None:
        hooks.at("body").deactivate() if deactivate else hooks.remove()

    hooks.edit("body.0", take_away)
    model(torch.ones(2, 4))
    assert "body" not in acts
    hooks.remove()


@pytest.mark.parametrize("deactivate", [True, False])
def test_an_edit_that_is_taken_away_in_flight_by_another_thread_does_not_act(deactivate: bool) -> None:
    """A09"""
    model, x = mlp(), torch.ones(2, 4)
    plain = model(x)
    hooks = hl.Hooks(model)

    def from_another_thread(_value: Tensor) -> None:
        last = hooks["last"]
        thread = threading.Thread(target=last.deactivate if deactivate else last.remove)
        thread.start()
        thread.join()

    hooks.edit("2:input", from_another_thread)
    hooks.edit("2", lambda value: value * 0, name="last")
    assert torch.equal(model(x), plain)
    hooks.remove()


def test_a_hook_that_is_added_in_flight_acts_from_the_next_call_on() -> None:
    """A10"""
    model = mlp()
    hooks = hl.Hooks(model)
    x = torch.ones(2, 4)
    plain = model(x)

    def add(_value: Tensor) -> None:
        if len(hooks) == 1:
            hooks.edit("0", lambda value: value * 0, name="late")
            hooks.capture("0")

    hooks.edit("0:input", add)
    assert torch.equal(model(x), plain)
    assert len(hooks.cache) == 0
    assert torch.equal(model(x), model[2](torch.zeros(2, 8)))
    assert hooks.cache["0"].count_nonzero() == 0
    hooks.remove()


@pytest.mark.parametrize("where", ["1", "0:input"])
def test_an_edit_that_runs_the_model_again_is_not_seen_by_any_hook(where: str) -> None:
    """A12"""
    model, x = mlp(), torch.ones(2, 4)
    plain = model(x)
    inner: list[Tensor] = []

    def run_again(value: Tensor) -> Tensor:
        inner.append(model(x + 1))
        inner.append(model[0](x + 1))
        return value

    hooks = hl.Hooks(model)
    acts = hooks.capture("*", "0#0", keep="all")
    hooks.edit(where, run_again)
    assert torch.equal(model(x), plain)
    hooks.remove()
    assert torch.equal(inner[0], model(x + 1))
    assert [len(acts.calls(site)) for site in ("0", "1", "2", "0#0")] == [1, 1, 1, 1]
    assert torch.equal(acts["0"], model[0](x))


def test_a_transform_that_runs_the_model_again_is_not_seen_by_any_hook() -> None:
    """A12"""
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0", keep="all", transform=lambda value: value + model[0](x)) as acts:
        model(x)
    assert len(acts.calls("0")) == 1
    assert torch.equal(acts["0"], 2 * model[0](x))


def test_an_edit_that_opens_a_block_of_its_own_sees_only_what_that_block_asked_for() -> None:
    """A12"""
    model, x = mlp(), torch.ones(2, 4)
    depth = itertools.count()

    def look_inside(value: Tensor) -> Tensor:
        assert next(depth) == 0, "the edit was called for its own run of the model"
        output, acts = hl.run(model, x * 2, capture="1")
        assert torch.equal(output, model[2](acts["1"]))
        model(x * 3)
        return value + 1

    hooks = hl.Hooks(model)
    hooks.edit("0", look_inside)
    seen = hooks.capture("1", keep="all")
    model(x)
    hooks.remove()
    assert len(seen.calls("1")) == 1
    assert torch.equal(seen["1"], (model[0](x) + 1).relu())


def test_an_exception_in_the_edit_of_a_gradient_names_the_site_and_leaves_no_hook() -> None:
    """A13"""
    model = mlp()
    before = state_of(model)
    error = Boom("in backward")

    def fail(_gradient: Tensor) -> Tensor:
        raise error

    with pytest.raises(Boom) as caught, hl.edit(model, "1:grad_output", fail):
        model(torch.ones(2, 4)).sum().backward()
    assert caught.value is error
    if hasattr(error, "add_note"):
        assert any("'1:grad_output'" in note for note in error.__notes__)
    assert model[0].weight.grad is None
    model.zero_grad()
    assert state_of(model) == before


def test_a_kept_exception_does_not_keep_what_was_captured() -> None:
    """A14"""
    model = mlp()

    def fail(_value: Tensor) -> Tensor:
        raise Boom

    with pytest.raises(Boom) as caught, hl.capture(model, "*") as acts, hl.edit(model, "1", fail):
        model(torch.ones(2, 4))
    assert "0" in acts
    with pytest.raises(hl.NotCaptured, match=says("nothing passed before Boom", "2")):
        acts["2"]
    kept = weakref.ref(acts["0"])
    acts.clear()
    assert kept() is None
    assert caught.value.__traceback__ is not None


class Catching(nn.Module):
    """Catches exceptions of its body."""

    def __init__(self, what: type[BaseException]) -> None:
        super().__init__()
        self.what = what
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.body(x)
        except self.what:
            return torch.zeros(2, 2)


def test_a_model_that_catches_exceptions_does_not_catch_the_stop() -> None:
    """A15"""
    output, acts = hl.run(Catching(Exception), torch.ones(2, 4), capture="body.0", stop=True)
    assert output is None
    assert list(acts) == ["body.0"]


def test_a_model_that_catches_everything_is_said_to_have_caught_the_stop() -> None:
    """A15"""
    with pytest.raises(hl.HooklineError, match=says("Catching caught the signal")):
        hl.run(Catching(BaseException), torch.ones(2, 4), capture="body.0", stop=True)


@pytest.mark.parametrize("training", [True, False])
def test_a_stopped_forward_that_has_touched_running_statistics_says_so(training: bool) -> None:
    """A15"""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)).train(training)
    if training:
        with pytest.warns(hl.HooklineWarning, match=says("ended early in train mode", "…model.eval()")):
            hl.run(model, torch.ones(2, 4), capture="1", stop=True)
    else:
        hl.run(model, torch.ones(2, 4), capture="1", stop=True)


def test_running_statistics_behind_the_stop_are_no_reason_to_warn() -> None:
    """A15"""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    hl.run(model, torch.ones(2, 4), capture="0", stop=True)
    assert model[1].num_batches_tracked == 0


def test_keywords_are_seen_also_of_a_call_that_fails() -> None:
    """A16"""
    block = Block()
    block.mlp[1] = nn.Linear(3, 3)  # Has the wrong width.
    with pytest.raises(RuntimeError, match="shapes"), hl.capture(block, ":inputs", "mlp.0:inputs") as acts:
        block(tokens(), scale=2.0)
    assert acts[":inputs"]["scale"] == 2.0
    assert acts["mlp.0:inputs"]["input"].shape == (2, 5, 8)


def test_an_edit_acts_also_through_a_forward_that_was_read_before_it_came() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    capture, edit = hl.Hooks(model), hl.Hooks(model)
    acts = capture.capture("0")
    forward = model[0].forward
    edit.edit("0", torch.zeros_like)
    with capture:
        assert not forward(x).any()
    assert torch.equal(acts["0"], nn.Linear.forward(model[0], x))
    edit.remove()
    model[0].forward = lambda value: forward(value)
    capture.deactivate()
    capture.activate()
    model[0](x)  # Must not recurse forever.
    capture.remove()
    del model[0].forward
