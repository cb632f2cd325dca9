"""The inputs of one model's module given to another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import Computes

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """Gives `x + shift` to a module inside, called in its own way."""

    def __init__(self, inner: Callable[..., Any], call: Callable[[nn.Module, Tensor], Any], shift: float = 0) -> None:
        super().__init__()
        self.first, self.inner, self.call = nn.Hardtanh(shift - 9, 9), Computes(inner), call
        self.shift = shift

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, self.first(x) + self.shift)


def report_of(inner: Callable[..., Any], of_a: Any, of_b: Any, inner_of_b: Any = None, **options: Any) -> hl.Comparison:
    """Compare two models in which a module inside gets other numbers."""
    return hl.compare(Calls(inner, of_a), Calls(inner_of_b or inner, of_b, 1), run=(X,), **options)


@pytest.mark.parametrize(
    ("inner", "call"),
    [
        (lambda x: x * 2, lambda inner, x: inner(x)),
        (lambda pair: pair[0] + pair[1], lambda inner, x: inner((x, 2 * x))),
        (lambda named: named["p"] * 2, lambda inner, x: inner({"p": x})),
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_a_module_of_b_gets_what_that_of_a_got(inner, call):
    report = report_of(inner, call, call)
    assert report["inner"].seen.relative > 0.1
    assert report["inner"].local.is_none
    assert report["inner"].note == ""


class ByName(nn.Module):
    """Multiplies its input by a mask, if `flag` is set."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class OtherName(nn.Module):
    def forward(self, hidden_states: Tensor, mask: Tensor, flag: bool = False) -> Tensor:
        assert flag
        return hidden_states * mask


class Masked(nn.Module):
    def __init__(self, inner: nn.Module, shift: float, **more: Any) -> None:
        super().__init__()
        self.inner, self.shift, self.more = inner, shift, more

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift, mask=(x > 0).float() + self.shift, **self.more)


def test_arguments_of_the_same_name_and_the_first_ones_correspond_and_others_stay():
    report = hl.compare(Masked(ByName(), 0), Masked(OtherName(), 1, flag=True), run=(X,), match={"inner": "inner"})
    assert report["inner"].seen.relative > 0.1
    assert report["inner"].local.is_none


def test_what_does_not_fit_stays_and_is_said():
    report = report_of(
        lambda pair: pair[0] * 2,
        lambda inner, x: inner((x,)),
        lambda inner, x: inner((x, x)),
        match={"inner": "inner"},
    )
    assert report["inner"].note.startswith("with b's own ")
    assert report["inner"].local.relative > 0.1


def test_inputs_are_given_in_the_layout_of_b():
    report = report_of(
        lambda x: x.sum(), lambda inner, x: inner(x), lambda inner, x: inner(x[:, :2].T), lambda x: x.sum() ,
        to_b=lambda tensor: tensor[:, :2].T if tensor.dim() == 2 else tensor,
    )  # fmt: skip
    assert report["inner"].note == ""
    torch.testing.assert_close(report["inner"].local.largest, X[:, 2].sum().abs().item())


def test_a_mask_stays_finite_in_a_smaller_dtype():
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min, -torch.inf])
    report = hl.compare(
        Calls(lambda m: m.isinf().float(), lambda inner, x: inner(mask)),
        Calls(lambda m: m.isinf().float(), lambda inner, x: inner(torch.zeros(3, dtype=torch.float16))),
        run=(X,),
    )
    assert report["inner"].seen.relative == 1
    assert report["inner"].local.is_none
