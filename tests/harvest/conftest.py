"""The folder that a test harvests to."""

from __future__ import annotations

import pytest


@pytest.fixture
def to(tmp_path):
    return tmp_path / "acts"
