"""One array of a store, read-only: rows as tensors, by number, slice, list, mask or sample, from mapped files.

Each read returns a copy or a private mapping. Writing to the result changes neither the file nor other reads.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hookline._store.disk_format import POSITIONS, Array, reserved
from hookline._store.row_index import RowIndex
from hookline._store.storage import Storage
from hookline._untrusted_files import dtype_name
from hookline.errors import HooklineError, NotCaptured, StoreError

_MOST_MAPS = 16384  # Mapped files of one store. Linux allows a process 65,530 mappings.
_COPIED = 1 << 20  # Up to this many bytes, a copy is cheaper than another mapping.
_GAP = 64 << 10  # Over a network, rows at most this many bytes apart are read together.
_READERS = 16  # Ranges requested at once over a network.
_FEW = 16  # If a read takes fewer rows per file, they are copied one by one, which beats a selection for each file.


class Rows:
    """The rows of one array, in the order of their samples: `rows[0]`, `rows[-5:]`, `rows[[3, 1, 4]]`, `rows[mask]`."""

    def __init__(self, array: Array, index: RowIndex, maps: MappedFiles) -> None:
        self.name = array.name
        self.dtype = array.dtype
        self._array = array
        self._index = index
        self._maps = maps
        self._sources: dict[int, ShardReader] = {}

    def __eq__(self, other: object) -> bool:
        """Return True for the same object; raise for anything that is not `Rows`: the elements are on disk."""
        if isinstance(other, Rows):
            return self is other
        raise TypeError("the rows of a store are on disk; read them to compare them: rows[:] == ...")

    __hash__ = object.__hash__

    @property
    def shape(self) -> torch.Size:
        """The number of rows, and the shape of each."""
        return torch.Size((len(self), *self._array.shape))

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return len(self) * self._array.row_bytes

    @property
    def bounds(self) -> list[int]:
        """The row numbers at which the units begin, and the end of the last unit."""
        return list(self._index.limits)

    @property
    def samples(self) -> Labels:
        """The sample number of each row."""
        return Labels(len(self), self._index.numbers_of)

    @property
    def positions(self) -> Labels:
        """The position of each row in its sample: that of the token, if rows are tokens."""
        return Labels(len(self), self._positions_of)

    @property
    def is_mapped(self) -> bool:
        """True if rows are read from mapped files; False if a part of the store is not on this machine."""
        return self._index.is_mapped

    @property
    def sample_numbers(self) -> Tensor:
        """The numbers of the stored samples, ascending, without skipped ones."""
        return self._index.samples.numbers.clone()

    def is_aligned_with(self, other: Rows) -> bool:
        """Return True if rows with the same number have the same sample and position in both arrays."""
        mine, theirs = self._index, other._index
        if not torch.equal(mine.bounds, theirs.bounds) or not mine.samples.equal(theirs.samples):
            return False
        bounds = self.bounds
        different = [line for line in range(len(bounds) - 1) if mine.positions(line) != theirs.positions(line)]
        spans = [slice(bounds[line], bounds[line + 1]) for line in different]
        return all(torch.equal(self.positions[span], other.positions[span]) for span in spans)

    def __len__(self) -> int:
        return self._index.rows

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice):
            return self._slice(range(*index.indices(len(self))))
        if _is_number(index):
            return self._one(_row(index, len(self)))
        return self._gather(_numbers(index, len(self)))

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self.scan():
            yield from rows.unbind()

    def span(self, sample: int) -> range:
        """Return the row numbers of one sample; raise NoSample (a NotCaptured and IndexError) if it has none."""
        found = self._index.span(operator.index(sample))
        if found is None:
            raise NoSample(f"sample {sample} has no rows in {self.name!r}: it is not in the store, or was skipped")
        return found

    def sample(self, sample: int) -> Tensor:
        """Return the rows of one sample."""
        return self._slice(self.span(sample))

    def scan(self, bytes: int = 64 << 20) -> Iterator[Tensor]:
        """Yield all rows in order, as tensors of at most `bytes` bytes (and at least one row)."""
        if not isinstance(bytes, int):
            raise HooklineError(f"bytes={bytes!r} is not a number of bytes, as 64 << 20 is")
        step = max(1, bytes // max(1, self._array.row_bytes))
        bounds = self.bounds
        for line, (begin, end) in enumerate(pairwise(bounds)):
            source = self._source(line)
            whole = source.own(0, end - begin) if source.storage.maps and self._index.is_ordered else None
            for start in range(begin, end, step):
                stop = min(start + step, end)
                if whole is None:
                    yield self._slice(range(start, stop))
                else:
                    yield from_words(whole[start - begin : stop - begin], self._array)

    def __repr__(self) -> str:
        return f"Rows({self.name!r}, {dtype_name(self.dtype)}, {tuple(self.shape)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}

    def _one(self, row: int) -> Tensor:
        """Return one row, without the overhead of the general case."""
        line = self._index.line(row)
        source = self._source(line)
        if not (source.storage.maps and self._index.is_ordered and self._array.row_bytes):
            return self._slice(range(row, row + 1))[0]
        words = source.mapped(self._maps)[row - self._index.limits[line]]
        return words.clone().view(self.dtype).view(self._array.shape)

    def _slice(self, rows: range) -> Tensor:
        """Return evenly spaced rows. Consecutive ones are read directly, file by file."""
        if rows.step != 1 or not self._index.is_ordered:
            return self._gather(_spread(rows))
        limits = self._index.limits
        first, last = self._index.line(rows.start), self._index.line(rows.stop - 1)
        if rows and first == last:
            begin = limits[first]
            found = self._source(first).between(rows.start - begin, rows.stop - begin, self._maps)
            return from_words(found, self._array)
        result = empty_words(len(rows), self._array)
        for line in range(first, last + 1) if rows else ():
            begin, end = limits[line : line + 2]
            start, stop = max(begin, rows.start), min(end, rows.stop)
            found = self._source(line).between(start - begin, stop - begin, self._maps)
            result[start - rows.start : stop - rows.start] = found
        return from_words(result, self._array)

    def _gather(self, rows: Tensor) -> Tensor:
        """Return any rows. They are read in the order on disk, with one selection per file."""
        stored = self._index.stored(rows)
        if not len(rows) or bool((stored.diff() >= 0).all()):
            return from_words(self._gather_sorted(stored, None), self._array)
        numbers, order = torch.sort(stored)
        first = self._index.line(int(numbers[0]))
        if int(numbers[-1]) < self._index.limits[first + 1]:  # Rows of one file can be selected in any order.
            return from_words(self._source(first).select(stored - self._index.limits[first], self._maps), self._array)
        return from_words(self._gather_sorted(numbers, order), self._array)

    def _gather_sorted(self, numbers: Tensor, order: Tensor | None) -> Tensor:
        """Return rows as words. `numbers` are in disk order and ascending; row `i` becomes row `order[i]`."""
        lines, places = self._index.files_of(numbers)
        found, counts = torch.unique_consecutive(lines, return_counts=True)
        sources = [self._source(line) for line in found.tolist()]
        result, done = empty_words(len(numbers), self._array), 0
        if len(numbers) < _FEW * len(sources) and self._index.is_mapped:
            to = torch.arange(len(numbers), device="cpu") if order is None else order
            copy_rows([source.mapped(self._maps) for source in sources], counts, places, result, to)
            return result
        for source, count in zip(sources, counts.tolist(), strict=True):
            own = slice(done, done + count)
            source.select(places[own], self._maps, out=result[own])
            done += count
        if order is None:
            return result
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cpu"))
        return result.index_select(0, back)

    def _source(self, line: int) -> ShardReader:
        found = self._sources.get(line)
        if found is None:
            part, array, own = self._index.file(line)
            rows = self._index.limits[line + 1] - self._index.limits[line]
            found = self._sources[line] = ShardReader(part.storage, part.index.name_of(array, own), self._array, rows)
        return found

    def _positions_of(self, rows: Tensor) -> Tensor:
        result = self._index.offsets_of(rows)
        lines, places = self._index.files_of(self._index.stored(rows))
        lines, order = torch.sort(lines, stable=True)
        found, counts = torch.unique_consecutive(lines, return_counts=True)
        for line, own in zip(found.tolist(), order.split(counts.tolist()), strict=True):
            file = self._index.positions(line)
            if file is not None:
                source = ShardReader(file[0], file[1], POSITIONS, file[2])
                result[own] = source.select(places[own], self._maps).view(-1)
        return result


class Labels:
    """A number for each row, computed on demand: `labels[5]`, `labels[:100]`, `labels[:]`."""

    def __init__(self, rows: int, of: Callable[[Tensor], Tensor]) -> None:
        self._rows = rows
        self._of = of

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._of(_spread(range(*index.indices(self._rows))))
        if _is_number(index):
            return int(self._of(torch.tensor([_row(index, self._rows)], device="cpu")))
        return self._of(_numbers(index, self._rows))

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._rows, 65536):
            yield from self[start : start + 65536].tolist()

    def __repr__(self) -> str:
        return f"Labels of {self._rows:,} rows"


class NoSample(NotCaptured, IndexError):
    """Raised for a sample that is not in a store."""


def _is_number(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.dim() == 0 and not index.is_floating_point() and index.dtype is not torch.bool
    return hasattr(index, "__index__") and not isinstance(index, bool) and not getattr(index, "shape", ())


def _row(index: Any, rows: int) -> int:
    row = operator.index(index)
    if not -rows <= row < rows:
        raise IndexError(f"row {row} of {rows:,}")
    return row % rows


def _spread(rows: range) -> Tensor:
    """Return a range as a tensor."""
    step = rows.step if len(rows) > 1 else 1  # The step of a single number may be too large for an int64.
    return torch.arange(len(rows), device="cpu") * step + rows.start


def _numbers(index: Any, rows: int) -> Tensor:
    """Return the row numbers of a list, a tensor, a range or a mask."""
    if index is Ellipsis or index is None or isinstance(index, (tuple, bool, str, float)):
        kind = "..." if index is Ellipsis else type(index).__name__
        raise TypeError(f"rows are chosen by a number, a slice, a list or a mask, not by {kind}; write rows[:8][:, 0]")
    if isinstance(index, list) and not index:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    try:
        found = _spread(index) if isinstance(index, range) else torch.as_tensor(index, device="cpu")
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"rows are chosen by whole numbers, not by this {type(index).__name__}: {error}") from None
    if found.dim() != 1 or found.is_floating_point() or found.is_complex():
        raise TypeError(
            f"rows are chosen by a list of whole numbers or a mask, not by {found.dtype} {list(found.shape)}"
        )
    if found.dtype is torch.bool:
        if len(found) != rows:
            raise IndexError(f"a mask of {len(found):,} for {rows:,} rows")
        return found.nonzero().view(-1)
    numbers = found.to(torch.int64)
    if len(numbers) and not (-rows <= int(numbers.min()) and int(numbers.max()) < rows):
        raise IndexError(f"rows {int(numbers.min())} to {int(numbers.max())} of {rows:,}")
    return torch.where(numbers < 0, numbers + rows, numbers)


class MappedFiles(dict[str, Tensor]):
    """The shared mappings of a store's files, the oldest first."""

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()  # Another process makes its own mappings.


class ShardReader:
    """Reads one data file of an array."""

    __slots__ = ("array", "key", "name", "rows", "storage")

    def __init__(self, storage: Storage, name: str, array: Array, rows: int) -> None:
        self.storage = storage
        self.name = name
        self.array = array
        self.rows = rows
        self.key = f"{storage}/{name}"

    def between(self, begin: int, end: int, maps: MappedFiles) -> Tensor:
        """Return consecutive rows: a copy if they are few, else a mapping that only the caller has."""
        if self.storage.maps and (end - begin) * self.array.row_bytes <= _COPIED:
            return self.mapped(maps)[begin:end].clone()
        return self.own(begin, end)

    def own(self, begin: int, end: int) -> Tensor:
        """Return consecutive rows in memory that nothing else writes to."""
        width = self.array.row_bytes
        where = (self.name, reserved(self.array) + begin * width, (end - begin) * width)
        with self._reading():
            try:
                found = self.storage.rows(*where)
            except RuntimeError:  # The process may have too many mappings; the system allows tens of thousands.
                found = torch.frombuffer(bytearray(self.storage.read(*where)), dtype=torch.uint8)
        return to_words(found.view(end - begin, width), self.array)

    def select(self, rows: Tensor, maps: MappedFiles, out: Tensor | None = None) -> Tensor:
        """Return these rows of the file, in this order, written to `out` if there is one."""
        if self.storage.maps:
            return torch.index_select(self.mapped(maps), 0, rows, out=out)
        found = self._fetch(rows)
        return found if out is None else out.copy_(found)

    def mapped(self, maps: MappedFiles) -> Tensor:
        """Return all rows in a shared mapping. It must not reach the user, who could write to it."""
        found = maps.get(self.key)
        if found is None:
            while len(maps) >= _MOST_MAPS:
                maps.pop(next(iter(maps)), None)
            with torch.inference_mode(False):
                found = maps[self.key] = self.own(0, self.rows)
        return found

    def _fetch(self, rows: Tensor) -> Tensor:
        """Read only the ranges that hold these rows. Rows that are close together share a range."""
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
        """Raise a StoreError that says why a file can't be read."""
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
    """Return rows as the widest integers whose size divides that of a row."""
    width = array.row_bytes
    kinds = (torch.int64, torch.int32, torch.int16) if width else ()
    kind = next((kind for kind in kinds if width % kind.itemsize == 0), torch.uint8)
    flat = rows.view(torch.uint8) if rows.dtype is not torch.uint8 else rows
    return flat.view(len(rows), width).view(kind)


def from_words(words: Tensor, array: Array) -> Tensor:
    """Return words as rows of the array's dtype and shape."""
    if not array.row_bytes:
        return torch.empty(len(words), *array.shape, dtype=array.dtype, device="cpu")
    rows = words.view(array.dtype)
    return rows if len(array.shape) == 1 else rows.view(len(words), *array.shape)


def copy_rows(sources: Sequence[Tensor], counts: Tensor, places: Tensor, out: Tensor, to: Tensor) -> None:
    """Copy a few rows of each of many files one by one: row `places[i]` of its file becomes row `to[i]` of `out`."""
    width = out.shape[1] * out.itemsize
    starts = torch.tensor([source.data_ptr() for source in sources], device="cpu").repeat_interleave(counts)
    memory = (to * width + out.data_ptr()).tolist(), (starts + places * width).tolist()
    collections.deque(map(ctypes.memmove, *memory, itertools.repeat(width)), maxlen=0)


def empty_words(rows: int, array: Array) -> Tensor:
    """Return uninitialized memory for rows, as words."""
    return to_words(torch.empty(rows, array.row_bytes, dtype=torch.uint8, device="cpu"), array)
