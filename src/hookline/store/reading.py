"""Rows of one data file, as words: tensors [rows, n] of plain integers, so that every dtype is read alike, bit by bit.

A mapped file is not an open one: no descriptor is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

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


class Maps(dict[tuple[str, str], Tensor]):
    """The files of a store that are mapped for reading, the oldest first."""

    def __reduce__(self) -> tuple[type[Maps], tuple[()]]:
        return Maps, ()  # Another process maps them itself.


@dataclass(frozen=True)
class Source:
    """One data file of an array."""

    place: Place
    name: str
    array: Array
    rows: int

    def between(self, begin: int, end: int, maps: Maps) -> Tensor:
        """Return consecutive rows: copied if they are few, else mapped for the caller alone."""
        if self.place.maps and (end - begin) * self.array.row_bytes <= _COPIED:
            return self.mapped(maps)[begin:end].clone()
        return self.own(begin, end)

    def own(self, begin: int, end: int) -> Tensor:
        """Return consecutive rows that nobody else can write to."""
        width = self.array.row_bytes
        with self._reading():
            found = self.place.rows(self.name, reserved(self.array) + begin * width, (end - begin) * width)
        return to_words(found.view(end - begin, width), self.array)

    def select(self, rows: Tensor, maps: Maps, out: Tensor | None = None) -> Tensor:
        """Return any rows of this file, in this order; `out` is where to put them."""
        if self.place.maps:
            return torch.index_select(self.mapped(maps), 0, rows, out=out)
        found = self._fetch(rows)
        return found if out is None else out.copy_(found)

    def mapped(self, maps: Maps) -> Tensor:
        """Return all rows, mapped once for everybody: not to be handed out, since it could be written to."""
        key = (str(self.place), self.name)
        found = maps.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = maps[key] = self.own(0, self.rows)
            while len(maps) > _MOST_MAPS:
                maps.pop(next(iter(maps)), None)
        return found

    def _fetch(self, rows: Tensor) -> Tensor:
        """Read only what is needed, neighbours together."""
        wanted, back = torch.unique(rows, return_inverse=True)
        far = (wanted.diff() * self.array.row_bytes > _GAP).nonzero().view(-1) + 1
        edges = [0, *far.tolist(), len(wanted)]
        spans = [(int(wanted[a]), int(wanted[b - 1]) + 1) for a, b in pairwise(edges)]
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
            path = f"{self.place}/{self.name}"
            raise StoreError(f"{path!r} can't be read: {reason}; store.verify() names every damaged file") from error


def to_words(rows: Tensor, array: Array) -> Tensor:
    """Return rows as the widest integers that they consist of."""
    width = array.row_bytes
    kind = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % kind.itemsize == 0)
    flat = rows.view(torch.uint8) if rows.dtype is not torch.uint8 else rows
    return flat.view(len(rows), width).view(kind)


def from_words(words: Tensor, array: Array) -> Tensor:
    """Return words as the rows that they are."""
    if not array.row_bytes:
        return torch.empty(len(words), *array.shape, dtype=array.dtype, device="cpu")
    return words.view(array.dtype).view(len(words), *array.shape)


def empty_words(rows: int, array: Array) -> Tensor:
    """Return memory for rows."""
    return to_words(torch.empty(rows, array.row_bytes, dtype=torch.uint8, device="cpu"), array)
