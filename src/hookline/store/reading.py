"""Rows of one data file, as words: tensors [rows, n] of plain integers, so that every dtype is read alike, bit by bit.

A mapped file is not an open one: no descriptor is held.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store.places import Place
from hookline.store.records import Array
from hookline.store.shards import reserved

_MOST_MAPS = 16384  # In one store; Linux allows a process 65,530.
_COPIED = 1 << 20  # Bytes up to which a copy is cheaper than a mapping of its own.
_GAP = 64 << 10  # Bytes between two rows that are cheaper read along than asked for apart, over a network.
_READERS = 16  # Ranges asked for at once, over a network.


class Maps(dict[str, Tensor]):
    """The files of a store that are mapped for reading, the oldest first."""

    def __reduce__(self) -> tuple[type[Maps], tuple[()]]:
        return Maps, ()  # Another process maps them itself.


class Source:
    """One data file of an array."""

    __slots__ = ("array", "key", "name", "place", "rows")

    def __init__(self, place: Place, name: str, array: Array, rows: int) -> None:
        self.place = place
        self.name = name
        self.array = array
        self.rows = rows
        self.key = f"{place}/{name}"

    def between(self, begin: int, end: int, maps: Maps) -> Tensor:
        """Return consecutive rows: copied if they are few, else mapped for the caller alone."""
        if self.place.maps and (end - begin) * self.array.row_bytes <= _COPIED:
            return self.mapped(maps)[begin:end].clone()
        return self.own(begin, end)

    def own(self, begin: int, end: int) -> Tensor:
        """Return consecutive rows that nobody else can write to."""
        width = self.array.row_bytes
        where = (self.name, reserved(self.array) + begin * width, (end - begin) * width)
        with self._reading():
            try:
                found = self.place.rows(*where)
            except RuntimeError:  # Too many mappings, of which the system allows some ten thousand.
                found = torch.frombuffer(bytearray(self.place.read(*where)), dtype=torch.uint8)
        return to_words(found.view(end - begin, width), self.array)

    def select(self, rows: Tensor, maps: Maps, out: Tensor | None = None) -> Tensor:
        """Return any rows of this file, in this order; `out` is where to put them."""
        if self.place.maps:
            return torch.index_select(self.mapped(maps), 0, rows, out=out)
        found = self._fetch(rows)
        return found if out is None else out.copy_(found)

    def mapped(self, maps: Maps) -> Tensor:
        """Return all rows, mapped once for everybody: not to be handed out, since it could be written to."""
        found = maps.get(self.key)
        if found is None:
            while len(maps) >= _MOST_MAPS:
                maps.pop(next(iter(maps)), None)
            with torch.inference_mode(False):
                found = maps[self.key] = self.own(0, self.rows)
        return found

    def _fetch(self, rows: Tensor) -> Tensor:
        """Read only what is needed, neighbours together."""
        wanted, back = torch.unique(rows, return_inverse=True)
        far = (wanted.diff() * self.array.row_bytes > _GAP).nonzero().view(-1) + 1
        edges = [0, *far.tolist(), len(wanted)]
        spans = [(int(wanted[a]), int(wanted[b - 1]) + 1) for a, b in itertools.pairwise(edges)]
        with ThreadPoolExecutor(min(_READERS, len(spans))) as pool:
            found = list(pool.map(lambda span: self.own(*span), spans))
        parts = [part[wanted[a:b] - wanted[a]] for part, a, b in zip(found, edges, edges[1:], strict=False)]
        return torch.cat(parts)[back]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say in words why a file can't be read."""
        try:
            yield
        except StoreError:
            raise
        except (OSError, EOFError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise StoreError(
                f"{self.key!r} can't be read: {reason}; store.verify() names every damaged file"
            ) from error


def to_words(rows: Tensor, array: Array) -> Tensor:
    """Return rows as the widest integers that they consist of."""
    width = array.row_bytes
    kinds = (torch.int64, torch.int32, torch.int16) if width else ()
    kind = next((kind for kind in kinds if width % kind.itemsize == 0), torch.uint8)
    flat = rows.view(torch.uint8) if rows.dtype is not torch.uint8 else rows
    return flat.view(len(rows), width).view(kind)


def from_words(words: Tensor, array: Array) -> Tensor:
    """Return words as the rows that they are."""
    if not array.row_bytes:
        return torch.empty(len(words), *array.shape, dtype=array.dtype, device="cpu")
    rows = words.view(array.dtype)
    return rows if len(array.shape) == 1 else rows.view(len(words), *array.shape)


def copy_rows(sources: Sequence[Tensor], counts: Tensor, places: Tensor, out: Tensor, to: Tensor) -> None:
    """Copy rows of many files, some of each, one by one: row `places[i]` of its file becomes row `to[i]` of `out`."""
    width = out.shape[1] * out.itemsize
    starts = torch.tensor([source.data_ptr() for source in sources], device="cpu").repeat_interleave(counts)
    memory = (to * width + out.data_ptr()).tolist(), (starts + places * width).tolist()
    collections.deque(map(ctypes.memmove, *memory, itertools.repeat(width)), maxlen=0)


def empty_words(rows: int, array: Array) -> Tensor:
    """Return memory for rows."""
    return to_words(torch.empty(rows, array.row_bytes, dtype=torch.uint8, device="cpu"), array)
