"""Stopping a forward: nothing after the last requested site runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Encoder, mlp, tokens


def test_a_stopped_forward_returns_none_and_nothing_after_the_stop_runs() -> None:
    model, x = mlp(), torch.ones(2, 4)
    seen: list[str] = []
    for name, module in model.named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    output, acts = hl.run(model, x, capture=["0", "1:input"], stop=True)
    assert output is None
    assert torch.equal(acts["0"], acts["1:input"])
    assert seen == ["0"]


def test_a_stop_waits_for_every_site() -> None:
    model, x = GPT(), tokens()
    seen: list[str] = []
    model.head.register_forward_hook(lambda *_: seen.append("head"))
    output, acts = hl.run(model, x, capture=["h.2.attn", "h.0", "h.1.mlp.*"], stop=True)
    assert output is None
    assert len(acts) == 5
    assert seen == []


def test_a_block_with_a_stop_goes_on_and_a_loop_runs_all_batches() -> None:
    model = mlp()
    batches = [torch.full((2, 4), float(number)) for number in range(3)]
    with hl.capture(model, "0", keep="all", stop=True) as acts:
        outputs = [model(batch) for batch in batches]
    assert outputs == [None, None, None]
    assert all(torch.equal(value, model[0](batch)) for value, batch in zip(acts.calls("0"), batches, strict=True))
    assert model(batches[0]) is not None


def test_a_stop_at_the_root_itself_lets_everything_run() -> None:
    model, x = mlp(), torch.ones(2, 4)
    output, acts = hl.run(model, x, capture=["", "0"], stop=True)
    assert output is None
    assert torch.equal(acts[""], model(x))


def test_a_stop_in_a_method_that_needs_the_output_ends_the_method() -> None:
    model, x = Encoder(), torch.ones(2, 4)
    output, acts = hl.run(model.generate, x, capture="h.1", stop=True)
    assert output is None
    assert torch.equal(acts["h.1"], model.encode(x))
    assert model.steps == 0
    output, acts = hl.run(model.generate, x, capture="h.1#2", stop=True)
    assert output is None
    assert model.steps == 2


def test_a_stop_waits_for_the_calls_that_were_asked_for() -> None:
    model, x = Encoder(), torch.ones(2, 4)
    output, acts = hl.run(model.generate, x, capture=["h.0#0", "h.1#2"], stop=True)
    assert output is None
    assert model.steps == 2
    assert list(acts) == ["h.0#0", "h.1#2"]


def test_a_stop_in_a_method_that_goes_around_forward_ends_it_too() -> None:
    model, x = Encoder(), torch.ones(2, 4)
    output, acts = hl.run(model.encode, x, capture="h.0", stop=True)
    assert output is None
    assert torch.equal(acts["h.0"], model.h[0](x))


class Outer(nn.Module):
    """Calls an inner model and carries on whether or not it gets an output."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inner = mlp()
        self.head = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 4)
        self.call = call
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(self.inner(x) if self.call is None else self.call(self.inner, x))
        return self.tail(self.head(x))


def test_nested_owners_do_not_eat_each_others_stop() -> None:
    x = torch.ones(2, 4)
    model = Outer()
    with hl.capture(model, "head", stop=True) as outer, hl.capture(model.inner, "0", stop=True) as inner:
        assert model(x) is None
    assert model.found == [None]
    assert list(outer) == ["head"]
    assert list(inner) == ["0"]


def test_a_run_inside_a_forward_stops_only_its_own_model() -> None:
    x = torch.ones(2, 4)
    model = Outer(lambda inner, x: hl.run(inner, x, capture="0", stop=True)[0])
    output, acts = hl.run(model, x, capture="head", stop=True)
    assert output is None
    assert model.found == [None]
    assert list(acts) == ["head"]
    assert torch.equal(hl.run(model, x), model.tail(model.head(x)))


def test_an_outer_stop_inside_an_inner_model_ends_the_outer_one() -> None:
    x = torch.ones(2, 4)
    model = Outer()
    with (
        pytest.warns(hl.HooklineWarning, match="'2' .*(stop|ended early)"),
        hl.capture(model.inner, nn.Linear, stop=True),
    ):
        with hl.capture(model, "inner.0", stop=True) as outer:
            assert model(x) is None
    assert model.found == []
    assert list(outer) == ["inner.0"]


def test_a_site_behind_somebody_elses_stop_says_that_the_forward_was_stopped() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with pytest.raises(hl.NeverFired, match="'2' .*(stop|ended early)"), hl.capture(model, "2") as acts:
        with hl.capture(model, "0", stop=True):
            assert model(x) is None
    with pytest.raises(hl.NotCaptured, match="'2' .*(stop|ended early)"):
        acts["2"]


def test_two_stops_on_one_model_both_get_what_they_wait_for() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0", stop=True) as first, hl.capture(model, "1", stop=True) as second:
        assert model(x) is None
    assert list(first) == ["0"]
    assert list(second) == ["1"]


def test_a_stop_that_is_never_reached_is_an_error_when_named() -> None:
    with pytest.raises(hl.NeverFired, match=says("was not reached was", "0#5")):
        hl.run(mlp(), torch.ones(2, 4), capture="0#5", stop=True)


def test_an_error_of_a_caller_that_got_none_tells_that_the_forward_was_stopped() -> None:
    model, x = GPT(), tokens()
    with pytest.raises(TypeError) as raised, hl.capture(model, "h.0", stop=True):
        model(x)[0]
    if hasattr(raised.value, "add_note"):  # Python 3.11.
        assert "hl.run(model.generate" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="other") as raised, hl.capture(model, "h.0", stop=True):
        model(x)
        raise ValueError("other")
    assert not getattr(raised.value, "__notes__", [])


def test_a_stop_warns_of_batchnorm_layers_that_were_added_after_an_earlier_one() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)
    hl.run(model, x, capture="1", stop=True)
    model[0] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(hl.HooklineWarning, match=says("ended early in train mode")):
        hl.run(model, x, capture="1", stop=True)
