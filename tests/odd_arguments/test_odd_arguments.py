"""Every public function with odd but plausible arguments: it does what the docs say, or it speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.odd_arguments.calls import CALLS, parameters, public
from tests.odd_arguments.expected import FINE, KNOWN, THEIRS
from tests.odd_arguments.oracle import DONE, FAILED, SPOKE, outcome
from tests.odd_arguments.values import ODD

pytest.importorskip("matplotlib").use("Agg")


def labels(text: str) -> set[str]:
    """Return the odd arguments that an entry of a table names."""
    named = set(text.removeprefix("all but ").split(", ")) - {"", "all"}
    return set(ODD) - named if text.startswith("all") else named


def wanted(place: str, annotation: str, label: str) -> set[str]:
    """Return what may come of an odd argument."""
    if label in labels(THEIRS.get(place, "")):
        return {FAILED}
    if annotation in ("bool", "bool | None"):  # One that is true may need another option, and says so.
        return {DONE, SPOKE} if label in ("True", "0") or (label == "None" and "None" in annotation) else {SPOKE}
    return {DONE} if label in labels(FINE.get(place, "")) else {SPOKE}


PLACES = {
    f"{name}.{parameter}": (name, parameter, annotation)
    for name in sorted(set(public()) & set(CALLS))
    for parameter, annotation in parameters(name).items()
}


class NotYet(Exception):
    """What is known not to be right is still so."""


def wrong(place: str, chosen: set[str], folder: Path) -> dict[str, str]:
    """Return the odd arguments, among those chosen, of which something else comes than should, and what."""
    name, parameter, annotation = PLACES[place]
    found = {}
    for number, label in enumerate(one for one in ODD if one in chosen):
        (folder / str(number)).mkdir()
        came, words = outcome(name, folder / str(number), **{parameter: label})
        if came not in wanted(place, annotation, label):
            found[label] = f"{came} {words}"
    return found


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_function_has_a_usual_call_that_says_nothing(name: str, tmp_path: Path) -> None:
    assert name in CALLS, "a new public function needs a usual call in calls.py"
    assert outcome(name, tmp_path) == (DONE, "")


@pytest.mark.parametrize("place", PLACES)
def test_it_does_what_the_docs_say_or_it_speaks(place: str, tmp_path: Path) -> None:
    known = set().union(*(labels(places.get(place, "")) for places in KNOWN.values()))
    assert wrong(place, set(ODD) - known, tmp_path) == {}


@pytest.mark.parametrize(
    ("place", "known"),
    [
        pytest.param(
            place, known, marks=pytest.mark.xfail(raises=NotYet, strict=True, reason=why), id=f"{place}: {why}"
        )
        for why, places in KNOWN.items()
        for place, known in places.items()
    ],
)
def test_it_does_so_one_day(place: str, known: str, tmp_path: Path) -> None:
    still = set(wrong(place, labels(known), tmp_path))
    assert still in (labels(known), set()), f"take out of KNOWN, for {place}: {sorted(labels(known) - still)}"
    if still:
        raise NotYet


def test_the_tables_name_what_there_is() -> None:
    for table in (FINE, THEIRS, *KNOWN.values()):
        assert set(table) <= set(PLACES)
        assert set().union(*map(labels, table.values())) <= set(ODD)
