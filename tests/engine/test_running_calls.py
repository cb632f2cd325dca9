"""The calls that are running: `call.parent`, and `running_calls` for clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import Call, running_calls
from tests.errors.wording import says


class Inner(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.twice(F.relu(x)) * scale

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, time: int) -> Tensor:
        return self.inner(self.inner(x), scale=0.5)


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        for time in (9, 5, 1):
            x = self.middle(x, time=time)
        return x


Seen = list[tuple[Any, ...]]
X = torch.ones(2)


def noting(seen: Seen, *more: str, inner: str = "middle.inner") -> hl.Hooks:
    """Return hooks that note the calls around each call of a site, outermost last; `more` are hooked too."""
    hooks = hl.Hooks(Sampler(), active=False)

    def note(_value: Any, call: Call) -> None:
        around, one = [], call.parent
        while one is not None:
            around.append((str(one.site), one.number, dict(one.kwargs)))
            one = one.parent
        seen.append((call.number, *around))

    hooks.edit(inner, note, with_call=True)
    for site in more:
        hooks.edit(site, lambda value: value)
    return hooks


@pytest.mark.parametrize("inner", ["middle.inner", "middle.inner.twice()", "middle.inner:input"])
@pytest.mark.parametrize("more", [(), ("middle",), ("middle", ""), ("middle:inputs",), ("middle", "middle:inputs")])
def test_a_call_knows_the_calls_around_it(inner, more):
    seen: Seen = []
    hooks = noting(seen, *more, inner=inner)
    with hooks:
        hooks.model(X)
    assert [number for number, *_ in seen] == [0, 1, 2, 3, 4, 5]
    assert [around[0][2] for _, *around in seen] == [{"time": time} for time in (9, 9, 5, 5, 1, 1)]
    assert {tuple(name.partition(":")[0] for name, *_ in around) for _, *around in seen} == {("middle", "")}


@pytest.mark.parametrize("site", ["middle", "middle:inputs"])
def test_the_number_of_the_call_around_is_known_where_it_is_hooked(site):
    seen: Seen = []
    hooks = noting(seen, site)
    with hooks:
        hooks.model(X)
    assert [around[0][1] for _, *around in seen] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("capture", ["middle", "middle:input"])
def test_captures_around_a_call_count_too(capture):
    seen: Seen = []
    hooks = noting(seen)
    hooks.capture(capture)
    with hooks:
        hooks.model(X)
    assert [around[0][1] for _, *around in seen] == [0, 0, 1, 1, 2, 2]


def test_a_function_is_in_a_call_of_its_module():
    seen: Seen = []
    hooks = noting(seen, inner="middle.inner/relu")
    with hooks:
        hooks.model(X)
    assert len(seen) == 6
    assert seen[0][1][0] in ("middle", "middle.inner")


def test_the_call_around_is_unknown_afterwards_and_in_a_capture_it_is_known():
    model, calls = Sampler(), []
    with hl.edit(model, "middle.inner", lambda _, call: calls.append(call), with_call=True):
        model(X)
    with pytest.raises(hl.HooklineError, match=says("known only while it runs")):
        calls[0].parent
    hooks = hl.Hooks(model)
    acts = hooks.capture(
        "middle.inner", transform=lambda _, call: call.parent.kwargs["time"], with_call=True, keep="all"
    )
    model(X)
    hooks.remove()
    assert acts.calls("middle.inner") == [9, 9, 5, 5, 1, 1]


def test_the_outermost_call_has_none_around_it():
    found: list[Any] = []
    with hl.edit(model := Sampler(), "", lambda _, call: found.append(call.parent), with_call=True):
        model(X)
    assert found == [None]


def test_the_tokens_that_pass_are_known_in_the_call_around():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4)))
    steps: list[int] = []
    with hl.edit(model, "1.0", lambda _, call: steps.append(call.parent.step), with_call=True):
        model(torch.zeros(1, 3, dtype=torch.long))
    assert steps == [0]


def test_a_call_outside_of_a_forward_knows_no_step():
    found: list[Any] = []
    with hl.edit(model := Sampler(), "middle", lambda _, call: found.append(call), with_call=True):
        model.middle(X, time=1)
    (call,) = found
    for name in ("step", "tokens"):
        with pytest.raises(hl.HooklineError, match=says("none was running")):
            getattr(call, name)


def test_nothing_runs_where_no_module_runs():
    assert running_calls() == []
