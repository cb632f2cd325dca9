"""The runs that a page shows: the tensors that passed, by site, read from a cache, a store, a mapping or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hookline import Cache, Site
from hookline._explore.excerpts import dense
from hookline._kernel import (
    DEEPEST,
    children,
    describe,
    fields,
    get_part,
    latest_value,
    leaf_places,
    leaves,
    shape_of,
    sites_without_values,
    write_subscripts,
)
from hookline._store.rows import Rows
from hookline._store.store import Store
from hookline._tables import count
from hookline.errors import HooklineError, SiteError, StaleValue

MOST_PARTS = 8  # Tensors of one value that are shown: a key-value cache has two for each layer.


class SiteValue(NamedTuple):
    """One tensor that passed a site, or what passed there instead."""

    site: Site
    source: Tensor | Rows | None
    describe: str
    dtype: str
    shape: tuple[int, ...]
    calls: int
    parts: tuple[tuple[int | str, ...], ...] = ()  # Ways to write each subscript that says which tensor of a value.


@dataclass
class Run:
    """What passed in one run, in order; and which sites were watched at which nothing passed."""

    name: str
    entries: dict[Site, SiteValue] = field(default_factory=dict)
    silent: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_of(what: Any, name: str) -> Run:
    """Return what a cache, a store, any mapping from site to value, or a file or folder of those holds."""
    if isinstance(what, (str, os.PathLike)):
        what = Store(what) if os.path.isdir(what) or "://" in os.fspath(what) else Cache.load(what)
    if not isinstance(what, Mapping):
        raise HooklineError(
            f"a page shows a Cache, a Store, a mapping from site to value, the path of one, or a model with run=(...), "
            f"not {describe(what)}"
        )
    run = Run(name)
    for site, values, calls in _each(what):
        for entry in _entries(site, values, calls, run.notes):
            run.entries[entry.site] = entry
    if isinstance(what, Cache):
        run.silent = sites_without_values(what)
    if isinstance(what, Store):
        run.notes.append(
            f"{name}: a store of {count(what.samples, 'sample')}; statistics are of all, pictures of the first"
        )
    return run


def _each(what: Mapping[Any, Any]) -> Iterator[tuple[Site, Any, int]]:
    """Return each site, its latest value, and how many calls there were."""
    for key in what:
        site = key if isinstance(key, Site) else Site.parse(key)
        if not isinstance(what, Cache):
            yield site, what[key], 1
            continue
        yield site, *latest_value(what, site)


def _entries(site: Site, value: Any, calls: int, notes: list[str]) -> Iterator[SiteValue]:
    """Return one entry for each tensor of a value; of a value without any, one that says what it is."""
    if isinstance(value, Rows):
        yield SiteValue(
            site, value, f"{_name(value.dtype)} {tuple(value.shape)}", _name(value.dtype), tuple(value.shape), calls
        )
        return
    tensors, text = leaves(value), _describe(value)
    found = list(zip(leaf_places(value), tensors, strict=True))
    held = _in_containers(value)
    if 0 < len(held) < len(found):
        notes.append(f"'{site}' has {len(found) - len(held)} more tensors inside of objects, such as a key-value cache")
        found = [(place, tensor) for place, tensor in found if id(tensor) in held]
    if len(found) > MOST_PARTS:
        notes.append(f"'{site}' has {len(found)} tensors, of which the first {MOST_PARTS} are shown")
    if not found:
        yield SiteValue(site, None, text, "", (), calls)
    for place, tensor in found[:MOST_PARTS]:
        named = site._replace(index=site.index + write_subscripts(place))
        entry = _entry(named, tensor, text if not place else f"{describe(tensor)}, of {text}", calls)
        yield entry._replace(parts=_ways(value, place))


def _ways(value: Any, place: tuple[Any, ...]) -> tuple[tuple[int | str, ...], ...]:
    """Return all subscripts that mean each one of `place`: an index also from the end, or the name of a field."""
    found = []
    for key in place:
        part, parts = get_part(value, (key,)), list(children(value) or ())
        at = parts.index(key) if key in parts else 0
        named = fields(value)[at : at + 1]
        found.append(tuple(way for way in dict.fromkeys((key, at, at - len(parts), *named)) if _is(value, way, part)))
        value = part
    return tuple(found)


def _is(value: Any, way: Any, part: Any) -> bool:
    try:
        return isinstance(way, (int, str)) and get_part(value, (way,)) is part
    except SiteError:
        return False


def _in_containers(value: Any, depth: int = 0) -> set[int]:
    """Return which tensors tuples, dicts and the like hold: not those of other objects."""
    if isinstance(value, Tensor):
        return {id(value)}
    parts = (children(value) or {}) if depth < DEEPEST else {}
    return {one for part in parts.values() for one in _in_containers(part, depth + 1)}


def _entry(site: Site, tensor: Tensor, text: str, calls: int) -> SiteValue:
    if tensor.is_meta:
        return SiteValue(site, None, f"{text} without data", _name(tensor.dtype), tuple(tensor.shape), calls)
    try:
        source = dense(tensor)
    except (RuntimeError, NotImplementedError) as error:
        return SiteValue(site, None, f"{text}, which can't be read: {error}", _name(tensor.dtype), (), calls)
    if source.is_complex():
        text += ", shown by size"
    return SiteValue(site, source, text, _name(tensor.dtype), tuple(source.shape), calls)


def _describe(value: Any) -> str:
    if isinstance(value, StaleValue):
        return str(value)
    tensors = leaves(value)
    if isinstance(value, Tensor) or not tensors:
        return describe(value)
    kinds = ", ".join(dict.fromkeys(_name(tensor.dtype) for tensor in tensors))
    return f"{describe(value)}: {kinds} {', '.join(map(shape_of, tensors[:4]))}{', …' if len(tensors) > 4 else ''}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
