"""What the records of one part of a store say, as a few tensors: made of the records, or read from a derived file.

The derived file holds the same numbers in one piece, so that thousands of units open in milliseconds. It is named after
the records that it was made of, has a checksum, and may be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store.places import Place
from hookline.store.records import UNITS, File, Manifest, Record, data_name, positions_name, unit_name, unit_of
from hookline.store.shards import memory_of
from hookline.store.writer import how_many

_FORMAT = ["hookline index", 1]
_FEWEST = 32  # Units from which on a derived file is worth it.
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


def read_index(place: Place, manifest: Manifest, trust: bool = True) -> Index:
    """Return the index of a part: from the derived file where it is there, else, or without trust, from the records."""
    sizes = {unit: size for name, size in place.sizes(UNITS).items() if (unit := unit_of(name)) is not None}
    units = sorted(sizes)
    told = json.dumps([_FORMAT, manifest.hash, sorted(sizes.items())])
    derived = f"index-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if trust and len(units) >= _FEWEST:
        with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            return _from_bytes(place.read(derived))
    index = from_records(read_records(place, manifest, units), len(manifest.arrays))
    if len(units) >= _FEWEST and how_many(place, manifest) == len(units):
        with suppress(OSError):  # A store may be read where nothing can be written.
            place.create(derived, _to_bytes(index))
    return index


def read_records(place: Place, manifest: Manifest, units: Iterable[int]) -> list[Record]:
    """Read the records of some units, every one of them checked."""

    def read(unit: int) -> Record:
        name = unit_name(unit)
        try:
            data = place.read(name)
        except OSError as error:
            raise StoreError(f"'{place}/{name}' can't be read: {error.strerror or error}") from error
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


def _to_bytes(index: Index) -> bytes:
    tensors = [tensor.contiguous() for tensor in (index.table, index.pool, index.positions)]
    data = b"".join(map(memory_of, tensors))
    shapes = [list(tensor.shape) for tensor in tensors]
    skipped = [[number, reason] for number, reason in index.skipped.items()]
    head = json.dumps({"format": _FORMAT, "shapes": shapes, "skipped": skipped}).encode()
    head += b" " * (-(len(head) + 17) % 8)
    checksum = f"{zlib.crc32(head + data):08x}{len(head):08x}\n".encode()
    return checksum + head + data


def _from_bytes(data: bytes) -> Index:
    """Read what `_to_bytes` made; anything else is a ValueError."""
    if int(data[:8], 16) != zlib.crc32(memoryview(data)[17:]):
        raise ValueError("a damaged index")
    length = 17 + int(data[8:16], 16)
    head = json.loads(data[17:length])
    if head["format"] != _FORMAT:
        raise ValueError("another format")
    numbers = torch.frombuffer(bytearray(data[length:]), dtype=torch.int64) if data[length:] else _numbers([])
    tensors = numbers.split([torch.Size(shape).numel() for shape in head["shapes"]])
    table, pool, positions = (part.view(shape) for part, shape in zip(tensors, head["shapes"], strict=True))
    return Index(table, pool, positions, dict(head["skipped"]))
