"""A store to read."""

from __future__ import annotations

import pytest

from tests.support.stores import ARRAYS, plans, write


@pytest.fixture
def acts(tmp_path):
    write(tmp_path / "acts", ARRAYS, plans())
    return tmp_path / "acts"
