"""Several calls in a site: `#1:`, `#:3`, `#{0,2}`, `#*` and `#-1`, of modules, methods and functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import is_wanted
from tests.errors.wording import says


class Loop(nn.Module):
    """A sampler: it calls its step several times, and each step calls functions and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor, times: int = 4) -> Tensor:
        for _ in range(times):
            x = self.step(x)
        return x


class Step(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.shift(F.relu(x) + F.relu(-x))

    def shift(self, x: Tensor) -> Tensor:
        return x + 1


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("text", "expected", "written"),
    [
        ("1:", [1, 2, 3, 4, 5], "1:"),
        ("0:", [0, 1, 2, 3, 4, 5], ":"),
        (":3", [0, 1, 2], ":3"),
        ("1:5:2", [1, 3], "1:5:2"),
        ("::2", [0, 2, 4], "::2"),
        ("1:4:1", [1, 2, 3], "1:4"),
        ("{0,2}", [0, 2], "{0,2}"),
        ("{ 2 , 0,2}", [0, 2], "{0,2}"),
        ("*", [0, 1, 2, 3, 4, 5], "*"),
        ("-1", [0, 1, 2, 3, 4, 5], "-1"),
    ],
)
def test_a_text_names_calls(text, expected, written):
    site = hl.Site.parse(f"h#{text}")
    assert str(site) == f"h#{written}"
    assert [number for number in range(6) if is_wanted(site.call, number)] == expected


def test_one_call_is_a_number_and_no_call_is_refused():
    assert hl.Site.parse("h#{2}").call == 2
    assert hl.Site.parse("h#7").call == 7
    for text in ("3:3", "3:1", ":0", "1:2:0", "-2", "{}", "{a}"):
        with pytest.raises(hl.SiteError):
            hl.Site.parse(f"h#{text}")


def test_a_text_that_names_no_call_is_quoted():
    with pytest.raises(hl.SiteError, match=says("names no call", "#2:2")):
        hl.Site.parse("step#2:2")


def test_the_latest_call_may_have_a_port():
    assert str(hl.Site.parse("h#-1:input").call) == "-1"
    assert str(hl.Site.parse("h#1::input[0]")) == "h#1::input[0]"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [("#1:", [2, 3, 4]), ("#:3", [1, 2, 3]), ("#1:9:2", [2, 4]), ("#{0,2}", [1, 3])],
)
@pytest.mark.parametrize("site", ["step", "step.shift()"])
def test_a_capture_keeps_each_call_that_is_named(site, calls, expected):
    _, acts = hl.run(Loop(), X, capture=site + calls)
    assert [int(one[0]) for one in acts.calls(site + calls)] == expected
    assert acts.stack(site + calls, calls=True).shape == (1, len(expected), 2)


def test_each_call_may_be_a_site_of_its_own():
    _, acts = hl.run(Loop(), X, capture=["step#*", "step.shift()#*"])
    assert {site: int(acts[site][0]) for site in acts} == {
        **{f"step#{number}": number + 1 for number in range(4)},
        **{f"step.shift()#{number}": number + 1 for number in range(4)},
    }


def test_the_latest_call_is_kept_alone():
    _, acts = hl.run(Loop(), X, capture="step#-1")
    assert acts["step#-1"].tolist() == [4, 4]
    _, acts = hl.run(Loop(), X, capture="step#-1:input")
    assert acts["step#-1:input"].tolist() == [3, 3]
    with pytest.raises(hl.SiteError, match=says("is the latest call alone", "step#-1", "#-1")):
        hl.Hooks(Loop()).capture("step#-1", keep="all")


def test_calls_of_a_function_are_counted_in_each_call_of_its_module():
    _, acts = hl.run(Loop(), X - 1, capture=["step#1:/relu#1", "step#{0,3}/relu#:1"])
    assert [int(one[0]) for one in acts.calls("step#1:/relu#1")] == [0, 0, 0]
    assert [int(one[0]) for one in acts.calls("step#{0,3}/relu#0:1")] == [0, 4]


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("step#1:", 31),
        ("step#:3", 31),
        ("step#{0,2}", 22),
        ("step#*", 40),
        ("step.shift()#2:", 22),
        ("step/relu#1:", 40),
    ],
)
def test_a_change_acts_at_the_calls_that_are_named(site, expected):
    """Each of them adds 9 to what 4 steps give, which is 4; a function runs in every step."""
    output = hl.run(Loop(), X, edit={site: lambda value: value + 9})
    assert int(output[0]) == expected


def test_a_stop_waits_for_the_last_call_that_is_named():
    ran: list[int] = []
    model = Loop()
    model.step.register_forward_hook(lambda *_: ran.append(1))
    output, acts = hl.run(model, X, capture="step#{0,2}", stop=True)
    assert output is None
    assert len(acts.calls("step#{0,2}")) == 2
    assert len(ran) <= 3
    for ends in ("step#:3", "step#1:9:3", "step#{0,1}"):
        assert hl.run(model, X, 9, capture=ends, stop=True)[0] is None
    for open_ended in ("step#1:", "step#::2", "step#5::3", "step#*", "step#-1"):
        with pytest.raises(hl.SiteError, match=says("more of it may always come")):
            hl.run(model, X, capture=open_ended, stop=True)


def test_calls_that_never_come_are_reported():
    with pytest.raises(hl.NeverFired, match=says("was not reached was called", "step#7")):
        hl.run(Loop(), X, edit={"step#7:": torch.relu})


def test_a_change_of_the_latest_call_is_refused():
    for add in (lambda hooks: hooks.edit("step#-1", torch.relu), lambda hooks: hooks.patch({"step#-1/relu": 0.0})):
        with pytest.raises(hl.SiteError, match=says("which call is the latest", "#2")):
            add(hl.Hooks(Loop()))
