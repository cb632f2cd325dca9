"""A folder of models and data, created once, as the working directory of commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A conftest.py can't skip, so what needs packages is imported here.
    from tests.support.command_line import made, with_pictures

    return with_pictures(made(tmp_path_factory.mktemp("original")))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the working directory of the test."""
    path = tmp_path / "folder"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield path
    sys.modules.pop("mine", None)  # The next test has another `mine.py`.


@pytest.fixture
def folder(original: Path, empty: Path) -> Path:
    """A copy of the folder of models and data, the working directory of the test."""
    return shutil.copytree(original, empty, dirs_exist_ok=True)
