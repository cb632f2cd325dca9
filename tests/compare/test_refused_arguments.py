"""Arguments that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3))


def test_a_model_of_torch_jit_is_refused():
    with pytest.raises(hl.HooklineError, match=says("b is compiled by torch")):
        hl.compare(stack(), torch.jit.trace(stack(), X), run=(X,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "h"}, says("match= takes names")),
        ({"tolerance": -1.0}, says("tolerance= takes a number")),
        ({"tolerance": "small"}, says("tolerance= takes a number")),
        ({"to_b": 3}, says("to_b= takes a function")),
        ({"match": {"nothing": "0"}}, says("a has nothing of this")),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(hl.HooklineError, match=message):
        hl.compare(stack(), stack(), run=(X,), **options)


def test_a_model_is_not_compared_with_itself():
    model = stack()
    with pytest.raises(hl.HooklineError, match=says("the same object")):
        hl.compare(model, model.eval(), run=(X,))
    with pytest.raises(hl.HooklineError, match=says("the same object")):
        hl.compare(model, model)
    assert hl.compare(model, torch.compile(model, backend="eager"), run=(X,)).ok
    assert hl.compare(model, model, run=(X,), run_b=(X[:1],), to_b=lambda tensor: tensor[:1]).ok


@pytest.mark.parametrize("option", ["run_b", "backward", "to_b", "to_a", "tolerance"])
def test_options_that_change_nothing_are_refused(option):
    given = {"run_b": (X,), "tolerance": 0.1}.get(option, lambda value: value)
    with pytest.raises(hl.HooklineError, match=says("changes nothing here", option)):
        hl.compare(stack(), stack(), **{option: given})
