"""What pyproject.toml promises about versions is what continuous integration runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").iterdir())
OLDEST = re.search(r'requires-python = ">=([\d.]+)"', PROJECT).group(1)


def test_every_python_that_is_promised_runs_the_tests():
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT))
    run = set(re.findall(r'(?:python|python-version): "(3\.\d+)"', WORKFLOWS))
    assert run == promised
    assert min(promised, key=lambda version: int(version.partition(".")[2])) == OLDEST


def test_the_oldest_versions_run_the_tests_of_the_kernel():
    floors = re.findall(r'"(\w+)>=([\d.]+)"', re.search(r"^dependencies = \[(.*)\]", PROJECT, flags=re.M).group(1))
    packages = re.search(r"^OLDEST_PACKAGES := (.*)$", MAKEFILE, flags=re.M).group(1).split()
    named = dict(package.split("==") for package in packages)
    assert dict(floors) == {name: named[name].removesuffix(".0") for name, _ in floors}
    assert f"OLDEST_PYTHON ?= python{OLDEST}\n" in MAKEFILE
    assert "command: make test-oldest" in WORKFLOWS


@pytest.mark.parametrize("pattern", [r'python_version = "([\d.]+)"', r'target-version = "py(3)(\d+)"'])
def test_types_and_lint_are_checked_for_the_oldest_python(pattern):
    assert ".".join(re.search(pattern, PROJECT).groups()) == OLDEST
