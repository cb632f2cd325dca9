"""What is attached to a model: listed, cleared, not doubled in silence, and gone with the Hooks that is dropped."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from tests.support.models import mlp
from tests.support.processes import python
from tests.support.states import state_of


def plus(number: float) -> Any:
    return lambda value: value + number


def test_dropping_the_last_reference_removes_the_hooks() -> None:
    model, x = mlp(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    hooks.edit("2", plus(1), name="mine")
    mine = hooks["mine"]
    del hooks
    gc.collect()
    assert torch.equal(model(x), plain + 1), "a selection holds the hooks it was taken from"
    del mine
    assert state_of(model) == before


def test_a_cache_outlives_its_hooks_but_not_the_other_way_round() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with pytest.warns(hl.HooklineWarning, match="'0' are gone before the model ran: nothing holds them"):
        acts = hl.Hooks(model).capture("0")
    model(x)
    with pytest.raises(hl.NotCaptured, match="the Hooks that filled this cache is gone; keep it in a variable"):
        acts["0"]
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    model(x)
    del hooks
    assert torch.equal(acts["0"], model[0](x))


def test_hooks_and_caches_do_not_keep_a_model_alive_once_removed() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    model(torch.ones(2, 4))
    hooks.remove()
    del hooks
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert acts["0"].shape == (2, 8)


def test_a_cell_that_is_run_twice_does_not_hook_twice_in_silence() -> None:
    model = mlp()
    found = []

    def cell() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", lambda value: value + 1)
        found.append(hooks)

    cell()
    with pytest.warns(hl.HooklineWarning, match=r"'0' has the same edit hook from another Hooks already; hl\.attached"):
        cell()
    assert hl.clear(model) == 2


def test_different_hooks_at_one_place_are_no_reason_to_warn() -> None:
    model = mlp()
    first, second = hl.Hooks(model), hl.Hooks(model)
    first.edit("0", plus(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.edit("0", F.relu)
        second.capture("0")
        second.edit("1", plus(1))
    first.remove()
    second.remove()


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
    with pytest.raises(hl.HooklineError, match="no hooks here"):
        hooks.activate()
    acts = hooks.capture("0")
    model(torch.ones(2, 4))
    assert acts["0"].shape == (2, 8)
    hooks.remove()


def test_a_second_block_does_not_show_the_values_of_the_first_as_its_own() -> None:
    model, x = mlp(), torch.ones(2, 4)
    expected = model[0](x * 2)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    hooks.deactivate()
    with hooks:
        model(x)
    with hooks:
        with pytest.raises(hl.NotCaptured, match="nothing passed '.*' in this block"):
            acts["0"]
        model(x * 2)
        assert torch.equal(acts["0"], expected)
    with hooks:
        pass  # No forward, no complaint.
    assert torch.equal(acts["0"], expected)
    hooks.remove()


@pytest.mark.parametrize("option", ["keep", "transform", "captures", "patches"])
def test_run_does_not_hand_the_model_what_was_meant_for_hookline(option: str) -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Identity()

        def forward(self, x: torch.Tensor, device: str = "", **kwargs: Any) -> torch.Tensor:
            return self.body(x)

    model, x = Open(), torch.ones(2)
    hl.run(model, x, capture="body", device="here")  # The model's own.
    with pytest.raises(hl.HooklineError, match=f"no option '{option}'"):
        hl.run(model, x, capture="body", **{option: "all"})


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
    assert python("-c", code).strip() == "1"


def test_the_same_edit_added_twice_to_one_hooks_warns_but_under_another_name_it_is_meant() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.edit("0", F.relu)
    with pytest.warns(hl.HooklineWarning, match="'0' has the same edit hook already"):
        hooks.edit("0", F.relu)
    hooks.edit("0", F.relu, name="again")
    hooks.remove()
