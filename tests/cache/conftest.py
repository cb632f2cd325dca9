"""The file that these tests write, and a check that no scratch file is left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "acts.safetensors"


@pytest.fixture
def nothing_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fail when a test leaves a scratch file behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    gc.collect()
    assert not list(folder.glob("hookline-*"))
