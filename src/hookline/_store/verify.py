"""Whether a store is what it was when it was written: its sizes on opening, every byte when asked."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hookline._store.layout import Index, Part, from_records, read_records
from hookline._store.manifest import UNITS, Array, File, Manifest, unit_name
from hookline._store.places import Place
from hookline._store.shards import POSITIONS, file_bytes, header
from hookline._store.writer import read_manifest
from hookline._tables import count
from hookline.errors import StoreError

_PIECE = 4 << 20  # Bytes read at a time.
_READERS = 4  # Files read at once.
_MOST_NAMED = 20
_WITHOUT_ROWS = 1 << 24  # Samples of a part that may take no byte on disk: a table of all samples is made of them.
_REMEDY = "remove the record of its unit (units/<unit>.json) and run the harvest again, which makes that unit again"


class Verified(NamedTuple):
    """What was found to be as it was written."""

    units: int
    files: int
    bytes: int


def check_units(place: Place, index: Index, most: int | None) -> None:
    """Raise where there are too many units or samples, or a unit does not begin where the one before it ended."""
    if len(index) and most is not None and index.attempts[-1][0] >= most:
        unit = index.attempts[-1][0]
        raise StoreError(
            f"'{place}' has a unit {unit}, but should have {most} in all, from 0 on; remove '{unit_name(unit)}', or "
            "restore the store"
        )
    if index.samples() > index.nbytes() + _WITHOUT_ROWS:
        told = f"{count(index.samples(), 'sample')}, but {count(index.nbytes(), 'byte')} of files"
        raise StoreError(f"'{place}/{UNITS}' is damaged: its records are of {told}; restore it, or harvest again")
    units, firsts, samples = (index.unit(column).tolist() for column in ("unit", "first", "samples"))
    expected = [(0, 0)] + [(unit + 1, first + span) for unit, first, span in zip(units, firsts, samples, strict=True)]
    for unit, first, (next_unit, next_first) in zip(units, firsts, expected, strict=False):
        if first < next_first or (unit == next_unit and first != next_first):
            raise StoreError(
                f"'{place}': unit {unit} begins at sample {first}, but those before it end at {next_first}; "
                "restore its records, or harvest again"
            )


def check_sizes(place: Place, manifest: Manifest, index: Index) -> None:
    """Raise where a data file is missing, or not as long as its record says."""
    files = list(_files(manifest, index))
    sizes = _sizes(place, files)
    told = [(name, _wrong_size(sizes.get(name), file, array)) for name, file, array in files]
    _refuse([f"'{place}/{name}' {problem}" for name, problem in told if problem])


def verify(parts: Sequence[Part]) -> Verified:
    """Read every byte of a store; raise one StoreError that names every damaged file."""
    problems: list[str] = []
    units = files = nbytes = 0
    for part in parts:
        found = list(_files(part.manifest, _fresh(part, problems)))
        sizes = _sizes(part.place, found)
        with ThreadPoolExecutor(_READERS) as pool:
            jobs = [pool.submit(_damage, part.place, *one, sizes.get(one[0])) for one in found]
            problems += filter(None, [job.result() for job in jobs])
        units += len(part.index)
        files += len(found)
        nbytes += sum(file.nbytes for _, file, _ in found)
    _refuse(problems)
    return Verified(units, files, nbytes)


def _fresh(part: Part, problems: list[str]) -> Index:
    """Return what manifest and records say now, and note where that is not what they said on opening."""
    records = []
    try:
        if read_manifest(part.place).hash != part.manifest.hash:
            problems.append(f"'{part.place}/harvest.json' is another one than when the store was opened")
    except StoreError as error:
        problems.append(str(error))
    units = part.index.unit("unit").tolist()
    for unit in units:
        try:
            records += read_records(part.place, part.manifest, [unit])
        except StoreError as error:
            problems.append(str(error))
    fresh = from_records(records, len(part.manifest.arrays))
    if len(records) == len(units) and not fresh.equal(part.index):
        problems.append(f"'{part.place}/{UNITS}' has other records than when the store was opened; open it again")
    return fresh


def _files(manifest: Manifest, index: Index) -> Iterable[tuple[str, File, Array]]:
    for number, array in enumerate(manifest.arrays):
        yield from ((name, file, array) for name, file in index.files(number))
    yield from ((name, file, POSITIONS) for name, file in index.files_of_positions())


def _sizes(place: Place, files: Iterable[tuple[str, File, Array]]) -> dict[str, int]:
    """Return the sizes of all files in the folders of some; one listing for each."""
    folders = {posixpath.dirname(name) for name, _, _ in files}
    return {f"{folder}/{name}": size for folder in folders for name, size in place.sizes(folder).items()}


def _wrong_size(size: int | None, file: File, array: Array) -> str:
    if size is None:
        return "is missing, or is not a regular file"
    if size != file.nbytes:
        return f"has {count(size, 'byte')}, but its record says {file.nbytes:,}"
    if size != file_bytes(array, file.rows):
        return f"has {count(size, 'byte')}, but {file.rows:,} rows take {file_bytes(array, file.rows):,}"
    return ""


def _damage(place: Place, name: str, file: File, array: Array, size: int | None) -> str:
    """Say what is wrong with a data file, or nothing."""
    try:
        problem = _wrong_size(size, file, array) or _wrong_bytes(place, name, file, array)
    except StoreError as error:
        return str(error)
    except FileNotFoundError:
        problem = "is missing"
    return problem and f"'{place}/{name}' {problem}"


def _wrong_bytes(place: Place, name: str, file: File, array: Array) -> str:
    expected, checksum = header(array, file.rows), 0
    if place.read(name, 0, len(expected)) != expected:
        return "is damaged: its header is not what was written"
    for start in range(len(expected), file.nbytes, _PIECE):
        checksum = zlib.crc32(place.read(name, start, min(_PIECE, file.nbytes - start)), checksum)
    return "" if checksum == file.crc32 else "is damaged: its rows do not fit their checksum"


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f"\n… and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        told = "\n".join(problems[:_MOST_NAMED])
        raise StoreError(f"{told}{more}\nTo mend a damaged file, {_REMEDY}.")
