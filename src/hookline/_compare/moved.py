"""Whether weights that are found by their numbers are where the names say, or moved: two swapped layers, q in v."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from difflib import SequenceMatcher


def moved(pairs: Mapping[str, str], names_in_b: Iterable[str], sizes: Mapping[str, Hashable]) -> dict[str, str]:
    """Return the names of a whose counterpart in b has another place than the names say, and which name has that.

    Only those of one size can have changed places. Two pairs cross if they are in one order in a and in the other in b.
    A crossing is no accident if the names of the other two are more alike, or if only their layer numbers are equal.
    """
    names, order = list(pairs), {other: place for place, other in enumerate(names_in_b)}
    found: dict[str, str] = {}
    for place, one in enumerate(names):
        for two in names[place + 1 :]:
            is_crossing = sizes[one] == sizes[two] and order[pairs[one]] > order[pairs[two]]
            if is_crossing and _likeness(one, two, pairs) < 0:
                found.setdefault(one, pairs[two])
                found.setdefault(two, pairs[one])
    return found


def _likeness(one: str, two: str, pairs: Mapping[str, str]) -> float:
    """Return how much more alike the names of two pairs are than if b's were exchanged."""
    as_found = _alike(one, pairs[one]) + _alike(two, pairs[two])
    return as_found - _alike(one, pairs[two]) - _alike(two, pairs[one])


def _alike(name: str, other: str) -> float:
    same_numbers = re.findall(r"\d+", name)[:1] == re.findall(r"\d+", other)[:1]
    return 2.0 * same_numbers + SequenceMatcher(None, name, other).ratio()
