"""Removing hooks: twice, late, by the garbage collector; other people's hooks stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.states import state_of


def test_removing_twice_is_the_same_as_once() -> None:
    """A08"""
    model = mlp()
    before = state_of(model)
    hooks = hl.Hooks(model)
    hooks.capture("*")
    one = next(iter(hooks))
    one.remove()
    one.remove()
    assert len(hooks) == 2
    hooks.remove()
    hooks.remove()
    hooks.deactivate()
    assert len(hooks) == 0
    assert not one.active
    assert state_of(model) == before


def test_hooks_of_a_model_that_nobody_else_holds_can_still_be_removed() -> None:
    """A08"""
    model = mlp()
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    output = model(torch.ones(2, 4))
    del model
    hooks.remove()
    assert acts["0"].shape == (2, 8)
    assert output.shape == (2, 2)


AFTER_REMOVAL: dict[str, Callable[[hl.Hooks, hl.Hook], object]] = {
    "activate": lambda hooks, _: hooks.activate(),
    "enter": lambda hooks, _: hooks.__enter__(),
    "activated": lambda hooks, _: hooks.activated().__enter__(),
    "run": lambda hooks, _: hooks.run(torch.ones(2, 4)),
    "activate one": lambda _, hook: hook.activate(),
}


@pytest.mark.parametrize("use", AFTER_REMOVAL)
def test_hooks_that_were_removed_refuse_to_act_again(use: str) -> None:
    """A08"""
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.edit("0", lambda value: value * 0)
    hook = next(iter(hooks))
    hooks.remove()
    with pytest.raises(hl.HooklineError, match=says("no hooks here")):
        AFTER_REMOVAL[use](hooks, hook)
    assert len(hl.attached(model)) == 0


def test_a_selection_whose_hooks_were_removed_refuses_to_act_again() -> None:
    """A08"""
    hooks = hl.Hooks(mlp())
    hooks.edit("0", lambda value: value, name="mine")
    mine = hooks["mine"]
    hooks.remove()
    with pytest.raises(hl.HooklineError, match=says("no hooks here")):
        mine.activate()


def test_a_site_whose_capture_was_removed_can_be_captured_anew() -> None:
    """A08"""
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.capture("0")
    model(torch.zeros(2, 4))
    hooks.remove()
    acts = hooks.capture("0")
    model(torch.ones(2, 4))
    assert torch.equal(acts["0"], model[0](torch.ones(2, 4)))
    hooks.remove()


def test_other_peoples_hooks_stay_in_their_tables_and_in_their_order() -> None:
    """A11"""
    model = mlp()
    calls: list[str] = []
    first = model[0].register_forward_hook(lambda *_: calls.append("first"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    before = state_of(model)
    with hl.capture(model, "*"), hl.edit(model, "0", lambda value: value):
        second = model[0].register_forward_hook(lambda *_: calls.append("second"))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert calls == ["before", "first", "second", "backward"]
    assert hl.clear(model) == 0
    assert list(model[0]._forward_hooks) == [first.id, second.id]
    second.remove()
    model.zero_grad()
    assert [key for key, value in state_of(model).items() if before[key] != value and "_parameters" not in key] == []


def test_a_module_that_was_tampered_with_does_not_keep_the_others_from_being_left() -> None:
    """A17"""
    model = mlp()
    before = state_of(model)
    with hl.capture(model, "*"):
        model(torch.ones(2, 4))
        del model[0].forward
        model[1].forward = own = lambda x: x
    assert model[1].forward is own
    del model[1].forward
    assert state_of(model) == before


def test_a_block_that_complains_at_its_end_has_left_every_module_before() -> None:
    """A17"""
    model = GPT()
    before = state_of(model)
    with pytest.raises(hl.NeverFired, match="'head'"), hl.capture(model, "h.*.mlp", "head"):
        model.h[0](tokens())
    assert state_of(model) == before


def test_gradient_hooks_leave_the_flags_of_modules_alone() -> None:
    """A19"""
    model = mlp()
    before = state_of(model)
    with hl.capture(model, "*:grad_output", "2:grad_input"), hl.edit(model, "1:grad_output", lambda value: value * 2):
        assert all(module._is_full_backward_hook is None for module in model.modules())
        model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    assert state_of(model) == before


def test_no_torch_hook_is_spent_and_no_table_replaced() -> None:
    """A20"""
    model = mlp()
    foreign = model[0].register_forward_hook(lambda *_: None)
    tables, number = model[0]._forward_hooks, RemovableHandle.next_id
    with hl.capture(model, "*", "*:input"), hl.edit(model, "0", lambda value: value):
        model(torch.ones(2, 4))
        assert model[0]._forward_hooks is tables
    assert RemovableHandle.next_id == number
    foreign.remove()
    assert len(tables) == 0


def test_hooks_that_the_cycle_collector_finds_come_off_the_model() -> None:
    """A21"""
    model = mlp()
    before = state_of(model)
    hooks = hl.Hooks(model)
    hooks.capture("*")
    cycle: list[Any] = [hooks]
    cycle.append(cycle)
    del hooks, cycle
    gc.collect()
    assert state_of(model) == before


def test_hooks_that_a_module_keeps_as_an_attribute_go_with_the_model() -> None:
    """A21"""
    model = mlp()
    model.hooks = hl.Hooks(model)
    model.hooks.capture("0")
    model(torch.ones(2, 4))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_nothing_global_is_hooked_and_no_other_model_is_touched() -> None:
    """A22"""
    model, other = mlp(), mlp()
    before = state_of(other)
    with hl.capture(model, "*", "*:grad_output") as acts:
        tables = [
            value for name, value in vars(torch_modules).items() if name.startswith("_global_") and "hooks" in name
        ]
        assert len(tables) >= 5
        assert not any(tables)
        other(torch.ones(2, 4))
        assert len(acts) == 0
        assert state_of(other) == before
