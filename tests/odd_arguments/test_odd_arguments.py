"""Every public function with odd but plausible arguments: it does what the docs say, or it raises or warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.odd_arguments.calls import CALLS, parameters, public
from tests.odd_arguments.expected import FEWER, FINE, THEIRS
from tests.odd_arguments.outcomes import DONE, FAILED, SPOKE, outcome
from tests.odd_arguments.values import ODD

pytest.importorskip("matplotlib").use("Agg")


def labels(text: str) -> set[str]:
    """Return the labels of odd arguments in a table entry."""
    return set(text.split(", ")) - {""}


def wanted(place: str, annotation: str, label: str) -> set[str]:
    """Return the outcomes that are allowed for an odd argument."""
    if label in labels(THEIRS.get(place, "")):
        return {FAILED}
    if annotation in ("bool", "bool | None"):  # True may require another option, and the error says so.
        return {DONE, SPOKE} if label == "True" or (label == "None" and "None" in annotation) else {SPOKE}
    return {DONE} if label in labels(FINE.get(place, "")) else {SPOKE}


PLACES = {
    f"{name}.{parameter}": (name, parameter, annotation)
    for name in sorted(set(public()) & set(CALLS))
    for parameter, annotation in parameters(name).items()
}


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_function_has_a_usual_call_that_says_nothing(name: str, tmp_path: Path) -> None:
    assert name in CALLS, "a new public function needs a usual call in calls.py"
    assert outcome(name, tmp_path) == (DONE, "")


@pytest.mark.parametrize("place", PLACES)
def test_it_does_what_the_docs_say_or_it_speaks(place: str, tmp_path: Path) -> None:
    name, parameter, annotation = PLACES[place]
    wrong = {}
    for number, label in enumerate(labels(FEWER[place]) if place in FEWER else ODD):
        (tmp_path / str(number)).mkdir()
        came, words = outcome(name, tmp_path / str(number), **{parameter: label})
        if came not in wanted(place, annotation, label):
            wrong[label] = f"{came} {words}"
    assert wrong == {}


def test_the_tables_name_what_there_is() -> None:
    for table in (FEWER, FINE, THEIRS):
        assert set(table) <= set(PLACES)
        assert set().union(*map(labels, table.values())) <= set(ODD)
