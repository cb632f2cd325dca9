"""Copies of a batch side by side: which rows belong to which, and what belongs to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import tokens
from tests.support.sweeps import both, is_packed, total


@pytest.fixture
def x() -> Tensor:
    return tokens()


class Held:
    """An object with a tensor, such as a cache."""

    def __init__(self, tensor: Tensor) -> None:
        self.keys = tensor


class Gives(nn.Module):
    """Two linear layers, and an output that is a function of their result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor, scale: Tensor | None = None, cache: Held | None = None, flag: bool = False) -> Any:
        if cache is not None:
            assert flag
            x = x.add_(cache.keys.add_(1)[:, None]) * scale
        return self.function(self.two(self.one(x)))


def test_nested_outputs_are_cut_along_the_dimension_that_counts_rows(x) -> None:
    model = Gives(lambda y: {"a": y, "b": (torch.ones(1, 3), [y.transpose(0, 1)])})
    assert is_packed(both(model, "*[:, *]", (x,), lambda output: total(output["a"]) + total(output["b"][1][0])))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y if y.numel() == 80 else y.flip(0, 1),
        lambda y: torch.zeros(len(y) + 3) + y.sum(),
        lambda y: y if y.numel() == 80 else (y, y),
    ],
    ids=["another order", "another size", "another structure"],
)
def test_outputs_that_are_no_copies_side_by_side_are_noticed(x, function) -> None:
    with pytest.warns(hl.HooklineWarning, match=says("each place was run alone")):
        both(Gives(function), "*[:, *]", (x,))


def test_objects_among_the_arguments_are_new_in_each_run_and_share_no_memory(x) -> None:
    given = {"x": x, "scale": torch.arange(8.0), "cache": Held(torch.zeros(2, 8)), "flag": True}
    before = x.clone()
    assert is_packed(both(Gives(lambda y: y), "*[:, *]", given))
    assert x.equal(before)
    assert given["cache"].keys.eq(0).all()


@pytest.mark.parametrize(
    "more",
    [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([float("-inf"), 1.0]),
        torch.tensor([1.0, -1e9]),
        torch.tensor([0.0, 0.0]),
        torch.tensor([1, 2]),
        torch.zeros(0),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_rows", [True, False])
def test_numbers_of_every_kind_are_equal_in_all_copies(x, more, has_rows) -> None:
    model = Gives(lambda y: (y, more.expand(len(y), -1) if has_rows else more))
    assert is_packed(both(model, "*[:, *]", (x,)))


@pytest.mark.parametrize(
    "more",
    [
        torch.tensor([[1.0, 1.0], [1.0, float("nan")]]),
        torch.tensor([[1.0, float("inf")], [1.0, 1.0]]),
        torch.tensor([[1, 2], [1, 3]]),
        torch.tensor([[0.0, 0.0], [0.0, 2.0]]),
        torch.tensor([[1.0, 1.0, -1e9], [1.0, 1.5, -1e9]]),
    ],
    ids=str,
)
def test_numbers_that_are_others_in_another_copy_are_noticed(x, more) -> None:
    model = Gives(lambda y: (y, more[torch.arange(y.numel() // 40) // 2 % 2]))
    with pytest.warns(hl.HooklineWarning, match=says("each place was run alone")):
        both(model, "*[:, *]", (x,))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda output: output["loss"] + 1, "'loss'"),
        (lambda output: 2 * output["loss"], "'loss'"),
        (lambda output: output["loss"].item(), "'loss'"),
        (lambda output: float(output["loss"]), "'loss'"),
        (lambda output: torch.exp(output["loss"]), "'loss'"),
        (lambda output: output["all"][0].sum() if output["loss"] < 2 else 1.0, "'loss'"),
        (lambda output: torch.stack([output["loss"]]), "'loss'"),
        (lambda output: output["all"][1].keys.sum(), "item 1"),
        (lambda output: output["number"] + 1, "'number'"),
    ],
    ids=range(9),
)
def test_what_belongs_to_the_whole_batch_can_not_be_read(x, read, name) -> None:
    model = Gives(
        lambda y: {"loss": y.mean(), "all": (y, Held(y)), "number": y.mean().item(), "same": 3, "name": "x", "no": None}
    )
    with pytest.warns(hl.HooklineWarning, match=f"metric reads {name}"):
        found = hl.sweep(model, "*[:, *]", read, run=(x,))
    assert dict(found) == dict(hl.sweep(model, "*[:, *]", read, run=(x,), batch=1))
    assert is_packed(both(model, "*[:, *]", (x,), lambda output: total(output["all"][0]) * output["same"]))
