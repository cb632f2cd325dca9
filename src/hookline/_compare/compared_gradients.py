"""Compare the gradients of two models: those of the values at each place, and those of the parameters.

As with values, a gradient that differs is either made wrong at a place or inherited from places behind it. To tell
which, both modules of a pair run once more with a's inputs, and get the gradient that came back to a's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._compare.apart import Apart, OtherShape, apart, worst
from hookline._compare.recording import paths_of
from hookline._compare.report import ComparedPlace, Comparison
from hookline._compare.rounding import Limit, Rounding, copied, run_alone
from hookline._compare.runs import Runs
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


def compare_gradients(runs: Runs, pairs: Mapping[str, ComparedPlace], loss: Loss) -> Comparison:
    """Compare the gradients at pairs of modules, and of their parameters."""
    models = zip((runs.a, runs.b), runs.arguments, strict=True)
    ours, theirs = (_backward(model, given, loss) for model, given in models)
    starts = runs.ours.starts()
    places = {}
    for path in sorted(pairs, key=lambda one: -starts[one]):  # In the order of a backward.
        other = pairs[path].other
        modules = runs.ours.calls[path][0].module, runs.theirs.calls[other][0].module
        one, two = (f"{name}:grad_output" for name in (path, other))
        if path in ours[0] and other in theirs[0]:
            place = places[one] = ComparedPlace(one, two, type(modules[0]).__name__)
            place.seen, place.note = _apart(ours[0][path], theirs[0][other])
            place.local = _local(modules, runs.ours.calls[path][0].inputs, ours[0][path], place, runs.rounding)
        names = dict(modules[1].named_parameters(recurse=False))
        for name in (name for name, _ in modules[0].named_parameters(recurse=False) if name in names):
            full = [f"{where}.{name}" if where else name for where in (path, other)]
            if full[0] in ours[1] and full[1] in theirs[1]:
                place = places[f"{full[0]}:grad"] = ComparedPlace(f"{full[0]}:grad", f"{full[1]}:grad", "parameter")
                place.seen, place.note = _apart(ours[1][full[0]], theirs[1][full[1]])
    return Comparison(places, [], None, _first(places))


def _backward(model: nn.Module, given: Arguments, loss: Loss) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the gradients at modules and of parameters."""
    observer, hooks = _Gradients(), short_form(model)
    sites = [Site(path, port="grad_output") for path in paths_of(model)]
    places: list[tuple[Found, Observer]] = [
        (place._replace(exact=False), observer) for site in sites for place in find_places(model, [site])
    ]
    add_observers(hooks, places)
    parameters = {name: one for name, one in unwrap(model).named_parameters() if one.requires_grad}
    if not parameters:
        raise HooklineError(f"backward= needs parameters that require gradients, and {type(model).__name__} has none")
    args, kwargs = map_tensors(torch.clone, given, in_objects=True)
    with left_as_found(model), buffers_as_found(model), torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        with hooks:
            result = loss(model(*args, **kwargs))
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                raise HooklineError(
                    "backward= takes a function from the output of a model to a loss, which is one number"
                )
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                result, list(parameters.values()), allow_unused=True
            )
    named = zip(parameters, gradients, strict=True)
    return observer.found, {name: one for name, one in named if one is not None}


def _apart(ours: Any, theirs: Any) -> tuple[Apart | None, str]:
    try:
        return apart(ours, theirs), ""
    except OtherShape as error:
        return None, f"not compared: {error}"


def _local(
    modules: tuple[nn.Module, nn.Module],
    inputs: Mapping[str, Any],
    gradient: Any,
    place: ComparedPlace,
    rounding: Rounding,
) -> Apart | None:
    """Return how far the gradients that two modules give back are apart if both get those of a."""
    try:
        ours, theirs = (_given_back(module, inputs, gradient) for module in modules)
    except Exception:  # Such a module can't run by itself, or not with a copy of its inputs.
        place.note = "can't run by itself"
        return None
    names = [name for name in ours if name in theirs]
    lost = [name for name in names if (ours[name] is None) != (theirs[name] is None)]
    if lost:
        where, whose = ("b", "a") if theirs[lost[0]] is None else ("a", "b")
        place.note, place.is_off = f"{where} gives no gradient to {lost[0]!r}, and {whose} does", True
    found = []
    more = _MORE * (1 + sum(1 for _ in modules[0].modules())) ** 0.5
    for name in names:
        one, two = ours[name], theirs[name]
        if one is not None and two is not None and one.shape == two.shape and one.numel():
            found.append(apart(one, two))
            free = rounding.free(one)[0]
            limit = Limit(more * free.largest, more * free.relative)
            if not limit.covers(found[-1]):
                place.is_off, place.rounding = True, limit
                place.note = place.note or f"the gradient of {name!r}"
                return found[-1]
    return found[worst(found)] if found else None


def _given_back(module: nn.Module, inputs: Mapping[str, Any], gradient: Any) -> dict[str, Tensor | None]:
    """Return the gradients of the inputs and parameters of a module if one comes to its output."""
    sources: dict[str, Tensor] = {}
    given = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            sources[name] = value = value.detach().clone().requires_grad_()
        given[name] = value
    module = copied(module)
    sources |= {name: one for name, one in module.named_parameters() if one.requires_grad}
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        output = run_alone(module, given, grad=True)
    pairs = [
        (one, came)
        for one, came in zip(_tensors(output), _tensors(gradient), strict=False)
        if one.requires_grad and one.shape == came.shape
    ]
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
