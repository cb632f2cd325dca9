"""Small models for the tests of tacklebox and nice_hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.compat_models import Model


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 2)


@pytest.fixture
def model() -> nn.Module:
    """The model of nice_hooks' README."""
    return Model()


@pytest.fixture
def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU())
