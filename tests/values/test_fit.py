"""Whether one value can replace another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


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
        (0.5, torch.ones(2, dtype=torch.int64), r"0\.5 given where int64 \(2,\) passes; .*fraction"),
        (1j, torch.ones(2), "complex"),
        (torch.ones(3), torch.ones(2), r"\(3,\) does not fit where \(2,\)"),
        (torch.ones(2, 2), torch.ones(2), r"\(2, 2\) does not fit where \(2,\)"),
        (
            torch.ones(2).double(),
            torch.ones(2),
            r"float64 given where torch.float32 passes; cast it with \.to\(torch\.float32\)",
        ),
        (None, torch.ones(2), "None given where"),
        ([torch.ones(2)], torch.ones(2), "list of 1 given where"),
        (0.0, (torch.ones(2), 1), r"0\.0 given where tuple of 2 passes; name the part"),
        ({"a": 1}, {"b": 1}, "dict of a given where dict of b passes: the keys differ"),
    ],
)
def test_what_does_not_fit_names_both_sides(new: Any, old: Any, message: str) -> None:
    with pytest.raises(hl.EditError, match=message):
        hl.run(nn.Identity(), old, patch={"": new})
