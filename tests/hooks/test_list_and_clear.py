"""The hooks on a model, listed with their owners and cleared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp, plus
from tests.support.quick_python import quick_python
from tests.support.running import python
from tests.support.states import state_of


def own_hook(module: nn.Module, args: Any, output: Any) -> None: ...


def test_attached_lists_every_hook_on_a_model_with_its_owner() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.capture("0")
    hooks.edit("", F.relu)
    model[0].register_forward_hook(own_hook)
    model[2].register_forward_pre_hook(own_hook)
    model[2].register_full_backward_hook(own_hook)
    model[2].register_full_backward_pre_hook(own_hook)
    model[1].forward = torch.relu
    found = [tuple(row) for row in hl.attached(model)]
    assert ("0", "capture", "hookline", "save()") in found
    assert ("", "edit", "hookline", "relu") in found
    assert ("0", "forward hook", __name__, "own_hook") in found
    kinds = {(row.site, row.kind) for row in hl.attached(model)}
    assert {("2", "forward pre-hook"), ("2", "backward hook"), ("2", "backward pre-hook")} <= kinds
    assert ("1", "replaced forward") in kinds
    assert len(found) == 7
    assert repr(hl.attached(mlp())) == "no hooks"
    hooks.deactivate()
    assert len(hl.attached(model)) == 5
    hooks.remove()


def test_clear_removes_hooklines_hooks_and_no_others() -> None:
    model, x = mlp(), torch.ones(2, 4)
    model[0].register_forward_hook(own_hook)
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    acts = hooks.capture("*")
    hooks.edit("2", plus(1))
    assert hl.clear(model) == 4
    assert hl.clear(model) == 0
    assert state_of(model) == before
    assert torch.equal(model(x), plain)
    assert not any(hook.active for hook in hooks)
    assert len(acts) == 0
    with hl.edit(model, "2", plus(1)):
        assert hl.clear(model) == 1
        assert torch.equal(model(x), plain)
    assert state_of(model) == before
    assert len(hl.attached(model)) == 1


def test_hooks_on_parameters_and_on_state_dicts_are_listed_too() -> None:
    model = mlp()
    handles = [
        model[0].weight.register_hook(lambda gradient: None),
        model[2].bias.register_post_accumulate_grad_hook(lambda parameter: None),
        model.register_state_dict_pre_hook(lambda *_: None),
    ]
    assert [(row.site, row.kind) for row in hl.attached(model)] == [
        ("", "state_dict pre-hook"),
        ("0.weight", "gradient hook"),
        ("2.bias", "accumulated gradient hook"),
    ]
    for handle in handles:
        handle.remove()
    assert len(hl.attached(model)) == 0


def test_what_was_cleared_can_be_captured_anew_and_does_not_come_back() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.capture("0")
    assert hl.clear(model) == 1
    with pytest.raises(hl.HooklineError, match=says("no hooks here")):
        hooks.activate()
    acts = hooks.capture("0")
    model(torch.ones(2, 4))
    assert acts["0"].shape == (2, 8)
    hooks.remove()


@pytest.mark.process
def test_a_gradient_that_comes_several_times_in_the_first_backward_of_a_process_warns() -> None:
    code = """
import torch, warnings
import hookline as hl
lin = torch.nn.Linear(3, 3)
with hl.capture(torch.nn.Sequential(lin, lin), "0:grad_output") as acts:
    torch.nn.Sequential(lin, lin)(torch.ones(2, 3)).sum().backward()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    acts["0:grad_output"]
print(len(said))
"""
    assert python("-c", code, command=quick_python()).strip() == "1"
