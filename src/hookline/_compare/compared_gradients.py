"""Compare the gradients of two models: those of the values at each place, and those of the parameters.

As with values, a gradient that differs is either made wrong at a place or inherited from places behind it. To tell
which, both modules of a pair run once more with a's inputs, and get the gradient that came back to a's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._compare.apart import Apart, MeasuredValue, OtherShape, apart, difference, largest_element
from hookline._compare.filled_inputs import Filled
from hookline._compare.paired_values import without_ones
from hookline._compare.random_numbers import random_numbers
from hookline._compare.recording import ModuleCall, paths_of
from hookline._compare.report import ComparedPlace, Comparison
from hookline._compare.rounding import Limit, cast, copied, run_alone, uncovered
from hookline._compare.runs import Runs
from hookline._compare.weight_differences import TRANSPOSED, difference_of
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
_CERTAIN = 0.05  # A gradient that is further off as a share is measured.
_NOISE = 0.02  # A gradient of which rounding changes so much may be nothing but rounding.
_BY_CHANCE = 4  # A gradient that is nothing but rounding may be so much larger in one model than in the other.
_NOT_ALONE = "can't run by itself"
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
                    place.is_off, place.note = True, "b computes no gradient for it, and a does"
    return Comparison(
        places, [], None, _first(places) or _first_seen(places, runs, largest_element(list(of_a.values())))
    )


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
        if torch.is_inference_mode_enabled():
            raise HooklineError("backward= can't work inside torch.inference_mode(), which records no graph")
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


class _Replay:
    """Two modules that run by themselves on a's inputs, and get the gradient that came to a's."""

    def __init__(self, place: ComparedPlace, calls: tuple[ModuleCall, ModuleCall], gradient: Any, runs: Runs) -> None:
        self.paths = tuple(site.removesuffix(":grad_output") for site in (place.site, place.other))
        self.filled = Filled(calls[0].inputs, calls[1].inputs, runs.to_b)
        self._calls = calls[0], replace(calls[1], inputs=self.filled.inputs)
        self._gradient, self._rounding = gradient, runs.rounding
        self.given_back = [_given_back(call, gradient) for call in self._calls]

    @cached_property
    def in_other_dtypes(self) -> list[dict[str, Tensor | None]]:
        """What each gives back in another dtype, which shows what rounding explains."""
        dtypes = self._rounding.other, self._rounding.for_b
        return [_in_dtype(call, self._gradient, dtype) for call, dtype in zip(self._calls, dtypes, strict=True)]

    def names(self, parameters: _Parameters, made_good: set[str]) -> Iterator[tuple[str, str]]:
        """Yield the names of the inputs and parameters that correspond, without those that may differ.

        These are parameters inside places that are made good, and those that only one model ties.
        """
        in_a, in_b = self.given_back
        start, other_start = (f"{path}." if path else "" for path in self.paths)
        inputs = {name for name in in_a if f"{start}{name}" not in parameters.pairs}
        yield from ((from_a, name) for name, from_a in self.filled.named if from_a in inputs and name in in_b)
        for name in in_a.keys() - inputs:
            full = f"{start}{name}"
            may_differ = full.rpartition(".")[0] in made_good or full in parameters.tied_in_one
            other = parameters.pairs[full].removeprefix(other_start)
            if other in in_b and not (may_differ and "." in name):
                yield name, other

    def limits(self, names: tuple[str, str], found: MeasuredValue) -> dict[str, Limit]:
        """Return what rounding explains of the difference of two gradients."""
        more = _MORE * (1 + sum(1 for _ in self._calls[0].module.modules())) ** 0.5
        more = min(more, max(1.0, _CERTAIN / self._rounding.share)) if self._rounding.tolerance is None else more
        limits = {part: limit.times(more) for part, limit in self._rounding.free(found.parts).items()}
        if uncovered(found.parts, limits) is None:
            return limits
        for name, one, again in zip(names, self.given_back, self.in_other_dtypes, strict=True):
            gradients = one[name], again.get(name)
            if gradients[0] is not None and gradients[1] is not None:
                again_parts = difference(*gradients).parts
                measured = self._rounding.with_explained(found.parts, again_parts)
                explained = {part: one.error.relative for part, one in again_parts.items()}
                limits = {
                    part: limit.larger(measured[part].times(_BY_CHANCE if explained.get(part, 0) > _NOISE else 1))
                    for part, limit in limits.items()
                }
        return limits


def _measure_local(
    place: ComparedPlace,
    calls: tuple[ModuleCall, ModuleCall],
    gradient: Any,
    runs: Runs,
    parameters: _Parameters,
    made_good: set[str],
) -> None:
    """Compare the gradients that two modules give back."""
    try:
        replay = _Replay(place, calls, gradient, runs)
    except Exception:  # Such a module can't run by itself, or not with a copy of its inputs.
        place.note = _NOT_ALONE
        return
    found_in_a, found_in_b = replay.given_back
    for name, other in replay.names(parameters, made_good):
        full = ".".join(filter(None, (replay.paths[0], name)))
        in_a, in_b = found_in_a[name], parameters.as_in_a(full, found_in_b[other])
        if (in_a is None) != (in_b is None):
            where, whose = ("b", "a") if in_b is None else ("a", "b")
            place.note, place.is_off = f"{where} gives no gradient to {name!r}, and {whose} does", True
        if in_a is None or in_b is None or in_a.shape != in_b.shape or not in_a.numel():
            continue
        found = difference(in_a, in_b)
        limits = replay.limits((name, other), found)
        part = uncovered(found.parts, limits)
        if part is not None and not place.is_off:
            place.is_off, place.rounding, place.local = True, limits[part], found.parts[part].error
            place.note = place.note or f"the gradient of {name!r}"
        elif not place.is_off and (place.local is None or found.whole.relative > place.local.relative):
            place.local = found.whole


def _in_dtype(call: ModuleCall, gradient: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Return the gradients that a module gives back in a dtype."""
    try:
        other = replace(call, module=copied(call.module, dtype), inputs=cast(call.inputs, dtype))
        return _given_back(other, map_tensors(lambda one: one.to(dtype), gradient))
    except Exception:  # For example, one of its kernels knows no float64.
        return {}


def _given_back(call: ModuleCall, gradient: Any) -> dict[str, Tensor | None]:
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
        for name, value in call.inputs.items()
    }
    module = unwrap(call.module)
    sources |= {name: one for name, one in module.named_parameters() if one.requires_grad}
    with left_as_found(module), buffers_as_found(module):
        output = run_alone(module, given, random=call.random, grad=True)
        pairs = [
            (one, came.reshape(one.shape))
            for one, came in zip(_tensors(output), _tensors(gradient), strict=False)
            if one.requires_grad and without_ones(one) == without_ones(came)
        ]
        if not pairs:
            raise ValueError("no gradient fits the output")
        found = torch.autograd.grad(
            [one for one, _ in pairs], list(sources.values()), [came.to(one) for one, came in pairs], allow_unused=True
        )
    return dict(zip(sources, found, strict=True))


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


def _first_seen(places: Mapping[str, ComparedPlace], runs: Runs, largest: float) -> ComparedPlace | None:
    """Return the first parameter whose gradient is off, if some modules can't run by themselves.

    Gradients that are nothing but rounding beside the largest one do not count.
    """
    share = _MORE * (1 + len(runs.matching.pairs)) ** 0.5 * runs.rounding.share
    is_checked = all(place.note != _NOT_ALONE for place in places.values())
    for place in places.values() if not is_checked else ():
        seen = place.seen if place.kind == "parameter" and not place.is_made_good else None
        if seen is not None and seen.relative > share and seen.largest > share * largest:
            place.is_off, place.rounding = True, Limit(share * largest, share)
            place.note = "no module was found that makes it so, and some can't run by themselves"
            return place
    return None
