"""The values kept of one site: how many calls, in which order, and whether they are still valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says

CALLS = st.recursive(st.just(()), lambda inside: st.lists(inside, max_size=3).map(tuple), max_leaves=6)


class Recursive(nn.Module):
    """A module that calls itself for each item of a nested tuple, and returns the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inside: tuple[Any, ...]) -> Tensor:
        number = self.calls
        self.calls += 1
        for one in inside:
            self(one)
        return torch.tensor(number)


@pytest.mark.filterwarnings("ignore:'' fired several times")
@settings(deadline=None, max_examples=50)
@given(st.lists(CALLS, min_size=1, max_size=3), st.sampled_from(["last", "all", 1, 2, 5]))
def test_the_latest_calls_are_kept_in_the_order_in_which_they_began(runs: list[Any], keep: str | int) -> None:
    model = Recursive()
    with hl.capture(model, "", keep=keep) as acts:
        for inside in runs:
            model(inside)
    most = {"last": 1, "all": model.calls}.get(keep, keep)  # type: ignore[call-overload]
    assert acts.calls("") == [*range(model.calls)][-most:]
    assert acts[""] == model.calls - 1


class Twice(nn.Module):
    """A model that runs its layer several times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, *values: float) -> None:
        for value in values:
            self.layer(value)


@pytest.mark.parametrize(("keep", "warns"), [("last", True), (1, True), (2, False), ("all", False)])
def test_several_calls_in_one_forward_warn_when_only_the_latest_is_kept(keep: str | int, warns: bool) -> None:
    model = Twice()
    with hl.capture(model, "layer", keep=keep) as acts:
        model(1.0)
        model(2.0)
        assert acts["layer"] == 2.0
        model(3.0, 4.0)
        if warns:
            with pytest.warns(hl.HooklineWarning, match=says("fired several times in one", "layer")):
                assert acts["layer"] == 4.0
        assert acts["layer"] == 4.0


@pytest.mark.parametrize("keep", ["last", 3, "all"])
def test_a_cleared_cache_is_like_a_new_one(keep: str | int) -> None:
    model = Twice()
    with hl.capture(model, "layer", keep=keep) as acts:
        model(1.0, 2.0)
        acts.clear()
        assert len(acts) == 0
        assert acts.calls("layer") == []
        assert "layer" not in acts
        model(3.0)
        assert acts["layer"] == 3.0
    assert acts.calls("layer") == [3.0]


def captured(keep: str = "last", **options: Any) -> tuple[hl.Cache, list[Tensor]]:
    """Capture the output of a layer in two forwards, and return it with what the model returned."""
    model = nn.Sequential(nn.ReLU())
    with torch.no_grad(), hl.capture(model, "0", keep=keep, **options) as acts:
        outputs = [model(torch.ones(2)), model(torch.ones(2))]
    return acts, outputs


def test_a_reference_is_read_until_somebody_writes_to_it() -> None:
    acts, outputs = captured(clone=False)
    assert acts["0"].data_ptr() == outputs[1].data_ptr()
    outputs[1].add_(1)
    with pytest.raises(hl.StaleValue, match=says("was overwritten in place version", "0", 0)):
        acts["0"]


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.copy_(x), lambda x: x.unsqueeze_(0)])
def test_what_was_captured_stays_as_it_was_when_the_models_own_value_is_overwritten(
    write: Callable[[Tensor], object],
) -> None:
    acts, outputs = captured()
    write(outputs[1])
    assert acts["0"].tolist() == [1.0, 1.0]


def test_each_call_that_is_listed_is_checked() -> None:
    acts, outputs = captured("all", clone=False)
    assert len(acts.calls("0")) == 2
    outputs[0].zero_()
    with pytest.raises(hl.StaleValue):
        acts.calls("0")
    assert acts["0"].tolist() == [1.0, 1.0]


def test_hooks_can_not_be_added_to_a_short_form_that_is_open() -> None:
    block = hl.capture(nn.Sequential(nn.Identity()), "0")
    with block, pytest.raises(hl.HooklineError, match="open already"):
        block.edit("0", torch.relu)


def test_a_short_form_is_read_through_its_cache() -> None:
    block = hl.capture(nn.Sequential(nn.Identity()), "0")
    with pytest.raises(hl.SiteError, match=says("with hl capture")):
        block["0"]


def test_after_a_failed_forward_the_cache_lists_what_can_be_read_and_nothing_else() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 4:
                raise ValueError("too much")
            return x

    model = nn.Sequential(nn.Identity(), Fails(), nn.Identity())
    with hl.capture(model, "0", "2") as acts:
        model(torch.ones(2))
        with pytest.raises(ValueError, match="too much"):
            model(torch.ones(9))
        assert list(acts) == ["0"]
        assert "2" not in acts
        assert dict(acts).keys() == {"0"}
