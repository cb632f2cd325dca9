"""Whether one value can replace another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (0.0, torch.ones(2), [0.0, 0.0]),
        (3, torch.ones(2, dtype=torch.int64), [3, 3]),
        (True, torch.zeros(2, dtype=torch.bool), [True, True]),
        (torch.ones(1), torch.zeros(2, 2), [[1.0, 1.0], [1.0, 1.0]]),
        (torch.tensor(5.0), torch.zeros(2), [5.0, 5.0]),
        (2.0, torch.zeros(1, dtype=torch.int32), [2]),
        (torch.ones(1).expand(2), torch.zeros(2), [1.0, 1.0]),
    ],
)
def test_numbers_and_tensors_broadcast_and_take_the_place_whole(new: Any, old: Tensor, expected: Any) -> None:
    result = hl.run(nn.Identity(), old, patch={"": new})
    assert result.tolist() == expected
    assert (result.dtype, result.shape) == (old.dtype, old.shape)
    assert result.is_contiguous()  # Else the model could not write into it.
    result.zero_()
    assert not isinstance(new, Tensor) or new.all()


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        (0.5, torch.ones(2, dtype=torch.int64), says("given where int64", "(2,)", "0.5")),
        (1j, torch.ones(2), "complex"),
        (torch.ones(3), torch.ones(2), says("does not fit where", "(3,)", "(2,)")),
        (torch.ones(2, 2), torch.ones(2), says("does not fit where", "(2, 2)", "(2,)")),
        (
            torch.ones(2).double(),
            torch.ones(2),
            says("float64 given where torch"),
        ),
        (None, torch.ones(2), says("None given where")),
        ([torch.ones(2)], torch.ones(2), says("list of given where", 1)),
        (0.0, (torch.ones(2), 1), says("given where tuple of passes", "0.0", 2)),
        ({"a": 1}, {"b": 1}, says("dict of a given where")),
    ],
)
def test_what_does_not_fit_names_both_sides(new: Any, old: Any, message: str) -> None:
    with pytest.raises(hl.EditError, match=message):
        hl.run(nn.Identity(), old, patch={"": new})
