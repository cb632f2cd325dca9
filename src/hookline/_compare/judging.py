"""Which differences count: those that rounding does not explain, and that the module around does not make good."""

from __future__ import annotations

from collections.abc import Mapping

from hookline._compare.apart import Apart
from hookline._compare.report import ComparedPlace
from hookline._compare.rounding import uncovered
from hookline._compare.runs import Runs

Places = Mapping[str, ComparedPlace]
_CANCELLED = 0.1  # A place whose own run is so much nearer to a than on a's inputs makes good what came before it.


def judge(places: Places, runs: Runs) -> None:
    """Decide which errors are more than rounding.

    What rounding explains is measured by running the module once more. It is not where that changes nothing: around
    a module that is off.
    """
    around_off: set[str] = set()
    for path in sorted(places, key=_depth, reverse=True):
        place = places[path]
        if place.local is None:
            continue
        limits = runs.free_limits(place)
        if uncovered(place.errors, limits) is not None and path not in around_off:
            call = runs.ours.calls[path][place.call]
            limits = runs.rounding.measured(call.module, call.inputs, call.output)
        worst = uncovered(place.errors, limits)
        place.rounding = limits[worst or 0]
        if worst is not None:
            place.is_off, place.local, place.limits = True, place.errors[worst], limits
            around_off |= {"", *(path[:end] for end, letter in enumerate(path) if letter == ".")}
        else:
            place.local_values = None


def clear_what_is_made_good(places: Places, runs: Runs) -> None:
    """Count no difference that the module around it makes good, as where a norm is folded into the next weight.

    Tested: with a's value in this place, the module around returns something else than in a. Or the place itself
    makes good what came before it: in its own run, b returns there what a does.
    """
    cleared: set[str] = set()
    waiting: dict[str, list[str]] = {}
    off = sorted((path for path, place in places.items() if place.is_off and path), key=_depth)
    for path in off:
        place, around = places[path], _around(path, places)
        if around is None or places[around].is_off:
            continue
        if _share(place.seen) <= max(place.rounding.relative, _CANCELLED * _share(place.local)):
            cleared.add(path)
        else:
            waiting.setdefault(around, []).append(path)
    for pairs in ({"": runs.matching.pairs.get("", "")}, *runs.levels()):
        while tested := {around: waiting[around].pop() for around in pairs if waiting.get(around)}:
            for around, error in runs.measure_with_outputs(tested, pairs).items():
                limit = max(places[around].rounding.relative, 2 * _share(places[around].local))
                cleared |= {tested[around]} if error.relative > limit else set()
    for path in off:
        around = _around(path, places)
        if around is not None and (path in cleared or around in cleared):
            cleared.add(path)
            places[path].clear(repr(around) if around else "the model")


def _around(path: str, places: Places) -> str | None:
    """Return the innermost module around another that was compared, and is around it in b too."""
    other = places[path].other
    found = [one for one in places if _is_inside(path, one) and _is_inside(other, places[one].other)]
    return max((one for one in found if places[one].local is not None), key=_depth, default=None)


def first_off(places: Places, runs: Runs) -> ComparedPlace | None:
    """Return the first place that is off in the order of a's run, and the innermost one inside it."""
    starts = runs.ours.starts()
    off = sorted((path for path, place in places.items() if place.is_off), key=lambda path: starts[path])
    around, found = None, None
    while True:
        inside = [path for path in off if around is None or _is_inside(path, around)]
        outermost = [path for path in inside if not any(_is_inside(path, one) for one in inside if one != path)]
        if not outermost:
            return found
        around = outermost[0]
        found = places[around]


def _depth(path: str) -> int:
    return path.count(".") + bool(path)


def _share(error: Apart | None) -> float:
    return 0.0 if error is None else error.relative


def _is_inside(path: str, around: str) -> bool:
    return path != around and (not around or path.startswith(f"{around}."))
