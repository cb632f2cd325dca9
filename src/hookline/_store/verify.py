"""Verify a store: check file sizes when it is opened, and every byte on request."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hookline._store.disk_format import (
    POSITIONS,
    UNITS,
    Array,
    File,
    Manifest,
    file_bytes,
    header,
    read_manifest,
    unit_name,
)
from hookline._store.row_index import StorePart, UnitIndex, from_records, read_records
from hookline._store.storage import Storage
from hookline._tables import count
from hookline.errors import StoreError

_PIECE = 4 << 20  # Bytes read at a time.
_READERS = 4  # Files read at once.
_MOST_NAMED = 20
_WITHOUT_ROWS = 1 << 24  # How many samples of a part may take no bytes on disk. More could fill the memory.
_REMEDY = "remove the record of its unit (units/<unit>.json) and run the harvest again, which redoes that unit"


class Verified(NamedTuple):
    """The numbers of units, files and bytes that were verified."""

    units: int
    files: int
    bytes: int


def check_units(storage: Storage, index: UnitIndex, most: int | None) -> None:
    """Raise if there are too many units or samples, or if a unit does not begin where the one before it ends."""
    if len(index) and most is not None and index.attempts[-1][0] >= most:
        unit = index.attempts[-1][0]
        raise StoreError(
            f"'{storage}' has a unit {unit}, but should have {most} in all, from 0 on; remove '{unit_name(unit)}', or "
            "restore the store"
        )
    if index.samples() > index.nbytes() + _WITHOUT_ROWS:
        found = f"{count(index.samples(), 'sample')}, but {count(index.nbytes(), 'byte')} of files"
        raise StoreError(f"'{storage}/{UNITS}' is damaged: its records list {found}; restore it, or harvest again")
    units, firsts, samples = (index.numbers[column] for column in ("unit", "first", "samples"))
    expected = [(0, 0)] + [(unit + 1, first + span) for unit, first, span in zip(units, firsts, samples, strict=True)]
    for unit, first, (next_unit, next_first) in zip(units, firsts, expected, strict=False):
        if first < next_first or (unit == next_unit and first != next_first):
            raise StoreError(
                f"'{storage}': unit {unit} begins at sample {first}, but those before it end at {next_first}; "
                "restore its records, or harvest again"
            )


def check_sizes(storage: Storage, manifest: Manifest, index: UnitIndex) -> None:
    """Raise if a data file is missing or does not have the size in its record."""
    files = list(_files(manifest, index))
    sizes = _sizes(storage, files)
    problems = [(name, _wrong_size(sizes.get(name), file, array)) for name, file, array in files]
    _raise_problems([f"'{storage}/{name}' {problem}" for name, problem in problems if problem])


def verify(parts: Sequence[StorePart]) -> Verified:
    """Read every byte of a store; raise one StoreError that names every damaged file."""
    problems: list[str] = []
    units = files = nbytes = 0
    for part in parts:
        found = list(_files(part.manifest, _fresh(part, problems)))
        sizes = _sizes(part.storage, found)
        with ThreadPoolExecutor(_READERS) as pool:
            jobs = [pool.submit(_damage, part.storage, *one, sizes.get(one[0])) for one in found]
            problems += filter(None, [job.result() for job in jobs])
        units += len(part.index)
        files += len(found)
        nbytes += sum(file.nbytes for _, file, _ in found)
    _raise_problems(problems)
    return Verified(units, files, nbytes)


def _fresh(part: StorePart, problems: list[str]) -> UnitIndex:
    """Read the manifest and the records again; add a problem if they have changed since the store was opened."""
    records = []
    try:
        if read_manifest(part.storage).hash != part.manifest.hash:
            problems.append(f"'{part.storage}/harvest.json' has changed since the store was opened; open it again")
    except StoreError as error:
        problems.append(str(error))
    units = part.index.numbers["unit"]
    for unit in units:
        try:
            records += read_records(part.storage, part.manifest, [unit])
        except StoreError as error:
            problems.append(str(error))
    fresh = from_records(records, len(part.manifest.arrays))
    if len(records) == len(units) and not fresh.equal(part.index):
        problems.append(f"'{part.storage}/{UNITS}' has changed since the store was opened; open it again")
    return fresh


def _files(manifest: Manifest, index: UnitIndex) -> Iterable[tuple[str, File, Array]]:
    for number, array in enumerate(manifest.arrays):
        yield from ((name, file, array) for name, file in index.files(number))
    yield from ((name, file, POSITIONS) for name, file in index.files_of_positions())


def _sizes(storage: Storage, files: Iterable[tuple[str, File, Array]]) -> dict[str, int]:
    """Return the size of each file, with one listing per folder."""
    folders = {posixpath.dirname(name) for name, _, _ in files}
    return {f"{folder}/{name}": size for folder in folders for name, size in storage.sizes(folder).items()}


def _wrong_size(size: int | None, file: File, array: Array) -> str:
    if size is None:
        return "is missing, or is not a regular file"
    if size != file.nbytes:
        return f"has {count(size, 'byte')}, but its record says {file.nbytes:,}"
    if size != file_bytes(array, file.rows):
        return f"has {count(size, 'byte')}, but {file.rows:,} rows take {file_bytes(array, file.rows):,}"
    return ""


def _damage(storage: Storage, name: str, file: File, array: Array, size: int | None) -> str:
    """Return a description of what is wrong with a data file; "" if nothing is."""
    try:
        problem = _wrong_size(size, file, array) or _wrong_bytes(storage, name, file, array)
    except StoreError as error:
        return str(error)
    except FileNotFoundError:
        problem = "is missing"
    return problem and f"'{storage}/{name}' {problem}"


def _wrong_bytes(storage: Storage, name: str, file: File, array: Array) -> str:
    expected, checksum = header(array, file.rows), 0
    if storage.read(name, 0, len(expected)) != expected:
        return "is damaged: its header is not what was written"
    for start in range(len(expected), file.nbytes, _PIECE):
        checksum = zlib.crc32(storage.read(name, start, min(_PIECE, file.nbytes - start)), checksum)
    return "" if checksum == file.crc32 else "is damaged: its rows do not fit their checksum"


def _raise_problems(problems: list[str]) -> None:
    if problems:
        more = f"\n… and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        named = "\n".join(problems[:_MOST_NAMED])
        raise StoreError(f"{named}{more}\nTo repair a damaged file, {_REMEDY}.")
