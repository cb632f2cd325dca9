"""Find the file of each row, and its place there. Row numbers follow the sample numbers, not the order on disk."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hookline._store.disk_format import (
    Array,
    File,
    Manifest,
    UnitRecord,
    committed,
    data_name,
    positions_name,
    read_record,
    unit_name,
)
from hookline._store.storage import Storage
from hookline._untrusted_files import check_memory
from hookline.errors import StoreError

_READERS = 16  # Records read at once over a network.
_UNIT = ("unit", "attempt", "first", "samples", "order", "skipped")  # The columns of `table`; then, for each array:
_ARRAY = ("rows", "nbytes", "crc32", "lengths", "group")


class UnitIndex:
    """The units of one part, in order, with a line of `table` for each.

    The lists of lengths and orders are in one pool, and the table has the start of each list. A negative entry for
    `lengths` is not a start: -1 - k means that each sample has k rows. An `order` of -1 means ascending.
    """

    def __init__(self, table: Tensor, pool: Tensor, positions: Tensor, skipped: Mapping[int, str]) -> None:
        self.table = table
        self.pool = pool
        self.positions = positions  # A line for each file: line of `table`, group, rows, nbytes, crc32.
        self.skipped = dict(skipped)
        self.numbers: dict[str, list[int]] = dict(zip(_UNIT, table[:, : len(_UNIT)].T.tolist(), strict=True))
        columns = (self.numbers["unit"], self.numbers["attempt"])
        self.attempts = [(unit, f"{attempt & (1 << 64) - 1:016x}") for unit, attempt in zip(*columns, strict=True)]
        self._groups = {(line, group): File(*rest) for line, group, *rest in positions.tolist()}

    def __len__(self) -> int:
        return len(self.table)

    def equal(self, other: UnitIndex) -> bool:
        """Return True if two indexes are the same."""
        tensors = [(one.table, one.pool, one.positions) for one in (self, other)]
        return all(map(torch.equal, *tensors)) and self.skipped == other.skipped

    def unit(self, column: str) -> Tensor:
        """Return a column of the units: one number for each. `numbers` has it as a list."""
        return self.table[:, _UNIT.index(column)]

    def array(self, array: int, column: str) -> Tensor:
        """Return a column of an array: one number for each unit's file."""
        return self.table[:, len(_UNIT) + array * len(_ARRAY) + _ARRAY.index(column)]

    def list_at(self, start: int, line: int) -> Tensor:
        """Return the list at `start` in the pool, with a number for each stored sample of the unit in this line."""
        return self.pool[start : start + self.numbers["samples"][line] - self.numbers["skipped"][line]]

    def name_of(self, array: int, line: int) -> str:
        """Return the name of an array's data file in a unit."""
        return data_name(array, *self.attempts[line])

    def positions_of(self, array: int, line: int) -> tuple[str, File] | None:
        """Return the file of an array's positions in a unit, or None if they are 0, 1, ... in each sample."""
        group = int(self.array(array, "group")[line])
        unit, attempt = self.attempts[line]
        return None if group < 0 else (positions_name(unit, attempt, group), self._groups[line, group])

    def samples(self) -> int:
        """Return the number of samples, including skipped ones."""
        return sum(self.numbers["samples"])

    def nbytes(self) -> int:
        """Return the total size of the files of all arrays."""
        return int(self.table[:, len(_UNIT) + _ARRAY.index("nbytes") :: len(_ARRAY)].sum())

    def end(self) -> int:
        """Return the sample number after the last one."""
        return self.numbers["first"][-1] + self.numbers["samples"][-1] if len(self) else 0

    def files(self, array: int) -> Iterable[tuple[str, File]]:
        """Yield the name and the description of every data file of an array."""
        numbers = zip(*(self.array(array, column).tolist() for column in _ARRAY[:3]), strict=True)
        for attempt, file in zip(self.attempts, numbers, strict=True):
            yield data_name(array, *attempt), File(*file)

    def files_of_positions(self) -> Iterable[tuple[str, File]]:
        """Yield the name and the description of every file of positions."""
        for (line, group), file in self._groups.items():
            unit, attempt = self.attempts[line]
            yield positions_name(unit, attempt, group), file


def read_index(storage: Storage, manifest: Manifest) -> UnitIndex:
    """Return the index of a part."""
    return from_records(read_records(storage, manifest, sorted(committed(storage))), len(manifest.arrays))


def read_records(storage: Storage, manifest: Manifest, units: Iterable[int]) -> list[UnitRecord]:
    """Read and check the records of some units."""

    def read(unit: int) -> UnitRecord:
        try:
            return read_record(storage, manifest, unit)
        except FileNotFoundError as error:
            raise StoreError(f"'{storage}/{unit_name(unit)}' is missing; run the harvest again") from error

    if storage.maps:
        return [read(unit) for unit in units]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, units))


def from_records(records: Sequence[UnitRecord], arrays: int) -> UnitIndex:
    """Return the index of some records."""
    pool: list[int] = []
    table: list[int] = []
    positions: list[int] = []
    skipped: dict[int, str] = {}
    for line, record in enumerate(records):
        codes = [_pooled(lengths, pool) for lengths in record.lengths]
        order = -1 if record.order is None else _pooled(record.order, pool)
        attempt = int(record.attempt, 16)
        signed = attempt - (1 << 64) if attempt >> 63 else attempt
        row = [record.unit, signed, record.first, record.samples, order, len(record.skipped)]
        for file, use, group in zip(record.files, record.uses, record.groups, strict=True):
            row += [file.rows, file.nbytes, file.crc32, codes[use], -1 if group is None else group]
        table += row
        for group, file in record.positions.items():
            positions += (line, group, *file)
        skipped.update(record.skipped)
    width = len(_UNIT) + len(_ARRAY) * arrays
    return UnitIndex(_numbers(table).view(-1, width), _numbers(pool), _numbers(positions).view(-1, 5), skipped)


def _pooled(numbers: int | tuple[int, ...], pool: list[int]) -> int:
    if isinstance(numbers, int):
        return -1 - numbers
    pool.extend(numbers)
    return len(pool) - len(numbers)


def _numbers(numbers: Sequence[int]) -> Tensor:
    """Return numbers as a tensor. `torch.tensor` of a list takes 8 times as long."""
    memory = array("q", numbers)
    return torch.frombuffer(memory, dtype=torch.int64) if memory else torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class StorePart:
    """One part of a store, and the number of its first sample in the whole store."""

    storage: Storage
    manifest: Manifest
    index: UnitIndex
    first: int = 0

    def number(self, name: str) -> int:
        """Return the number of an array in this part."""
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {array.name: number for number, array in enumerate(self.manifest.arrays)}

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        return {array.name: array for array in self.manifest.arrays}


@dataclass(frozen=True)
class SampleTable:
    """The stored samples in the order of their numbers, and where the rows of each begin."""

    numbers: Tensor
    starts: Tensor  # The first row number of each sample, and the end of the last: one more entry than samples.
    stored: Tensor  # The first row of each sample in its unit's file.

    @cached_property
    def first(self) -> int:
        """The number of the first sample."""
        return int(self.numbers[0]) if len(self.numbers) else 0

    @cached_property
    def is_gapless(self) -> bool:
        """True if no number is missing, so that a sample is found without a search."""
        return not len(self.numbers) or int(self.numbers[-1]) - self.first + 1 == len(self.numbers)

    def equal(self, other: SampleTable) -> bool:
        """Return True if both have the same samples with the same rows."""
        return self is other or (torch.equal(self.numbers, other.numbers) and torch.equal(self.starts, other.starts))


class RowIndex:
    """The places of an array's rows. A "line" is the index of a unit among the units of all parts."""

    def __init__(self, parts: Sequence[StorePart], name: str, tables: dict[tuple[int, ...], SampleTable]) -> None:
        self._tables = tables  # Shared by arrays with the same lengths.
        self._parts = [(part, part.number(name)) for part in parts]
        rows: list[list[int]] = [part.index.array(number, "rows").tolist() for part, number in self._parts]
        self.limits = list(itertools.accumulate(itertools.chain.from_iterable(rows), initial=0))
        self._lines = list(itertools.accumulate((len(part.index) for part in parts), initial=0))
        self.is_mapped = all(part.storage.maps for part in parts)
        self.is_ordered = all(max(part.index.numbers["order"], default=-1) < 0 for part in parts)

    def __getstate__(self) -> dict[str, object]:
        return {**{name: value for name, value in self.__dict__.items() if name != "samples"}, "_tables": {}}

    @cached_property
    def bounds(self) -> Tensor:
        """The same as `limits`, for many rows at once."""
        with torch.inference_mode(False):
            return _numbers(self.limits)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.limits[-1]

    def file(self, line: int) -> tuple[StorePart, int, int]:
        """Return the part that has a unit, the array's number in that part, and the unit's line in it."""
        part = bisect.bisect_right(self._lines, line) - 1
        return *self._parts[part], line - self._lines[part]

    def line(self, row: int) -> int:
        """Return the line of the unit that has a row."""
        return bisect.bisect_right(self.limits, row) - 1

    def positions(self, line: int) -> tuple[Storage, str, int] | None:
        """Return the storage, name and number of rows of a unit's file of positions, or None if it has none."""
        part, array, own = self.file(line)
        found = part.index.positions_of(array, own)
        return None if found is None else (part.storage, found[0], found[1].rows)

    def stored(self, rows: Tensor) -> Tensor:
        """Convert row numbers from sample order to the order on disk."""
        if self.is_ordered:
            return rows
        samples = self._holding(rows)
        begins = self.bounds[torch.searchsorted(self.bounds, rows, right=True) - 1]
        return begins + self.samples.stored[samples] + rows - self.samples.starts[samples]

    def files_of(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for row numbers in disk order, the line of each one's unit and the row in that unit's file."""
        lines = torch.searchsorted(self.bounds, stored, right=True) - 1
        return lines, stored - self.bounds[lines]

    def numbers_of(self, rows: Tensor) -> Tensor:
        """Return the sample number of each row."""
        return self.samples.numbers[self._holding(rows)]

    def offsets_of(self, rows: Tensor) -> Tensor:
        """Return the index of each row within its sample: 0, 1, ...."""
        return rows - self.samples.starts[self._holding(rows)]

    def span(self, sample: int) -> range | None:
        """Return the row numbers of one sample, or None if it is not stored."""
        samples = self.samples
        place = sample - samples.first if samples.is_gapless else int(torch.searchsorted(samples.numbers, sample))
        if not 0 <= place < len(samples.numbers) or not (samples.is_gapless or samples.numbers[place] == sample):
            return None
        return range(*samples.starts[place : place + 2].tolist())

    @cached_property
    def samples(self) -> SampleTable:
        """The table of stored samples. It is made on demand: reading rows by number usually does not need it."""
        codes = [part.index.array(number, "lengths").tolist() for part, number in self._parts]
        key = tuple(itertools.chain.from_iterable(codes))
        if key not in self._tables:
            self._check_memory()
            with torch.inference_mode(False):
                tables = [_table(part, number) for part, number in self._parts]
                numbers, lengths, stored = (torch.cat(columns) for columns in zip(*tables, strict=True))
                self._tables[key] = SampleTable(numbers, starts_of(lengths), stored)
        return self._tables[key]

    def _check_memory(self) -> None:
        samples = sum(part.index.samples() for part, _ in self._parts)
        try:
            check_memory(3 * 8 * samples)  # Three int64 numbers for each sample.
        except MemoryError as error:
            raise StoreError(f"'{self._parts[0][0].storage}': a table of {samples:,} samples needs {error}") from error

    def _holding(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self.samples.starts, rows, right=True) - 1


def starts_of(lengths: Tensor) -> Tensor:
    """Return the starts of consecutive pieces of these lengths, and the end of the last."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts


def _table(part: StorePart, array: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three columns for the stored samples of a part, ascending: number, rows, and first row in the file."""
    index = part.index
    codes, orders, skipped = index.array(array, "lengths"), index.unit("order"), index.unit("skipped")
    counts = index.unit("samples")
    if not (codes >= 0).any() and not (orders >= 0).any() and not skipped.any():  # The usual case needs no loop.
        offsets = torch.arange(int(counts.sum()), device="cpu") - starts_of(counts)[:-1].repeat_interleave(counts)
        each = (-1 - codes).repeat_interleave(counts)
        return part.first + index.unit("first").repeat_interleave(counts) + offsets, each, offsets * each
    gone = sorted(index.skipped)
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    tables = [(empty, empty, empty)] + [_unit_table(part, array, line, gone) for line in range(len(index))]
    numbers, lengths, stored = (torch.cat(columns) for columns in zip(*tables, strict=True))
    return numbers, lengths, stored


def _unit_table(part: StorePart, array: int, line: int, gone: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    index = part.index
    first, samples, order = (index.numbers[column][line] for column in ("first", "samples", "order"))
    code = int(index.array(array, "lengths")[line])
    numbers = torch.arange(first, first + samples, device="cpu")
    if index.numbers["skipped"][line]:
        own = gone[bisect.bisect_left(gone, first) : bisect.bisect_left(gone, first + samples)]
        numbers = numbers[torch.isin(numbers, torch.tensor(own, device="cpu"), invert=True)]
    lengths = index.list_at(code, line) if code >= 0 else torch.full((len(numbers),), -1 - code, device="cpu")
    stored = starts_of(lengths)[:-1]
    if order >= 0:
        ranks = index.list_at(order, line).argsort()
        lengths, stored = lengths[ranks], stored[ranks]
    return numbers + part.first, lengths, stored
