"""run_with_cache and the caching hooks: the values they keep, their names, and why one may be missing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.points_models import Around, Manual, Nothing, Several


class Scalar(nn.Module):
    """A model that returns a loss and overwrites its hidden values in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.W = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4))

    def forward(self, x):
        hidden = self.relu(self.first(x - self.b))
        return (hidden @ self.W + self.b).square().mean()


class Attention(nn.Module):
    """Attention whose values have TransformerLens's dimensions: batch, position, head, width."""

    def __init__(self):
        super().__init__()
        self.hook_q = hl.HookPoint()
        self.hook_scores = hl.HookPoint()
        self.hook_flag = hl.HookPoint()

    def forward(self, x):
        q = self.hook_q(x.view(*x.shape[:2], 2, -1))
        self.hook_scores(torch.einsum("bqhw,bkhw->bhqk", q, q))
        self.hook_flag(x.new_ones(1))
        return q.flatten(2)


def test_every_point_is_cached_in_the_order_they_fire():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    output, cache = model.run_with_cache(x)
    assert list(cache) == ["0.hook_point", "1.hook_point", "2.hook_point", "hook_point"]
    assert isinstance(cache, dict)
    assert cache["0.hook_point"].equal(model[0](x))
    assert cache["hook_point"].equal(output)
    assert not cache["hook_point"].requires_grad
    assert not hl.attached(model)


def test_values_are_right_though_the_model_overwrites_them():
    model, x = hl.auto_hook(Scalar()), torch.randn(2, 4)
    before = model.first(x - model.b)
    _, cache = model.run_with_cache(x)
    assert cache["first.hook_point"].equal(before)
    assert cache["relu.hook_point"].equal(before.relu())
    kept, hooks, _ = model.get_caching_hooks()
    with model.hooks(fwd_hooks=hooks):
        model(x)
    assert kept["first.hook_point"].equal(before)


def test_a_parameters_point_holds_the_latest_of_its_operations():
    model, x = hl.auto_hook(Scalar()), torch.randn(2, 4)
    hidden = model.first(x - model.b).relu()
    product = hidden @ model.W
    total = product + model.b
    _, cache = model.run_with_cache(x)
    assert cache["W.hook_point"].equal(product)
    assert cache["b.hook_point"].equal(total)
    assert list(cache)[-3:] == ["W.hook_point", "b.hook_point", "hook_point"]


def test_gradients_are_cached_under_their_own_names():
    model, x = hl.auto_hook(Scalar()), torch.randn(2, 4)
    loss, cache = model.run_with_cache(x, incl_bwd=True)
    hidden = model.first(x - model.b).relu()
    product = (hidden @ model.W).detach().requires_grad_()
    expected = torch.autograd.grad((product + model.b).square().mean(), product)[0]
    assert cache["W.hook_point_grad"].allclose(expected)
    assert cache["hook_point_grad"] == 1
    assert model.W.grad is not None
    assert loss.equal(cache["hook_point"])


@pytest.mark.parametrize(
    "names",
    [
        "1.hook_point",
        ["1.hook_point"],
        ("1.hook_point",),
        {"1.hook_point"},
        lambda name: name.startswith("1"),
    ],
    ids=["name", "list", "tuple", "set", "filter"],
)
def test_names_are_chosen_by_name_list_or_filter(names):
    _, cache = hl.auto_hook(mlp()).run_with_cache(torch.randn(3, 4), names_filter=names)
    assert list(cache) == ["1.hook_point"]


def test_an_empty_list_caches_nothing():
    output, cache = hl.auto_hook(mlp()).run_with_cache(torch.randn(3, 4), names_filter=[])
    assert cache == {}
    assert output.shape == (3, 2)


def test_a_name_that_is_not_there_is_an_error_before_the_model_runs():
    model = hl.auto_hook(mlp())
    with pytest.raises(hl.SiteError, match=says("is not a hook point", "Sequential", "1.hook_pint", "1.hook_point")):
        model.run_with_cache(torch.randn(3, 4), names_filter=["0.hook_point", "1.hook_pint"])
    with pytest.raises(hl.SiteError, match=says("the filter selects none of", "Sequential", 4)):
        model.run_with_cache(torch.randn(3, 4), names_filter=lambda name: False)
    with pytest.raises(hl.SiteError, match=says("names_filter is a name")):
        model.run_with_cache(torch.randn(3, 4), names_filter=[0])


def test_what_was_not_cached_says_why():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            self.unused = nn.ReLU()

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model = hl.auto_hook(Unused())
    _, cache = model.run_with_cache(torch.randn(3, 1, 4))
    assert "unused.hook_point" not in cache
    with pytest.raises(KeyError, match=says("was not called in", "unused", 1)):
        cache["unused.hook_point"]
    with pytest.raises(hl.NotCaptured, match=says("MultiheadAttention reads its weight directly")):
        cache["attention.out_proj.hook_point"]
    with pytest.raises(hl.NotCaptured, match=says("was not cached", "atention.hook_point")):
        cache["atention.hook_point"]
    assert cache.get("unused.hook_point") is None


def test_a_point_asked_for_by_name_that_never_fires_raises_and_one_of_a_filter_warns():
    model, x = hl.auto_hook(nn.MultiheadAttention(4, 2)), torch.randn(3, 1, 4)
    with pytest.raises(hl.NeverFired, match=says("was not called")):
        model.run_with_cache(x, x, x, names_filter="out_proj.hook_point")
    with pytest.warns(hl.HooklineWarning, match=says("was not called")):
        model.run_with_cache(x, x, x, names_filter=lambda name: True)


def test_a_value_that_can_have_no_gradient_is_left_out():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.choose = Around(nn.Identity())
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x)[self.choose(torch.zeros(2, dtype=torch.long))].sum()

    model = hl.auto_hook(Choice())
    _, cache = model.run_with_cache(torch.randn(2, 4), incl_bwd=True)
    assert "fc.hook_point_grad" in cache
    with pytest.raises(hl.NotCaptured, match=says("int64 values have none")):
        cache["choose.hook_point_grad"]


def test_backward_needs_one_number():
    model = hl.auto_hook(mlp())
    with pytest.raises(ValueError, match=says("which is float32", "(3, 2)")):
        model.run_with_cache(torch.randn(3, 4), incl_bwd=True)
    assert not hl.attached(model)


def test_a_value_with_one_tensor_is_that_tensor_and_any_other_keeps_its_structure():
    _, cache = hl.auto_hook(Around(Several())).run_with_cache(torch.zeros(2))
    assert cache["inner.hook_point"]["rest"][2][1][0] == 3
    _, cache = hl.auto_hook(Around(Nothing())).run_with_cache(torch.zeros(2))
    assert cache["inner.hook_point"] is None
    lstm = nn.LSTM(4, 4)
    _, cache = hl.auto_hook(lstm).run_with_cache(torch.randn(3, 1, 4))
    assert isinstance(cache["hook_point"], tuple)

    class One(nn.Module):
        def forward(self, x):
            return {"logits": x + 1, "loss": None}

    model = hl.auto_hook(Around(One()))
    kept = model.add_caching_hooks()
    _, cache = model.run_with_cache(torch.zeros(2))
    assert cache["inner.hook_point"].equal(torch.ones(2))
    assert kept["inner.hook_point"].equal(torch.ones(2))
    model.reset_hooks()


def test_values_are_kept_on_a_device_without_the_batch():
    model = hl.auto_hook(GPT())
    _, cache = model.run_with_cache(tokens(1), device="meta", remove_batch_dim=True)
    assert cache["h.0.hook_point"].is_meta
    assert cache["h.0.hook_point"].shape == (5, 8)
    with pytest.raises(hl.HooklineError, match=says("a batch of one", 5)):
        model.run_with_cache(tokens(2), remove_batch_dim=True)


@pytest.mark.parametrize(
    ("pos_slice", "expected"),
    [
        (-1, lambda value: value[:, -1:]),
        (2, lambda value: value[:, 2:3]),
        (slice(1, 3), lambda value: value[:, 1:3]),
        ((1, 3), lambda value: value[:, 1:3]),
        ([0, 4], lambda value: value[:, [0, 4]]),
        (torch.tensor([0, 4]), lambda value: value[:, [0, 4]]),
    ],
    ids=["last", "number", "slice", "pair", "list", "tensor"],
)
def test_positions_are_cut_out(pos_slice, expected):
    model, x = hl.auto_hook(GPT()), tokens()
    _, whole = model.run_with_cache(x)
    _, part = model.run_with_cache(x, pos_slice=pos_slice)
    kept, hooks, _ = model.get_caching_hooks(pos_slice=pos_slice)
    model.run_with_hooks(x, fwd_hooks=hooks)
    for name in whole:
        assert part[name].equal(expected(whole[name]))
        assert kept[name].equal(part[name])
        assert part[name].untyped_storage().nbytes() == part[name].nbytes


def test_positions_of_heads_are_found_by_the_name_of_the_point():
    model, x = hl.auto_hook(Attention()), torch.randn(1, 5, 8)
    _, cache = model.run_with_cache(x, pos_slice=slice(0, 2), remove_batch_dim=True)
    assert cache["hook_q"].shape == (2, 2, 4)
    assert cache["hook_scores"].shape == (2, 2, 5)
    assert cache["hook_flag"].shape == ()


def test_hooks_that_change_a_value_come_before_the_cache():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    model.add_hook("0.hook_point", lambda tensor, hook: tensor * 0)
    _, cache = model.run_with_cache(x)
    assert cache["0.hook_point"].equal(torch.zeros(3, 8))
    with model.hooks(fwd_hooks=[("0.hook_point", lambda tensor, hook: tensor + 1)]):
        _, cache = model.run_with_cache(x)
    assert cache["0.hook_point"].equal(torch.ones(3, 8))
    model.reset_hooks()


def test_caching_hooks_that_stay_fill_their_dict_at_every_run():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    kept = {"mine": 1}
    assert model.add_caching_hooks("0.hook_point", incl_bwd=True, cache=kept) is kept
    model(x).sum().backward()
    assert list(kept) == ["mine", "0.hook_point", "0.hook_point_grad"]
    first = kept["0.hook_point"]
    model(x + 1)
    assert not kept["0.hook_point"].equal(first)
    model.reset_hooks()
    _, cache = model.run_with_cache(x, reset_hooks_end=False, names_filter="1.hook_point")
    first = cache["1.hook_point"]
    model(x + 1)
    assert not cache["1.hook_point"].equal(first)
    model.reset_hooks()
    assert not hl.attached(model)


def test_caching_hooks_of_all_points_do_not_complain_of_those_that_never_fire():
    model, x = hl.auto_hook(nn.MultiheadAttention(4, 2)), torch.randn(3, 1, 4)
    kept, hooks, backward = model.get_caching_hooks(incl_bwd=True)
    with model.hooks(hooks, backward):
        model(x, x, x)
    assert list(kept) == ["hook_point"]
    _, hooks, _ = model.get_caching_hooks(names_filter="out_proj.hook_point")
    with pytest.raises(hl.NeverFired, match=says("was not called")):
        model.run_with_hooks(x, x, x, fwd_hooks=hooks)


def test_a_module_that_runs_several_times_keeps_the_latest():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Linear(4, 4)

        def forward(self, x):
            return self.step(self.step(x))

    model, x = hl.auto_hook(Twice()), torch.randn(2, 4)
    output, cache = model.run_with_cache(x)
    assert cache["step.hook_point"].equal(output)


def test_the_authors_own_points_are_cached_too():
    model, x = hl.auto_hook(Manual()), torch.randn(2, 4)
    _, cache = model.run_with_cache(x, names_filter="mid_hook")
    assert list(cache) == ["mid_hook"]
    assert cache["mid_hook"].equal(model.fc(x))


def test_the_output_is_the_same_as_without_a_cache():
    model, x = hl.auto_hook(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))), torch.randn(8, 4)
    state = torch.get_rng_state()
    expected = model(x)
    mean = model[2].running_mean.clone()
    model[2].reset_running_stats()
    torch.set_rng_state(state)
    output, _ = model.run_with_cache(x)
    assert output.equal(expected)
    assert model[2].running_mean.equal(mean)


def test_a_module_name_that_was_not_cached_names_its_point():
    _, cache = hl.auto_hook(nn.Sequential(nn.Linear(4, 2))).run_with_cache(torch.ones(1, 4))
    with pytest.raises(hl.NotCaptured, match=says("was not cached", "0", "0.hook_point")):
        cache["0"]
