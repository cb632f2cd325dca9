"""Compare a model with values that another one returned: a Cache, a Store, a dict, or a file of another framework.

Only seen errors are known then: nobody can ask the other model what it does on b's inputs, or b on its inputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Cache, Site, Store
from hookline._compare.apart import Convert, OtherShape, difference, has_nothing_finite, in_one_layout, where_apart
from hookline._compare.matching import GIVEN, NAME, Matching, refuse_unused, renamed
from hookline._compare.paired_values import tensors_of
from hookline._compare.random_numbers import random_numbers
from hookline._compare.report import ComparedPlace, Comparison
from hookline._compare.rounding import Rounding, copied, dtype_of_model, uncovered
from hookline._kernel import describe, find_places, map_tensors, short_form
from hookline._scan.fake_run import call_arguments_of
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline.errors import HooklineError, NeverFired, SiteError, StoreError, did_you_mean

Reference = Cache | Store | Mapping[str, Any] | str | os.PathLike[str]
_ONLY_SEEN = "only seen errors are known, since a is saved values and not a model"


def reference_of(given: Any) -> Mapping[str, Any]:
    """Return saved values by name. Raises `HooklineError` if this is none."""
    if isinstance(given, Mapping):
        if not given or not all(isinstance(name, str) for name in given):
            raise HooklineError(f"hl.compare takes values by site, not {describe(given) if given else 'an empty dict'}")
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise HooklineError(f"hl.compare takes a model, a Cache, a Store, a dict or a path as a, not {describe(given)}")
    path = Path(given)
    if path.is_dir():
        return Store(path)
    try:
        return Cache.load(path)
    except StoreError:
        if not path.is_file():
            raise
    return _foreign(path)


def _foreign(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file that hookline did not write."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise StoreError(f"{str(path)!r} is not a safetensors file: {error}") from error


def compare_with_reference(
    values: Mapping[str, Any],
    b: nn.Module,
    run: Any,
    match: Mapping[str, str | None] | None,
    tolerance: float | None,
    to_a: Convert | None,
) -> Comparison:
    """Compare each value with the one that passes at the same place of b."""
    matching = _matching(values, b, match)
    seen = _values_of(b, run, list(matching.pairs.values()))
    dtypes = {one.dtype for name in matching.pairs for one in tensors_of(_value(values, name, None))}
    own = dtype_of_model(b)
    saved = max((one for one in dtypes if one.is_floating_point), key=lambda one: torch.finfo(one).eps, default=own)
    rounding = Rounding(saved, own, tolerance)
    again = {} if tolerance is not None else _in_dtype(b, run, list(seen), rounding.for_b)
    places = {}
    for name, other in sorted(matching.pairs.items(), key=lambda pair: _order(pair[1], seen)):
        place = places[name] = ComparedPlace(name, other, "")
        if other not in seen:
            place.odd = [f"b never calls {other!r}"]
            place.is_off = True
            continue
        saved_value, value = in_one_layout(_value(values, name, seen[other]), seen[other], None, to_a)
        try:
            found = difference(saved_value, value)
            place.seen, place.parts, place.odd = found.whole, found.parts, [*found.odd, *found.reshaped]
            if has_nothing_finite(saved_value):
                place.odd = ["nothing in a is finite"]
        except OtherShape as error:
            place.odd = [str(error)]
        place.is_off = bool(place.odd)
        if place.seen is None:
            continue
        exact = in_one_layout(saved_value, again.get(other, value), None, to_a)[1]
        limits = rounding.with_explained(place.parts, difference(value, exact).parts)
        part = uncovered(place.parts, limits)
        place.part = next(iter(limits)) if part is None else part
        place.rounding, place.limits = limits[place.part], limits
        if part is not None:
            place.is_off, place.seen = True, place.parts[part].error
        place.seen_values = saved_value, value
        place.worst = where_apart(saved_value, value, place.part)
    first = next((place for place in places.values() if place.is_off), None)
    return Comparison(places, [], matching, first, [_ONLY_SEEN], tolerance=tolerance)


def _matching(values: Mapping[str, Any], b: nn.Module, match: Mapping[str, str | None] | None) -> Matching:
    """Return which value belongs to which place of b."""
    found = Matching()
    refuse_unused(list(values), match)
    for name in values:
        other = renamed(name, match) if match else name
        if other is None:
            continue
        try:
            find_places(b, [Site.parse(other)])
        except SiteError:
            found.only_a.append(name)
        else:
            found.add(name, str(Site.parse(other)), NAME if other == name else GIVEN)
    if not found.pairs:
        name = next(iter(values))
        near = did_you_mean(name, [name for name, _ in b.named_modules()])
        is_weight = name in dict(b.named_parameters())
        advice = (
            "it is a weight: load the file into a model and compare that" if is_weight else "name places with match="
        )
        raise HooklineError(f"a has no name of a place of {type(b).__name__}: {name!r} is none{near}; {advice}")
    return found


def _in_dtype(b: nn.Module, run: Any, sites: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """Return what passes in a copy of a model in another dtype; nothing if there can be none."""
    try:
        return _values_of(copied(b).to(dtype), run, sites, dtype)
    except Exception:  # It can't be copied, or one of its operations knows no such dtype.
        return {}


def _values_of(b: nn.Module, run: Any, sites: list[str], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return what passes at some places of a model, in their order."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()

    hooks = short_form(b)
    kept = hooks.capture([Site.parse(site) for site in sites])
    args, kwargs = map_tensors(cast, call_arguments_of(run), in_objects=True)
    with left_as_found(b), buffers_as_found(b), random_numbers(), torch.no_grad(), suppress(NeverFired), hooks:
        b(*args, **kwargs)  # If some are not called, the report says which.
    return {str(site): kept[site] for site in kept}


def _value(values: Mapping[str, Any], name: str, like: Any) -> Any:
    """Return a value; of a store the rows that the run has."""
    if not isinstance(values, Store):
        return values[name]
    rows = values[name]
    tensors = tensors_of(like)[:1]
    if not tensors:
        return rows[:1]
    wanted = tensors[0]
    per_row = max(rows[:1].numel(), 1)
    found = rows[: wanted.numel() // per_row]
    return found.reshape(wanted.shape) if found.numel() == wanted.numel() else found


def _order(site: str, seen: Mapping[str, Any]) -> int:
    return list(seen).index(site) if site in seen else len(seen)
