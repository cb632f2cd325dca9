"""Threads, asyncio tasks and forked processes that share one model."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens
from tests.support.running import elsewhere
from tests.support.states import state_of


class Waiting(nn.Module):
    """Its forward waits until `leave` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.leave = threading.Event()

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        self.entered.set()
        assert self.leave.wait(10)
        return x * scale


def test_two_threads_with_blocks_on_one_model_get_their_own_values() -> None:
    """F01"""
    model, x = GPT(depth=2), tokens()
    both_open = threading.Barrier(2)

    def work(scale: float) -> tuple[Tensor, Tensor]:
        with hl.capture(model, "h.1") as acts:
            both_open.wait(10)
            for _ in range(20):
                model(x * scale)
            both_open.wait(10)
            return acts["h.1"], model.h[1](model.h[0](x * scale, scale=0.5), scale=0.5)

    with ThreadPoolExecutor(2) as pool:
        for seen, expected in pool.map(work, (1.0, 2.0)):
            assert torch.equal(seen, expected)


KINDS: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "patch": lambda model: hl.patch(model, {"h.1": 0.0}),
    "edit": lambda model: hl.edit(model, "h.1", lambda value: value * 2),
    "skip": lambda model: hl.skip(model, "h.1"),
    "stop": lambda model: hl.capture(model, "h.0", stop=True),
    "gradient edit": lambda model: hl.edit(model, "h.1:grad_output", lambda value: value * 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_changes_is_not_changed_on_another_thread(kind: str) -> None:
    """F01"""
    model, x = GPT(depth=2), tokens()

    def run() -> tuple[Tensor, Tensor]:
        (gradient,) = torch.autograd.grad(model(x).sum(), model.h[0].attn.weight)
        return model(x), gradient

    output, gradient = run()
    with KINDS[kind](model):
        model(x)
        other_output, other_gradient = elsewhere(run)
    assert torch.equal(other_output, output)
    assert torch.equal(other_gradient, gradient)


def test_hooks_that_are_kept_act_on_every_thread() -> None:
    """F01"""
    model, x = GPT(depth=2), tokens()
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.0")
    hooks.edit("h.1", lambda value: value * 0, name="zero")
    expected = model(x)
    assert torch.equal(elsewhere(model, x * 2), model.head(torch.zeros_like(x)))
    assert torch.equal(acts["h.0"], model.h[0](x * 2, scale=0.5))
    hooks.deactivate()
    assert not torch.equal(elsewhere(model, x), expected)
    hooks.remove()


def test_one_set_of_captures_is_not_entered_by_two_threads_at_once() -> None:
    """F01"""
    model, x = GPT(depth=2), tokens()
    block = hl.capture(model, "h.1")

    def enter() -> None:
        with block:
            model(x)

    with block as acts:
        model(x)
        seen = acts["h.1"]
        error = elsewhere(enter)
        assert torch.equal(acts["h.1"], seen)
    assert isinstance(error, hl.HooklineError)
    assert "make a Hooks for each" in str(error)
    assert elsewhere(enter) is None


def test_asyncio_tasks_that_interleave_get_their_own_values() -> None:
    """F02"""
    model, x = GPT(depth=2), tokens()

    async def work(scale: float) -> tuple[Tensor, Tensor, Tensor]:
        with hl.capture(model, "h.1") as acts:
            await asyncio.sleep(0)
            model(x * scale)
            await asyncio.sleep(0)
            with hl.edit(model, "h.0", lambda value: value * scale):
                await asyncio.sleep(0)
                edited = model(x)
                await asyncio.sleep(0)
            model(x * scale)
            await asyncio.sleep(0)
        return acts["h.1"], edited, torch.tensor(scale)

    async def main() -> list[tuple[Tensor, Tensor, Tensor]]:
        return await asyncio.gather(*(work(scale) for scale in (1.0, 2.0, 3.0)))

    for seen, edited, scale in asyncio.run(main()):
        first = model.h[0](x * scale, scale=0.5)
        assert torch.equal(seen, model.h[1](first, scale=0.5))
        assert torch.equal(edited, model.head(model.h[1](model.h[0](x, scale=0.5) * scale, scale=0.5)))


def test_a_task_started_inside_a_block_belongs_to_it_and_one_outside_does_not() -> None:
    """F02"""
    model, x = GPT(depth=2), tokens()
    plain = model(x)

    async def call() -> Tensor:
        await asyncio.sleep(0)
        return model(x)

    async def main() -> tuple[Tensor, Tensor]:
        outside = asyncio.ensure_future(call())
        with hl.patch(model, {"head": 0.0}):
            inside = asyncio.ensure_future(call())
            return await outside, await inside

    outside, inside = asyncio.run(main())
    assert torch.equal(outside, plain)
    assert torch.equal(inside, torch.zeros_like(plain))


PASSED_OVER = says("GPT ran on another thread")


class TestTasksOfOneBlock:
    """F02: tasks that are started inside a block belong to it and share its cache."""

    model, x = GPT(depth=2), tokens()

    async def call(self, scale: float) -> Tensor:
        await asyncio.sleep(0)
        return self.model(self.x * scale)

    async def siblings(self, **options: Any) -> hl.Cache:
        with hl.capture(self.model, "h.1", **options) as acts:
            await asyncio.gather(*(self.call(scale) for scale in (1.0, 2.0, 3.0)))
        return acts

    def value(self, scale: float) -> Tensor:
        return self.model.h[1](self.model.h[0](self.x * scale, scale=0.5), scale=0.5)

    def test_several_of_which_one_value_is_kept_are_warned_of(self) -> None:
        acts = asyncio.run(self.siblings())
        with pytest.warns(hl.HooklineWarning, match=says("was captured by several asyncio", "h.1", "keep='all'")):
            assert torch.equal(acts["h.1"], self.value(3.0))
        assert torch.equal(acts["h.1"], self.value(3.0))  # The warning comes once.

    def test_several_of_which_all_values_are_kept_are_not(self) -> None:
        acts = asyncio.run(self.siblings(keep="all"))
        assert torch.equal(acts["h.1"], self.value(3.0))
        for value, scale in zip(acts.calls("h.1"), (1.0, 2.0, 3.0), strict=True):
            assert torch.equal(value, self.value(scale))

    def test_one_after_the_other_each_read_before_the_next_are_not(self) -> None:
        async def main() -> list[Tensor]:
            with hl.capture(self.model, "h.1") as acts:
                found = []
                for scale in (1.0, 2.0):
                    await asyncio.create_task(self.call(scale))
                    found.append(acts["h.1"])
                return found

        for value, scale in zip(asyncio.run(main()), (1.0, 2.0), strict=True):
            assert torch.equal(value, self.value(scale))

    def test_one_that_runs_the_model_often_is_not(self) -> None:
        async def main() -> Tensor:
            with hl.capture(self.model, "h.1") as acts:
                for scale in (1.0, 2.0):
                    await self.call(scale)
            return acts["h.1"]

        assert torch.equal(asyncio.run(main()), self.value(2.0))

    def test_a_change_is_made_in_each(self) -> None:
        async def main() -> list[Tensor]:
            with hl.patch(self.model, {"head": 0.0}):
                return await asyncio.gather(self.call(1.0), self.call(2.0), asyncio.to_thread(self.model, self.x))

        assert not any(output.any() for output in asyncio.run(main()))

    @pytest.mark.parametrize("at_once", [True, False])
    def test_threads_that_run_the_model_at_the_same_time_are_warned_of_and_others_are_not(self, at_once: bool) -> None:
        waiting = Waiting()
        model, x = nn.Sequential(waiting), torch.ones(2, 3)

        async def main() -> hl.Cache:
            with hl.capture(model, "0") as acts:
                first = asyncio.create_task(asyncio.to_thread(model, x))
                await asyncio.to_thread(waiting.entered.wait, 10)
                if not at_once:
                    waiting.leave.set()
                    await first
                waiting.entered.clear()
                second = asyncio.create_task(asyncio.to_thread(model, x * 2))
                await asyncio.to_thread(waiting.entered.wait, 10)
                waiting.leave.set()
                await asyncio.gather(first, second)
            return acts

        acts = asyncio.run(main())
        with (
            pytest.warns(hl.HooklineWarning, match=says("was captured by several asyncio"))
            if at_once
            else nullcontext()
        ):
            acts["0"]


def test_a_capture_on_a_worker_thread_is_not_passed_over_in_silence() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    with pytest.raises(hl.NeverFired, match=says("was passed over on another thread", "h.1")):
        with hl.capture(model, "h.1") as acts, ThreadPoolExecutor(1) as pool:
            pool.submit(model, x).result()
            with pytest.raises(hl.NotCaptured, match=says("on this thread", "h.1")):
                acts["h.1"]
    with pytest.raises(hl.NotCaptured, match=PASSED_OVER):
        acts["h.1"]


PARTS: dict[str, Callable[[GPT], nn.Module]] = {"the model": lambda model: model, "a part": lambda model: model.h[1]}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [*KINDS, "parameter", "function"])
def test_a_change_on_a_worker_thread_is_not_passed_over_in_silence(kind: str, part: str) -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    places = {"parameter": {"h.1.attn.weight:param": 0.0}, "function": {"h.1.attn/linear": 0.0}}
    if kind == "stop" and part == "a part":
        block = hl.capture(model, "h.1", stop=True)
    else:
        block = hl.patch(model, places[kind]) if kind in places else KINDS[kind](model)
    with pytest.raises(hl.NeverFired, match=PASSED_OVER), ThreadPoolExecutor(1) as pool, block:
        pool.submit(PARTS[part](model), x).result()


def test_what_a_pattern_means_is_a_warning_if_the_model_ran_on_another_thread_and_what_may_be_missing_nothing() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    for block in (hl.capture(model, "h.*"), hl.skip(model, "h.*").when_missing("warn")):
        with pytest.warns(hl.HooklineWarning, match=PASSED_OVER), block:
            elsewhere(model, x)
    with pytest.raises(hl.NeverFired, match=PASSED_OVER), hl.skip(model, "h.*"):  # Nothing was skipped.
        elsewhere(model, x)
    with hl.patch(model, {"h.1": 0.0}).when_missing("ignore"):
        elsewhere(model, x)


def test_a_watch_that_has_seen_nothing_says_so_if_the_model_ran_on_another_thread() -> None:
    """F03"""
    model, bad = GPT(depth=2), tokens() * float("nan")

    async def stranger() -> Tensor:
        with hl.watch(model):
            return await asyncio.get_running_loop().run_in_executor(None, model, bad)

    async def adopted() -> Tensor:
        with hl.watch(model):
            return await asyncio.to_thread(model, bad)

    with pytest.warns(hl.HooklineWarning, match=says("nothing was watched on another thread")):
        asyncio.run(stranger())
    with pytest.raises(hl.BadValue):
        asyncio.run(adopted())


def test_a_site_that_another_thread_ran_is_told_where_the_block_saw_others() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    told = says("was not called, and also elsewhere", "h.1")
    with pytest.raises(hl.NeverFired, match=told), hl.capture(model, "h.0", "h.1"):
        model.h[0](x)
        elsewhere(model.h[1], x)


def test_hooks_that_act_everywhere_do_not_make_a_worker_thread_part_of_a_block() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    hooks = hl.Hooks(model)
    hooks.capture("h.1")
    with pytest.raises(hl.NeverFired, match=PASSED_OVER), hl.edit(model, "h.1", lambda value: value * 0):
        elsewhere(model, x)
    hooks.remove()


def test_a_block_on_another_model_does_not_excuse_a_worker_thread() -> None:
    """F03"""
    model, other, x = GPT(depth=2), mlp(), tokens()

    def work() -> None:
        with hl.capture(other, "0"):
            other(torch.ones(1, 4))
            model(x)

    with pytest.raises(hl.NeverFired, match=PASSED_OVER), hl.patch(model, {"h.1": 0.0}):
        assert elsewhere(work) is None


def test_a_block_in_which_nothing_ran_does_not_mind_threads_with_their_own() -> None:
    """F01: the threads run the model, a part of it or a model around it."""
    model, x = GPT(depth=2), tokens()
    whole = nn.Sequential(model)

    def under(owner: nn.Module, where: str, run: Callable[[Tensor], object]) -> None:
        with hl.capture(owner, where):
            run(x)

    with hl.capture(model, "h.1"), hl.patch(model, {"h.0": 0.0}), hl.watch(model):
        assert elsewhere(under, model, "h.0", model) is None
        assert elsewhere(under, model, "h.0", lambda x: [part(x) for part in model.h]) is None
        assert elsewhere(under, model.h[0], "attn", lambda x: model.h[0](x)) is None
        assert elsewhere(under, whole, "0.h.1", whole) is None
        assert isinstance(elsewhere(lambda: hl.run(model, x, skip="h.0")), Tensor)
        assert len(elsewhere(hl.scan, model, x)) > 0


def test_a_thread_that_serves_beside_a_block_is_its_own_business_if_the_block_ran_too() -> None:
    """F01"""
    model, x = GPT(depth=2), tokens()
    plain = model(x)
    with hl.patch(model, {"head": 0.0}), hl.watch(model):
        assert torch.equal(elsewhere(model, x), plain)
        assert not model(x).any()
        assert torch.equal(elsewhere(model, x), plain)


def test_a_worker_thread_adopts_a_block_by_copying_its_context() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()
    with hl.capture(model, "h.1", keep="all") as acts, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(contextvars.copy_context().run, model, x * scale) for scale in range(6)]
        outputs = [job.result() for job in jobs]
    assert len(outputs) == len(acts.calls("h.1")) == 6
    sums = sorted(value.sum().item() for value in acts.calls("h.1"))
    expected = [model.h[1](model.h[0](x * scale, scale=0.5), scale=0.5).sum().item() for scale in range(6)]
    assert sums == sorted(expected)


def test_asyncio_to_thread_adopts_the_block_and_a_bare_executor_does_not() -> None:
    """F03"""
    model, x = GPT(depth=2), tokens()

    async def adopted() -> Tensor:
        with hl.capture(model, "h.1") as acts:
            await asyncio.to_thread(model, x)
        return acts["h.1"]

    async def stranger() -> Tensor:
        with hl.capture(model, "h.1") as acts:
            await asyncio.get_running_loop().run_in_executor(None, model, x)
        return acts["h.1"]

    assert torch.equal(asyncio.run(adopted()), model.h[1](model.h[0](x, scale=0.5), scale=0.5))
    with pytest.raises(hl.NeverFired, match=says("ran on another thread")):
        asyncio.run(stranger())


@pytest.mark.parametrize("where", ["0", "0:input", '0:inputs["scale"]', "0:grad_output"])
def test_a_block_that_closes_while_another_thread_is_inside_the_module_does_not_disturb_it(where: str) -> None:
    """F04"""
    waiting = Waiting()
    model, x = nn.Sequential(waiting), torch.ones(2, 3, requires_grad=True)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(hl.NeverFired, match=says("ran on another thread")), hl.capture(model, where):
            job = pool.submit(model, x)
            assert waiting.entered.wait(10)
        waiting.leave.set()
        assert torch.equal(job.result(), x * 2)
    waiting.entered.clear()
    waiting.leave.clear()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(contextvars.copy_context().run, hl.run, model, x, capture="0")
        assert waiting.entered.wait(10)
        with hl.edit(model, "0", lambda value: value * 0):
            waiting.leave.set()
            output, acts = job.result()
    assert torch.equal(output, x * 2)
    assert torch.equal(acts["0"], x * 2)


def test_a_hundred_thousand_calls_under_blocks_that_come_and_go_never_mix() -> None:
    """F04, F05"""
    model = mlp().eval()
    before = state_of(model)
    wrong: list[Any] = []
    calls = [0] * 4

    def work(number: int) -> None:
        x = torch.full((1, 4), float(number))
        want = nn.functional.linear(x, model[0].weight, model[0].bias)
        rest = {"patch": torch.full((1, 8), float(number))}
        patched = nn.functional.linear(rest["patch"], model[2].weight, model[2].bias)
        while calls[number] < 26_000 and not wrong:
            with hl.capture(model, "0", "2:input") as acts:
                for _ in range(20):
                    model(x)
            with hl.patch(model, {"1": rest["patch"]}):
                outputs = [model(x) for _ in range(20)]
            calls[number] += 160
            if not torch.equal(acts["0"], want) or not torch.equal(acts["2:input"], want.relu()):
                wrong.append((number, "capture"))
            if not all(torch.equal(output, patched) for output in outputs):
                wrong.append((number, "patch"))

    began = time.perf_counter()
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(no_grad, work, number) for number in range(4)]:
            job.result()
    assert not wrong
    assert sum(calls) >= 100_000
    assert time.perf_counter() - began < 60
    assert state_of(model) == before


def no_grad(function: Callable[..., None], *args: Any) -> None:
    """Call a function without gradients; grad mode is per thread."""
    with torch.no_grad():
        function(*args)


def test_threads_that_place_and_take_away_hooks_at_once_leave_none_behind() -> None:
    """F05"""
    model, x = GPT(depth=2), tokens()
    before = state_of(model)
    start = threading.Barrier(4)

    def work(_number: int) -> int:
        start.wait(10)
        seen = 0
        for _ in range(50):
            hooks = hl.Hooks(model)
            acts = hooks.capture("**", keep="all")
            model(x)
            hooks.remove()
            seen += len(acts.calls("h.1"))
        return seen

    with pytest.warns(hl.HooklineWarning, match=says("another Hooks already")), ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(work, range(4)))
    assert all(count >= 50 for count in seen)
    assert len(hl.attached(model)) == 0
    assert state_of(model) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestFork:
    """F06"""

    @staticmethod
    def in_child(function: Callable[[], str]) -> str:
        """Return the result of a function in a forked process."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, function().encode())
            except BaseException as error:
                os.write(writing, repr(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            return pipe.read()

    def test_hooks_are_inert_in_a_forked_child_and_reading_there_raises(self) -> None:
        model, x = GPT(depth=2), tokens()
        plain = model(x)

        def child() -> str:
            inert = torch.equal(model(x), plain) and not any("forward" in vars(module) for module in model.modules())
            try:
                acts["h.0"]
            except hl.NotCaptured as error:
                return f"{inert}: {error}"
            return f"{inert}: it was read"

        with hl.patch(model, {"h.1": 0.0}), hl.capture(model, "h.0") as acts:
            model(x * 2)
            said = self.in_child(child)
            assert torch.equal(model(x), model.head(torch.zeros_like(x)))
        assert said.startswith("True: ")
        assert "fork" in said
        assert torch.equal(acts["h.0"], model.h[0](x, scale=0.5))

    def test_hooks_that_stay_are_inert_in_a_forked_child(self) -> None:
        model, x = GPT(depth=2), tokens()
        plain = model(x)
        hooks = hl.Hooks(model)
        hooks.edit("h.1", lambda value: value * 0)
        assert self.in_child(lambda: str(torch.equal(model(x), plain))) == "True"
        assert not torch.equal(model(x), plain)
        hooks.remove()

    def test_a_forked_child_can_place_hooks_of_its_own_and_read_a_cache_that_was_finished(self) -> None:
        model, x = GPT(depth=2), tokens()
        _, finished = hl.run(model, x, capture="h.0")

        def child() -> str:
            _, acts = hl.run(model, x, capture="h.0")
            return str(torch.equal(acts["h.0"], finished["h.0"]))

        with hl.capture(model, "h.1"):
            model(x)
            assert self.in_child(child) == "True"
