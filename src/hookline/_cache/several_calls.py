"""Several calls of a site: join their values, select parts of them, and find out which calls they are."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline._cache.record import Record
from hookline._sites.calls import Calls
from hookline._sites.language import write_subscripts
from hookline._tables import count
from hookline._values.copy_or_share import copy_tensor
from hookline._values.nested import describe, expand, get_part, leaf_places, map_tensors
from hookline._values.tokens import tokens_in
from hookline.errors import EditError, HooklineError, first_line

Along = tuple[str, Sequence[int]]  # What several calls are, such as "step", and the number of each.
_MOST = 3  # Values that an error describes.


def with_several(records: Iterable[Record]) -> Record | None:
    """Return the first record that holds several calls."""
    return next((record for record in records if len(record.stamps()) > 1), None)


def stack_sites(values: Mapping[str, Any]) -> Tensor:
    """Return one value of each site as one tensor (site, ...)."""
    shapes = {site: describe(value) for site, value in values.items()}
    if len(set(shapes.values())) > 1 or not all(isinstance(value, Tensor) for value in values.values()):
        found = ", ".join(f"'{site}' is {shape}" for site, shape in shapes.items())
        raise EditError(f"only tensors of one shape and dtype stack: {found}{_part_to_select(values.items())}")
    return _joined(torch.stack, list(values.values()))


def stack_calls(values: Mapping[str, Sequence[Any]]) -> Tensor:
    """Return every call of each site as one tensor (site, call, ...)."""
    if len({len(calls) for calls in values.values()}) > 1:
        found = ", ".join(f"'{site}' has {count(len(calls), 'call')}" for site, calls in values.items())
        raise EditError(f"only sites with equally many calls stack: {found}; select(...) those, or stack(..., call=-1)")
    kinds: dict[str, str] = {}
    for site, number, value in _each(values):
        kinds.setdefault(describe(value), f"'{site}' is {describe(value)} in call {number}")
    if len(kinds) > 1 or not all(isinstance(value, Tensor) for *_, value in _each(values)):
        part = _part_to_select((site, value) for site, _, value in _each(values))
        are_even = all(len({describe(value) for value in calls}) == 1 for calls in values.values())
        hint = "; select(...) sites of one shape" if are_even else "; cat(site, dim=1) joins calls of different lengths"
        raise EditError(f"only calls of one shape and dtype stack: {_listed(kinds)}{part or hint}")
    return _joined(torch.stack, [_joined(torch.stack, list(calls)) for calls in values.values()])


def cat_calls(site: str, calls: Sequence[Any], dim: int) -> Tensor:
    """Return every call of a site as one tensor, joined along a dimension."""
    alike: dict[Any, str] = {}
    for _, number, value in _each({site: calls}):
        if not isinstance(value, Tensor):
            part = _part_to_select([(site, value)])
            raise EditError(f"'{site}' is {describe(value)} in call {number}, and only tensors join{part}")
        if not -value.dim() <= dim < value.dim():
            other = f"; stack({site!r}, calls=True) adds one" if not value.dim() else ""
            raise EditError(f"'{site}' is {describe(value)} in call {number}, which has no dimension {dim}{other}")
        shape = list(value.shape)
        shape[dim] = -1
        alike.setdefault((value.dtype, *shape), f"{describe(value)} in call {number}")
    if len(alike) > 1:
        raise EditError(f"only calls that differ in nothing but dimension {dim} join: '{site}' is {_listed(alike)}")
    return _joined(lambda tensors: torch.cat(tensors, dim), list(calls))


def why_not_by_call(record: Record, has_gaps: bool) -> str:
    """Return why the values of a site can't be put into the calls that they came from; "" if they can."""
    site, kept = record.site, len(record.stamps())
    if site.is_gradient:
        return "and gradients are kept in the order of the backward passes, not of the calls"
    if site.function:
        return "and a function is counted from 0 again in each call of its module"
    if "@" in site.index and tokens_in(site.subscripts) is not None:
        return "and each of these is one sequence"
    if isinstance(site.call, int):
        return f"and '#{site.call}' is one call in each block"
    if has_gaps:
        others = "and others have no value here, or a later block counted from 0 again"
        others = f"the latest of {record.count}" if record.count > kept else others
        return f"{others}: it is unknown which call each value belongs to (keep='all' keeps them all)"
    return ""


def refuse_calls(record: Record, reason: str) -> None:
    """Raise because one value has to be chosen of the calls of a site."""
    site = str(record.site)
    raise EditError(
        f"'{site}' has {count(len(record.stamps()), 'call')} in this cache, {reason}; choose one, as in "
        f"{{{site!r}: cache.calls({site!r})[0]}}; dict(cache) has the latest of each"
    )


def passed_at(stamps: Iterable[Any], forwards: list[tuple[int, Any]]) -> list[Any]:
    """Return what passed in the model's forward of each call, a `Passing` or None; [] if no forward is known.

    The stamp of a gradient is (backward pass, call).
    """
    starts = [start for start, _ in forwards]
    at = [bisect.bisect(starts, stamp[1] if isinstance(stamp, tuple) else stamp) - 1 for stamp in stamps]
    return [forwards[number][1] if number >= 0 else None for number in at] if forwards else []


def same_columns(passed: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if the calls of two caches can be the same tokens, as far as is known."""
    each = [[(one.step, one.first, one.width) for one in side if one is not None] for side in (passed, others)]
    return each[0] == each[1] or not others


def calls_along(record: Record, passed: Sequence[Any], has_gaps: bool) -> Along:
    """Return what the calls of a site are, "step" if they are one sequence of tokens, and the number of each."""
    steps = [one.step for one in passed if one is not None and one.width is not None]
    if len(steps) == len(passed) > 0 and all(map(operator.lt, steps, steps[1:])):
        return "step", steps
    site, kept = record.site, len(record.stamps())
    if has_gaps:
        return "kept call", range(kept)
    if isinstance(site.call, Calls) and not site.function:  # A function is counted in each call of its module.
        return "call", site.call.numbers[:kept]
    return "call", range(kept)


def shared_along(each: Sequence[Along]) -> Along:
    """Return what the calls of all sites are, and their numbers."""
    along, numbers = max(each, key=lambda one: len(one[1]))
    if all(one == along and [*own] == [*numbers[: len(own)]] for one, own in each):
        return along, numbers
    are_numbered = all(one != "kept call" and [*own] == [*range(len(own))] for one, own in each)
    return "call" if are_numbered else "kept call", range(len(numbers))


def parts_of(record: Record, rest: tuple[Any, ...]) -> dict[str, dict[int, Any]]:
    """Return the parts of a site's values that `rest` selects: by their subscripts as text, then by call."""
    if not rest:
        return {"": dict(enumerate(record.unread()))}
    parts: dict[str, dict[int, Any]] = {}
    for number, value in enumerate(record.each()):
        for subscripts in expand(value, rest):  # Expanded for each call: a later one may be shorter.
            found = parts.setdefault(write_subscripts(subscripts), {})
            found[number] = map_tensors(copy_tensor, get_part(value, subscripts))
    return parts


def check_paired(value: Record, gradient: Record) -> None:
    """Raise unless a site's values and gradients belong to the same calls."""
    calls, gradients = value.stamps(), gradient.stamps()
    if len(calls) != len(gradients):
        found = f"{count(len(calls), 'value')} and {count(len(gradients), 'gradient')}"
        raise HooklineError(f"'{value.site}' has {found}: it is unknown which belong together; capture one backward()")
    # The stamp of a gradient is (backward pass, call). In a cache made from another one, it is a number.
    if any(isinstance(stamp, tuple) and stamp[1] != call for call, stamp in zip(calls, gradients, strict=True)):
        raise HooklineError(
            f"the gradient at '{gradient.site}' belongs to an earlier forward than the value; call backward() after "
            "each forward, or leave the block in between"
        )


def _each(values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, int, Any]]:
    """Yield each site, call and value."""
    return ((site, number, value) for site, calls in values.items() for number, value in enumerate(calls))


def _listed(found: Mapping[Any, str]) -> str:
    """List what was found, and not all of it if there is much."""
    more = " …" if len(found) > _MOST else ""
    return ", ".join(list(found.values())[:_MOST]) + more


def _part_to_select(values: Iterable[tuple[str, Any]]) -> str:
    """Return a hint that names the first tensor in a nested value; "" if there is none."""
    for site, value in values:
        places = leaf_places(value) if not isinstance(value, Tensor) else []
        if places:
            return f"; name the part, as in {site + write_subscripts(places[0])!r}"
    return ""


def _joined(join: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    try:
        return join(tensors)
    except RuntimeError as error:  # For example, the tensors are on different devices.
        raise HooklineError(f"these values can't be joined: {first_line(error)}") from error
