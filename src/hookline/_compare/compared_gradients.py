"""Compare the gradients of two models: those of the values at each place, and those of the parameters.

As with values, a gradient that differs is either made wrong at a place or inherited from places behind it. To tell
which, both modules of a pair run once more with a's inputs, and get the gradient that came back to a's module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._compare.apart import Apart, OtherShape, apart, difference
from hookline._compare.filled_inputs import Filled
from hookline._compare.random_numbers import random_numbers
from hookline._compare.recording import ModuleCall, paths_of
from hookline._compare.report import ComparedPlace, Comparison
from hookline._compare.rounding import Limit, run_alone, uncovered
from hookline._compare.runs import Runs
from hookline._compare.weights import TRANSPOSED, difference_of
from hookline._kernel import (
    Arguments,
    Call,
    Found,
    Observer,
    add_observers,
    find_places,
    leaves,
    map_tensors,
    short_form,
    unwrap,
)
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline.errors import HooklineError

Loss = Callable[[Any], Any]  # From the output of a model to one number.
_MORE = 16  # A backward adds up more numbers than a forward: its rounding may be this many times as large.


class _Gradients(Observer):
    """Keeps the gradient of each place."""

    with_call = True

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Keep a gradient."""
        self.found.setdefault(call.site.path, map_tensors(torch.clone, value))
        return value


def _tied(parameters: Mapping[str, nn.Parameter]) -> dict[str, set[str]]:
    """Return the names of each parameter."""
    names: dict[int, set[str]] = {}
    for name, one in parameters.items():
        names.setdefault(id(one), set()).add(name)
    return {name: names[id(one)] for name, one in parameters.items()}


class _Parameters:
    """The pairs of parameters, some of which b holds transposed, as a linear layer and `Conv1D` of transformers do."""

    def __init__(self, runs: Runs, pairs: Mapping[str, str]) -> None:
        self.pairs = pairs
        in_a, in_b = (dict(unwrap(model).named_parameters(remove_duplicate=False)) for model in (runs.a, runs.b))
        both = {name: (in_a[name], in_b[other]) for name, other in pairs.items() if name in in_a and other in in_b}
        self._turned = {name for name, pair in both.items() if difference_of(*pair)[1] == TRANSPOSED}
        tied = _tied(in_a), _tied(in_b)
        self.tied_in_one = {
            name: (tied[0][name], tied[1][other])
            for name, other in pairs.items()
            if name in both and {pairs.get(one) for one in tied[0][name]} != tied[1][other]
        }

    def how_tied(self, name: str) -> str:
        """Say that one model uses a weight in several places, and the other does not."""
        for side, other, names in zip("ab", "ba", self.tied_in_one.get(name, ()), strict=False):
            if len(names) > 1:
                return f"{side} has one weight as {' and '.join(map(repr, sorted(names)))}, and {other} does not"
        return ""

    def as_in_a(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of a parameter of b in the layout of a."""
        return gradient.T if gradient is not None and name in self._turned else gradient


def compare_gradients(
    runs: Runs, pairs: Mapping[str, ComparedPlace], weights: Mapping[str, str], loss: Loss
) -> Comparison:
    """Compare the gradients at pairs of modules, and of pairs of parameters."""
    models = zip("ab", (runs.a, runs.b), runs.arguments, strict=True)
    (at_a, of_a), (at_b, of_b) = (_backward(*model, loss) for model in models)
    starts = runs.of_a.starts()
    parameters = _Parameters(runs, weights)
    places: dict[str, ComparedPlace] = {}
    made_good = {path for path, place in pairs.items() if place.is_made_good}
    for path in sorted(pairs, key=lambda one: -starts[one]):  # In the order of a backward.
        other = pairs[path].other
        calls = runs.of_a.calls[path][0], runs.of_b.calls[other][0]
        if path in at_a and other in at_b:
            place = ComparedPlace(f"{path}:grad_output", f"{other}:grad_output", type(calls[0].module).__name__)
            places[place.site] = place
            place.seen, place.note = _apart(at_a[path], at_b[other])
            if pairs[path].is_made_good:  # With other weights inside, other gradients are right.
                place.is_made_good, place.note = True, pairs[path].note
            else:
                _measure_local(place, calls, at_a[path], runs, parameters, made_good)
        held = {f"{path}.{name}" if path else name for name, _ in calls[0].module.named_parameters(recurse=False)}
        for name, there in weights.items():
            if name in held and name in of_a:
                place = places[f"{name}:grad"] = ComparedPlace(f"{name}:grad", f"{there}:grad", "parameter")
                place.is_made_good = pairs[path].is_made_good
                if there in of_b:
                    place.seen, place.note = _apart(of_a[name], parameters.as_in_a(name, of_b[there]))
                    how = parameters.how_tied(name)
                    if how and place.seen is not None and place.seen.relative > _MORE * runs.rounding.share:
                        place.is_off, place.note = True, how
                elif not place.is_made_good:
                    place.is_off, place.note = True, "b gives it no gradient, and a does"
    return Comparison(places, [], None, _first(places) or _first_seen(places, runs))


def _backward(side: str, model: nn.Module, given: Arguments, loss: Loss) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the gradients at modules and of parameters."""
    observer, hooks = _Gradients(), short_form(model)
    sites = [Site(path, port="grad_output") for path in paths_of(model)]
    places: list[tuple[Found, Observer]] = [
        (place._replace(exact=False), observer) for site in sites for place in find_places(model, [site])
    ]
    add_observers(hooks, places)
    named = unwrap(model).named_parameters(remove_duplicate=False)
    parameters = {name: one for name, one in named if one.requires_grad}
    if not parameters:
        raise HooklineError(f"backward= needs parameters that require gradients, and {side} has none")
    args, kwargs = map_tensors(torch.clone, given, in_objects=True)
    with left_as_found(model), buffers_as_found(model), random_numbers(), torch.enable_grad(), hooks:
        result = loss(model(*args, **kwargs))
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            raise HooklineError("backward= takes a function from the output of a model to a loss, which is one number")
        gradients: Sequence[Tensor | None] = torch.autograd.grad(result, list(parameters.values()), allow_unused=True)
    found = zip(parameters, gradients, strict=True)
    return observer.found, {name: one for name, one in found if one is not None}


def _apart(in_a: Any, in_b: Any) -> tuple[Apart | None, str]:
    try:
        return apart(in_a, in_b), ""
    except OtherShape as error:
        return None, f"not compared: {error}"


def _measure_local(
    place: ComparedPlace,
    calls: tuple[ModuleCall, ModuleCall],
    gradient: Any,
    runs: Runs,
    parameters: _Parameters,
    made_good: set[str],
) -> None:
    """Compare the gradients that two modules give back if both get those of a, and a's inputs.

    Those of parameters inside places that are made good are left out.
    """
    path = place.site.removesuffix(":grad_output")
    of_a, of_b = calls
    filled = Filled(of_a.inputs, of_b.inputs, runs.to_b)
    try:
        in_a = _given_back(of_a, of_a.inputs, gradient)
        in_b = _given_back(of_b, filled.inputs, gradient)
    except Exception:  # Such a module can't run by itself, or not with a copy of its inputs.
        place.note = "can't run by itself"
        return
    named = [
        (in_a.pop(from_a), in_b.pop(name), name) for name, from_a in filled.named if from_a in in_a and name in in_b
    ]
    start, other_start = (f"{one}." if one else "" for one in (path, place.other.removesuffix(":grad_output")))
    for name, found_in_a in in_a.items():
        there = parameters.pairs.get(f"{start}{name}", "").removeprefix(other_start)
        is_known = f"{start}{name}".rpartition(".")[0] in made_good or f"{start}{name}" in parameters.tied_in_one
        if there in in_b and not (is_known and "." in name):
            named.append((found_in_a, parameters.as_in_a(f"{start}{name}", in_b[there]), name))
    more = _MORE * (1 + sum(1 for _ in of_a.module.modules())) ** 0.5
    for one, two, name in named:
        if one is None or two is None:
            if one is not two:
                where, whose = ("b", "a") if two is None else ("a", "b")
                place.note, place.is_off = f"{where} gives no gradient to {name!r}, and {whose} does", True
            continue
        if one.shape != two.shape or not one.numel():
            continue
        found = difference(one, two)
        limits = {part: limit.times(more) for part, limit in runs.rounding.free(found.parts).items()}
        part = uncovered(found.parts, limits)
        if place.local is None or found.whole.relative > place.local.relative or (part and not place.is_off):
            place.local = found.whole
        if part is not None and not place.is_off:
            place.is_off, place.rounding, place.local = True, limits[part], found.parts[part].error
            place.note = place.note or f"the gradient of {name!r}"


def _given_back(call: ModuleCall, inputs: Mapping[str, Any], gradient: Any) -> dict[str, Tensor | None]:
    """Return the gradients of the inputs and parameters of a module if one comes to its output."""
    sources: dict[str, Tensor] = {}

    def as_source(name: str, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        if copy.is_floating_point():
            sources[name] = copy.requires_grad_()
        return copy

    given = {
        name: as_source(name, value)
        if isinstance(value, Tensor)
        else map_tensors(lambda one: one.detach().clone(), value, in_objects=True)
        for name, value in inputs.items()
    }
    module = unwrap(call.module)
    sources |= {name: one for name, one in module.named_parameters() if one.requires_grad}
    with left_as_found(module), buffers_as_found(module):
        output = run_alone(module, given, random=call.random, grad=True)
        pairs = [
            (one, came.reshape(one.shape))
            for one, came in zip(_tensors(output), _tensors(gradient), strict=False)
            if one.requires_grad and _without_ones(one) == _without_ones(came)
        ]
        if not pairs:
            raise ValueError("no gradient fits the output")
        found = torch.autograd.grad(
            [one for one, _ in pairs], list(sources.values()), [came.to(one) for one, came in pairs], allow_unused=True
        )
    return dict(zip(sources, found, strict=True))


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in leaves(value) if tensor.is_floating_point()]


def _first(places: Mapping[str, ComparedPlace]) -> ComparedPlace | None:
    """Return the innermost place that is off, the first of them in the order of a backward."""
    off = [place for place in places.values() if place.is_off]
    paths = {id(place): place.site.rpartition(":")[0] for place in off}

    def holds_another(place: ComparedPlace) -> bool:
        start = f"{paths[id(place)]}." if paths[id(place)] else ""
        return any(paths[id(one)].startswith(start) and paths[id(one)] != paths[id(place)] for one in off)

    return next((place for place in off if not holds_another(place)), None)


def _first_seen(places: Mapping[str, ComparedPlace], runs: Runs) -> ComparedPlace | None:
    """Return the first parameter whose gradient is further off than rounding, if no module was found to make it so.

    Some modules can't run by themselves.
    """
    more = _MORE * (1 + len(runs.matching.pairs)) ** 0.5
    share = more * runs.rounding.share
    for site, place in places.items():
        if site.endswith(":grad") and place.seen is not None and not place.is_made_good and place.seen.relative > share:
            place.is_off, place.rounding = True, Limit(math.inf, share)
            place.note = "no module was found that makes it so: some can't run by themselves"
            return place
    return None
