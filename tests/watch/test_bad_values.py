"""What counts as a bad value: NaN, infinities and values over a limit, in every dtype and kind of value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.support.models import Gives
from tests.support.watch_models import INF, NAN, X, bad


def test_infinity_is_bad_unless_it_is_allowed_and_then_nan_still_is():
    model = nn.Sequential(Gives(torch.tensor([1.0, -INF])), nn.Identity())
    assert "gave Inf: 1 of 2" in str(bad(model, X))
    with hl.watch(model, inf=False):
        model(X)
    model[0].value = torch.tensor([NAN, -INF])
    assert "gave NaN: 1 of 2" in str(bad(model, X, inf=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_limit_holds_for_every_dtype(dtype):
    model = nn.Sequential(Gives(torch.tensor([1.0, 90.0, -101.0]).to(dtype)))
    with hl.watch(model, limit=102):
        model(X)
    error = bad(model, X, limit=100)
    assert "over the limit: 1 of" in str(error)
    assert "(-101)" in str(error)


def test_a_sum_that_overflows_where_no_element_does_is_fine():
    half = nn.Sequential(Gives(torch.full((1000,), 6e4, dtype=torch.float16)))
    single = nn.Sequential(Gives(torch.full((1000,), 3e38)))
    with hl.watch(half):
        half(X)
    with hl.watch(single):
        single(X)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0),
        torch.zeros(3, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
        None,
        "text",
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        (torch.ones(2), {"a": [torch.ones(3), None]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_kind_of_value_passes(value):
    model = nn.Sequential(Gives(value))
    with hl.watch(model):
        model(X)


@pytest.mark.parametrize(
    ("value", "site"),
    [
        ((torch.ones(2), {"a": [torch.tensor([NAN]), None]}), '0[1]["a"][0]'),
        (torch.tensor([[1.0, NAN]]).to_sparse(), "0"),
        (torch.tensor([NAN]).to(torch.float8_e4m3fn), "0"),
        (torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]), "0"),
        (torch.tensor(complex(1, NAN)), "0"),
    ],
    ids=["nested value", "sparse", "float8", "nested tensor", "complex"],
)
def test_a_bad_tensor_is_found_in_any_kind_of_value(value, site):
    assert str(bad(nn.Sequential(Gives(value)), X).site) == site
