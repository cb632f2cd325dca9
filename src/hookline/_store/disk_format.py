"""The contents of a store's files: the manifest, the record of a finished unit, and the header of a data file.

Manifest and records are JSON with a checksum. A data file is a standard safetensors file with one tensor, "rows". Space
for its header is reserved first, and the header is written last. The array and the number of rows determine the header,
so any other header means damage. It is padded so that the rows begin at a multiple of the page size.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._store.storage import Sink, Storage
from hookline._torch import first_element
from hookline._untrusted_files import DTYPES, check_parts, dtype_name, parse_json, stored_dtype
from hookline.errors import StoreError, first_line

MANIFEST, END, UNITS, DATA, MORE = "harvest.json", "end.json", "units", "data", "more"
_STORE, _UNIT, _END = (["hookline store", 1], ["hookline unit", 1], ["hookline end", 1])
_AGAIN, _ELSEWHERE = "remove it and run the harvest again", "give a path that was harvested to"
_PART = re.compile(r"[0-9]{4,9}")
_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_LARGEST = 1 << 48  # The limit of any size. Sums of many sizes still fit into an int64 tensor.
_PAGE = 4096
_MOST_ROWS = 1 << 62
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Array:
    """One array of a store: its name, and the dtype and shape of a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        fits = len(self.shape) < 60 and all(type(size) is int and 0 <= size < _LARGEST for size in self.shape)
        if not stored_dtype(self.dtype):
            raise StoreError(f"{self.name!r}: a store can't hold {self.dtype}; cast it with dtype= or transform=")
        if not fits or self.row_bytes >= _LARGEST:
            raise StoreError(f"{self.name!r}: rows of shape {self.shape} can't be stored")

    @property
    def row_bytes(self) -> int:
        """The size of one row in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name!r} ({dtype_name(self.dtype)}, rows of {self.shape})"


POSITIONS = Array("positions", torch.int64, ())  # The position of each row in its sample.


@dataclass(frozen=True)
class Manifest:
    """The arrays of a store, and the harvest they are from.

    The hash covers `spec` and `arrays`. `units` and `plan` may differ between runs of one harvest.
    """

    spec: Mapping[str, Any]
    arrays: tuple[Array, ...]
    units: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The SHA-256 of the canonical JSON of spec and arrays."""
        return hashlib.sha256(_canonical({"spec": self.spec, "arrays": self._arrays()})).hexdigest()

    def to_json(self) -> bytes:
        """Return the text of harvest.json."""
        content = {"spec": self.spec, "arrays": self._arrays(), "units": self.units, "plan": self.plan}
        return _sealed({"format": _STORE, "hash": self.hash, **content})

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Manifest:
        """Read harvest.json, or raise a StoreError that begins with `name`."""
        found = _unsealed(data, _STORE, name)
        try:
            _expect(type(found["spec"]) is type(found["plan"]) is dict, "its spec or plan")
            _expect(all(type(one["shape"]) is list for one in found["arrays"]), "a shape")
            arrays = tuple(Array(one["name"], DTYPES[one["dtype"]], tuple(one["shape"])) for one in found["arrays"])
            manifest = cls(found["spec"], arrays, found["units"], found["plan"])
            _expect(all(type(array.name) is str for array in arrays), "a name that is not text")
            _expect(len({array.name for array in arrays}) == len(arrays), "two arrays of one name")
            _expect(manifest.units is None or _is_size(manifest.units), "the number of units")
            _expect(manifest.hash == found["hash"], "its hash is not that of its spec")
        except (*_MALFORMED, StoreError) as error:
            raise StoreError(f"{name} is damaged ({first_line(error)}); harvest into another folder") from error
        return manifest

    def _arrays(self) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "dtype": str(one.dtype), "shape": list(one.shape)} for one in self.arrays
        ]  # fmt: skip


class File(NamedTuple):
    """One data file: the number of rows, the size of the file, and the crc32 of the rows' bytes."""

    rows: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class UnitRecord:
    """The contents of one finished unit, in the order on disk. Skipped samples are not stored."""

    unit: int
    attempt: str
    first: int  # The number of the first sample.
    samples: int  # How many sample numbers the unit spans, including skipped ones.
    files: tuple[File, ...]  # One for each array.
    lengths: tuple[int | tuple[int, ...], ...]  # Distinct lists of the rows per stored sample; an int if all are equal.
    uses: tuple[int, ...]  # For each array, the index of its list in `lengths`.
    order: tuple[int, ...] | None = None  # The stored samples as offsets from `first`; None if they are ascending.
    skipped: Mapping[int, str] = field(default_factory=dict)  # Sample number to error.
    inputs: str = ""  # The digest of the batches, if the data was an iterable.
    positions: Mapping[int, File] = field(default_factory=dict)  # Files by group. Positions 0, 1, ... have no file.
    groups: tuple[int | None, ...] = ()  # For each array, the group of its positions; None for positions 0, 1, ....

    @property
    def stored(self) -> int:
        """The number of stored samples."""
        return self.samples - len(self.skipped)

    def to_json(self) -> bytes:
        """Return the text of the record."""
        content = {
            "unit": self.unit, "attempt": self.attempt, "first": self.first, "samples": self.samples,
            "files": [_file(file) for file in self.files], "lengths": self.lengths, "uses": self.uses,
            "order": self.order, "skipped": {str(number): reason for number, reason in self.skipped.items()},
            "inputs": self.inputs, "positions": {str(group): _file(file) for group, file in self.positions.items()},
            "groups": self.groups,
        }  # fmt: skip
        return _sealed({"format": _UNIT, **content})

    @classmethod
    def from_json(cls, data: bytes, name: str, unit: int, arrays: Sequence[Array]) -> UnitRecord:
        """Read the record of a unit, or raise a StoreError that begins with `name`."""
        found = _unsealed(data, _UNIT, name)
        try:
            record = cls(
                found["unit"], found["attempt"], found["first"], found["samples"],
                files=tuple(_read_file(file) for file in found["files"]),
                lengths=tuple(one if type(one) is int else tuple(one) for one in found["lengths"]),
                uses=tuple(found["uses"]),
                order=None if found["order"] is None else tuple(found["order"]),
                skipped={int(number): reason for number, reason in found["skipped"].items()},
                inputs=found["inputs"],
                positions={int(group): _read_file(file) for group, file in found["positions"].items()},
                groups=tuple(found["groups"]),
            )  # fmt: skip
            _expect(record.unit == unit, f"it is the record of unit {str(record.unit)[:40]}")
            record.check(arrays)
        except _MALFORMED as error:
            raise StoreError(f"{name} is damaged ({first_line(error)}); {_AGAIN}") from error
        return record

    def check(self, arrays: Sequence[Array]) -> None:
        """Raise a ValueError if the record contradicts itself or the arrays."""
        _expect(type(self.attempt) is str and _ATTEMPT.fullmatch(self.attempt) is not None, "its attempt")
        _expect(all(_is_size(number) for number in (self.unit, self.first, self.samples)), "a number")
        _expect(all(type(text) is str for text in (self.inputs, *self.skipped.values())), "a text")
        span = range(self.first, self.first + self.samples)
        _expect(all(number in span for number in self.skipped), "a skipped sample is not in this unit")
        self._check_order()
        _expect(len(self.files) == len(self.uses) == len(self.groups) == len(arrays), "not a file for each array")
        _expect(all(map(_is_size, self.positions)), "a group of positions")
        rows = [self._rows_of(lengths) for lengths in self.lengths]
        for array, file, use, group in zip(arrays, self.files, self.uses, self.groups, strict=True):
            _expect(type(use) is int and 0 <= use < len(rows), "an array without lengths")
            _expect(file.rows == rows[use], f"{array.name!r} has {file.rows} rows, its samples {rows[use]}")
            known = group is None or (type(group) is int and self.positions[group].rows == file.rows)
            _expect(known, f"positions of {array.name!r}")

    def _check_order(self) -> None:
        if self.order is None:
            return
        _expect(len(self.order) == self.stored, f"an order of {len(self.order)} for {self.stored} samples")
        skipped = {number - self.first for number in self.skipped}
        expected = [number for number in range(self.samples) if number not in skipped]
        _expect(all(type(number) is int for number in self.order) and sorted(self.order) == expected, "its order")

    def _rows_of(self, lengths: int | tuple[int, ...]) -> int:
        if isinstance(lengths, int):
            _expect(_is_size(lengths), "a length")
            return lengths * self.stored
        _expect(len(lengths) == self.stored, f"{len(lengths)} lengths for {self.stored} samples")
        # There may be millions, so this has no Python loop. If their sum is a size, each of them is.
        _expect(not lengths or ({*map(type, lengths)} == {int} and min(lengths) >= 0), "a length")
        _expect(_is_size(rows := sum(lengths)), "a length")
        return rows


def end_to_json(units: int) -> bytes:
    """Return the text of end.json, which records the number of units once the end of the data is known."""
    return _sealed({"format": _END, "units": units})


def end_from_json(data: bytes, name: str) -> int:
    """Read end.json."""
    units: Any = _unsealed(data, _END, name).get("units")
    if not _is_size(units):
        raise StoreError(f"{name} is damaged; {_AGAIN}")
    return int(units)


def unit_of(name: str) -> int | None:
    """Return the unit whose record has this name, or None if no record is named so."""
    digits = name.removesuffix(".json")
    unit = int(digits) if re.fullmatch("[0-9]{8,15}", digits) else -1
    return unit if name == f"{unit:08d}.json" else None


def unit_name(unit: int) -> str:
    """Return the name of a unit's record."""
    return f"{UNITS}/{unit:08d}.json"


def data_name(array: int, unit: int, attempt: str) -> str:
    """Return the name of a data file."""
    return f"{DATA}/{array:04d}/{unit:08d}-{attempt}.safetensors"


def positions_name(unit: int, attempt: str, group: int) -> str:
    """Return the name of a file of positions."""
    return f"{DATA}/positions/{unit:08d}-{attempt}-{group}.safetensors"


def has_manifest(storage: Storage) -> bool:
    """Return True if a store was begun in this folder."""
    return MANIFEST in storage.names("")


def read_manifest(storage: Storage) -> Manifest:
    """Return the manifest of a store."""
    try:
        data = storage.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        is_file = os.path.isfile(str(storage))
        remedy = "a file that Cache.save wrote is read by hl.Cache.load" if is_file else "harvest to it first"
        raise StoreError(f"{str(storage)!r} is not a store: it has no {MANIFEST}; {remedy}") from error
    return Manifest.from_json(data, _named(storage, MANIFEST))


def _named(storage: Storage, name: str) -> str:
    return repr(f"{storage}/{name}")


def unit_count(storage: Storage, manifest: Manifest) -> int | None:
    """Return the number of units of the complete store, or None if it is not known yet."""
    if manifest.units is not None:
        return manifest.units
    try:
        return end_from_json(storage.read(END), _named(storage, END))
    except FileNotFoundError:
        return None


def committed(storage: Storage) -> set[int]:
    """Return the units that are done."""
    return {unit for name in storage.names(UNITS) if (unit := unit_of(name)) is not None}


def read_record(storage: Storage, manifest: Manifest, unit: int) -> UnitRecord:
    """Return the record of a unit that is done."""
    name = unit_name(unit)
    return UnitRecord.from_json(storage.read(name), _named(storage, name), unit, manifest.arrays)


def parts(storage: Storage) -> list[Storage]:
    """Return the storages of the parts that were appended to a store, in order."""
    names = [name for name in storage.names(MORE) if _PART.fullmatch(name)]
    children = [storage.child(f"{MORE}/{name}") for name in sorted(names, key=int)]
    inside = {child: child.names("") for child in children}
    for child, found in inside.items():
        if MANIFEST not in found and UNITS in found:
            raise StoreError(f"{_named(child, MANIFEST)} is missing; restore it, or remove its folder")
    return [child for child, found in inside.items() if MANIFEST in found]


def _canonical(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"a spec or plan must be plain JSON (text, whole numbers, lists, dicts): {error}") from error


def _sealed(value: dict[str, Any]) -> bytes:
    """Return JSON with a checksum."""
    data = _canonical({**value, "checksum": f"{zlib.crc32(_canonical(value)):08x}"})
    try:
        check_parts(data.decode())
    except ValueError as error:
        raise StoreError(f"too much for one file of JSON: {error}; take smaller units") from error
    return data


def _unsealed(data: bytes, format: list[Any], name: str) -> dict[str, Any]:
    """Return sealed JSON as a dict; refuse text that is damaged, from another program or from a newer version."""
    try:
        value = parse_json(data)
        found = value["format"]
        checksum = value.pop("checksum", None)
        is_whole = _fits(checksum, data, value)
    except _MALFORMED as error:
        problem = f"is damaged, or not from hookline ({first_line(error)})"
        raise StoreError(f"{name} {problem}; {_AGAIN if format != _STORE else _ELSEWHERE}") from error
    if found != format and (is_whole or checksum is None):
        newer = isinstance(found, list) and found[:1] == format[:1]
        remedy = "update hookline" if newer else _ELSEWHERE
        raise StoreError(f"{name} is of format {first_line(found)}, but this hookline reads {format}; {remedy}")
    if not is_whole:
        remedy = _AGAIN if format != _STORE else "restore it, or harvest into another folder"
        raise StoreError(f"{name} is damaged: it does not fit its checksum; {remedy}")
    return dict(value)


def _fits(checksum: Any, data: bytes, value: dict[str, Any]) -> bool:
    """Return True if a checksum fits the rest of its JSON, which is `value`."""
    # hookline writes canonical JSON. It stays canonical without the checksum, so it need not be encoded again.
    rest = data.replace(f'"checksum":"{checksum}",'.encode(), b"", 1)
    if checksum == f"{zlib.crc32(rest):08x}":
        return True
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return bool(checksum == f"{zlib.crc32(text.encode()):08x}")


def _file(file: File) -> dict[str, Any]:
    return {"rows": file.rows, "bytes": file.nbytes, "crc32": f"{file.crc32:08x}"}


def _read_file(found: Mapping[str, Any]) -> File:
    _expect(_is_size(found["rows"]) and _is_size(found["bytes"]), "the size of a file")
    _expect(_CHECKSUM.fullmatch(found["crc32"]) is not None, "a checksum")
    return File(found["rows"], found["bytes"], int(found["crc32"], 16))


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < _LARGEST


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)


class Shard:
    """A data file that is being written."""

    def __init__(self, storage: Storage, name: str, array: Array) -> None:
        self._array = array
        self._sink: Sink = storage.sink(name, reserved(array))
        self._rows = self._checksum = 0

    def append(self, rows: Tensor) -> None:
        """Write rows, without a copy in memory."""
        plain = rows.detach().resolve_conj().resolve_neg().contiguous()
        memory = memory_view(plain)
        self._checksum = zlib.crc32(memory, self._checksum)
        self._sink.write(memory)  # One call for all: Linux then caches the data in larger pages, which map faster.
        self._rows += len(rows)

    def finish(self) -> File:
        """Write the header, and wait until the file is on disk."""
        self._sink.finish(header(self._array, self._rows))
        return File(self._rows, file_bytes(self._array, self._rows), self._checksum)

    def close(self) -> None:
        """Close the file after its record was written."""
        self._sink.close()

    def discard(self) -> None:
        """Remove the file."""
        self._sink.discard()


def header(array: Array, rows: int) -> bytes:
    """Return the bytes of a file before its first row."""
    data = _json(array, rows)
    length = reserved(array) - 8
    return length.to_bytes(8, "little") + data + b" " * (length - len(data))


@lru_cache(maxsize=4096)
def reserved(array: Array) -> int:
    """Return the offset at which the rows begin. It does not depend on their number."""
    return -(-(len(_json(array, _MOST_ROWS)) + 8) // _PAGE) * _PAGE


def file_bytes(array: Array, rows: int) -> int:
    """Return the size of a data file."""
    return reserved(array) + rows * array.row_bytes


def _json(array: Array, rows: int) -> bytes:
    pairs = [2] if array.dtype.is_complex else []
    tensor = {
        "dtype": stored_dtype(array.dtype),
        "shape": [rows, *array.shape, *pairs],
        "data_offsets": [0, rows * array.row_bytes],
    }
    content = {"__metadata__": {"name": array.name, "dtype": str(array.dtype)}, "rows": tensor}
    return json.dumps(content, separators=(",", ":")).encode()


def memory_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without copying. The tensor must outlive the view."""
    if not tensor.nbytes:
        return memoryview(b"")
    start = first_element(tensor)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(start)).cast("B")
