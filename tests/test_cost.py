"""Bounds on hookline's cost in bytecodes and calls, whose counts are the same on every machine and in every run.

`python -m tests.support.cost` prints today's counts beside the bounds, which are in that file.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
import weakref
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.cost import (
    BOUNDS,
    ELSEWHERE,
    FEW,
    FORWARD,
    MANY,
    SLACK,
    Subject,
    X,
    bare,
    count,
    counted,
    forward,
    model_of,
)
from tests.support.running import python


@pytest.fixture(scope="module")
def today():
    """Today's counts, of a new process: a block costs more where something was compiled before."""
    return json.loads(python("-c", "import json\nfrom tests.support.cost import measure\nprint(json.dumps(measure()))"))


@pytest.mark.process
@pytest.mark.parametrize("name", BOUNDS)
def test_no_work_takes_more_than_its_bound(name, today):
    (bytecodes, calls), (most_bytecodes, most_calls) = today[name], BOUNDS[name]
    told = f"{name}: {bytecodes:g} bytecodes, {calls:g} C calls; bounds are {most_bytecodes} and {most_calls}"
    assert bytecodes <= most_bytecodes, told
    assert calls <= most_calls, told


@pytest.mark.process
def test_all_that_is_counted_has_a_bound(today):
    assert set(BOUNDS) == set(today)


def test_counting_twice_gives_the_same():
    assert counted(FORWARD["capture"], FEW).total == counted(FORWARD["capture"], FEW).total


def test_work_that_grows_is_counted():
    def one_more(hooks: hl.Hooks, names: list[str]) -> None:
        hooks.capture(names, transform=lambda value: value + 0)

    plain, more = ((counted(one, MANY) - counted(one, FEW)).total for one in (FORWARD["capture"], forward(one_more)))
    assert more > SLACK * plain


@pytest.mark.parametrize("name", FORWARD)
def test_every_hook_costs_the_same_however_many_others_there_are(name):
    totals = [counted(FORWARD[name], size).total for size in range(2, 7)]
    assert len({after - before for before, after in pairwise(totals)}) == 1


@pytest.mark.parametrize("name", [name for name in FORWARD if "all" not in name])
def test_the_three_hundredth_forward_costs_what_the_tenth_does(name):
    def after(forwards: int) -> int:
        def prepare(subject: Subject):
            run = FORWARD[name](subject)
            for _ in range(forwards):
                run()
            return run

        return counted(prepare, FEW).total

    assert after(10) == after(300)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_attaching_finding_and_reading_grow_linearly(name):
    steps = [counted(ELSEWHERE[name], size, size).total for size in (10, 20, 40)]
    first, second = steps[1] - steps[0], steps[2] - steps[1]
    assert second <= 2.05 * first


@pytest.mark.parametrize("grad", [False, True])
def test_hooks_that_rest_cost_nothing_at_all(grad):
    def resting(hooks: hl.Hooks, names: list[str]) -> None:
        hooks.capture(names)
        hooks.patch(dict.fromkeys(names, 0.0))
        hooks.deactivate()

    one, none = counted(forward(resting), FEW, grad=grad), counted(bare, FEW, grad=grad)
    assert (one.total, one.python.total(), one.c) == (none.total, none.python.total(), none.c)


def test_a_model_whose_block_is_over_costs_nothing_more():
    def after_a_block(subject: Subject):
        with hl.capture(subject.model, subject.names):
            subject.model(X)
        return lambda: subject.model(X)

    one, none = counted(after_a_block, FEW), counted(bare, FEW)
    assert (one.total, one.c) == (none.total, none.c)


def grown(run, times: int) -> float:
    """Return the bytes of Python objects that one run leaves behind."""
    gc.collect()
    tracemalloc.start()
    try:
        # Warm up: Python keeps some 80 freed lists and tuples for reuse, and shares the integers up to 256.
        for _ in range(300):
            run()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            run()
        return (tracemalloc.get_traced_memory()[0] - before) / times
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"clone": False}, {"clone": True}, {"detach": False}, {"keep": 3}])
def test_a_forward_leaves_nothing_behind_but_the_values_it_replaces(options):
    model = model_of(MANY)
    hooks = hl.Hooks(model)
    hooks.capture(nn.Linear, **options)
    assert grown(lambda: model(X), 50) < 8
    hooks.remove()


def test_a_call_that_is_kept_holds_its_value_and_its_time_and_no_more():
    model = nn.Sequential(nn.Identity())
    hooks = hl.Hooks(model)
    hooks.capture("0", keep="all")
    with torch.no_grad():
        own = sys.getsizeof(X.clone()) + sys.getsizeof((1, X)) + sys.getsizeof(1000) + 16  # 16: its place in the list.
        assert grown(lambda: model(X), 200) < own + 150  # A tensor's Python object is larger than getsizeof says.
    hooks.remove()


def peak(run) -> int:
    """Return the peak bytes of Python objects during a run."""
    run()
    gc.collect()
    tracemalloc.start()
    try:
        run()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_hooked_call_needs_no_memory_but_its_value():
    models = model_of(MANY), model_of(4 * MANY)
    hooks = [hl.Hooks(model) for model in models]
    for one in hooks:
        one.capture(nn.Linear)
    with torch.no_grad():
        few, many = (peak(lambda model=model: model(X)) for model in models)
    assert many - few < 3 * MANY * 150  # A tensor's Python object and three integers for each call.
    for one in hooks:
        one.remove()


def test_a_stopped_forward_leaves_nothing_behind():
    model = model_of(FEW)
    hooks = hl.Hooks(model)
    hooks.capture("2", stop=True)
    x = X.clone().requires_grad_()
    seen = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        assert model(x) is None
        del x
        assert seen() is None
        assert grown(lambda: model(X), 50) < 8
    finally:
        gc.enable()
        hooks.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_fails_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, value):
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    hooks = hl.Hooks(model)
    hooks.capture("0")

    def run() -> None:
        with suppress(ValueError):
            model(X)

    x = X.clone()
    seen = weakref.ref(x)
    with pytest.raises(ValueError, match="no") as caught:
        model(x)
    del x, caught
    gc.collect()
    assert seen() is None
    assert grown(run, 50) < 8
    hooks.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_counting_ends_with_the_trace_that_was_there_before():
    before = sys.gettrace(), sys.getprofile()
    count(lambda: None)
    assert (sys.gettrace(), sys.getprofile()) == before
