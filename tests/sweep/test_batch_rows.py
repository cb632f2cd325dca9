"""Copies of a batch side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline._sweep.batch_rows import (
    MIXED,
    NotCopies,
    NotOfOneCopy,
    cuttable,
    difference,
    differences,
    repeat_arguments,
    repeat_value,
    row_dims,
    rows_of,
)


def test_a_value_is_repeated_and_the_rows_of_each_copy_are_found() -> None:
    one = {"a": torch.arange(6.0).view(2, 3), "b": (torch.ones(1, 3), [torch.arange(4.0).view(1, 2, 2)])}
    two = {"a": torch.cat([one["a"]] * 2), "b": (one["b"][0], [torch.cat([one["b"][1][0]] * 2, 1)])}
    dims = row_dims(one, two)
    assert dims == [0, None, 1]
    many = repeat_value(one, dims, 3)
    assert [tuple(tensor.shape) for tensor in (many["a"], many["b"][0], many["b"][1][0])] == [(6, 3), (1, 3), (1, 6, 2)]
    for copy in range(3):
        assert all(apart.share() == 0 for apart in differences(rows_of(many, dims, copy, 3), one))


def test_samples_that_alternate_are_no_copies_side_by_side() -> None:
    one = torch.arange(6.0).view(2, 3)
    with pytest.raises(NotCopies):
        row_dims(one, one.repeat_interleave(2, 0))
    assert row_dims(one, one.repeat_interleave(2, 0), by_value=False) == [0]
    for other in (torch.zeros(5, 3), torch.zeros(4, 6), torch.zeros(4), (one, one)):
        with pytest.raises(NotCopies):
            row_dims(one, other)


def test_objects_among_the_arguments_are_new_in_each_run_and_share_no_memory() -> None:
    class Held:
        def __init__(self) -> None:
            self.keys = torch.zeros(2, 3)

    given: tuple[Any, Any] = ((torch.ones(2, 3), torch.ones(4)), {"cache": Held(), "flag": True})
    (x, y), named = repeat_arguments(given, 3)
    assert x.shape == (6, 3)
    assert y.shape == (4,)
    assert named["cache"].keys.shape == (6, 3)
    (x, _), named = repeat_arguments(given, 1)
    x.add_(1)
    named["cache"].keys.add_(1)
    assert given[0][0].eq(1).all()
    assert given[1]["cache"].keys.eq(0).all()


@pytest.mark.parametrize(
    ("one", "two", "share"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), 0.25),
        (torch.tensor([1.0, 1.0, -1e9]), torch.tensor([1.0, 1.5, -1e9]), 1 / 6),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, 2.0]), 0.5),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), 0.0),
        (torch.tensor([float("-inf"), 1.0]), torch.tensor([float("-inf"), 1.0]), 0.0),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, float("nan")]), float("inf")),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 1.0]), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_the_distance_of_two_tensors_is_a_share_of_their_size(one: Tensor, two: Tensor, share: float) -> None:
    assert difference(one, two).share() == pytest.approx(share)


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.keys = tensor


def test_what_belongs_to_the_whole_batch_can_not_be_read() -> None:
    value: dict[str, Any] = {"loss": torch.tensor(1.0), "all": (torch.ones(4, 2), Held(torch.ones(4)))}
    value |= {"number": 2.0, "same": 3, "name": "x"}
    base = {**value, "number": 1.0}
    cut, dims = cuttable(value, base, [MIXED, 0])
    assert dims == [0]
    assert rows_of(cut, dims, 1, 2)["all"][0].shape == (2, 2)
    assert (cut["same"], cut["name"]) == (3, "x")
    readings: list[Callable[[], object]] = [
        lambda: cut["loss"] + 1, lambda: 2 * cut["loss"], lambda: cut["loss"].item(), lambda: float(cut["loss"]),
        lambda: torch.exp(cut["loss"]), lambda: bool(cut["loss"] < 2), lambda: torch.stack([cut["loss"]]),
    ]  # fmt: skip
    for read in readings:
        with pytest.raises(NotOfOneCopy, match="'loss'"):
            read()
    with pytest.raises(NotOfOneCopy, match="item 1"):
        _ = cut["all"][1].keys
    with pytest.raises(NotOfOneCopy, match="'number'"):
        _ = cut["number"] + 1


def test_what_can_all_be_cut_stays_the_same_object() -> None:
    value = {"all": (torch.ones(4, 2), 1), "none": None}
    assert cuttable(value, value, [0]) == (value, [0])
    assert cuttable(value, value, [0])[0] is value
