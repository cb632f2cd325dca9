"""Hooks: add, name, narrow and remove."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, plus, tokens
from tests.support.states import state_of


def test_hooks_act_as_soon_as_they_are_added_until_they_are_removed() -> None:
    model, x = mlp(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0", "2:input")
    assert acts is hooks.cache
    added = hooks.edit("2", plus(1))
    assert torch.equal(model(x), plain + 1)
    assert torch.equal(acts["0"], model[0](x))
    added.remove()
    assert torch.equal(model(x), plain)
    assert len(hooks) == 2
    hooks.remove()
    assert state_of(model) == before
    assert torch.equal(acts["2:input"], model[:2](x))


def test_adding_returns_the_hooks_just_added() -> None:
    model = GPT()
    hooks = hl.Hooks(model)
    assert len(hooks.edit("h.*.mlp", F.relu)) == 3
    assert [str(hook.site) for hook in hooks.patch({"h.0": 0.0, "h.1:input": 0.0})] == ["h.0", "h.1:input"]
    assert [hook.kind for hook in hooks.skip("h.2")] == ["skip"]
    assert [hook.kind for hook in hooks.stop_after("head")] == ["stop"]
    assert len(hooks) == 7
    hooks.remove()


def test_a_hook_shows_what_it_does_where() -> None:
    hooks = hl.Hooks(mlp())
    hooks.edit("0:input[:, 0]", F.relu, name="rectify")
    hook = next(iter(hooks))
    assert (str(hook.site), hook.kind, hook.name, hook.active) == ("0:input[:, 0]", "edit", "rectify", True)
    assert repr(hook) == "<edit 'rectify' at '0:input[:, 0]': relu, active>"
    hook.deactivate()
    assert "inactive" in repr(hook)
    hook.activate()
    assert hook.active
    assert hook == next(iter(hooks))
    assert hash(hook) == hash(next(iter(hooks)))
    hook.remove()
    assert not hook.active
    assert hook not in hooks


def test_a_table_lists_the_hooks_in_order() -> None:
    hooks = hl.Hooks(mlp())
    hooks.capture("0")
    hooks.edit("2", F.relu, name="rectify")
    hooks["rectify"].deactivate()
    assert repr(hooks).splitlines()[0] == "2 hooks on Sequential"
    assert repr(hooks).splitlines()[1].split() == ["name", "kind", "site", "action", "active"]
    assert [line.split()[-1] for line in repr(hooks).splitlines()[3:]] == ["yes", "no"]
    hooks["rectify"].remove()
    assert repr(hooks).startswith("1 hook on Sequential")
    hooks.remove()
    assert repr(hooks).startswith("0 hooks on Sequential")


def test_hooks_are_counted_iterated_and_contain_names_sites_and_hooks() -> None:
    hooks = hl.Hooks(GPT())
    hooks.edit("h.*.mlp", F.relu, name="rectify")
    assert len(hooks) == 3
    assert [str(hook.site) for hook in hooks] == ["h.0.mlp", "h.1.mlp", "h.2.mlp"]
    assert "rectify" in hooks
    assert "h.1.mlp" in hooks
    assert hl.Site("h.1.mlp") in hooks
    assert next(iter(hooks)) in hooks
    assert "h.1" not in hooks
    assert next(iter(hooks)) not in hl.Hooks(GPT())
    hooks.remove()


def test_hooks_are_narrowed_by_name_place_and_kind() -> None:
    hooks = hl.Hooks(GPT())
    hooks.capture("h.*", "h.0.mlp:input")
    hooks.edit("h.*.mlp", F.relu, name="rectify")
    hooks.edit("h.0.mlp[0]", F.relu, name="first")
    assert len(hooks["rectify"]) == 3
    assert len(hooks.of("edit")) == 4
    assert len(hooks.of("skip")) == 0
    assert [hook.kind for hook in hooks.at("h.0.mlp")] == ["capture", "edit", "edit"]
    assert [hook.kind for hook in hooks.at("h.0.mlp:input")] == ["capture"]
    assert len(hooks.at("h.*")) == 3
    assert len(hooks.at("h.0", "h.1.mlp")) == 2
    assert len(hooks.of("edit").at("h.0.mlp")["first"]) == 1
    assert len(hooks.at(nn.Sequential)) == 5
    hooks.remove()


def test_narrowing_to_nothing_says_what_there_is() -> None:
    hooks = hl.Hooks(mlp())
    hooks.edit("0", F.relu, name="rectify")
    with pytest.raises(hl.SiteError, match=says("no hook here is named did", "rectfy", "rectify")):
        hooks["rectfy"]
    with pytest.raises(hl.SiteError, match=says("no hook here is named", "x", "rectify")):
        hooks["x"]
    with pytest.raises(hl.SiteError, match=says("is not a kind of", "edits", "edit")):
        hooks.of("edits")
    with pytest.raises(hl.SiteError, match=says("no hook here is at", "2")):
        hooks.at("2")
    with pytest.raises(hl.SiteError, match=says("matches nothing did you mean", "7")):
        hooks.at("7")
    hooks.remove()


def test_a_place_narrows_tied_modules_under_any_of_their_names() -> None:
    model = mlp()
    model.again = model[0]
    hooks = hl.Hooks(model)
    hooks.edit("0", F.relu)
    assert len(hooks.at("again")) == 1
    assert "again" in hooks
    hooks.remove()


def test_run_calls_the_model_under_the_hooks() -> None:
    model, x = GPT(), tokens()
    hooks = hl.Hooks(model)
    hooks.edit("head", lambda value: value * 0)
    hooks.deactivate()
    assert hooks.run(x=x).count_nonzero() == 0
    assert hooks.of("edit").run(x).count_nonzero() == 0
    assert model(x).count_nonzero() > 0
    hooks.remove()


def test_the_short_forms_act_only_inside_their_block() -> None:
    model, x = mlp(), torch.ones(2, 4)
    plain, before = model(x), state_of(model)
    block = hl.edit(model, "2", plus(1))
    assert state_of(model) == before
    assert not any(hook.active for hook in block)
    with block:
        assert all(hook.active for hook in block)
        assert torch.equal(model(x), plain + 1)
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_one_site_is_captured_once_by_one_hooks() -> None:
    hooks = hl.Hooks(mlp())
    hooks.capture("0")
    hooks.capture("0:input", "0[0]")
    with pytest.raises(hl.SiteError, match=says("is captured by these hooks", "0")):
        hooks.capture("0", keep="all")
    hooks.remove()


def test_a_hook_knows_whether_anything_has_passed() -> None:
    model, x = mlp(), torch.ones(2, 4)
    hooks = hl.Hooks(model)
    hooks.capture("0")
    (hook,) = hooks
    assert not hook.fired
    model(x)
    assert hook.fired
    with hooks:
        assert not hook.fired
        model(x)
        assert hook.fired
    assert hook.fired
    hooks.remove()


def test_each_place_that_hooks_are_narrowed_to_has_one() -> None:
    hooks = hl.Hooks(mlp())
    hooks.edit("0", torch.relu)
    hooks.edit("2:input", torch.relu)
    assert len(hooks.at("0", "2")) == len(hooks.at(["2", "0"])) == 2
    assert [hook.site.path for hook in hooks.at("2", "0")] == ["0", "2"]
    assert len(hooks.at("*")) == 2
    with pytest.raises(hl.SiteError, match=says("no hook here is at", "1")):
        hooks.at("0", "1")
    hooks.remove()


def test_a_site_in_place_of_a_name_is_told_where_its_hooks_are() -> None:
    hooks = hl.Hooks(mlp())
    hooks.capture("0")
    with pytest.raises(hl.SiteError, match=says("no hook here is named hooks", "0", "0")):
        hooks["0"]
