"""`hl.compare`: where two models part.

Two models run on the same inputs. Their outputs differ at each place behind the first fault, so a second measurement
tells which place makes an error from which inherits it: each module of b also runs on the inputs that its counterpart
in a had. All modules of one nesting level are measured in one run of b, in which the inputs of each are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._compare.apart import Apart, Convert, OtherShape, apart, in_one_layout, where_apart, worst
from hookline._compare.compared_gradients import Loss, compare_gradients
from hookline._compare.filled_inputs import Filled
from hookline._compare.hints import Suspect, hint_for
from hookline._compare.matching import Matching, match_modules, match_names
from hookline._compare.recording import ModuleCall, Recording, paths_of, record
from hookline._compare.references import Reference, compare_with_reference, reference_of
from hookline._compare.report import ComparedPlace, Comparison, Pair
from hookline._compare.rounding import Rounding
from hookline._compare.weights import compare_weights
from hookline._kernel import Call, describe, map_tensors, refuse_flags, unwrap
from hookline._scan.fake_run import call_arguments_of
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline._tables import count
from hookline.errors import HooklineError


def compare(
    a: nn.Module | Reference,
    b: nn.Module,
    *,
    run: Any = None,
    run_b: Any = None,
    match: Mapping[str, str | None] | None = None,
    tolerance: float | None = None,
    to_b: Convert | None = None,
    to_a: Convert | None = None,
    backward: Loss | None = None,
    strict: bool = False,
) -> Comparison:
    """Find where two models part: the first module that does something else on the same inputs, and why.

    >>> import copy
    >>> import hookline as hl
    >>> a = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 0.1
    >>> report = hl.compare(a, b, run=(torch.ones(2, 4),))
    >>> report.first.site, report.first.hint
    ('1', 'eps is 1e-05 in a and 0.1 in b')

    Args:
        a: The model that is right; or values that it returned, by site: a Cache, a Store, a dict, or a file's path.
        b: The model to look at; or the same model, compiled or on another device.
        run: What both are called with: a tuple of arguments, or a dict of keywords. Without it, weights are compared.
        run_b: What b is called with, if it takes something else.
        match: The modules of a and what stands for them in b, as in `{"h.*": "layers.*"}`; None leaves a module out.
        tolerance: The largest difference that counts as rounding, as a share of the largest element. By default,
            hookline measures what the dtypes explain.
        to_b: A function that changes the layout of a tensor of a into that of b, as from channels last to first.
        to_a: The reverse, for outputs of b.
        backward: A function from the output of a model to a loss, whose gradients are compared too.
        strict: Raise `Diverged` if the models part.
    """
    _refuse_odd(b, match, tolerance, {"to_b": to_b, "to_a": to_a, "backward": backward}, strict)
    run_b = run if run_b is None else run_b
    if not isinstance(a, nn.Module):
        if run_b is None:
            raise HooklineError("hl.compare with saved values needs run=(...): what b is called with")
        report = compare_with_reference(reference_of(a), b, run_b, match, tolerance, to_a)
    elif run is None:
        names = match_names(paths_of(a), paths_of(b), match)
        report = Comparison({}, compare_weights(a, b, names), None, None)
    else:
        report = _Comparing(a, b, run, run_b, match, tolerance, to_b, to_a, backward).report()
    if strict:
        report.check()
    return report


def _refuse_odd(b: Any, match: Any, tolerance: Any, functions: Mapping[str, Any], strict: Any) -> None:
    """Raise for arguments of a wrong type."""
    refuse_flags(strict=strict)
    if not isinstance(b, nn.Module):
        raise HooklineError(f"hl.compare takes a model as b, not {describe(b)}")
    is_match = isinstance(match, Mapping) and all(isinstance(one, str) for one in match)
    if match is not None and not (is_match and all(one is None or isinstance(one, str) for one in match.values())):
        raise HooklineError(f'match= takes names of a and of b, as in {{"h.*": "layers.*"}}, not {describe(match)}')
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance < float("inf")):
        raise HooklineError(f"tolerance= takes a number such as 1e-4, not {describe(tolerance)}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise HooklineError(f"{name}= takes a function, not {describe(function)}")


class _Comparing:
    """Compares two models on one batch."""

    def __init__(
        self,
        a: nn.Module,
        b: nn.Module,
        run: Any,
        run_b: Any,
        match: Mapping[str, str | None] | None,
        tolerance: float | None,
        to_b: Convert | None,
        to_a: Convert | None,
        backward: Loss | None,
    ) -> None:
        self.a, self.b = a, b
        self.arguments = call_arguments_of(run), call_arguments_of(run_b)
        self.to_b, self.to_a, self.backward = to_b, to_a, backward
        self.rounding = Rounding(a, b, tolerance)
        self.ours = self._record(a, self.arguments[0], paths_of(a))
        self.theirs = self._record(b, self.arguments[1], paths_of(b))
        self.matching: Matching = match_modules(self.ours, self.theirs, match)
        self.given: dict[str, list[Mapping[str, Any]]] = {}  # What b's modules got of a's inputs, by path in a.
        self.kept: dict[str, set[str]] = {}  # The inputs of b's modules for which a has none.

    def report(self) -> Comparison:
        """Measure everything."""
        places = {path: self._seen(path, other) for path, other in self.matching.pairs.items()}
        for pairs in self._levels():
            self._measure_level(pairs, places)
        if not any(place.local for place in places.values()):
            notes = {place.note for place in places.values()} - {""}
            why = f" ({', '.join(sorted(notes)[:2])})" if notes else ""
            raise HooklineError(
                f"{count(len(places), 'pair')} of modules, and none returned values that can be compared{why}: "
                "name pairs with match=, or map layouts with to_b= and to_a="
            )
        self._judge(places)
        first = self._first(places)
        if first is not None:
            self._explain(first)
        gradients = None
        if self.backward is not None:
            gradients = compare_gradients(
                (self.a, self.b), self.arguments, (self.ours, self.theirs), places, self.backward, self.rounding
            )
        weights = compare_weights(self.a, self.b, self.matching.pairs)
        return Comparison(places, weights, self.matching, first, gradients=gradients)

    def _record(
        self, model: nn.Module, arguments: Any, paths: list[str], prepare: Callable[[Hooks], None] = lambda _: None
    ) -> Recording:
        with left_as_found(model), buffers_as_found(model), torch.random.fork_rng():
            torch.manual_seed(0)
            return record(model, arguments, paths, prepare)

    def _seen(self, path: str, other: str) -> ComparedPlace:
        call = self.ours.calls[path][0]
        place = ComparedPlace(path, other, type(call.module).__name__)
        found = self._measured(self.ours.outputs(path), self.theirs.outputs(other))
        place.seen, place.seen_values, place.call, place.note = found
        if not path and not other:  # The inputs of the model are the same.
            place.local, place.local_values = place.seen, place.seen_values
            self.given[path] = [one.inputs for one in self.theirs.calls[other]]
        return place

    def _measured(self, ours: list[Any], theirs: list[Any]) -> tuple[Apart | None, Pair | None, int, str]:
        """Return how far outputs are apart in the call where it is most, those of that call, its number, and a note."""
        pairs, errors = [], []
        for pair in zip(ours, theirs, strict=False):
            try:
                pairs.append(self._in_one_layout(*pair))
                errors.append(apart(*pairs[-1]))
            except OtherShape as error:
                return None, pairs[-1], len(errors), f"not compared: {error}"
        if not errors:
            return None, None, 0, "never returned"
        error = worst(errors)
        number = errors.index(error)
        note = f"{count(len(ours), 'call')} in a, {len(theirs)} in b" if len(ours) != len(theirs) else ""
        return error, pairs[number], number, note

    def _in_one_layout(self, ours: Any, theirs: Any) -> tuple[Any, Any]:
        return in_one_layout(ours, theirs, self.to_b, self.to_a)

    def _levels(self) -> list[dict[str, str]]:
        """Return the pairs of each nesting level of b, without those of the model itself."""
        levels: dict[int, dict[str, str]] = {}
        theirs = set(self.matching.pairs.values())
        for path, other in self.matching.pairs.items():
            if path or other:
                ends = [end for end, letter in enumerate(other) if letter == "."]
                around = {"", *(other[:end] for end in ends)} - {other}
                levels.setdefault(len(around & theirs), {})[path] = other
        return [levels[depth] for depth in sorted(levels)]

    def _measure_level(self, pairs: dict[str, str], places: dict[str, ComparedPlace]) -> None:
        """Run b with the inputs of each of these modules replaced by those of its counterpart in a."""

        def prepare(hooks: Hooks) -> None:
            for path, other in pairs.items():
                hooks.edit(Site(other, port="inputs"), self._replacement(path), with_call=True, check=False)

        recording = self._record(self.b, self.arguments[1], list(pairs.values()), prepare)
        for path, other in pairs.items():
            place, kept = places[path], self.kept.get(path)
            found = self._measured(self.ours.outputs(path), recording.outputs(other))
            place.local, place.local_values, place.call, note = found
            place.note = note or (f"with b's own {', '.join(sorted(kept))}" if kept else place.note)

    def _replacement(self, path: str) -> Callable[[Any, Call], Any]:
        calls: list[ModuleCall] = self.ours.calls[path]
        given = self.given[path] = []

        def replace(inputs: Mapping[str, Any], call: Call) -> Any:
            number = int(call.number)
            if number >= len(calls):
                return None
            filled = Filled(calls[number].inputs, inputs, self.to_b)
            self.kept.setdefault(path, set()).update(filled.kept)
            given.append(map_tensors(torch.clone, filled.inputs))
            return map_tensors(torch.clone, filled.inputs)

        return replace

    def _judge(self, places: Mapping[str, ComparedPlace]) -> None:
        """Decide which errors are more than rounding.

        What rounding explains is measured by running the module once more. It is not where that changes nothing: around
        a module that is off.
        """
        around_off: set[str] = set()
        for path in sorted(places, key=lambda one: -one.count(".") - bool(one)):
            place = places[path]
            outputs = self.ours.outputs(path)
            place.rounding = self.rounding.free(outputs)
            if place.local is None or place.local.largest <= place.rounding:
                place.local_values = None
                continue
            if path not in around_off:
                call = self.ours.calls[path][place.call]
                place.rounding = self.rounding.allowed(call.module, call.inputs, call.output)
            place.is_off = not place.local.largest <= place.rounding
            if not place.is_off:
                place.local_values = None  # Equal up to rounding: they would only take memory.
            else:
                around_off |= {"", *(path[:end] for end, letter in enumerate(path) if letter == ".")}

    def _first(self, places: dict[str, ComparedPlace]) -> ComparedPlace | None:
        """Return the first place that is off in the order of a's run, and the innermost one inside it."""
        starts = self.ours.starts()
        off = sorted((path for path, place in places.items() if place.is_off), key=lambda path: starts[path])
        around, found = None, None
        while True:
            inside = [path for path in off if around is None or _is_inside(path, around)]
            outermost = [path for path in inside if not any(_is_inside(path, one) for one in inside if one != path)]
            if not outermost:
                return found
            around = outermost[0]
            found = places[around]

    def _explain(self, place: ComparedPlace) -> None:
        """Look for the reason, and for the element that differs most."""
        ours, theirs = self.ours.calls[place.site][place.call], self.theirs.calls[place.other][place.call]
        given = self.given.get(place.site, [])[place.call :]
        if not given or place.local_values is None:
            return
        place.worst = where_apart(*place.local_values)

        def convert(output: Any) -> tuple[Any, Any]:
            return self._in_one_layout(ours.output, output)

        modules, inputs = (ours.module, theirs.module), (ours.inputs, given[0])
        hint = hint_for(Suspect(*modules, *inputs, *place.local_values, place.rounding, convert, self._owner))
        if hint is not None:
            place.hint = hint.text
            inside = hint.function if hint.function[:1] in ("", "/") or not place.other else f".{hint.function}"
            place.function = f"{place.other}{inside}" if inside else ""

    def _owner(self, tensor: Tensor) -> str:
        """Return the name of a's parameter or buffer that has the numbers of a tensor."""
        model = unwrap(self.a)
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if one.shape == tensor.shape and torch.equal(one.to(tensor), tensor):
                return name
        return ""


def _is_inside(path: str, around: str) -> bool:
    return path != around and (not around or path.startswith(f"{around}."))
