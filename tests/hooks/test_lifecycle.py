"""The life of hooks: paused, active again, in nested blocks, added and removed inside blocks, and dropped."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp, plus
from tests.support.states import state_of


def test_a_hook_at_rest_leaves_nothing_on_its_module() -> None:
    model = mlp()
    before = state_of(model)
    hooks = hl.Hooks(model)
    acts = hooks.capture("*")
    hooks.deactivate()
    assert state_of(model) == before
    model(torch.ones(2, 4))
    assert len(acts) == 0
    hooks.at("1").activate()
    model(torch.ones(2, 4))
    assert list(acts) == ["1"]
    hooks.remove()


def test_hooks_at_one_site_act_in_the_order_they_were_added_also_after_a_rest() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(2)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="first")
    hooks.capture("0")
    hooks.edit("0", lambda value: value * 10, name="second")
    hooks["first"].deactivate()
    hooks["first"].activate()
    assert model(x).tolist() == [20.0, 20.0]
    assert hooks.cache["0"].tolist() == [2.0, 2.0]
    hooks.remove()


def test_activated_restores_what_was_before() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    hooks.edit("0", plus(10), name="ten")
    hooks["ten"].deactivate()
    with hooks.of("edit").activated():
        assert model(x).item() == 11
    assert model(x).item() == 1
    hooks.deactivate()
    with hooks["one"].activated():
        assert model(x).item() == 1
        with hooks["ten"].activated():
            assert model(x).item() == 11
            with hooks.activated():
                assert model(x).item() == 11
        assert model(x).item() == 1
    assert model(x).item() == 0
    hooks.remove()


def test_a_block_may_be_entered_again_and_again_also_inside_itself() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    before = state_of(model)
    for hooks in (hl.edit(model, "0", plus(1)), hl.Hooks(model)):
        if len(hooks) == 0:
            hooks.edit("0", plus(1))
            hooks.deactivate()
        for _ in range(3):
            with hooks:
                assert model(x).item() == 1
                with hooks:
                    assert model(x).item() == 1
                assert model(x).item() == 1
            assert model(x).item() == 0
    assert state_of(model) == before


def test_a_block_restores_hooks_that_were_deactivated_or_activated_inside_it() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    hooks.edit("0", plus(10), name="ten")
    hooks["ten"].deactivate()
    with hooks:
        hooks.deactivate()
        assert model(x).item() == 0
        hooks["ten"].activate()
        assert model(x).item() == 10
    assert model(x).item() == 1
    assert [hook.active for hook in hooks] == [True, False]
    hooks.remove()


def test_hooks_may_be_added_inside_a_block() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    before = state_of(model)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    hooks.deactivate()
    with hooks:
        hooks.edit("0", plus(10), name="ten")
        assert model(x).item() == 11
    assert not hooks["one"].of("edit").__iter__().__next__().active
    hooks.deactivate()
    assert model(x).item() == 0
    assert state_of(model) == before


def test_hooks_may_be_removed_inside_a_block() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    before = state_of(model)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    hooks.edit("0", plus(10), name="ten")
    hooks.deactivate()
    with hooks:
        hooks["one"].remove()
        assert model(x).item() == 10
    assert state_of(model) == before
    assert len(hooks) == 1
    with hooks:
        hooks.remove()
        assert model(x).item() == 0
    assert state_of(model) == before


def test_a_block_counts_calls_from_zero() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    hooks = hl.Hooks(model)
    hooks.edit("0#1", plus(1))
    assert [model(x).item() for _ in range(3)] == [0, 1, 0]
    for _ in range(2):
        with hooks:
            assert [model(x).item() for _ in range(3)] == [0, 1, 0]
    hooks.remove()


def test_a_stop_is_a_hook_that_can_rest() -> None:
    model, x = mlp(), torch.ones(2, 4)
    hooks = hl.Hooks(model)
    hooks.capture("*")
    hooks.stop_after("0", "1")
    assert model(x) is None
    assert list(hooks.cache) == ["0", "1"]
    hooks.of("stop").deactivate()
    assert model(x) is not None
    assert list(hooks.cache) == ["0", "1", "2"]
    hooks.remove()


def test_a_block_that_fails_restores_the_state_before_it() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.zeros(1)
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    hooks["one"].deactivate()
    with pytest.raises(ZeroDivisionError), hooks:
        raise ZeroDivisionError
    assert model(x).item() == 0

    def fail(_value: Tensor) -> Tensor:
        raise ZeroDivisionError

    hooks.edit("0", fail, name="failing")
    hooks["failing"].deactivate()
    with pytest.raises(ZeroDivisionError):
        hooks.run(x)
    assert model(x).item() == 0
    hooks.remove()


def test_deactivated_hooks_are_not_expected_to_fire() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    hooks = hl.Hooks(model)
    hooks.edit("0", plus(1), name="one")
    with hooks:
        hooks["one"].deactivate()
        model(torch.zeros(1))
    hooks.remove()


def test_hooks_may_rest_until_they_are_wanted() -> None:
    model, x = mlp(), torch.ones(2, 4)
    bare = model(x)
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("0")
    hooks.edit("2", torch.zeros_like, name="zero")
    hooks.edit("2", lambda value: value + 1)
    assert torch.equal(model(x), bare)
    assert not any(hook.active for hook in hooks)
    assert len(hl.attached(model)) == 0
    with hooks:
        assert torch.equal(model(x), torch.ones(2, 2))
    assert list(acts) == ["0"]
    hooks["zero"].activate()
    assert torch.equal(model(x), torch.zeros(2, 2))
    hooks["zero"].remove()
    assert torch.equal(model(x), bare)


def test_inactive_hooks_are_not_added_inside_their_open_block_where_they_would_not_act() -> None:
    model, x = mlp(), torch.ones(2, 4)
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("0")
    with hooks:
        with pytest.raises(hl.HooklineError, match=says("would not act in this")):
            hooks.patch({"1": 0.0})
        with pytest.raises(hl.HooklineError, match=says("would not act in this")):
            hooks.capture("1")
        model(x)
    assert list(acts) == ["0"]
    hooks.capture("1")
    with hooks:
        model(x)
    assert list(acts) == ["0", "1"]


def test_dropping_the_last_reference_removes_the_hooks() -> None:
    model, x = mlp(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    hooks.edit("2", plus(1), name="mine")
    mine = hooks["mine"]
    del hooks
    gc.collect()
    assert torch.equal(model(x), plain + 1), "a selection did not keep the hooks alive that it was taken from"
    del mine
    assert state_of(model) == before


def test_a_cache_outlives_its_hooks_but_not_the_other_way_round() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with pytest.warns(hl.HooklineWarning, match=says("were gone before the model", "0")):
        acts = hl.Hooks(model).capture("0")
    model(x)
    with pytest.raises(hl.NotCaptured, match=says("the Hooks that filled this")):
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
    with pytest.warns(hl.HooklineWarning, match=says("has the same edit hook from", "0")):
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


def test_a_second_block_does_not_show_the_values_of_the_first_as_its_own() -> None:
    model, x = mlp(), torch.ones(2, 4)
    expected = model[0](x * 2)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    hooks.deactivate()
    with hooks:
        model(x)
    with hooks:
        with pytest.raises(hl.NotCaptured, match=says("in this block")):
            acts["0"]
        model(x * 2)
        assert torch.equal(acts["0"], expected)
    with hooks:
        pass  # No forward, no warning.
    assert torch.equal(acts["0"], expected)
    hooks.remove()


def test_the_same_edit_added_twice_to_one_hooks_warns_but_under_another_name_it_is_meant() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.edit("0", F.relu)
    with pytest.warns(hl.HooklineWarning, match=says("has the same edit hook", "0")):
        hooks.edit("0", F.relu)
    hooks.edit("0", F.relu, name="again")
    hooks.remove()
