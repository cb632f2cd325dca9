"""HookPoint: its hook functions, their order, levels and contexts, for values of any kind."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.points_models import Around, Nothing, Several, add_one


def test_a_hook_gets_the_tensor_and_the_point_and_none_leaves_it_alone():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    seen = []

    def observe(tensor, hook):
        seen.append((tensor, hook))

    model.add_hook("0.hook_point", observe)
    output = model(x)
    model.reset_hooks()
    assert seen[0][0].equal(model[0](x))
    assert seen[0][1] is model.hook_dict["0.hook_point"]
    assert seen[0][1].name == "0.hook_point"
    assert output.equal(model(x))


def test_what_a_hook_returns_takes_the_tensors_place():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    expected = model[2](model[1](model[0](x) + 1))
    model.add_hook("0.hook_point", add_one)
    assert model(x).equal(expected)
    model.reset_hooks()


def test_a_hook_may_write_into_its_tensor_and_nobody_else_sees_it():
    model, x = hl.auto_hook(nn.Sequential(nn.Identity(), nn.Identity())), torch.ones(2, 2)

    def clear(tensor, hook):
        tensor[:, 0] = 0

    model.add_hook("0.hook_point", clear)
    assert model(x).equal(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    assert x.equal(torch.ones(2, 2))
    model.reset_hooks()


def test_hooks_run_in_the_order_they_were_added_but_for_those_put_in_front():
    model, order = hl.auto_hook(mlp()), []
    for name in "abcd":
        note = functools.partial(lambda tensor, hook, name: order.append(name), name=name)
        model.add_hook("1.hook_point", note, prepend=name in "bd")
    model(torch.randn(1, 4))
    assert order == ["d", "b", "a", "c"]
    handles = model.hook_dict["1.hook_point"].fwd_hooks
    assert [handle.user_hook.keywords["name"] for handle in handles] == ["d", "b", "a", "c"]
    model.reset_hooks()


def test_backward_hooks_run_in_that_order_too():
    model, order = hl.auto_hook(mlp()), []
    for name in "abc":
        note = functools.partial(lambda gradient, hook, name: order.append(name), name=name)
        model.add_hook("1.hook_point", note, dir="bwd", prepend=name == "b")
    model(torch.randn(1, 4)).sum().backward()
    assert order == ["b", "a", "c"]
    model.reset_hooks()


@pytest.mark.parametrize("wrap", [lambda new: new, lambda new: (new,)], ids=["tensor", "tuple of one"])
def test_a_backward_hook_changes_the_gradient(wrap):
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    model(x).sum().backward()
    expected = model[0].weight.grad * 2
    model.zero_grad()
    model.add_hook("1.hook_point", lambda gradient, hook: wrap(gradient * 2), dir="bwd")
    model(x).sum().backward()
    assert model[0].weight.grad.equal(expected)
    model.reset_hooks()


def test_backward_hooks_work_before_an_in_place_activation():
    model = hl.auto_hook(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)))
    x, seen = torch.randn(3, 4), []
    model.run_with_hooks(x, bwd_hooks=[("0.hook_point", lambda gradient, hook: seen.append(gradient))]).sum().backward()
    hidden = model[0](x)
    expected = torch.autograd.grad(model[2](hidden.relu()).sum(), hidden)[0]
    assert seen[0].equal(expected)


def test_each_tensor_of_a_nested_output_is_hooked_in_order():
    model, x, seen = hl.auto_hook(Around(Several())), torch.zeros(2), []

    def double(tensor, hook):
        seen.append(tensor[0].item())
        return tensor * 2 if tensor[0] != 2 else None

    output = model.run_with_hooks(x, fwd_hooks=[("inner.hook_point", double)])
    assert seen == [1, 2, 3]
    assert output["first"].equal(torch.full((2,), 2.0))
    assert output["rest"][0].equal(torch.full((2,), 2.0))
    assert output["rest"][1] is None
    assert output["rest"][2][0] == 3
    assert output["rest"][2][1].equal(torch.full((2,), 6.0))


def test_a_hook_may_write_into_one_tensor_of_several():
    model = hl.auto_hook(Around(Several()))
    output = model.run_with_hooks(
        torch.zeros(2),
        fwd_hooks=[("inner.hook_point", lambda tensor, hook: None if tensor[0] > 1 else (tensor.zero_(), None)[1])],
    )
    assert [output["first"][0], output["rest"][0][0]] == [0, 2]


def test_gradients_of_a_nested_output_are_hooked_each():
    model, x, seen = hl.auto_hook(Around(Several())), torch.zeros(2, requires_grad=True), []
    hooks = [("inner.hook_point", lambda gradient, hook: seen.append(gradient[0].item()))]
    output = model.run_with_hooks(x, bwd_hooks=hooks)
    (output["first"].sum() + 5 * output["rest"][2][1].sum()).backward()
    assert sorted(seen) == [1, 5]


def test_a_point_where_no_tensor_passes_says_so():
    model = hl.auto_hook(Around(Nothing()))
    with pytest.raises(hl.NeverFired, match=says("gives no tensor to hook", "inner.hook_point")):
        model.run_with_hooks(torch.zeros(2), fwd_hooks=[("inner.hook_point", add_one)])
    assert model.run_with_hooks(torch.zeros(2), fwd_hooks=[(lambda name: True, add_one)]) is None


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (lambda tensor, hook: tensor[:, :1], says("a shape given where another passes", "(3, 1)", "(3, 8)", "0")),
        (lambda tensor, hook: tensor.double(), says("torch float64 torch float32 passes")),
        (lambda tensor, hook: [tensor], says("given where float32", 1)),
        (lambda tensor, hook: 0.0, says("given where passes", "0.0", "float32")),
    ],
    ids=["shape", "dtype", "structure", "number"],
)
def test_a_hook_that_returns_what_does_not_fit_is_an_error(hook, problem):
    model = hl.auto_hook(mlp())
    with pytest.raises(hl.EditError, match=problem):
        model.run_with_hooks(torch.randn(3, 4), fwd_hooks=[("0.hook_point", hook)])
    assert not hl.attached(model)


def test_an_error_in_a_hook_passes_through_and_leaves_nothing():
    model = hl.auto_hook(mlp())

    def fail(tensor, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(torch.randn(3, 4), fwd_hooks=[("0.hook_point", fail)])
    assert not hl.attached(model)
    assert not model.hook_dict["0.hook_point"].fwd_hooks


def test_hooks_that_remain_hold_until_they_are_reset_but_permanent_ones():
    model = hl.auto_hook(mlp())
    point = model.hook_dict["0.hook_point"]
    model.add_hook("0.hook_point", add_one)
    model.add_perma_hook("0.hook_point", add_one)
    model.add_hook("0.hook_point", add_one, dir="bwd", level=3)
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (2, 1)
    assert point.has_hooks(level=3)
    assert not point.has_hooks("fwd", including_permanent=False, level=3)
    model.reset_hooks(direction="fwd")
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (1, 1)
    model.remove_all_hook_fns(level=2)
    assert len(point.bwd_hooks) == 1
    model.remove_all_hook_fns(level=3)
    assert not point.bwd_hooks
    assert [handle.is_permanent for handle in point.fwd_hooks] == [True]
    assert len(hl.attached(model)) == 1
    model.reset_hooks(including_permanent=True)
    assert not hl.attached(model)
    assert not point.has_hooks()


def test_contexts_hold_what_hooks_keep_and_are_cleared():
    model = hl.auto_hook(mlp())

    def count(tensor, hook):
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1

    point = model.hook_dict["1.hook_point"]
    with model.hooks(fwd_hooks=[("1.hook_point", count)]):
        model(torch.randn(1, 4))
        model(torch.randn(1, 4))
    assert point.ctx == {"calls": 2}
    with model.hooks(fwd_hooks=[("1.hook_point", count)], clear_contexts=True):
        model(torch.randn(1, 4))
    assert point.ctx == {}
    point.ctx["kept"] = 1
    model.reset_hooks(clear_contexts=False)
    assert point.ctx == {"kept": 1}
    model.reset_hooks()
    assert point.ctx == {}
    point.ctx["kept"] = 1
    model.clear_contexts()
    assert point.ctx == {}


def test_a_point_knows_its_layer():
    model = hl.auto_hook(GPT())
    assert model.hook_dict["h.2.mlp.0.hook_point"].layer() == 2
    with pytest.raises(hl.HooklineError, match=says("has no layer number", "head.hook_point")):
        model.hook_dict["head.hook_point"].layer()


def test_a_wrong_direction_and_a_hook_that_is_no_function_are_refused():
    model = hl.auto_hook(mlp())
    with pytest.raises(ValueError, match=says("dir= is not or", "up", "fwd", "bwd")):
        model.add_hook("0.hook_point", add_one, dir="up")
    with pytest.raises(ValueError, match=says("dir= is not or", "up", "fwd", "bwd")):
        model.reset_hooks(direction="up")
    with pytest.raises(hl.EditError, match=says("a hook is a function")):
        model.add_hook("0.hook_point", "print")
    assert not hl.attached(model)


def test_the_same_function_may_be_added_twice():
    model, x = hl.auto_hook(mlp()), torch.randn(3, 4)
    expected = model[2](model[1](model[0](x) + 1 + 1))
    model.add_hook("0.hook_point", add_one)
    model.add_hook("0.hook_point", add_one)
    assert model(x).equal(expected)
    model.reset_hooks()


def test_a_backward_hook_that_stays_only_warns_of_a_run_without_gradients():
    model, seen = hl.auto_hook(mlp()), []
    model.add_hook("0.hook_point", lambda gradient, hook: seen.append(gradient), dir="bwd")
    with torch.no_grad(), pytest.warns(hl.HooklineWarning, match=says("can get no gradient")):
        model(torch.randn(1, 4))
    model(torch.randn(1, 4)).sum().backward()
    assert len(seen) == 1
    model.reset_hooks()


def test_a_named_backward_hook_of_one_run_raises_where_no_gradient_can_come():
    model = hl.auto_hook(mlp())
    with torch.no_grad(), pytest.raises(hl.NeverFired, match=says("can get no gradient")):
        model.run_with_hooks(torch.randn(1, 4), bwd_hooks=[("0.hook_point", add_one)])


def test_a_point_whose_model_is_gone_says_so():
    model = hl.auto_hook(mlp())
    point = model.hook_dict["0.hook_point"]
    del model
    with pytest.raises(hl.HooklineError, match=says("belongs to a hooked model", "0.hook_point")):
        point.add_hook(add_one)


def test_hooks_hold_no_hooked_model_that_is_dropped():
    raw = mlp()
    model = hl.auto_hook(raw)
    model.add_hook("0.hook_point", add_one)
    held = weakref.ref(model)
    del model
    assert held() is None
    gc.collect()
    assert not hl.attached(raw)


def test_an_unhooked_model_has_nothing_on_it():
    raw = GPT()
    before = {name: dict(module.__dict__) for name, module in raw.named_modules()}
    model = hl.auto_hook(raw)
    model.hook_dict, model.mod_dict
    model.run_with_hooks(tokens(), fwd_hooks=[(lambda name: True, lambda tensor, hook: None)])
    model.run_with_cache(tokens())
    model.add_hook("head.hook_point", add_one)
    assert "forward" in raw.head.__dict__
    model.reset_hooks()
    assert {name: dict(module.__dict__) for name, module in raw.named_modules()} == before


def test_hooks_of_a_hook_rest_while_it_runs():
    model, calls = hl.auto_hook(mlp()), []

    def again(tensor, hook):
        calls.append(1)
        model(torch.randn(1, 4))

    model.run_with_hooks(torch.randn(1, 4), fwd_hooks=[("0.hook_point", again)])
    assert len(calls) == 1


def test_attached_names_the_hook_function():
    model = hl.auto_hook(mlp())
    model.add_hook("0.hook_point", add_one)
    assert hl.attached(model)[0].action.startswith("add_one")
    model.reset_hooks()


def test_values_in_inference_mode_are_hooked():
    model, x = hl.auto_hook(Around(Several())), torch.zeros(2)
    with torch.inference_mode():
        output = model.run_with_hooks(x, fwd_hooks=[("inner.hook_point", add_one)])
    assert isinstance(output["first"], Tensor)
    assert output["first"][0] == 2
