"""The tests mirror the source: `tests/<package>/test_<file>.py`; what several of them need is in tests/support."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "hookline"
MOST_LINES = 800

# Folders that mirror no package: each is about a promise, or drives hookline from outside. Their helpers are their own.
SUITES = {"browser", "failure_modes", "gpu", "odd_arguments", "properties"}
# Test files of a package whose name begins with no file of it. Better empty: give the file the name of what it tests.
EXCEPTIONS: set[str] = set()

FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]
PACKAGES = sorted({path.parent.name for path in TEST_FILES} - SUITES - {"tests"})


def source_of(package: str) -> Path:
    """Return the folder that a folder of tests mirrors: of the same name, or with an underscore in front."""
    found = [SOURCE / name for name in (package, f"_{package}") if (SOURCE / name).is_dir()]
    assert found, f"tests/{package} mirrors no package of hookline, and is not among SUITES"
    return found[0]


def is_about(name: str, subjects: set[str]) -> bool:
    """Return True if a test file's name is that of a subject, or a subject's and a topic: `cache`, `cache_slices`."""
    return any(name == subject or name.startswith(f"{subject}_") for subject in subjects)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_test_file_begins_with_the_name_of_a_file_of_its_package(package):
    inside = [path for path in source_of(package).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    subjects = {path.stem for path in inside} - {"__init__"} | {package}  # The package's own name: all of it together.
    names = {path.stem.removeprefix("test_") for path in TEST_FILES if path.parent.name == package}
    strange = {name for name in names if not is_about(name, subjects) and f"{package}/test_{name}.py" not in EXCEPTIONS}
    assert not strange, f"{strange} begin with none of {sorted(subjects)}"


def test_a_name_is_about_a_file_or_a_topic_of_it():
    subjects = {"cache", "file"}
    assert [is_about(name, subjects) for name in ("cache", "cache_slices", "caches", "slices")] == [
        True,
        True,
        False,
        False,
    ]


def test_every_exception_is_a_test_file():
    assert all((TESTS / name).is_file() for name in EXCEPTIONS)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_that_mirrors_a_package_holds_tests_alone(package):
    """What they need is in tests/support, or a fixture in their conftest.py."""
    names = {path.name for path in FILES if path.parent.name == package} - {"__init__.py", "conftest.py"}
    assert not {name for name in names if not name.startswith("test_")}


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES if path.name not in ("__init__.py", "conftest.py")]
    assert sorted(names) == sorted(set(names))


def test_no_file_is_long():
    lines = {str(path.relative_to(TESTS)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {name: number for name, number in lines.items() if number > MOST_LINES}


def test_no_file_imports_from_a_test_file():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(TESTS)}: {name}" for name in names if ".test_" in f".{name}"]
    assert not found, "what two test files need belongs in tests/support"
