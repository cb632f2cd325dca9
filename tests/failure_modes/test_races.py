"""Threads that share one model: a second thread may act at any moment of a forward, and each sees its own values.

`make fuzz` tries every moment, and `make test` some.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from contextvars import Context, copy_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.deep import IS_DEEP
from tests.support.states import state_of

SOURCE = str(Path(hl.__file__).parent)
STEP = 1 if IS_DEEP else 9
OTHER = ThreadPoolExecutor(1)  # Starting a thread for each meeting would take longer than the meeting.


def elsewhere(act: Callable[[], object]) -> None:
    """Do something on the other thread, in a new context."""
    OTHER.submit(Context().run, act).result()


def begin_elsewhere(act: Callable[[], object], wait: float) -> Future[object]:
    """Do something on the other thread, in a new context, and wait some seconds for its end."""
    future = OTHER.submit(Context().run, act)
    with suppress(TimeoutError):
        future.result(wait)
    return future


class Part(nn.Module):
    """Has a child, a parameter and two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.inner(x) @ self.weight, -1)


class Net(nn.Module):
    """Two parts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Part()
        self.b = Part()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Meeting:
    """A block in which another thread calls `act` at the `moment`-th possible thread switch in hookline's code.

    If that needs a lock which this thread holds at that moment, the other thread goes on when it is free.
    """

    def __init__(self, moment: int, act: Callable[[], object], wait: float = 0.05) -> None:
        self.moment = moment
        self.act = act
        self.wait = wait
        self.passed = 0  # The number of moments so far.
        self.begun: Future[object] | None = None

    def __enter__(self) -> Meeting:
        self.before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(self.before)
        if self.begun is not None:
            self.begun.result()

    def _look(self, frame: FrameType, event: str, _called: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(SOURCE):
            return
        self.passed += 1
        if self.passed == self.moment:
            sys.setprofile(None)
            self.begun = begin_elsewhere(self.act, self.wait)


class Job:
    """The work of one thread with a model, and the values it must see, computed without hooks."""

    def __init__(self, model: Net, number: float) -> None:
        self.model, self.number = model, number
        self.meeting: Meeting | None = None
        with torch.no_grad():
            self.x = torch.full((2, 3), number / 7)
            self.product = model.a.inner(self.x) @ model.a.weight
            self.a = self.product.softmax(-1)
            self.b = model.b(self.a)
            self.output = model.head(self.b)
            self.weight = model.a.weight.clone()
            read = (model.a.inner(self.x) @ torch.full((3, 3), number)).softmax(-1)
            self.with_a = model.head(model.b(torch.full((2, 3), number)))
            self.with_product = model.head(model.b(torch.full((2, 3), number).softmax(-1)))
            self.with_weight = model.head(model.b(read))

    def run(self) -> Tensor:
        """Run the model; another thread may act meanwhile."""
        if self.meeting is None:
            return self.model(self.x)
        with self.meeting:
            return self.model(self.x)

    def bare(self) -> None:
        """Run the model without hooks."""
        assert torch.equal(self.run(), self.output)

    def capture(self, sites: dict[str, Tensor]) -> None:
        """Capture some sites."""
        with hl.capture(self.model, *sites) as acts:
            output = self.run()
        assert torch.equal(output, self.output)
        for site, expected in sites.items():
            assert torch.equal(acts[site], expected), site

    def patch(self, site: str, expected: Tensor) -> None:
        """Patch a site with this job's number."""
        with hl.patch(self.model, {site: self.number}):
            output = self.run()
        assert torch.equal(output, expected), site


WORK: dict[str, Callable[[Job], None]] = {
    "nothing": Job.bare,
    "a capture": lambda job: job.capture({"a": job.a, "head": job.output}),
    "two captures": lambda job: job.capture({"a": job.a, "a:input": job.x, "b": job.b}),
    "a patch": lambda job: job.patch("a", job.with_a),
    "functions": lambda job: job.capture({"a/softmax": job.a, "a/matmul": job.product}),
    "a patched function": lambda job: job.patch("a/matmul", job.with_product),
    "a parameter": lambda job: job.capture({"a.weight:param": job.weight}),
    "a patched parameter": lambda job: job.patch("a.weight:param", job.with_weight),
    "an operation": lambda job: job.capture({"a.weight/matmul": job.product}),
    "a patched operation": lambda job: job.patch("a.weight/matmul", job.with_product),
}
OTHERS: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "a capture": lambda model: hl.capture(model, "a", "b", "head", ""),
    "a patch": lambda model: hl.patch(model, {"a": 0.0, "head": 0.0}),
    "functions": lambda model: hl.capture(model, "a/*"),
    "parameters": lambda model: hl.patch(model, {"a.weight:param": 0.0, "head.bias:param": 0.0}),
    "operations": lambda model: hl.patch(model, {"a.weight/matmul": 0.0}),
}
TIMES = {"leave": (True, False), "come and leave": (False, False), "come": (False, True)}  # Hooks on before? After?


@pytest.mark.filterwarnings("ignore:hl.* was never entered:hookline.HooklineWarning")  # If the moment never comes.
@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("time", TIMES)
def test_hooks_of_another_thread_may_come_and_go_at_any_moment_of_a_forward(name: str, other: str, time: str) -> None:
    model = Net()
    before, job = state_of(model), Job(model, 5.0)
    comes_before, leaves_after = TIMES[time]

    def meet(moment: int) -> int:
        hooks = OTHERS[other](model)

        def leave() -> None:
            hooks.__exit__(KeyboardInterrupt, None, None)  # Without an error it would report that nothing fired.

        def act() -> None:
            None if comes_before else hooks.__enter__()
            None if leaves_after else leave()

        elsewhere(hooks.__enter__) if comes_before else None
        job.meeting = Meeting(moment, act)
        WORK[name](job)
        elsewhere(leave)
        return job.meeting.passed

    with torch.no_grad():
        meet(0)  # Fill caches that are made on first use.
        for moment in range(1, meet(0) + 1, 1 if comes_before else STEP):  # Leaving is the riskier case.
            meet(moment)
    assert state_of(model) == before


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("where", ["a", "a:input", "a/softmax", "a.weight:param", "a.weight/matmul"])
def test_a_forward_may_run_at_any_moment_at_which_another_thread_places_hooks_and_takes_them_off(
    name: str, where: str
) -> None:
    model = Net()
    before, job = state_of(model), Job(model, 5.0)
    expected = []
    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        output, acts = hl.run(model, x, capture=where)
        expected.append((x, output, acts[where]))

    def meet(moment: int) -> int:
        with torch.no_grad(), hl.capture(model, where) as acts:
            inside = copy_context()

            def forward(x: Tensor, output: Tensor, seen: Tensor) -> None:
                with torch.no_grad():
                    assert torch.equal(inside.run(model, x), output)
                assert torch.equal(acts[where], seen)

            forward(*expected[1])
            meeting = Meeting(moment, lambda: forward(*expected[0]))
            with meeting:
                Context().run(WORK[name], job)
        return meeting.passed

    meet(0)
    for moment in range(1, meet(0) + 1, STEP):
        meet(moment)
    assert state_of(model) == before


@pytest.mark.parametrize("verb", ["deactivate", "remove"])
@pytest.mark.parametrize("where", ["a", "a:input", "a/*", "a.weight:param", "a.weight/*", "a:grad_output"])
def test_hooks_on_all_threads_may_be_taken_off_at_any_moment_of_a_forward(where: str, verb: str) -> None:
    model = Net()
    before, job = state_of(model), Job(model, 5.0)

    def meet(moment: int) -> int:
        hooks = hl.Hooks(model)
        hooks.capture(where)
        job.meeting = Meeting(moment, getattr(hooks, verb))
        job.bare()
        hooks.remove()
        return job.meeting.passed

    meet(0)
    for moment in range(1, meet(0) + 1):
        meet(moment)
    assert state_of(model) == before


@pytest.mark.filterwarnings("ignore:.*fired several times:hookline.HooklineWarning")  # Two forwards run at once.
@pytest.mark.parametrize("options", [{}, {"clone": False}, {"clone": True}, {"keep": 2}], ids=str)
def test_a_capture_on_all_threads_keeps_the_call_that_began_last_whenever_they_change(options: dict[str, Any]) -> None:
    begun: list[bool] = []  # For each forward of the layer, whether the other thread had acted.

    class Layer(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            if given is x:
                begun.append(meeting.begun is not None)
            return super().forward(given)

    model, x = nn.Sequential(Layer(3, 3)), torch.ones(2, 3)
    meeting = Meeting(0, list)
    mine, others = model(x), model(x * 2)
    hooks = hl.Hooks(model)
    acts = hooks.capture("0", **options)
    moments, moment, is_others = 0, 0, []
    while moment <= moments:
        acts.clear()
        model(x)  # So that the moments are the same each time.
        meeting = Meeting(moment, lambda: model(x * 2), wait=10)
        with meeting:
            model(x)
        moments = max(moments, meeting.passed)
        is_later = torch.equal(acts["0"], others)
        assert is_later or torch.equal(acts["0"], mine)
        assert is_later or begun[-1] or not meeting.begun, f"moment {moment}: the other call began in this one"
        is_others += [is_later] if meeting.begun else []
        moment += 1
    hooks.remove()
    # The other call begins before this one up to some moment, and after it from then on.
    assert is_others == sorted(is_others)
    assert len({*is_others}) == 2


CROWDS = {
    "captures and patches": ["a capture", "two captures", "a patch", "nothing"] * 2,
    "functions and parameters": ["nothing", "nothing", *list(WORK)[4:]],
    "all of them": ["nothing", "a capture", "two captures", "a patch", *list(WORK)[5:9]],
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_eight_threads_on_one_model_each_see_their_own(crowd: str) -> None:
    model = Net()
    before = state_of(model)
    start = threading.Barrier(8)
    jobs = [(Job(model, float(number)), WORK[name]) for number, name in enumerate(CROWDS[crowd])]

    def work(job: Job, run: Callable[[Job], None]) -> None:
        torch.set_grad_enabled(False)  # Grad mode is per thread.
        start.wait(60)
        for _ in range(500):
            run(job)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, *job) for job in jobs]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert state_of(model) == before


def test_a_block_ends_if_garbage_is_collected_at_any_moment() -> None:
    model, x = Net(), torch.randn(2, 3)

    def collect(frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            gc.collect(0)
        return collect

    before = sys.gettrace()
    try:
        with hl.capture(model, "a") as acts:
            model(x)
            sys.settrace(collect)
    finally:
        sys.settrace(before)
    assert torch.equal(acts["a"], model.a(x))
