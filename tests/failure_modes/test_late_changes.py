"""What changes around hooks: forwards that take another branch, layers that are added, generators that yield."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import mlp
from tests.support.running import said

X = torch.ones(2, 4)


class Branching(nn.Module):
    """Takes its branch if the input is positive."""

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
                    with pytest.warns(hl.HooklineWarning, match=r"is the value that was read before.*cache.clear\(\)"):
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
                model(-X)  # As the steps of a generation, of which the first alone runs an encoder.
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
                    passed = model.branch(scale * X)  # As a generation runs its encoder.
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
        with pytest.warns(hl.HooklineWarning, match="'2' was added after the hooks were made, and has none"), hooks:
            model(X)

        def again() -> None:
            with hooks:
                model(X)

        assert said(again) == []  # Once.

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
        with pytest.warns(hl.HooklineWarning, match=r"'1\.0' was added after the hooks were made, and has none"), hooks:
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
        with pytest.warns(
            hl.HooklineWarning, match=r"Sequential runs under a block of a generator.*before `yield`"
        ) as all_:
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

        with pytest.warns(hl.HooklineWarning, match="generator that has yielded"):
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
    with pytest.warns(hl.HooklineWarning, match="'2.mlp' was added after the hooks were made"), hooks:
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
