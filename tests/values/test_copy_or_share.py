"""Copies of tensors are equal, and a write to one does not change the other."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings

from hookline._values.copy_or_share import copy_tensor, share
from hookline._values.fit import fit
from hookline._values.nested import leaves
from tests.support.nested_values import photo, trees


@settings(deadline=None)
@given(trees())
def test_a_shared_or_fitted_value_is_equal_and_a_write_on_either_side_leaves_the_other_alone(value: Any) -> None:
    before = photo(value)
    for copied in (share(value), fit(value, value)):
        assert photo(copied) == before
        for tensor in leaves(copied):
            tensor.zero_()
        assert photo(value) == before
    shared, fitted = share(value), fit(value, value)
    for tensor in leaves(value):
        tensor.fill_(1)
    assert photo(shared) == photo(fitted) == before


def test_an_expanded_tensor_is_copied_without_filling_its_memory() -> None:
    copied = copy_tensor(torch.ones(1, 3).expand(1000, 3))
    assert copied.shape == (1000, 3)
    assert copied.untyped_storage().nbytes() == 12
