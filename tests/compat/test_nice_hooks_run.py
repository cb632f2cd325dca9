"""hookline.compat.nice_hooks: run with its six keywords, ActivationCache, and methods patched to modules."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.nice_hooks import ActivationCache, expand_module_path, run
from tests.errors.wording import says
from tests.support.compat_models import X, paths

# run.


def test_hooks_see_outputs_before_they_are_patched_and_the_cache_after(chain: nn.Sequential) -> None:
    seen: list[torch.Tensor] = []
    _, cache = run(
        chain,
        X,
        return_activations=["0"],
        with_activations={"0": torch.zeros(2, 5)},
        forward_hooks={"0": lambda module, path, args, output: seen.append(output)},
    )
    assert seen[0].equal(chain[0](X))
    assert not cache["0"].any()


def test_all_six_keywords_together(model: nn.Module) -> None:
    order: list[str] = []
    result, cache = run(
        model,
        X,
        return_activations="mod2",
        with_activations={"mod2[0]": 0.0},
        forward_hooks={"mod2": lambda *_: order.append("forward")},
        forward_pre_hooks={"mod2": lambda *_: order.append("pre")},
        full_backward_hooks={"mod2": lambda *_: order.append("backward")},
        full_backward_pre_hooks={"mod2": lambda *_: order.append("backward pre")},
        scale=2.0,
    )
    result.sum().backward()
    assert order == ["pre", "forward", "backward pre", "backward"]
    assert not cache["mod2"][0].any()


@pytest.mark.parametrize("nothing", [None, False, []])
def test_without_activations_the_result_comes_alone(chain: nn.Sequential, nothing: Any) -> None:
    assert run(chain, X, return_activations=nothing).equal(chain(X))


def test_cached_values_keep_the_graph_and_are_not_overwritten(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    result, cache = run(model, x, return_activations=["mod1.*", "mod2", ""])
    expected = X @ model.mod1[0].weight.T + model.mod1[0].bias
    assert cache["mod1.0"].allclose(expected)
    assert (expected < 0).any()
    assert cache[""] is result
    assert cache["mod2"].requires_grad
    assert torch.autograd.grad(result.sum(), cache["mod2"])[0].allclose(torch.ones(2, 5) @ model.blocks[0].weight)


def test_a_patched_value_is_not_overwritten_and_gets_its_gradient(model: nn.Module) -> None:
    given = -torch.ones(2, 5)
    run(model, X, with_activations={"mod1.0": given})  # The ReLU that follows writes in place.
    assert given.equal(-torch.ones(2, 5))
    given = torch.ones(5, requires_grad=True)
    run(model, X, with_activations={"mod2[0]": given}).sum().backward()
    assert given.grad is not None
    assert given.grad.allclose(model.blocks[0].weight.sum(0))


def test_the_last_call_of_a_module_is_cached() -> None:
    layer = nn.Linear(3, 3)
    twice = nn.Sequential(layer, layer)
    result, cache = run(twice, torch.ones(1, 3), return_activations=True)
    assert list(cache) == ["0", ""]
    assert cache["0"].equal(result)


class Halved(nn.Module):
    """A module that calls itself on the halves of a batch that is too long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.short(x)
        except ValueError:
            return torch.cat([self(half) for half in x.chunk(2)])

    def short(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise ValueError(len(x))
        return self.linear(x)  # type: ignore[no-any-return]


def test_values_that_are_no_tensors_are_cached_as_they_are() -> None:
    class Odd(nn.Module):
        def forward(self, value: Any) -> Any:
            return value

    for value in (None, {"a": 1}, (1, "b"), threading.Lock(), (one for one in "abc")):
        assert run(nn.Sequential(Odd()), value, return_activations=["0"])[1] == {"0": value}
        if value is not None:
            assert run(nn.Sequential(Odd()), X, with_activations={"0": value}) == value
    assert run(nn.Sequential(Odd()), X, with_activations={"0": None}).equal(X)


def test_a_part_of_a_dict_has_no_path() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x}

    for keywords in ({"return_activations": ["[*]"]}, {"forward_hooks": {"[*]": print}}):
        with pytest.raises(hl.SiteError, match=says("the value is a dict", "*")):
            run(Named(), X, **keywords)  # type: ignore[arg-type]


def test_without_hooks_anything_that_can_be_called_is_called(chain: nn.Sequential) -> None:
    assert run(functools.partial(chain), X, forward_hooks={}, return_activations=False).equal(chain(X))
    with pytest.raises(hl.SiteError, match=says("a model is a torch")):
        run(functools.partial(chain), X, return_activations=True)


def test_what_is_no_mapping_is_shown(chain: nn.Sequential) -> None:
    with pytest.raises(TypeError, match="with_activations is a mapping, as in {'h.0': ...}, not str"):
        run(chain, X, with_activations="0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="forward_hooks is a mapping, as in {'h.0': ...}, not list"):
        run(chain, X, forward_hooks=[("0", print)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=says("a path is text")):
        nice_hooks.register_forward_hook(chain, None, print)  # type: ignore[arg-type]


def test_the_modules_of_a_model_are_listed_once() -> None:
    class Listed(nn.Sequential):
        listed = 0

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            self.listed += 1
            return super().named_modules(*args, **kwargs)

    model = Listed(*(nn.ReLU() for _ in range(50)))
    _, cache = run(model, X, return_activations=True)
    model.listed = 0
    assert run(model, X, with_activations=cache, forward_hooks={"*": lambda *_: None}).equal(X.relu())
    assert len(expand_module_path(model, list(cache))) == 51
    assert model.listed <= 3


@pytest.mark.parametrize("given", [["**[0]", "**[*]"], ["*[*]"], ["*", "*[0]"]])
def test_keys_come_in_the_order_in_which_values_pass(chain: nn.Sequential, given: list[str]) -> None:
    _, cache = run(chain, X, return_activations=given)
    own = {"[*]": ["[0]", "[1]"], "[0]": ["[0]"], "": [""]}
    parts = [part for path in given for part in own[path.lstrip("*0")]]
    assert list(cache) == list(dict.fromkeys(name + part for name in ("0", "1", "") for part in parts))


def test_a_cache_patches_another_run(model: nn.Module) -> None:
    _, clean = run(model, X, return_activations=["mod*"])
    assert run(model, X * 0, with_activations=clean).equal(model(X))


def test_an_exception_in_the_model_leaves_it_as_it_was(chain: nn.Sequential) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(chain, X[:, :3], return_activations=True, forward_hooks={"**": print}, with_activations={"0": X})
    assert not any("forward" in vars(module) for module in chain.modules())


def test_two_threads_run_one_model_with_their_own_hooks(chain: nn.Sequential) -> None:
    inside, done = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def wait(*_: Any) -> None:
        inside.set()
        assert done.wait(10)

    run_other = threading.Thread(
        target=lambda: results.append(run(chain, X, with_activations={"1": X * 0}, forward_hooks={"0": wait}))
    )
    run_other.start()
    assert inside.wait(10)
    plain, (_, cache) = chain(X), run(chain, X, return_activations=["0"])
    done.set()
    run_other.join()
    assert not results[0].any()
    assert plain.any()
    assert cache["0"].equal(chain[0](X))


# ActivationCache.


def test_arithmetic_is_on_the_common_keys_in_the_order_of_the_left() -> None:
    one = ActivationCache({"b": torch.ones(2), "a": torch.ones(2), "c": torch.ones(2)})
    other = {"a": torch.full((2,), 2.0), "b": torch.full((2,), 3.0), "d": torch.zeros(1)}
    assert list(one + other) == ["b", "a"]
    assert (one + other)["b"].equal(torch.full((2,), 4.0))
    assert (one - other)["a"].equal(-torch.ones(2))
    assert type(one - other) is ActivationCache
    assert (one * 2)["c"].sum() == 4
    assert (one / 2)["c"].sum() == 1
    for left, right in (({}, one), (one, 1), (one, None)):
        with pytest.raises(TypeError, match="unsupported operand"):
            left + right  # type: ignore[operator]


def test_a_cache_stays_a_cache() -> None:
    cache = ActivationCache({"a": torch.arange(4.0).reshape(2, 2)})
    assert cache.to(torch.float16)["a"].dtype == torch.float16
    assert cache.to("cpu")["a"].device.type == "cpu"
    assert cache.index((slice(None), 0))["a"].tolist() == [0.0, 2.0]
    made = [cache.copy(), cache | {"b": torch.ones(1)}, cache.to("cpu"), cache.index(0), cache * 1]
    assert {type(one) for one in made} == {ActivationCache}
    assert list(made[1]) == ["a", "b"]
    assert made[0] is not cache
    assert isinstance(cache, dict)


# patch_method_to_module.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def inner_calc(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner_calc(self.linear(x)) + 1


class Overriding(Inner):
    def inner_calc(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.fixture
def patched() -> nn.Sequential:
    model = nn.Sequential(Inner(), Overriding(), nn.ReLU())  # Created before the class is patched.
    nice_hooks.patch_method_to_module(Inner, "inner_calc")
    nice_hooks.patch_method_to_module(Inner, "inner_calc")  # A second time does nothing.
    return model


def test_a_method_has_a_path_and_is_hooked_like_a_module(patched: nn.Sequential) -> None:
    assert paths(patched, "**.inner*") == ["0.inner_calc", "1.inner_calc"]
    assert paths(patched, "0.*") == ["0.inner_calc", "0.linear"]
    seen: list[Any] = []
    result, cache = run(
        patched,
        X,
        return_activations=True,
        with_activations={"1.inner_calc[:, 0]": 5.0},
        forward_hooks={"0.inner_calc": lambda module, path, args, output: seen.append((module, str(path), args))},
    )
    assert list(cache)[:3] == ["0.linear", "0.inner_calc", "0"]
    assert cache["0.inner_calc"].equal(cache["0.linear"] * 2)
    assert cache["1.inner_calc"][:, 1:].equal(cache["1.linear"][:, 1:] * 3)
    assert (result[:, 0] == 6).all()
    module, path, (argument,) = seen[0]
    assert module is patched[0]
    assert path == "0.inner_calc"
    assert argument.equal(cache["0.linear"])


def test_a_method_takes_pre_hooks_and_no_backward_hooks(patched: nn.Sequential) -> None:
    result = run(patched, X, forward_pre_hooks={"0.inner_calc": lambda module, path, args: (args[0] * 0,)})
    assert result.equal(patched[2](patched[1](torch.ones(2, 4))))
    with pytest.raises(ValueError, match=says("is a method, which takes no backward", "1.inner_calc")):
        run(patched, X, full_backward_hooks={"1.inner_calc": print})


def test_nothing_of_a_patched_class_is_touched(patched: nn.Sequential) -> None:
    fresh = nn.Sequential(Inner())
    assert Inner.inner_calc is Inner.__dict__["inner_calc"]
    assert "inner_calc" not in repr(fresh)
    assert list(fresh.state_dict()) == ["0.linear.weight", "0.linear.bias"]
    fresh.eval().to(torch.float64).apply(lambda module: None)
    assert copy.deepcopy(fresh)(X.double()).equal(fresh(X.double()))
    assert [name for name, _ in fresh.named_modules()] == ["", "0", "0.linear"]


def test_a_method_that_is_not_there_or_has_no_calls_is_refused() -> None:
    with pytest.raises(AttributeError, match=says("has no attribute", "Inner", "other")):
        nice_hooks.patch_method_to_module(Inner, "other")
    for name in ("forward", "__call__", "__doc__", "dump_patches"):
        with pytest.raises(ValueError, match=says("is not a method that", f"Inner.{name}")):
            nice_hooks.patch_method_to_module(Inner, name)
    with pytest.raises(TypeError, match=r"not an object of type Inner: patch_method_to_module\(Inner, 'inner_calc'\)"):
        nice_hooks.patch_method_to_module(Inner(), "inner_calc")  # type: ignore[arg-type]


def test_a_method_can_be_named_without_patching() -> None:
    class Own(Overriding):
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x)

    model = nn.Sequential(Own())
    with pytest.warns(hl.HooklineWarning, match=says("is a method", "0.other", "0.other()")):
        run(model, X, return_activations=["0.other"])
    assert list(run(model, X, return_activations=["0.other()"])[1]) == ["0.other"]


def test_a_patched_class_is_not_kept_alive() -> None:
    kind = type("Passing", (Inner,), {})
    nice_hooks.patch_method_to_module(kind, "inner_calc")
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None
