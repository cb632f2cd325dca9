"""Which picture suits a value, and the numbers drawn from it."""

from __future__ import annotations

import pytest
import torch

from hookline._plot.plot_data import DIMENSIONS, MEASURES, by_token, dead_share, kind_of, measure, shaped
from hookline.errors import HooklineError
from tests.errors.wording import says


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), "number"), ((3,), "line"), ((2, 3), "units"), ((2, 3, 4), "tokens"), ((2, 3, 4, 4), "maps")],
)
def test_a_shape_tells_the_kind(shape, kind):
    tensor = torch.randn(shape)
    assert kind_of(tensor) == kind
    assert shaped(tensor, kind).dim() == len(DIMENSIONS[kind])


def test_a_softmax_over_keys_is_attention_in_any_precision_and_with_padded_queries():
    pattern = torch.randn(2, 4, 6, 6).softmax(-1)
    pattern[1, :, 4:] = 0
    assert kind_of(pattern) == kind_of(pattern.bfloat16()) == "attention"
    assert kind_of(torch.zeros(2, 4, 6, 6)) == kind_of(torch.ones(2, 4, 6, 6, dtype=torch.long)) == "maps"
    assert kind_of(pattern - pattern.flip(-1)) == "maps"
    assert kind_of(pattern.mean(1)) == "attention"  # The shape that MultiheadAttention returns.
    assert kind_of(torch.randn(2, 6, 5).softmax(-1)) == "tokens"  # For example, router weights of experts.


def test_dimensions_too_many_are_joined_and_too_few_are_added():
    assert shaped(torch.zeros(2, 3, 4, 5, 6), "maps").shape == (6, 4, 5, 6)
    assert shaped(torch.zeros(5, 6), "tokens").shape == (1, 5, 6)
    assert shaped(torch.zeros(2, 3, 4), "units").shape == (6, 4)
    assert shaped(torch.zeros(3, 4, 4), "attention").shape == (3, 1, 4, 4)  # Three samples, not three heads.


def test_measures_are_those_of_the_elements():
    value = torch.tensor([[[3.0, -4.0], [0.0, 0.0]]])
    assert measure(value, "norm") == 5.0
    assert measure(value, "zeros") == 0.5
    assert by_token(value, "norm").tolist() == [[5.0, 0.0]]
    assert by_token(value, "abs").tolist() == [[3.5, 0.0]]
    assert all(by_token(value, name).shape == (1, 2) for name in MEASURES)


def test_an_unknown_measure_says_what_is_near():
    with pytest.raises(HooklineError, match=says("is not a statistic did", "nrom", "norm")):
        measure(torch.ones(2), "nrom")


def test_a_unit_is_dead_if_it_is_zero_wherever_it_is_seen():
    maps = torch.ones(2, 4, 3, 3)
    maps[:, 0] = 0
    maps[0, 1] = 0
    assert dead_share(maps, "maps") == 0.25
    assert dead_share(maps, "attention") is None
