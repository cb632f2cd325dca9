"""Hostile files in a store or a cache are read correctly, or one HooklineError names the file, without long delay.

`script_hostile_files.py` makes the files and reads them in a separate process with limited memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.quick_python import quick_python
from tests.support.running import python

needs("fsspec")
from tests.failure_modes import script_hostile_files as hostile  # noqa: E402

ABSENT = ("nothing", "a link to nothing")  # Without its record, a unit is not done yet.

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, pipes and limits on memory")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str, str]]]:
    """The outcomes of all attempts, by group."""
    folder = tmp_path_factory.mktemp("hostile")
    told = python("-m", "tests.failure_modes.script_hostile_files", folder, command=quick_python())
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in told.splitlines():
        group, *outcome = json.loads(line)
        found.setdefault(group, []).append(tuple(outcome))
    return found


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("group", [group.__name__ for group in hostile.GROUPS])
def test_a_hostile_file_is_refused_in_words_in_seconds_and_in_little_memory(outcomes, group):
    assert len(outcomes[group]) > 15
    bad = [one for one in outcomes[group] if one[2].startswith(("FOREIGN", "TOO LATE"))]
    assert not bad
    # The limit is per line, because a list of damaged files has a line for each.
    long = [one for one in outcomes[group] if len(one[2]) > 600 * (1 + one[2].count("\n"))]
    assert not long
    lines = [one for one in outcomes[group] if "\n" in one[2] and "To repair a damaged file" not in one[2]]
    assert not lines


@pytest.mark.process
@pytest.mark.parametrize("group", ["store", "cache", "spilled"])
def test_a_file_that_was_replaced_is_named_and_one_that_is_back_is_read(outcomes, group):
    whole = [outcome for case, _, outcome in outcomes[group] if case == "as it was"]
    assert whole
    assert set(whole) == {"read"}
    for case, file, outcome in outcomes[group]:
        if case in {name for name, _ in hostile.replacements(Path("x"), b"")}:
            assert outcome != "read", (case, file)
            assert Path(file).name in outcome or (case in ABSENT and "units" in outcome), (case, file, outcome)


@pytest.mark.process
@pytest.mark.parametrize(
    ("group", "case"),
    [
        *[("forged", case) for case in hostile.COUNTS],
        *[("elsewhere", case) for case in hostile.COUNTS],
        *[("cache", case) for case in hostile.MANIFESTS if "digits" not in case and "list" not in case],
        ("cache", "gigabytes of holes that are declared"),
    ],
)
def test_counts_and_names_that_cannot_be_are_refused(outcomes, group, case):
    (outcome,) = [outcome for name, _, outcome in outcomes[group] if name == case]
    assert outcome != "read"
