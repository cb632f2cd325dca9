"""Statistics of values."""

from __future__ import annotations

import torch

from hookline._stats import histogram


def test_a_histogram_counts_every_finite_element_once():
    found = histogram([torch.randn(1000), torch.tensor([float("nan"), float("inf"), 9.0])], bins=16)
    assert sum(found.counts) == 1001
    assert found.high == 9.0
    assert histogram([torch.full((7,), 2.0)], bins=4).counts == (0, 0, 7, 0)
    assert histogram([], bins=4).counts == (0, 0, 0, 0)
