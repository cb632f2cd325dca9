"""Which errors are more than rounding, which of them are made good, and which comes first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hookline._compare.apart import SMALL, Apart, sums
from hookline._compare.recording import Recording
from hookline._compare.report import ComparedPlace
from hookline._compare.rounding import Limit, Rounding, uncovered
from hookline._compare.runs import Runs
from hookline._kernel import leaves

Places = Mapping[str, ComparedPlace]
_Numbers = tuple[int, float, float]
_RESTORED = 0.1  # A place makes good what came before if b's own run is so much nearer to a there than on a's inputs,
_ADDED_UP = 256  # and what is left is so many times the rounding of one small module.
_WORSE = 2  # An error has become larger if it is so many times as large.
_NEAR = 32  # An error that is so many times as large as its limit may still be rounding.


def judge(places: Places, runs: Runs) -> None:
    """Decide which errors are more than rounding.

    What rounding explains is measured by running the module once more. Around a module that is off, this is only done
    if the error is small, since it would change nothing otherwise.
    """
    around_off: set[str] = set()
    for path in sorted(places, key=_depth, reverse=True):
        place = places[path]
        place.is_off = bool(place.odd)
        if place.local is not None and not _is_explained(place, runs, is_around_off=path in around_off):
            place.is_off = True
        if place.is_off:
            around_off |= {"", *(path[:end] for end, letter in enumerate(path) if letter == ".")}
        else:
            place.local_values = None


def _is_explained(place: ComparedPlace, runs: Runs, is_around_off: bool) -> bool:
    """Return True if the error of a place is rounding, and note how large that may be."""
    limits = runs.free_limits(place)
    if uncovered(place.parts, limits) is not None and not (is_around_off and _is_large(place, limits)):
        limits = runs.rounding.measured(runs.of_a.calls[place.site][place.call], place.parts)
    part = uncovered(place.parts, limits)
    place.part = next(iter(limits)) if part is None else part
    place.rounding, place.limits = limits[place.part], limits
    if part is not None:
        place.local = place.parts[part].error
    return part is None


def _is_large(place: ComparedPlace, limits: Mapping[str, Limit]) -> bool:
    """Return True if rounding can't explain an error. Where numbers cancel out, small ones may be nothing else."""
    whole = {name: part.error for name, part in place.parts.items() if not name.endswith(SMALL)}
    return any(not limits[name].times(_NEAR).covers(error) for name, error in whole.items())


def clear_what_is_made_good(places: Places, runs: Runs) -> None:
    """Clear the places whose error is made good inside the module around them, as where a norm is folded into a weight.

    - A place restores a's values if in its own run b returns there what a does, though it is off on a's inputs. It and
      the places that its inputs come from are cleared together.
    - Of all others, a's value is put there: if the error of the module around becomes larger, the place is cleared.
    """
    found = {path: _around(path, places) for path, place in places.items() if place.is_off and path and not place.odd}
    around = {path: outer for path, outer in found.items() if outer is not None}
    groups: dict[str, list[set[str]]] = {}  # By module around: the places that are cleared together.
    restoring = [path for path in around if _restores(places[path], runs.rounding)]
    sources = _Sources(places, runs.of_b) if restoring else None
    for path in restoring:
        assert sources is not None
        before = {one for one in sources.off_before(path) if around.get(one) == around[path]}
        groups.setdefault(around[path], []).append({path, *before})
    cleared = {path for several in groups.values() for group in several for path in group}
    waiting: dict[str, list[str]] = {}
    for path, outer in around.items():
        if path not in cleared:
            waiting.setdefault(outer, []).append(path)
    for pairs in runs.all_levels():
        while tested := {outer: {waiting[outer].pop()} for outer in pairs if waiting.get(outer)}:
            for outer, (error, parts) in runs.measure_with_outputs(tested, pairs).items():
                is_worse = error.relative > _WORSE * _share(places[outer].local)
                if is_worse and uncovered(parts, places[outer].limits) is not None:
                    groups.setdefault(outer, []).append(tested[outer])
        for outer in pairs:
            if outer in groups and places[outer].is_off:
                _keep_those_at_fault(outer, groups[outer], places, runs, pairs)
    for outer, several in groups.items():
        for path in {path for group in several for path in group}:
            places[path].clear(repr(outer) if outer else "the model")
    for path, outer in sorted(around.items(), key=lambda one: _depth(one[0])):
        if places[outer].is_made_good and places[path].is_off:
            places[path].clear(repr(outer))


def _keep_those_at_fault(
    around: str, groups: list[set[str]], places: Places, runs: Runs, pairs: Mapping[str, str]
) -> None:
    """Take those groups out that are why a module is off: it is right if they return a's values.

    Halves of them are tested, until only one is left.
    """

    def is_right(tested: list[set[str]]) -> bool:
        paths = {path for group in tested for path in group}
        measured = runs.measure_with_outputs({around: paths}, pairs)
        return around in measured and uncovered(measured[around][1], places[around].limits) is None

    at_fault = list(groups)
    if not is_right(at_fault):
        return  # Something else is why.
    while len(at_fault) > 1:
        middle = len(at_fault) // 2
        half = next((one for one in (at_fault[:middle], at_fault[middle:]) if is_right(one)), None)
        if half is None:
            break
        at_fault = half
    together = sorted(path for group in at_fault for path in group)
    for group in at_fault:
        groups.remove(group)
        for path in group if len(together) > 1 else ():
            others = ", ".join(repr(one) for one in together if one != path)
            places[path].note = places[path].note or f"so does {others}, and one may make good the other"


def _restores(place: ComparedPlace, rounding: Rounding) -> bool:
    """Return True if b returns what a does in its own run, and something else on a's inputs."""
    seen = place.seen_parts.get(place.part)
    if seen is None or place.local is None:
        return False
    in_all = min(_RESTORED * place.local.relative, _ADDED_UP * rounding.share)
    return place.rounding.covers(seen.error) or seen.error.relative <= in_all


class _Sources:
    """Which places the inputs of others come from, in b's run: the input has the numbers that a module returned."""

    def __init__(self, places: Places, of_b: Recording) -> None:
        self._places = places
        self._calls = {path: of_b.calls[place.other][0] for path, place in places.items()}
        self._returned: dict[_Numbers, list[str]] = {}
        for path in sorted(places, key=lambda one: self._calls[one].start):
            for tensor in leaves(self._calls[path].output):
                self._returned.setdefault(_numbers(tensor), []).append(path)

    def off_before(self, path: str) -> set[str]:
        """Return the places with an error from which the inputs of another come, also through some that are right."""
        found: set[str] = set()
        waiting, known = [path], set()
        while waiting:
            one = waiting.pop()
            known.add(one)
            sources = {self._source(tensor, one) for tensor in leaves(self._calls[one].inputs)}
            for source in sources - known - {""}:
                place = self._places[source]
                if place.is_off or (place.is_made_good and not place.is_seen_equal):
                    found.add(source)
                elif not place.is_seen_equal:
                    waiting.append(source)
        return found

    def _source(self, tensor: Tensor, path: str) -> str:
        """Return the last place that returned a tensor before a module got it; "" if none did."""
        before = [
            one
            for one in self._returned.get(_numbers(tensor), ())
            if self._calls[one].start < self._calls[path].start and not _is_inside(path, one)
        ]
        return before[-1] if before else ""


def _numbers(tensor: Tensor) -> _Numbers:
    """Return numbers by which a tensor is known: its size, the sum of its elements, and that without signs."""
    return tensor.numel(), *(sums(tensor) if tensor.numel() else (0.0, 0.0))


def _around(path: str, places: Places) -> str | None:
    """Return the innermost module around another that was compared, and is around it in b too."""
    other = places[path].other
    found = [one for one in places if _is_inside(path, one) and _is_inside(other, places[one].other)]
    return max((one for one in found if places[one].local is not None), key=_depth, default=None)


def first_off(places: Places, runs: Runs) -> ComparedPlace | None:
    """Return the first place that is off in the order of a's run, and the innermost one inside it."""
    found = _first_off(places, runs)
    if found is not None and not found.note and any(place.is_made_good for place in places.values()):
        before = sorted(_Sources(places, runs.of_b).off_before(found.site))
        if before:
            found.note = f"what it gets comes from {', '.join(map(repr, before))}, where b differs too"
    return found


def _first_off(places: Places, runs: Runs) -> ComparedPlace | None:
    starts = runs.of_a.starts()
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
