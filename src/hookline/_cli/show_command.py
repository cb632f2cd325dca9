"""`hookline show`: show the contents of a file of captured values, or of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from hookline._cli.output import say, say_json
from hookline._kernel import describe, leaves
from hookline._stats import Stats, numbers_of_pieces
from hookline._store.store import is_store
from hookline._tables import Table
from hookline._untrusted_files import dtype_name
from hookline.errors import HooklineError, NotCaptured, SiteError, StoreError, did_you_mean

_PIECE = 1 << 20  # The bytes of a store that are read at a time.


def run_show(
    file: str,
    at: Sequence[str],
    *,
    stats: bool,
    values: bool,
    rows: int | None,
    partial: bool,
    whole: bool,
    json: bool,
) -> None:
    """Write what a file or store holds."""
    if rows is not None and not values:
        raise HooklineError("--rows is for --values, which shows the numbers; add it, or leave --rows out")
    if names_store(file):
        store = hl.Store(file, partial=partial)
        names = names_matching(store, at)
        show_store(file, store, names, stats=stats, values=(rows or 4) if values else 0, whole=whole, json=json)
    else:
        acts = load_cache(file)
        for option in (name for name, is_given in {"--rows": rows, "--partial": partial}.items() if is_given):
            raise HooklineError(f"{option} is for the folder of a harvest, and {file!r} is a file; leave it out")
        show_cache(file, acts.select(*at) if at else acts, stats=stats, values=values, whole=whole, json=json)


def names_store(file: str) -> bool:
    """Return True if FILE is a store, and not a file of `capture`. Anything with a URL is a store."""
    return "://" in file or (Path(file).is_dir() and is_store(file))


def load_cache(file: str) -> hl.Cache:
    """Read a cache, or raise and say what the file is instead."""
    path = Path(file)
    if path.suffix.lower() in (".html", ".htm"):
        raise StoreError(f"{file!r} is a page: `hookline explore {file}` opens it")
    if path.is_dir():
        is_model = (path / "config.json").exists()
        found = ", and a model: `hookline scan` shows it" if is_model else " that holds neither a store nor a model"
        raise StoreError(f"{file!r} is a folder{found}")
    return hl.Cache.load(path)


def show_cache(file: str, acts: hl.Cache, *, stats: bool, values: bool, whole: bool, json: bool) -> None:
    """Write the contents of a cache."""
    if json:
        found = [entry_of(acts, site, stats=stats, values=values) for site in acts]
        say_json({"file": file, "kind": "cache", "sites": found})
    elif values and acts:
        if stats:
            say(acts.stats(), whole=whole)
        for site in acts:
            for number, value in enumerate(acts.calls(site)):
                say(f"{site or repr('')}{f', call {number}' if len(acts.calls(site)) > 1 else ''}: {describe(value)}")
                say(f"{_text(value)}\n")
    else:
        say(acts.stats() if stats else acts, whole=whole)


def _text(value: Any) -> str:
    """Return a value as text, or a note if Python refuses it, as it does for integers of thousands of digits."""
    try:
        return str(value)
    except ValueError as error:
        return f"(not shown: {error})"


def show_store(
    file: str, store: hl.Store, names: Sequence[str], *, stats: bool, values: int, whole: bool, json: bool
) -> None:
    """Write the contents of a store, with the first `values` rows of each array."""
    numbers = {name: numbers_of_pieces(store[name].scan(_PIECE)) for name in names} if stats else {}
    if json:
        found = []
        for name in names:
            found.append(array_of(store, name))
            if stats:
                found[-1]["stats"] = numbers[name]._asdict()
            if values:
                found[-1]["values"] = store[name][:values]
        left_out = {"skipped": store.skipped} if store.skipped else {}
        say_json({"file": file, "kind": "store", "samples": store.samples, **left_out, "sites": found})
    elif values and names:
        if stats:
            say(Stats.of(numbers), whole=whole)
        for name in names:
            rows = store[name]
            say(f"{name or repr('')}: {min(values, len(rows)):,} of {len(rows):,} rows\n{rows[:values]}\n")
    elif stats:
        say(Stats.of(numbers), whole=whole)
    else:
        say(store if list(names) == list(store) else _table_of(store, names), whole=whole)


def names_matching(store: Mapping[str, Any], at: Sequence[str]) -> list[str]:
    """Return the names that these patterns match; without patterns, all names."""
    if not at:
        return list(store)
    names = hl.Cache({name: torch.empty(store[name].shape, device="meta") for name in store})
    found: dict[str, None] = {}
    for where in at:
        try:
            chosen = names.select(where)
            if any(site not in store for site in chosen):
                raise SiteError(f"{where!r}: the arrays of a store are shown whole; leave the subscripts out")
            found.update(dict.fromkeys(chosen))
        except NotCaptured:
            raise NotCaptured(f"{where!r} matches nothing in this store{did_you_mean(where, names)}") from None
    return list(found)


def entry_of(acts: hl.Cache, site: str, *, stats: bool = False, values: bool = False) -> dict[str, Any]:
    """Return the entry of a cache for a site, for JSON."""
    value = acts[site]
    tensors = leaves(value)
    entry: dict[str, Any] = {
        "site": site,
        "calls": len(acts.calls(site)),
        "dtype": [dtype_name(one.dtype) for one in tensors],
        "shape": [list(one.shape) for one in tensors],
    }
    if isinstance(value, Tensor):  # The usual case needs no list.
        entry |= {"dtype": entry["dtype"][0], "shape": entry["shape"][0]}
    if stats:
        entry["stats"] = acts.select(site).stats()[site]._asdict()
    if values:
        entry["values"] = acts.calls(site)
    return entry


def array_of(store: hl.Store, name: str) -> dict[str, Any]:
    """Return the description of a store's array, for JSON."""
    rows = store[name]
    return {
        "site": name,
        "dtype": dtype_name(rows.dtype),
        "shape": list(rows.shape[1:]),
        "rows": len(rows),
        "bytes": rows.nbytes,
    }


def _table_of(store: hl.Store, names: Sequence[str]) -> Table:
    found = [array_of(store, name) for name in names]
    cells = [(one["site"], one["dtype"], tuple(one["shape"]), f"{one['rows']:,}", f"{one['bytes']:,}") for one in found]
    return Table(("site", "dtype", "shape", "rows", "bytes"), cells)
