"""What the records of one part of a store say, as a few tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store.places import Place
from hookline.store.records import File, Manifest, Record, data_name, positions_name, unit_name
from hookline.store.writer import committed

_READERS = 16  # Records read at once where each is a question over a network.
_UNIT = ("unit", "attempt", "first", "samples", "order", "skipped")  # The columns of `table`, then these of each array:
_ARRAY = ("rows", "nbytes", "crc32", "lengths", "group")


class Index:
    """The units of one part, in order. Lists of lengths and orders are in one pool, and are named by where they begin.

    A `lengths` below 0 is no such place: -1 - k stands for k rows of each sample.
    """

    def __init__(self, table: Tensor, pool: Tensor, positions: Tensor, skipped: Mapping[int, str]) -> None:
        self.table = table
        self.pool = pool
        self.positions = positions  # A line for each file: line of `table`, group, rows, nbytes, crc32.
        self.skipped = dict(skipped)
        columns = (self.unit("unit").tolist(), self.unit("attempt").tolist())
        self.attempts = [(unit, f"{attempt & (1 << 64) - 1:016x}") for unit, attempt in zip(*columns, strict=True)]
        self._groups = {(line, group): File(*rest) for line, group, *rest in positions.tolist()}

    def __len__(self) -> int:
        return len(self.table)

    def equal(self, other: Index) -> bool:
        """Whether two say the same."""
        tensors = [(one.table, one.pool, one.positions) for one in (self, other)]
        return all(map(torch.equal, *tensors)) and self.skipped == other.skipped

    def unit(self, column: str) -> Tensor:
        """Return one number of each unit."""
        return self.table[:, _UNIT.index(column)]

    def array(self, array: int, column: str) -> Tensor:
        """Return one number of each unit's file of an array."""
        return self.table[:, len(_UNIT) + array * len(_ARRAY) + _ARRAY.index(column)]

    def list_at(self, start: int, line: int) -> Tensor:
        """Return the list in the pool of as many numbers as a unit has stored samples."""
        return self.pool[start : start + int(self.unit("samples")[line] - self.unit("skipped")[line])]

    def name_of(self, array: int, line: int) -> str:
        """Return the name of a unit's file of an array."""
        return data_name(array, *self.attempts[line])

    def positions_of(self, array: int, line: int) -> tuple[str, File] | None:
        """Return the file of an array's positions, if they are not 0, 1, ... in each sample."""
        group = int(self.array(array, "group")[line])
        unit, attempt = self.attempts[line]
        return None if group < 0 else (positions_name(unit, attempt, group), self._groups[line, group])

    def samples(self) -> int:
        """Return how many sample numbers there are, the skipped ones among them."""
        return int(self.unit("samples").sum())

    def nbytes(self) -> int:
        """Return how many bytes the files of all arrays have."""
        return int(self.table[:, len(_UNIT) + _ARRAY.index("nbytes") :: len(_ARRAY)].sum())

    def end(self) -> int:
        """Return the sample number after the last."""
        return int(self.unit("first")[-1] + self.unit("samples")[-1]) if len(self) else 0

    def files(self, array: int) -> Iterable[tuple[str, File]]:
        """Return the name and the description of every file of an array."""
        numbers = zip(*(self.array(array, column).tolist() for column in _ARRAY[:3]), strict=True)
        for told, file in zip(self.attempts, numbers, strict=True):
            yield data_name(array, *told), File(*file)

    def files_of_positions(self) -> Iterable[tuple[str, File]]:
        """Return the name and the description of every file of positions."""
        for (line, group), file in self._groups.items():
            unit, attempt = self.attempts[line]
            yield positions_name(unit, attempt, group), file


def read_index(place: Place, manifest: Manifest) -> Index:
    """Return the index of a part."""
    return from_records(read_records(place, manifest, sorted(committed(place))), len(manifest.arrays))


def read_records(place: Place, manifest: Manifest, units: Iterable[int]) -> list[Record]:
    """Read the records of some units, every one of them checked."""

    def read(unit: int) -> Record:
        name = unit_name(unit)
        try:
            data = place.read(name)
        except FileNotFoundError as error:
            raise StoreError(f"'{place}/{name}' is missing; run the harvest again") from error
        return Record.from_json(data, f"'{place}/{name}'", unit, manifest.arrays)

    if place.maps:
        return [read(unit) for unit in units]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, units))


def from_records(records: Sequence[Record], arrays: int) -> Index:
    """Make the index of records."""
    pool: list[int] = []
    table: list[list[int]] = []
    positions: list[list[int]] = []
    skipped: dict[int, str] = {}
    for line, record in enumerate(records):
        codes = [_pooled(lengths, pool) for lengths in record.lengths]
        order = -1 if record.order is None else _pooled(record.order, pool)
        attempt = int(record.attempt, 16)
        signed = attempt - (1 << 64) if attempt >> 63 else attempt
        row = [record.unit, signed, record.first, record.samples, order, len(record.skipped)]
        for file, use, group in zip(record.files, record.uses, record.groups, strict=True):
            row += [file.rows, file.nbytes, file.crc32, codes[use], -1 if group is None else group]
        table.append(row)
        positions += [[line, group, file.rows, file.nbytes, file.crc32] for group, file in record.positions.items()]
        skipped.update(record.skipped)
    width = len(_UNIT) + len(_ARRAY) * arrays
    return Index(_numbers(table).view(-1, width), _numbers(pool), _numbers(positions).view(-1, 5), skipped)


def _pooled(numbers: int | tuple[int, ...], pool: list[int]) -> int:
    if isinstance(numbers, int):
        return -1 - numbers
    pool.extend(numbers)
    return len(pool) - len(numbers)


def _numbers(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
