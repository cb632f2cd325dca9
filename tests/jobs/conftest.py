"""The folder that a test writes to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "acts"
