"""Hook points that the author of a model put into it."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import hookline as hl
from tests.support.points_models import Manual, add_one


def test_a_point_in_a_model_of_its_own_is_an_identity_that_can_be_hooked():
    model, x = Manual(), torch.randn(2, 4)
    expected = model.fc(x) * 2
    assert model(x).equal(expected)
    model.mid_hook.add_hook(add_one)
    assert model(x).equal((model.fc(x) + 1) * 2)
    model.mid_hook.remove_hooks()
    assert model(x).equal(expected)
    assert "forward" not in model.mid_hook.__dict__


def test_a_point_of_the_authors_keeps_its_name_and_is_the_same_object():
    model, x = hl.auto_hook(Manual()), torch.randn(2, 4)
    assert list(model.hook_dict) == ["hook_point", "fc.hook_point", "mid_hook"]
    assert model.hook_dict["mid_hook"] is model.mid_hook
    assert model.mid_hook.name == "mid_hook"
    model.add_hook("mid_hook", add_one)
    output, cache = model.run_with_cache(x)
    assert cache["mid_hook"].equal(model.fc(x) + 1)
    assert output.equal(cache["mid_hook"] * 2)
    assert model.run_with_hooks(x, fwd_hooks=[("mid_hook", lambda tensor, hook: tensor * 0)]).equal(torch.zeros(2, 4))
    raw = model.unwrap()
    assert raw.mid_hook.name is None
    assert not hl.attached(raw)


def test_a_point_of_the_authors_with_the_name_of_another_stands_for_it():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.hook_point = hl.HookPoint()

        def forward(self, x):
            return self.hook_point(x) + 1

    model = hl.auto_hook(Named())
    assert list(model.hook_dict.values()) == [model.hook_point]
    model.hook_point = nn.Identity()
    assert list(model.hook_dict) == ["hook_point", "hook_point.hook_point"]
    model.add_hook("hook_point", add_one)
    model.add_hook("hook_point.hook_point", add_one)
    assert model(torch.zeros(1)) == 3
    model.reset_hooks()


def test_copies_of_a_point_are_unhooked():
    model, x = Manual(), torch.randn(2, 4)
    expected = model(x)
    model.mid_hook.add_hook(add_one)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not copied.mid_hook.has_hooks()
        assert copied(x).equal(expected)
    model.mid_hook.remove_hooks()
