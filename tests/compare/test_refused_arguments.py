"""Arguments that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3))


def test_a_model_of_torch_jit_is_refused():
    with pytest.raises(hl.HooklineError, match="b is compiled by torch.jit"):
        hl.compare(stack(), torch.jit.trace(stack(), X), run=(X,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "h"}, "match= takes names"),
        ({"tolerance": -1.0}, "tolerance= takes a number"),
        ({"tolerance": "small"}, "tolerance= takes a number"),
        ({"to_b": 3}, "to_b= takes a function"),
        ({"match": {"nothing": "0"}}, "a has nothing of this name"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(hl.HooklineError, match=message):
        hl.compare(stack(), stack(), run=(X,), **options)


def test_a_model_is_not_compared_with_itself():
    model = stack()
    with pytest.raises(hl.HooklineError, match=r"the same object.*copy\.deepcopy"):
        hl.compare(model, model.eval(), run=(X,))
    with pytest.raises(hl.HooklineError, match="the same object"):
        hl.compare(model, model)
    assert hl.compare(model, torch.compile(model, backend="eager"), run=(X,)).ok
    assert hl.compare(model, model, run=(X,), run_b=(X[:1],), to_b=lambda tensor: tensor[:1]).ok


@pytest.mark.parametrize("option", ["run_b", "backward", "to_b", "to_a", "tolerance"])
def test_options_that_change_nothing_are_refused(option):
    given = {"run_b": (X,), "tolerance": 0.1}.get(option, lambda value: value)
    with pytest.raises(hl.HooklineError, match=f"{option}= changes nothing here"):
        hl.compare(stack(), stack(), **{option: given})
