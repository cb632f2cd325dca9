"""Fixtures for the tests of a page's data."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from tests.support.explorer_pages import Net, size_without_data


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def ids():
    return torch.randint(20, (2, 5))


@pytest.fixture
def size_of_page(tmp_path):
    """How many bytes a page has besides its data."""
    return size_without_data(hl.explore({"h": torch.zeros(1)}, to=tmp_path / "small.html").path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.html"
