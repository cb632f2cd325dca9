"""Begin a store, append to it, write its units, and end it.

A unit is stored as a whole or not at all, even if several processes write it. Data is written first and the record
last: a unit is done if and only if its record exists. Attempts at one unit share no files, so a late writer can't touch
a finished unit. `remove_leftovers` removes the files of killed writers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from hookline._jobs.compare_specs import difference_of_specs, difference_of_versions
from hookline._store.disk_format import (
    DATA,
    END,
    MANIFEST,
    MORE,
    POSITIONS,
    UNITS,
    Array,
    File,
    Manifest,
    Shard,
    UnitRecord,
    committed,
    data_name,
    end_to_json,
    has_manifest,
    parts,
    positions_name,
    read_manifest,
    unit_count,
    unit_name,
)
from hookline._store.storage import Storage
from hookline.errors import StoreError, did_you_mean

_FILE = re.compile(r"([0-9]{8,15})-([0-9a-f]{16})(-[0-9]+)?\.safetensors")
_SYNCS = 4  # How many files are flushed to disk at the same time.


def begin(storage: Storage, manifest: Manifest) -> Manifest:
    """Create harvest.json, or return the existing one; refuse a store of another harvest."""
    if not has_manifest(storage):
        storage.create(MANIFEST, manifest.to_json())
    found = read_manifest(storage)
    if found.hash != manifest.hash:
        remedy = "give another path" if committed(storage) else "nothing is in it yet: remove it, or give another path"
        raise StoreError(f"{str(storage)!r} holds another harvest: {_difference(found, manifest)}; {remedy}")
    return found


def begin_part(storage: Storage, manifest: Manifest) -> tuple[Storage, Manifest]:
    """Begin to append a part to a store, or resume a part; return its storage and its manifest.

    If there is no store, this begins one. The earlier parts must be complete, and may differ only in their data.
    """
    if not has_manifest(storage):
        storage.create(MANIFEST, manifest.to_json())
    first = read_manifest(storage)
    for part in (storage, *parts(storage)):
        found = read_manifest(part)
        if found.hash == manifest.hash:
            return part, found
        _check_complete(part, found)
    one, other = (replace(each, spec={**each.spec, "data": None}) for each in (first, manifest))
    if one.hash != other.hash:
        raise StoreError(f"{str(storage)!r} can't be appended to: {_difference(one, other)}; give another path")
    number = len(parts(storage)) + 1
    storage.child(f"{MORE}/{number:04d}").create(MANIFEST, manifest.to_json())
    return begin_part(storage, manifest)  # Looks again: another process may have created this part first.


class Unit:
    """One attempt at one unit. At the end of a `with` block, it is discarded unless it was committed."""

    def __init__(self, storage: Storage, manifest: Manifest, unit: int) -> None:
        self.unit = unit
        self.attempt = os.urandom(8).hex()
        self._storage = storage
        self._arrays = manifest.arrays
        self._shards: dict[int, Shard] = {}
        self._positions: dict[int, Shard] = {}
        self._is_over = self._is_kept = False

    def append(self, array: int, rows: Tensor) -> None:
        """Write rows of an array to disk. Only one thread at a time may write to an array."""
        expected = self._arrays[array]
        if rows.dtype != expected.dtype or rows.shape[1:] != expected.shape or not rows.dim() or not rows.is_cpu:
            found = f"{rows.dtype} of shape {tuple(rows.shape)} on {rows.device}"
            raise StoreError(f"rows of {expected} were expected, on the CPU, but came as {found}")
        self._write(self._shards, array, data_name(array, self.unit, self.attempt), expected, rows)

    def positions(self, group: int, positions: Tensor) -> None:
        """Write the positions of rows in their samples, for a group of arrays. Not needed if they are 0, 1, 2, ...."""
        name = positions_name(self.unit, self.attempt, group)
        self._write(self._positions, group, name, POSITIONS, positions.to("cpu", torch.int64))

    def commit(
        self,
        *,
        first: int,
        samples: int,
        lengths: Sequence[int | Sequence[int]],
        order: Sequence[int] | None = None,
        skipped: Mapping[int, str] | None = None,
        inputs: str = "",
        groups: Sequence[int] | None = None,
    ) -> bool:
        """Finish the files, wait for the disk, then create the record; return False if another attempt was faster.

        Args:
            samples: How many sample numbers the unit spans, including those in `skipped`.
            lengths: For each array, the number of rows of each stored sample in stored order, or one number for all.
            order: The stored samples as offsets from `first`, if they are not ascending.
            groups: For each array, the group of its positions. Without it, arrays with equal lengths are one group,
                and groups are numbered in order of appearance.
        """
        try:
            different, uses = _distinct_lengths(lengths)
            own = [group if group in self._positions else None for group in groups or uses]
            for array in range(len(self._arrays)):
                if array not in self._shards:
                    self.append(array, torch.empty(0, *self._arrays[array].shape, dtype=self._arrays[array].dtype))
            files, positions = self._finish()
            record = UnitRecord(
                self.unit, self.attempt, first, samples, tuple(files), different, tuple(uses),
                None if order is None else tuple(order), dict(skipped or {}), inputs, positions, tuple(own),
            )  # fmt: skip
            self._check(record)
        except BaseException:
            self.discard()
            raise
        return self._publish(record.to_json())

    def discard(self) -> None:
        """Remove the files, unless the unit was committed. May be called again."""
        self._is_over = True
        for shard in self._all():
            shard.close() if self._is_kept else shard.discard()

    def __enter__(self) -> Unit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def _all(self) -> list[Shard]:
        return [*self._shards.values(), *self._positions.values()]

    def _write(self, shards: dict[int, Shard], key: int, name: str, array: Array, rows: Tensor) -> None:
        try:
            if key not in shards:
                shards[key] = Shard(self._storage, name, array)
            if self._is_over:  # Another thread may have discarded the unit while the file was created.
                shards[key].discard()
                raise StoreError(f"unit {self.unit} takes no more rows: it was committed or discarded")
            shards[key].append(rows)
        except BaseException:
            self.discard()
            raise

    def _finish(self) -> tuple[list[File], dict[int, File]]:
        """Finish all files, several at once, since most of the time is spent waiting for the disk."""
        ordered = [self._shards[array] for array in range(len(self._arrays))] + list(self._positions.values())
        if len(ordered) == 1:
            files = [ordered[0].finish()]
        else:
            with ThreadPoolExecutor(_SYNCS) as pool:
                files = list(pool.map(Shard.finish, ordered))
        count = len(self._arrays)
        return files[:count], dict(zip(self._positions, files[count:], strict=True))

    def _publish(self, record: bytes) -> bool:
        """Create the record; return False if another attempt was faster.

        After an error, the files are kept if the record may exist and list them.
        """
        self._is_kept = True
        try:
            # `discard` on another thread sets `_is_over`, then reads `_is_kept`, so at least one of the two sees the
            # other. If both do, files may stay without a record: `remove_leftovers` removes them.
            if self._is_over:
                raise StoreError(f"unit {self.unit} can't be committed: it was discarded")
            self._is_kept = self._storage.create(unit_name(self.unit), record)
        except BaseException as error:
            found = self._is_committed()
            self._is_kept = found is not False
            # Over a network, the record may have been created, and only the answer lost.
            if not (found and isinstance(error, StoreError)):
                raise
        finally:
            self.discard()
        return self._is_kept

    def _is_committed(self) -> bool | None:
        """Return True if the unit's record is from this attempt, None if it can't be read."""
        try:
            return self.attempt.encode() in self._storage.read(unit_name(self.unit))
        except FileNotFoundError:
            return False
        except OSError:
            return None

    def _check(self, record: UnitRecord) -> None:
        try:
            record.check(self._arrays)
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"unit {self.unit} can't be committed: {error}") from error


def end(storage: Storage, units: int) -> bool:
    """Record the number of units, if it was unknown at the beginning; return False if it was recorded already."""
    created = storage.create(END, end_to_json(units))
    before = unit_count(storage, read_manifest(storage))
    if before != units:
        raise StoreError(
            f"{str(storage)!r} ended after {before} units in another run, and after {units} now: is it the same data?"
        )
    return created


def remove_leftovers(storage: Storage) -> list[str]:
    """Remove data files that no record names and no running writer holds; return their names."""
    removed = [name for folder in ("", UNITS) for name in storage.remove_temporary(folder)]
    for folder in (f"{DATA}/{name}" for name in storage.names(DATA)):
        removed += storage.remove_temporary(folder)
        for found in _unclaimed_files(storage, folder):
            if storage.remove_dead(f"{folder}/{found[0]}", partial(_is_of_record, storage, found)):
                removed.append(f"{folder}/{found[0]}")
    for part in parts(storage):
        removed += [f"{part}/{name}" for name in remove_leftovers(part)]
    return removed


def _check_complete(storage: Storage, manifest: Manifest) -> None:
    units, done = unit_count(storage, manifest), committed(storage)
    if units is None or len(done) < units:
        found = f"{len(done)} of {'an unknown number of' if units is None else units} units"
        raise StoreError(f"{str(storage)!r} has {found}; finish it before appending: run its harvest again")


def _difference(found: Manifest, wanted: Manifest) -> str:
    """Return a description of the first difference between two manifests."""
    return (
        difference_of_versions(found.spec, wanted.spec)
        or _difference_of_arrays(found, wanted)
        or difference_of_specs(found.spec, wanted.spec)
    )


def _difference_of_arrays(found: Manifest, wanted: Manifest) -> str:
    ours, theirs = {one.name: one for one in wanted.arrays}, {one.name: one for one in found.arrays}
    for name in ours.keys() - theirs.keys():
        return f"it has no {name!r}, which this run is to keep{did_you_mean(name, theirs)}"
    for name in theirs.keys() - ours.keys():
        return f"it has {name!r}, which this run does not keep"
    for name, array in ours.items():
        if theirs[name] != array:
            return f"it has {theirs[name]}, this run {array}"
    return "its arrays come in another order" if found.arrays != wanted.arrays else ""


def _unclaimed_files(storage: Storage, folder: str) -> list[re.Match[str]]:
    """Return the files of units that are not done or have several attempts. Checking all files would take long."""
    files = [found for name in storage.names(folder) if (found := _FILE.fullmatch(name))]
    done, attempts = committed(storage), Counter((found[1], found[3]) for found in files)
    return [found for found in files if int(found[1]) not in done or attempts[found[1], found[3]] > 1]


def _is_of_record(storage: Storage, found: re.Match[str]) -> bool:
    """Return True if a data file belongs to a finished unit, or if the record of its unit is damaged."""
    try:
        data = storage.read(unit_name(int(found[1])))
    except FileNotFoundError:
        return False
    return found[2].encode() in data or b'"attempt"' not in data


def _distinct_lengths(lengths: Sequence[int | Sequence[int]]) -> tuple[tuple[int | tuple[int, ...], ...], list[int]]:
    """Return the distinct lengths, and for each array the index of its own."""
    numbers: dict[int | tuple[int, ...], int] = {}
    seen: dict[int, int] = {}  # By id, since usually all arrays share one list.
    uses = []
    for one in lengths:
        if id(one) not in seen:
            rows = one if isinstance(one, int) else tuple(map(int, one))
            if isinstance(rows, tuple) and rows and len(set(rows)) == 1:
                rows = rows[0]
            seen[id(one)] = numbers.setdefault(rows, len(numbers))
        uses.append(seen[id(one)])
    return tuple(numbers), uses
