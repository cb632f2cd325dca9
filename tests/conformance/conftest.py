"""The result that a test is about: one of each type for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.subjects import Subject


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def result(subject: Subject, folder: Path) -> Iterator[Any]:
    with subject.example(folder) as made:
        yield made


@pytest.fixture
def other(subject: Subject, folder: Path) -> Iterator[Any]:
    """A result of the same type with other content."""
    with subject.example(folder, 1) as made:
        yield made
