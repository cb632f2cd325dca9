"""Why nothing passed: the warnings about hooks that did not fire, and when there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens


def test_hooks_that_need_not_fire_say_nothing_and_a_reading_still_says_why() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with hl.capture(model, "unused", "used").when_missing("ignore") as acts:
        model(torch.ones(1, 2))
    with pytest.raises(hl.NotCaptured, match=says("was not called in", "unused")):
        acts["unused"]
    with pytest.warns(hl.HooklineWarning, match=says("was not called in", "unused")):
        with hl.capture(model, "unused").when_missing("warn"):
            model(torch.ones(1, 2))
    with pytest.raises(hl.NeverFired, match=says("was not called in", "unused")):
        with hl.capture(model, "*").when_missing("raise"):
            model(torch.ones(1, 2))
    del model.forward


def test_a_gradient_that_need_not_come_is_no_reason_to_complain() -> None:
    layer = nn.Linear(2, 2)
    hooks = hl.Hooks(layer)
    acts = hooks.capture(":grad_output")
    hooks.when_missing("ignore")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(1, 2))
    with pytest.raises(hl.NotCaptured, match=says("can get no gradient torch", "torch.no_grad")):
        acts[":grad_output"]
    hooks.remove()


def test_what_happens_when_something_is_missing_is_one_of_three() -> None:
    with pytest.raises(hl.HooklineError, match=says("when_missing takes raise", "error")):
        hl.Hooks(mlp()).when_missing("error")


def test_a_module_that_is_replaced_may_be_said_to_be_no_matter() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.head = nn.Linear(2, 2)
            return self.head(x)

    model, x = Replaces(), torch.ones(1, 2)
    with pytest.raises(hl.NeverFired), hl.capture(model, "head"):
        model(x)
    with (
        pytest.warns(hl.HooklineWarning, match=says("was not called more", "head")),
        hl.capture(model, "head").when_missing("warn"),
    ):
        model(x)
    with hl.capture(model, "head").when_missing("ignore"):
        model(x)


def test_a_part_of_a_model_that_runs_by_itself_is_said_to_be_a_part() -> None:
    model = mlp()
    with pytest.raises(hl.NeverFired, match=says("was not called nor", "2")):
        with hl.capture(model, "0", "2"):
            model[0](torch.ones(2, 4))


def test_hooks_that_stay_do_not_complain_of_what_did_not_fire() -> None:
    model = GPT()
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.2", "head")
    model.h[2](tokens())
    assert list(acts) == ["h.2"]
    with pytest.raises(hl.NotCaptured, match=says("nothing has passed yet", "head")):
        acts["head"]
    hooks.remove()


def test_reading_a_capture_that_is_not_active_says_so() -> None:
    model, x = mlp(), torch.ones(2, 4)
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("0")
    model(x)
    with pytest.raises(hl.NotCaptured, match=says("its hook is not active")):
        acts["0"]
    hooks.activate()
    with pytest.raises(hl.NotCaptured, match=says("nothing has passed yet")):
        acts["0"]
    hooks.deactivate()
    with pytest.raises(hl.NotCaptured, match=says("its hook is not active")):
        acts["0"]
    hooks.run(x)
    assert acts["0"].shape == (2, 8)


def test_a_call_that_was_not_reached_is_counted_for_the_user() -> None:
    with pytest.raises(hl.NeverFired, match=says("was not reached was called", "0#3", "0", 2, "#", 0)):
        with hl.capture(model := mlp(), "0#3"):
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))


def test_calls_before_the_block_are_not_counted_for_the_user() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.edit("0#1", lambda value: value)
    model(torch.ones(2, 4))
    with pytest.raises(hl.NeverFired, match=says("was not reached was", "0#1", "0", 1)):
        hooks.run(torch.ones(2, 4))
    hooks.remove()
