"""hookline.compat.auto_hookpoint: the bugs of the original, each fixed."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.compat.auto_hookpoint import (
    HookedModule,
    auto_hook,
    check_auto_hook,
)
from tests.errors.wording import says
from tests.points.conftest import kind_of_points  # noqa: F401  # Each test runs with both kinds of points.
from tests.support.compat_models import Mixed
from tests.support.models import Returns
from tests.support.points_models import add_one
from tests.support.running import python


@pytest.fixture
def x():
    return torch.randn(2, 4)


@pytest.mark.process
def test_it_works_offline_and_without_transformer_lens():
    code = """
import socket, sys, warnings
warnings.simplefilter("error")
def refuse(*args, **kwargs): raise OSError("offline")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import torch, safetensors.torch
before = set(sys.modules)
from hookline.compat.auto_hookpoint import auto_hook, check_auto_hook
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - {"hookline"} - sys.stdlib_module_names))
sys.modules["transformer_lens"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "transformer_lens" else found(name, *args)
hooked = auto_hook(torch.nn.Linear(2, 2))
print(hooked.hook_dict.items())
"""
    said = python("-c", code)  # Not forked: it is about what the import imports.
    assert said.splitlines() == ["", "dict_items([('hook_point', HookPoint())])"]


def test_frozen_parameters_stay_frozen():
    raw = Mixed()
    raw.W.requires_grad_(False)
    hooked = auto_hook(raw)
    assert not hooked.W.requires_grad
    assert not hooked.unwrap().W.requires_grad


def test_an_optimizer_made_before_trains_on(x):
    raw = Mixed()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    before = raw.W.detach().clone()
    hooked = auto_hook(raw)
    hooked.run_with_hooks(x, fwd_hooks=[("W.hook_point", add_one)]).square().sum().backward()
    optimizer.step()
    assert not hooked.W.equal(before)
    assert list(map(id, hooked.parameters())) == list(map(id, raw.parameters()))


def test_buffers_stay():
    hooked = auto_hook(Mixed())
    names = ["W", "steps", "fc.weight", "fc.bias", "layers.0.weight", "layers.0.bias"]
    assert list(hooked.state_dict()) == names
    assert [name for name, _ in hooked.named_buffers()] == ["steps"]
    assert hooked.double().steps.dtype == torch.float64
    assert hooked.to(torch.float16).steps.dtype == torch.float16
    assert hooked.load_state_dict(Mixed().state_dict())


def test_eval_reaches_the_model(x):
    raw = Mixed()
    hooked = auto_hook(raw)
    assert hooked.eval() is not None
    assert not raw.training
    assert hooked(x).equal(hooked(x))
    hooked.train()
    assert raw.training


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_in = nn.Parameter(torch.randn(4, 4))
            self.W_out = self.W_in

        def forward(self, x):
            return x @ self.W_in @ self.W_out.T

    hooked = auto_hook(Tied())
    assert hooked.W_in is hooked.W_out
    assert len(list(hooked.parameters())) == 1
    assert copy.deepcopy(hooked).W_in is not hooked.W_in


def test_hooking_a_model_twice_is_refused_and_leaves_one_set_of_points(x):
    raw = Mixed().eval()
    hooked = auto_hook(raw)
    with pytest.raises(hl.HooklineError, match=says("this Mixed has hook points")):
        auto_hook(raw)
    assert hooked.run_with_hooks(x, fwd_hooks=[("hook_point", add_one)]).equal(raw(x) + 1)


def test_hooked_models_can_be_copied_and_pickled(x):
    hooked = auto_hook(Mixed()).eval()
    expected = hooked(x)
    hooked.add_hook("W.hook_point", add_one)
    for copied in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked)), copy.copy(hooked)):
        assert isinstance(copied, HookedModule)
        assert isinstance(copied.model, Mixed)
        assert copied.model is not hooked.model
        assert not any(point.has_hooks() for point in copied.hook_points())
    hooked.reset_hooks()
    assert copy.deepcopy(hooked)(x).equal(expected)


def test_a_sequential_keeps_its_length(x):
    raw = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked = auto_hook(raw)
    assert (len(hooked), len(raw), hooked[0], list(hooked)) == (2, 2, raw[0], list(raw))
    assert list(hooked.hook_dict) == ["hook_point", "0.hook_point", "1.hook_point"]


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda x: {"y": x}, lambda value: value["y"]),
        (lambda x: [x], lambda value: value[0]),
        (lambda x: (None, x), lambda value: value[1]),
        (lambda x: (x, x.detach()), lambda value: value[1]),
        (lambda x: torch.max(x, dim=1, keepdim=True), lambda value: value.values),
    ],
    ids=["dict", "list", "tuple with None", "second of a tuple", "named tuple"],
)
def test_tensors_in_other_values_are_hooked(make, get, x):
    model = auto_hook(nn.Sequential(Returns(make), Returns(get)))
    expected = model(x)
    assert model.run_with_hooks(x, fwd_hooks=[("0.hook_point", add_one)]).equal(expected + 1)
    output, cache = model.run_with_cache(x)
    assert output.equal(expected)
    assert "0.hook_point" in cache


def test_a_value_without_tensors_is_passed_on():
    model = auto_hook(nn.Sequential(Returns(lambda x: ()), Returns(lambda nothing: torch.ones(1))))
    assert model.run_with_cache(torch.ones(1))[0].item() == 1.0


def test_each_point_fires_however_a_parameter_is_used(x):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("linear", "einsum", "matmul", "negative", "size"):
                self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))

        def forward(self, x):
            x = F.linear(x, self.linear)
            x = torch.einsum("bi,ij->bj", x, self.einsum)
            x = self.matmul.T.matmul(x.T).T
            return x @ -self.negative + abs(self.size).sum()

    hooked, names = auto_hook(Uses()), set()
    hooked.run_with_hooks(x, fwd_hooks=[(lambda name: True, lambda tensor, hook: names.add(hook.name))])
    assert names == set(hooked.hook_dict)
    check_auto_hook(Uses, {"x": x}, strict=True)


def test_new_submodules_have_points(x):
    hooked = auto_hook(nn.Sequential(nn.Linear(4, 4)))
    hooked.append(nn.Tanh())
    assert list(hooked.hook_dict) == ["hook_point", "0.hook_point", "1.hook_point"]
    assert hooked.run_with_hooks(x, fwd_hooks=[("1.hook_point", add_one)]).equal(hooked(x) + 1)


def test_values_in_a_cache_are_not_overwritten(x):
    hooked = auto_hook(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    _, cache = hooked.run_with_cache(x)
    assert cache["0.hook_point"].equal(hooked[0](x))
    assert (cache["0.hook_point"] < 0).any()


def test_forward_hooks_on_the_model_are_called(x):
    raw, calls = Mixed(), []
    handle = raw.register_forward_hook(lambda module, args, output: calls.append(1))
    auto_hook(raw)(x)
    assert calls == [1]
    handle.remove()


def test_a_dropped_model_is_freed(x):
    hooked = auto_hook(Mixed())
    hooked.add_hook("W.hook_point", add_one)
    hooked(x)
    raw, gone = weakref.ref(hooked.model), weakref.ref(hooked)
    del hooked
    gc.collect()
    assert gone() is None
    assert raw() is None


def test_threads_have_hooks_of_their_own(x):
    hooked = auto_hook(Mixed()).eval()
    expected, outputs = hooked(x), []
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        outputs.append(hooked(x))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with hooked.hooks(fwd_hooks=[("hook_point", add_one)]):
        inside.set()
        done.wait(10)
        assert hooked(x).equal(expected + 1)
    thread.join()
    assert outputs[0].equal(expected)


def test_points_are_those_of_transformer_lens_where_it_is_there(kind_of_points):  # noqa: F811
    if kind_of_points == "own":
        pytest.skip("needs transformer_lens")
    import transformer_lens
    from transformer_lens.hook_points import HookPoint

    model, weight = auto_hook(Mixed()), auto_hook(nn.Parameter(torch.ones(2)))
    assert isinstance(model, transformer_lens.HookedRootModule)
    assert all(isinstance(point, HookPoint) for name, point in model.hook_dict.items() if name != "relu_hook")
    assert isinstance(weight.hook_point, HookPoint)


def test_a_hooked_model_that_is_moved_or_switched_stays_hooked():
    hooked = auto_hook(Mixed())
    for same in (hooked.eval(), hooked.train(), hooked.to("cpu"), hooked.double(), hooked.requires_grad_(False)):
        assert same is hooked
