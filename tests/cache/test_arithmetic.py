"""Caches are added, subtracted, multiplied and divided, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens


def test_two_caches_add_and_subtract_value_by_value() -> None:
    model, x = GPT(), tokens()
    _, clean = hl.run(model, x, capture=["h.*", "h.0:inputs"])
    _, other = hl.run(model, x + 1, capture=["h.*", "h.0:inputs"])
    difference = clean - other
    assert list(difference) == list(clean)
    torch.testing.assert_close(difference["h.1"], clean["h.1"] - other["h.1"])
    torch.testing.assert_close(difference["h.0:inputs"]["x"], torch.full_like(x, -1.0))
    assert difference["h.0:inputs"]["scale"] == 0.0
    torch.testing.assert_close((difference + other)["h.2"], clean["h.2"])
    torch.testing.assert_close((clean + dict(other))["h.2"], clean["h.2"] + other["h.2"])


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 1.0}, says("only one cache has it", "a", "c")),
        (
            {"a": torch.ones(2)},
            {"a": torch.ones(3)},
            says("in one cache and float32", "(2,)", "(3,)", "a"),
        ),
        ({"a": torch.ones(2)}, {"a": None}, says("in one cache and None", "(2,)", "a")),
        (
            {"a": (torch.ones(2),)},
            {"a": [torch.ones(2), 3]},
            says("is tuple of in", "a", 1, 2),
        ),
        ({"a": {"x": torch.ones(1)}}, {"a": {"y": torch.ones(1)}}, says("in one cache and", "a")),
        ({"a": "cat"}, {"a": "dog"}, says("in one cache and", "a", "cat", "dog")),
        ({"a": (None,)}, {"a": (3,)}, says("is None in one cache", "a", 3)),
        ({"a": True}, {"a": False}, says("is True in one cache", "a")),
        ({"a": nn.ReLU()}, {"a": nn.ReLU()}, says("is ReLU in one cache", "a")),
    ],
)
def test_caches_that_differ_are_not_combined(one: dict[str, Any], other: dict[str, Any], message: str) -> None:
    for combine in (hl.Cache.__add__, hl.Cache.__sub__, hl.Cache.__mul__, hl.Cache.__truediv__):
        with pytest.raises(hl.HooklineError, match=message):
            combine(hl.Cache(one), hl.Cache(other))


def test_what_cannot_be_subtracted_is_named() -> None:
    mask = hl.Cache({"mask": torch.tensor([True, False])})
    with pytest.raises(hl.HooklineError, match="'mask'"):
        mask - mask
    with pytest.raises(TypeError):
        mask - 3  # type: ignore[operator]


def test_numbers_are_computed_with_and_what_both_have_in_common_stays() -> None:
    one = hl.Cache({"loss": 3.0, "inputs": {"steps": 4, "name": "text", "mask": None, "causal": True}})
    other = hl.Cache({"loss": 1.0, "inputs": {"steps": 1, "name": "text", "mask": None, "causal": True}})
    assert (one - other)["loss"] == 2.0
    assert (one - other)["inputs"] == {"steps": 3, "name": "text", "mask": None, "causal": True}
    assert (one / other)["inputs"]["steps"] == 4.0
    with pytest.raises(hl.EditError, match=says("which would be divided by", "loss", "3.0", 0)):
        one / {**other, "loss": 0.0}


def test_caches_multiply_divide_and_scale() -> None:
    values = {"a": torch.tensor([2.0, 4.0]), "b": (torch.tensor([3]), {"name": "text", "mask": None})}
    cache = hl.Cache(values)
    assert (cache * cache)["a"].tolist() == [4.0, 16.0]
    assert (cache / cache)["b"][0].tolist() == [1.0]
    assert ((cache + cache) / 2 == cache.map(lambda value: value)) is False  # Whole numbers became floats.
    assert ((cache + cache) / 2)["a"].equal(values["a"])
    assert (0.5 * cache)["a"].equal((cache * 0.5)["a"])
    assert (cache * 2)["b"] == (torch.tensor([6]), {"name": "text", "mask": None})
    for wrong in (True, "2", [1]):
        with pytest.raises(TypeError):
            cache * wrong
    with pytest.raises(hl.EditError, match=says("can't be multiplied", "mask")):
        hl.Cache({"mask": torch.tensor([True])}) * 2


def test_a_cache_works_with_numbers_of_numpy_on_either_side() -> None:
    numpy = pytest.importorskip("numpy")
    cache = hl.Cache({"a": torch.tensor([1.0, 2.0])})
    assert (numpy.float32(2) * cache)["a"].tolist() == [2.0, 4.0]
    assert (numpy.float64(2) * cache)["a"].tolist() == [2.0, 4.0]
    assert (numpy.float64(2) / cache)["a"].tolist() == [2.0, 1.0]
    with pytest.raises(TypeError):
        numpy.ones(2) + cache


def test_caches_are_summed_negated_and_divided_by() -> None:
    values = {"a": torch.tensor([1.0, 2.0]), "b": (torch.tensor([4]), {"name": "text", "mask": None})}
    cache = hl.Cache(values)
    assert sum([cache, cache]) == cache * 2
    assert sum([cache]) == cache
    assert ({**cache} + cache)["a"].tolist() == [2.0, 4.0]
    assert (-cache)["b"] == (torch.tensor([-4]), {"name": "text", "mask": None})
    assert (1 / cache)["a"].tolist() == [1.0, 0.5]
    assert ({**cache} / cache)["b"][0].tolist() == [1.0]
    with pytest.raises(TypeError):
        1 + cache
    with pytest.raises(hl.EditError, match=says("can't be divided by it", "loss", 0, 1)):
        1 / hl.Cache({"loss": 0})


def test_a_tensor_of_one_number_scales_a_cache_from_either_side() -> None:
    cache, two = hl.Cache({"a": torch.tensor([1.0, 2.0])}), torch.tensor(2.0)
    assert (cache * two)["a"].tolist() == (two * cache)["a"].tolist() == [2.0, 4.0]
    assert (cache / two)["a"].tolist() == [0.5, 1.0]
    assert (two / cache)["a"].tolist() == [2.0, 1.0]
    for wrong in (torch.ones(2), torch.tensor(True)):
        with pytest.raises(TypeError):
            cache * wrong
