"""A sweep as one safetensors file. It is written completely or not at all, and nothing in it is pickled.

Any safetensors reader can open the file. Measurements that are single numbers are one tensor of float64, in the order
of the sites.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._kernel import read_file, write_file
from hookline.errors import StoreError

_KIND = "sweep"


class SweepParts(NamedTuple):
    """What a file holds of a sweep."""

    base: Any
    measured: dict[str, Any]
    change: str
    dimensions: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def write_sweep(path: str | os.PathLike[str], parts: SweepParts, overwrite: bool) -> None:
    """Write the parts of a sweep to a file."""
    values: Any = list(parts.measured.values())
    if values and not any(isinstance(value, Tensor) for value in values):
        values = torch.tensor(values, dtype=torch.float64)
    # Many sites have the same names of dimensions, so each is written once.
    names = list(dict.fromkeys(parts.dimensions.values()))
    entry = {
        "base": parts.base,
        "sites": list(parts.measured),
        "values": values,
        "change": parts.change,
        "names": names,
        "dimensions": {site: names.index(one) for site, one in parts.dimensions.items()},
        "notes": parts.notes,
    }
    write_file(path, {_KIND: [entry]}, kind=_KIND, overwrite=overwrite)


def read_sweep(path: str | os.PathLike[str]) -> SweepParts:
    """Return what `write_sweep` wrote. A damaged or foreign file raises StoreError."""
    entries = read_file(path, _KIND)
    try:
        (entry,) = entries[_KIND]
        values = entry["values"].tolist() if isinstance(entry["values"], Tensor) else entry["values"]
        measured = dict(zip(entry["sites"], values, strict=True))
        names = entry["names"]
        dimensions = {site: names[number] for site, number in entry["dimensions"].items()}
        return SweepParts(entry["base"], measured, entry["change"], dimensions, entry["notes"])
    except (ValueError, TypeError, LookupError, AttributeError):
        raise StoreError(f"{os.fspath(path)!r} is damaged: its parts don't make a sweep; save it again") from None
