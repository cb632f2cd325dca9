"""Models that change while hooked: modules and forwards are replaced, other branches run, layers are added."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.running import said

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(x + self.mlp(x))

    def widen(self, x: Tensor) -> Tensor:
        return x * 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        x = self.body(x)
        return x if cut else self.head(x)


def _replace_block(model: Model) -> None:
    model.body.h[0] = Block()


def _replace_list(model: Model) -> None:
    model.body.h = nn.ModuleList(Block() for _ in range(3))


def _replace_body(model: Model) -> None:
    model.body = Stack()


def _shorten(model: Model) -> None:
    model.body.h = model.body.h[1:2]


REPLACED = [_replace_block, _replace_list, _replace_body, _shorten]


@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("runs_before", [False, True])
def test_hooks_say_when_what_holds_their_module_is_replaced(
    replace: Callable[[Model], None], runs_before: bool
) -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    if runs_before:
        model(X)
    replace(model)
    with pytest.warns(
        hl.HooklineWarning, match=says("was replaced while hooked, by another", "Linear", "body.h.0.mlp")
    ):
        model(X)
    model(X)  # It warns once.
    hooks.remove()


@pytest.mark.parametrize(
    "name", ["body.h.2.mlp", "body.h.2.mlp.weight:param", "body.h.2.widen()", "body.h.2.mlp/linear"]
)
def test_hooks_say_when_their_module_is_in_the_model_no_more(name: str) -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({name: 0.0})
    model(X)
    model.body.h = model.body.h[:2]
    with pytest.warns(hl.HooklineWarning, match=says("was taken out of the")):
        model(X)
    hooks.remove()


def test_hooks_by_a_pattern_say_nothing_of_a_layer_that_is_taken_out() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.edit("body.h.*.mlp", torch.neg)
    hooks.capture("body.h.*")
    model(X)
    model.body.h = model.body.h[:2]
    model(X)
    hooks.remove()


@pytest.mark.parametrize("model", [nn.Sequential(*map(nn.Linear, [4] * 3, [4] * 3)), Model().body])
def test_hooks_say_when_their_layer_is_deleted_from_a_list(model: nn.Module) -> None:
    layers = model if isinstance(model, nn.Sequential) else model.h
    hooks = hl.Hooks(model)
    hooks.patch({layers[0]: 0.0})
    model(X)
    del layers[0]
    with pytest.warns(hl.HooklineWarning, match=says("was replaced by another", "…0'", type(layers[0]).__name__)):
        model(X)
    hooks.remove()


def test_many_hooks_that_are_lost_are_told_of_together() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("body.h.*.mlp")
    hooks.edit("body.h.*.mlp", torch.neg)
    model(X)
    model.body = Stack()
    with pytest.warns(hl.HooklineWarning) as said:
        model(X)
    assert [str(one.message) for one in said] == [
        "'body.h.0.mlp' and 2 more were replaced by other modules while hooked, and their hooks no longer act; make "
        "the hooks again"
    ]
    with pytest.raises(hl.NotCaptured, match=says("was replaced and its hooks are gone", "Linear", "body.h.1.mlp")):
        acts["body.h.1.mlp"]
    hooks.remove()


def test_hooks_say_where_they_act_when_their_module_is_elsewhere_in_the_model() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    model(X)
    model.body.h[0].mlp = nn.Sequential(model.body.h[0].mlp, nn.Tanh())
    with pytest.warns(hl.HooklineWarning, match=says("still act on the old", "body.h.0.mlp.0")):
        model(X)
    hooks.remove()
    hooks.edit("body.h.*", torch.neg)
    model.body.h[0], model.body.h[1] = model.body.h[1], model.body.h[0]
    with pytest.warns(hl.HooklineWarning, match=says("their hooks still act on", "body.h.0", 1)):
        model(X)
    hooks.remove()


def test_hooks_that_are_added_to_one_on_the_model_itself_say_when_theirs_is_replaced() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.capture("")
    model(X)
    hooks.patch({"body.h.0.mlp": 0.0})
    model(X)
    _replace_block(model)
    with pytest.warns(
        hl.HooklineWarning, match=says("was replaced while hooked, by another", "Linear", "body.h.0.mlp")
    ):
        model(X)
    hooks.remove()


def test_hooks_that_rested_while_their_block_was_replaced_say_so_when_they_act_again() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    hooks.deactivate()
    _replace_block(model)
    model(X)
    hooks.activate()
    with pytest.warns(
        hl.HooklineWarning, match=says("was replaced while hooked, by another", "Linear", "body.h.0.mlp")
    ):
        model(X)
    hooks.remove()


def test_hooks_whose_module_is_still_in_the_model_say_nothing() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0, "body.h.1.mlp": 0.0})
    model(X)
    model.body.h = model.body.h[:2]  # Another list with the same blocks.
    model(X)
    model.body.h[0] = nn.Sequential(model.body.h[0])  # The wrapped block still runs.
    model(X)
    model.body.h = nn.ModuleList(reversed(model.body.h))
    model(X)
    assert all(hook.fired for hook in hooks)
    hooks.remove()


def test_an_edit_that_is_lost_with_the_block_around_it_is_an_error_at_the_end() -> None:
    model = Model()
    with pytest.raises(hl.HooklineError, match=says("was replaced while hooked", "body.h.0.mlp")):
        with hl.edit(model, "body.h.0.mlp", torch.neg):
            model(X)
            _replace_block(model)
            model(X)


def test_a_module_that_was_taken_out_before_it_was_called_is_named_so() -> None:
    model = Model()
    with pytest.raises(hl.NeverFired, match=says("was not called it", "body.h.2.mlp")):
        with hl.capture(model, "body.h.2.mlp"):
            model.body.h = model.body.h[:2]
            model(X)


def test_a_block_that_was_replaced_is_not_held() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.*.mlp": 0.0})
    hooks.patch({"head": 0.0})
    model(X)
    old = weakref.ref(model.body.h)
    model.body.h = model.body.h[:]
    model(X)
    gc.collect()
    assert old() is None
    hooks.remove()


def other(x: Tensor) -> Tensor:
    return x + 1


METHODS = {"head": ("head", "forward"), "body.h.0.widen()": ("body.h.0", "widen"), "head/linear": ("head", "forward")}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("captures", [False, True])
def test_hooks_say_when_the_method_they_are_on_is_replaced(name: str, runs_before: bool, captures: bool) -> None:
    model = Model()
    path, method = METHODS[name]
    hooks = hl.Hooks(model)
    _ = hooks.capture(name) if captures else hooks.patch({name: 0.0})
    if runs_before:
        model(X)
    setattr(model.get_submodule(path), method, other)
    with pytest.warns(hl.HooklineWarning, match=says("on the instance", name, method)):
        model(X)
    model(X)  # It warns once.
    hooks.remove()
    delattr(model.get_submodule(path), method)


@pytest.mark.parametrize("name", METHODS)
def test_a_block_gives_the_method_that_was_replaced_as_the_reason(name: str) -> None:
    model = Model()
    path, method = METHODS[name]
    with pytest.raises(hl.NeverFired, match=says("was replaced on the instance", method)):
        with hl.capture(model, name):
            setattr(model.get_submodule(path), method, other)
            model(X)
    delattr(model.get_submodule(path), method)


def test_a_forward_that_fails_after_it_was_replaced_is_told_of_when_it_does_not() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"body.h.0.mlp": 0.0})
    model.body.h[0].mlp.forward = other
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'body.h.0.mlp'"):
        model(X)
    hooks.remove()
    del model.body.h[0].mlp.forward


def test_hooks_that_may_miss_say_nothing_of_a_forward_that_was_replaced() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.capture("head")
    hooks.when_missing("ignore")
    model.head.forward = other
    model(X)
    hooks.remove()
    del model.head.forward


def test_a_forward_that_is_wrapped_by_one_that_calls_it_says_nothing() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("head")
    hooks.patch({"body.h.0.mlp": 0.0})
    for layer in (model.head, model.body.h[0].mlp):
        layer.forward = lambda x, before=layer.forward: before(x) + 1
    assert torch.equal(model(X) - 1, acts["head"])
    model(X, cut=True)
    hooks.capture("body.h.1")  # Makes hookline check all hooks again.
    model(X, cut=True)
    hooks.remove()
    del model.head.forward, model.body.h[0].mlp.forward


def test_a_forward_that_is_compiled_after_it_was_hooked_says_nothing() -> None:
    """Calls in a compiled graph are not counted."""
    model = Model()
    hooks = hl.Hooks(model)
    acts = hooks.capture("head")
    hooks.edit("body.h.0.mlp", torch.zeros_like)
    hooks.skip("body.h.1.mlp")
    for layer in (model.head, model.body.h[0].mlp, model.body.h[1].mlp):
        layer.forward = torch.compile(layer.forward, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X), acts["head"])
    assert all(hook.fired for hook in hooks)
    hooks.remove()
    del model.head.forward, model.body.h[0].mlp.forward, model.body.h[1].mlp.forward


def test_hooks_that_are_put_on_again_are_on_the_forward_that_is_there_now() -> None:
    model = Model()
    hooks = hl.Hooks(model)
    hooks.patch({"head": 0.0})
    model.head.forward = other
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'head'"):
        model(X)
    hooks.deactivate()
    hooks.activate()
    assert not model(X).any()
    hooks.remove()
    assert model.head.forward is other
    del model.head.forward


def test_other_hooks_and_copies_are_not_taken_for_replaced_forwards() -> None:
    model = Model()
    hooks, others = hl.Hooks(model), hl.Hooks(model)
    acts = hooks.capture("head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        others.edit("head", torch.neg)
        model(X)
        copy.deepcopy(model)(X)
        others.remove()
        model(X)
    assert "head" in acts
    hooks.remove()


class Branching(nn.Module):
    """Calls `branch` if the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x)
        return self.branch(y) if x.sum() > 0 else y


class TestBranches:
    @pytest.mark.parametrize("site", ["branch", "branch:input", "branch[:, 0]"])
    def test_a_value_that_is_read_again_after_a_forward_that_did_not_pass_it_warns(self, site: str) -> None:
        model, read = Branching(), []
        with hl.capture(model, "trunk", site) as acts:
            for x in (X, -X):
                model(x)
                assert acts["trunk"].any()
                if x.sum() > 0:
                    read.append(acts[site])
                else:
                    with pytest.warns(hl.HooklineWarning, match=says("is the value that was")):
                        read.append(acts[site])
        assert read[0].equal(read[1])

    def test_hooks_that_stay_are_held_to_it_too(self) -> None:
        model = Branching()
        hooks = hl.Hooks(model)
        acts = hooks.capture("branch")
        model(X)
        assert len(said(lambda: (acts["branch"], acts["branch"]))) == 0
        model(-X)
        assert len(said(lambda: (acts["branch"], acts["branch"]))) == 1
        hooks.remove()

    def test_a_value_that_is_read_once_or_that_came_again_says_nothing(self) -> None:
        model = Branching()

        def run() -> None:
            with hl.capture(model, "branch") as acts:
                model(X)
                model(-X)  # In a generation, only the first step runs an encoder.
            assert acts["branch"].shape == acts["branch"].shape
            with hl.capture(model, "branch") as acts:
                for _ in range(3):
                    model(X)
                    assert acts["branch"].any()

        assert said(run) == []

    def test_a_part_that_runs_by_itself_before_each_forward_says_nothing(self) -> None:
        model = Branching()

        def run() -> None:
            with hl.capture(model, "branch") as acts:
                for scale in (1, 2, 3):
                    passed = model.branch(scale * X)  # Like the encoder in a generation.
                    model(-X)
                    model(-X)
                    assert acts["branch"].equal(passed)

        assert said(run) == []

    def test_calls_that_are_all_kept_and_gradients_say_nothing(self) -> None:
        model = Branching()

        def run() -> None:
            with hl.capture(model, "branch", keep="all") as acts, hl.capture(model, "branch:grad_output") as gradients:
                model(X).sum().backward()
                assert acts["branch"].any()
                assert gradients["branch:grad_output"].any()
                model(-X)
                assert acts["branch"].any()
                assert gradients["branch:grad_output"].any()

        assert said(run) == []

    def test_clearing_the_cache_before_each_forward_lets_reading_raise(self) -> None:
        model = Branching()
        with hl.capture(model, "branch") as acts:
            model(X)
            assert acts["branch"].any()
            acts.clear()
            model(-X)
            with pytest.raises(hl.NotCaptured):
                acts["branch"]


class TestLayersAddedLater:
    @pytest.mark.parametrize("where", ["*", "**", nn.Linear])
    def test_a_layer_that_a_pattern_means_and_that_was_added_later_is_named(self, where: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = hl.Hooks(model, active=False)
        hooks.capture(where)
        with hooks:
            model(X)
        model.append(nn.Linear(4, 4))
        with pytest.warns(hl.HooklineWarning, match=says("was added after the hooks", "2")), hooks:
            model(X)

        def again() -> None:
            with hooks:
                model(X)

        assert said(again) == []  # The warning comes once.

    @pytest.mark.parametrize("where", ["0", "{0,1}", nn.Linear])
    def test_a_layer_that_was_not_asked_for_is_not(self, where: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = hl.Hooks(model, active=False)
        hooks.edit(where, torch.relu)
        model.append(nn.ReLU())

        def run() -> None:
            with hooks:
                model(X)

        assert said(run) == []

    def test_a_layer_in_a_list_that_was_empty_is_named_too(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential())
        hooks = hl.Hooks(model, active=False)
        hooks.capture("**")
        model[1].append(nn.Linear(4, 4))
        with pytest.warns(hl.HooklineWarning, match=says("was added after the hooks", "1.0")), hooks:
            model(X)

    def test_a_layer_whose_hook_was_removed_was_not_added_later(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = hl.Hooks(model, active=False)
        hooks.capture("*")
        hooks.at("0").remove()
        model.append(nn.Linear(4, 4))

        def run() -> None:
            with hooks:
                model(X)

        why = "was added after the hooks were made, and has none; make the hooks again"
        assert said(run) == [f"'2' {why}"]

    @pytest.mark.parametrize("verb", ["capture", "patch", "edit"])
    def test_hooks_that_simply_act_name_it_at_the_next_forward_and_once(self, verb: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = hl.Hooks(model)
        {
            "capture": lambda: hooks.capture("*"),
            "patch": lambda: hooks.patch({"*": 0.0}),
            "edit": lambda: hooks.edit("*", torch.relu),
        }[verb]()
        assert said(lambda: model(X)) == []
        model.append(nn.Linear(4, 4))
        model.append(nn.Linear(4, 4))
        (message,) = said(lambda: (model(X), model(X)))
        assert message.startswith("'2' was added after the hooks were made, and has none; make the hooks again (and 1")
        model.append(nn.Linear(4, 4))
        hooks.deactivate()
        assert said(lambda: model(X)) == []
        hooks.activate()
        assert len(said(lambda: model(X))) == 1
        hooks.remove()

    def test_a_layer_that_no_pattern_of_hooks_that_simply_act_means_is_not_named(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = hl.Hooks(model)
        hooks.edit(nn.Linear, torch.relu)
        exact = hl.Hooks(model)
        exact.patch({"0": 0.0})
        del model[1]
        assert said(lambda: model(X)) == []
        model.append(nn.ReLU())
        model.append(nn.ReLU())
        assert said(lambda: model(X)) == []
        hooks.remove()
        exact.remove()


def patched_batches(model: nn.Module) -> Iterator[Tensor]:
    with hl.patch(model, {"": 0.0}):
        yield model(X)
        yield model(X)


@contextmanager
def patched(model: nn.Module) -> Iterator[None]:
    with hl.patch(model, {"": 0.0}):
        yield


@pytest.fixture
def patched_model() -> Iterator[nn.Module]:
    model = mlp()
    with hl.patch(model, {"": 0.0}):
        yield model


class TestGenerators:
    def test_a_block_of_a_suspended_generator_that_acts_on_its_consumer_warns_once(self) -> None:
        model = mlp()
        batches = patched_batches(model)
        assert not next(batches).any()
        with pytest.warns(hl.HooklineWarning, match=says("Sequential runs under a block")) as all_:
            assert not model(X).any()
            assert not model(X).any()
        assert len(all_) == 1
        assert not next(batches).any()
        assert next(batches, None) is None
        assert model(X).any()

    def test_an_asynchronous_generator_warns_too(self) -> None:
        model = mlp()

        async def batches() -> AsyncIterator[Tensor]:
            with hl.patch(model, {"": 0.0}):
                yield model(X)

        async def consume() -> None:
            async for _ in batches():
                model(X)

        with pytest.warns(hl.HooklineWarning, match=says("Sequential runs under a block")):
            asyncio.run(consume())

    def test_what_a_generator_has_captured_can_be_pickled(self) -> None:
        model = mlp()
        expected = model[0](X)

        def captured() -> Iterator[bytes]:
            with hl.capture(model, "0") as acts:
                model(X)
                yield pickle.dumps(acts)
            yield pickle.dumps(acts)

        for stored in captured():
            assert pickle.loads(stored)["0"].equal(expected)

    def test_a_generator_that_runs_the_model_itself_says_nothing(self) -> None:
        model = mlp()
        assert said(lambda: list(patched_batches(model))) == []

    @pytest.mark.parametrize("begin", ["thread", "task"])
    def test_a_generator_that_lets_a_thread_or_a_task_run_the_model_says_nothing(self, begin: str) -> None:
        model = mlp()

        async def output() -> Tensor:
            return model(X)

        async def batches() -> AsyncIterator[Tensor]:
            with hl.patch(model, {"": 0.0}):
                for _ in range(2):
                    yield await (asyncio.to_thread(model, X) if begin == "thread" else asyncio.create_task(output()))

        async def consume() -> None:
            assert not any([batch.any() async for batch in batches()])

        assert said(lambda: asyncio.run(consume())) == []

    def test_a_context_manager_and_a_fixture_act_on_their_blocks(self, patched_model: nn.Module) -> None:
        model = mlp()

        def run() -> None:
            with patched(model):
                assert not model(X).any()
            assert not patched_model(X).any()

        assert said(run) == []


@pytest.mark.parametrize("library", ["_pytest", "pytest_asyncio", "anyio"])
def test_a_fixture_that_a_library_runs_acts_on_its_test(library: str) -> None:
    model = mlp()
    names: dict[str, Any] = {"__name__": f"{library}.fixtures"}
    exec("def begin(fixture): return next(fixture)", names)

    def run() -> None:
        fixture = patched_batches(model)
        names["begin"](fixture)
        assert not model(X).any()
        fixture.close()  # type: ignore[attr-defined]

    assert said(run) == []


def test_a_block_that_is_added_under_a_pattern_with_several_parts_is_named() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    model = nn.Sequential(Block(), Block())
    hooks = hl.Hooks(model)
    hooks.capture("*.mlp")
    model.append(Block())
    with pytest.warns(hl.HooklineWarning, match=says("was added after the hooks", "2.mlp")), hooks:
        model(torch.ones(1))


def test_a_generator_that_a_context_manager_yields_from_is_meant_to_wait() -> None:
    model = mlp()

    def helper() -> Iterator[None]:
        with hl.patch(model, {"0": 0.0}):
            yield

    @contextmanager
    def patched() -> Iterator[None]:
        yield from helper()

    with patched():
        model(torch.ones(1, 4))


def test_a_layer_is_not_missed_by_a_pattern_whose_hooks_were_removed() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    hooks.edit("*", torch.relu, name="all")
    hooks.capture("0")
    hooks["all"].remove()
    model.append(nn.ReLU())
    assert said(lambda: model(X)) == []
    hooks.remove()


def test_a_module_that_is_replaced_before_it_was_called_is_named() -> None:
    """B12"""
    model = mlp()
    with pytest.raises(hl.NeverFired, match=says("was not called replaced", "0")):
        with hl.capture(model, "0"):
            model[0] = nn.Linear(4, 8)
            model(torch.ones(2, 4))


def test_an_edit_that_is_lost_with_the_module_it_was_on_is_not_lost_in_silence() -> None:
    """B12"""
    model, x = mlp(), torch.ones(2, 4)
    with pytest.raises((hl.HooklineError, hl.HooklineWarning), match="'0'.*(replaced|another module)"):
        with hl.edit(model, "0", lambda value: value * 0):
            model(x)
            model[0] = nn.Linear(4, 8)
            model(x)


def test_hooks_that_stay_say_when_their_module_was_replaced() -> None:
    """B12"""
    model, x = mlp(), torch.ones(2, 4)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0")
    model(x)
    model[0] = nn.Linear(4, 8)
    with pytest.raises((hl.HooklineError, hl.HooklineWarning), match="'0'.*(replaced|another module)"):
        model(x)
        acts["0"]
    hooks.remove()


@pytest.mark.parametrize(
    "add", [lambda hooks: hooks.capture("body.h.2.mlp"), lambda hooks: hooks.edit("body.h.2.mlp", torch.neg)]
)
def test_a_named_module_that_leaves_the_model_is_reported_though_the_hook_may_miss(
    add: Callable[[hl.Hooks], Any],
) -> None:
    model = Model()
    hooks = hl.Hooks(model)
    add(hooks)
    hooks.when_missing("warn")
    model(X)
    model.body.h = model.body.h[:2]
    with pytest.warns(hl.HooklineWarning, match=says("was taken out of the")):
        model(X)
    hooks.remove()
