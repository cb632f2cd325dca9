"""A small net and its input, for the tests of tacklebox."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 2)
