"""The hook points of a model: which exist, points of parameters, names, blocks, threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.points_models import AutoEncoder, add_one, double


@pytest.fixture
def x():
    return torch.randn(2, 4)


def test_the_points_are_the_root_its_parameters_then_each_module_and_its_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), AutoEncoder()])
            self.body = nn.Sequential(nn.ReLU(), nn.GroupNorm(2, 4))
            self.gain = nn.Parameter(torch.ones(4))
            self.weights = nn.ParameterList([torch.ones(4)])

        def forward(self, x):
            return x

    assert list(hl.auto_hook(Model()).hook_dict) == [
        "hook_point",
        "gain.hook_point",
        "layers.0.hook_point",
        *("layers.1.hook_point", "layers.1.W_enc.hook_point", "layers.1.W_dec.hook_point"),
        *("layers.1.b_enc.hook_point", "layers.1.b_dec.hook_point"),
        *("body.0.hook_point", "body.1.hook_point"),
        "weights.0.hook_point",
    ]


def test_a_container_that_has_a_forward_of_its_own_has_a_point():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    assert list(hl.auto_hook(nn.Sequential(Residual(nn.ReLU()))).hook_dict) == [
        "hook_point",
        "0.hook_point",
        "0.0.hook_point",
    ]


def test_a_model_that_has_methods_but_no_forward_is_hooked(x):
    class Methods(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.W = nn.Parameter(torch.eye(4))

        def encode(self, x):
            return self.fc(x) @ self.W

    model, seen = hl.auto_hook(Methods()), []
    assert list(model.hook_dict) == ["W.hook_point", "fc.hook_point"]
    with model.hooks(fwd_hooks=[(lambda name: True, lambda tensor, hook: seen.append(hook.name))]):
        model.encode(x)
    assert seen == ["fc.hook_point", "W.hook_point"]


def test_mod_dict_has_the_modules_and_the_points():
    model = hl.auto_hook(GPT(depth=1))
    assert model.mod_dict["h.0.mlp"] is model.h[0].mlp
    assert model.mod_dict["h.0.hook_point"] is model.hook_dict["h.0.hook_point"]
    assert "" not in model.mod_dict
    assert list(model.hook_points()) == list(model.hook_dict.values())


@pytest.mark.parametrize("name", ["W_enc", "W_dec", "b_enc", "b_dec"])
def test_a_parameters_point_sees_and_changes_the_result_of_each_operation_on_it(name, x):
    model = AutoEncoder()
    with torch.no_grad():
        model.b_dec.fill_(0.5)
    centred = x - model.b_dec
    encoded = centred @ model.W_enc
    biased = encoded + model.b_enc
    decoded = biased.relu() @ model.W_dec
    results = {"W_enc": [encoded], "W_dec": [decoded], "b_enc": [biased], "b_dec": [centred, decoded + model.b_dec]}
    seen = []
    hooked = hl.auto_hook(model)
    output = hooked.run_with_hooks(x, fwd_hooks=[(f"{name}.hook_point", lambda tensor, hook: seen.append(tensor))])
    assert len(seen) == len(results[name])
    assert all(map(torch.equal, seen, results[name]))
    assert output.equal(model(x))
    zero = hooked.run_with_hooks(x, fwd_hooks=[(f"{name}.hook_point", lambda tensor, hook: tensor * 0)])
    assert not zero.equal(output)


def test_gradients_pass_a_parameters_point(x):
    model, seen = hl.auto_hook(AutoEncoder()), []
    model.run_with_hooks(
        x, bwd_hooks=[("W_enc.hook_point", lambda gradient, hook: seen.append(gradient))]
    ).sum().backward()
    assert seen[0].shape == (2, 8)
    assert (x - model.b_dec).T.matmul(seen[0]).allclose(model.W_enc.grad)


@pytest.mark.parametrize(
    "operation",
    [
        lambda w, x: torch.matmul(x, w),
        lambda w, x: F.linear(x, w),
        lambda w, x: torch.einsum("bi,ij->bj", x, w),
        lambda w, x: (w.T @ x.T).T,
        lambda w, x: x - w[0],
        lambda w, x: -w,
        lambda w, x: abs(w),
        lambda w, x: w[torch.tensor([0, 1])],
        lambda w, x: w.sum(),
    ],
    ids=["matmul", "linear", "einsum", "transposed", "row", "negated", "absolute", "looked up", "method"],
)
def test_operations_of_every_kind_fire_a_parameters_point(operation, x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return operation(self.W, x)

    model, seen = hl.auto_hook(Model()), []
    expected = model(x)
    output = model.run_with_hooks(x, fwd_hooks=[("W.hook_point", lambda tensor, hook: seen.append(tensor))])
    assert output.equal(expected)
    assert len(seen) == 1


def test_modules_that_come_later_have_points_and_those_that_go_lose_theirs(x):
    hooked = hl.auto_hook(mlp())
    assert "extra.hook_point" not in hooked.hook_dict
    hooked.add_module("extra", nn.Linear(2, 2))
    assert "extra.hook_point" in hooked.hook_dict
    before = hooked(x)
    assert hooked.run_with_hooks(x, fwd_hooks=[("extra.hook_point", add_one)]).equal(before + 1)
    hooked.add_hook("extra.hook_point", add_one)
    gone = hooked.extra
    point = hooked.hook_dict["extra.hook_point"]
    del hooked.extra
    assert "extra.hook_point" not in hooked.hook_dict
    assert "forward" not in gone.__dict__
    with pytest.raises(hl.HooklineError, match=says("is not in the model", "extra.hook_point")):
        point.add_hook(add_one)


def test_a_name_that_is_not_there_says_what_is_near():
    model = hl.auto_hook(GPT())
    with pytest.raises(hl.SiteError, match=says("is not a hook point", "GPT", "head", "head.hook_point")):
        model.add_hook("head", add_one)
    with pytest.raises(LookupError, match=says("is not a hook point", "GPT", "hed.hook_point")):
        model.run_with_hooks(tokens(), fwd_hooks=[("hed.hook_point", add_one)])
    with pytest.raises(hl.SiteError, match=says("the filter selects none of")):
        model.add_hook(lambda name: "conv" in name, add_one)
    with pytest.raises(hl.SiteError, match=says("by name or by a")):
        model.add_hook(3, add_one)


def test_hooks_of_a_block_end_with_it_and_blocks_nest_by_level(x):
    model = hl.auto_hook(mlp())
    plain, point = model(x), model.hook_dict["2.hook_point"]
    model.add_hook("2.hook_point", add_one)
    with model.hooks(fwd_hooks=[("2.hook_point", double)]) as given:
        assert given is model
        assert model.context_level == 1
        assert model(x).equal((plain + 1) * 2)
        with model.hooks(fwd_hooks=[(lambda name: name == "2.hook_point", add_one)]):
            assert [handle.context_level for handle in point.fwd_hooks] == [None, 1, 2]
            assert model(x).equal((plain + 1) * 2 + 1)
            model.add_hook("2.hook_point", add_one, level=2)
        assert model(x).equal((plain + 1) * 2)
    assert model.context_level == 0
    assert model(x).equal(plain + 1)
    with pytest.raises(ZeroDivisionError), model.hooks(fwd_hooks=[("2.hook_point", double)]):
        raise ZeroDivisionError
    assert model(x).equal(plain + 1)
    with model.hooks(fwd_hooks=[("2.hook_point", double)]):
        model.reset_hooks()
        assert model(x).equal(plain)
    assert not hl.attached(model)


def test_hooks_of_a_block_may_stay(x):
    model = hl.auto_hook(mlp())
    plain = model(x)
    with model.hooks(fwd_hooks=[("2.hook_point", add_one)], reset_hooks_end=False):
        pass
    assert model(x).equal(plain + 1)
    model.run_with_hooks(x, fwd_hooks=[("2.hook_point", double)], reset_hooks_end=False)
    assert model(x).equal((plain + 1) * 2)
    with model.hooks():
        assert model(x).equal((plain + 1) * 2)
    model.reset_hooks()
    assert model(x).equal(plain)


def test_backward_hooks_of_a_run_act_in_the_backward_that_follows(x):
    model, seen = hl.auto_hook(mlp()), []
    output = model.run_with_hooks(x, bwd_hooks=[("1.hook_point", lambda gradient, hook: seen.append(hook.name))])
    output.sum().backward()
    assert seen == ["1.hook_point"]
    assert not hl.attached(model)


def test_threads_and_tasks_do_not_see_each_others_blocks(x):
    model = hl.auto_hook(mlp())
    plain = model(x)
    barrier = threading.Barrier(2)
    results = {}

    def run(name, hook, expected):
        with model.hooks(fwd_hooks=[("2.hook_point", hook)]):
            barrier.wait()
            _, cache = model.run_with_cache(x)
            results[name] = cache["2.hook_point"].equal(expected)
            barrier.wait()

    workers = [
        threading.Thread(target=run, args=("one", add_one, plain + 1)),
        threading.Thread(target=run, args=("two", double, plain * 2)),
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == {"one": True, "two": True}
    assert model.context_level == 0
    assert not hl.attached(model)

    async def task(hook):
        with model.hooks(fwd_hooks=[("2.hook_point", hook)]):
            await asyncio.sleep(0)
            output = model(x)
            await asyncio.sleep(0)
            return output

    async def both():
        return await asyncio.gather(task(add_one), task(double))

    one, two = asyncio.run(both())
    assert one.equal(plain + 1)
    assert two.equal(plain * 2)
    assert not hl.attached(model)
