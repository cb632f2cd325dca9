"""Writing a store: units, each of which is there wholly or not at all, whoever writes it and however often.

Data first, the record last: a unit is done if and only if its record exists. Attempts at one unit share no files, so
that one who comes too late can't touch what is done.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from hookline._store.manifest import (
    DATA,
    END,
    MANIFEST,
    MORE,
    UNITS,
    Array,
    File,
    Manifest,
    Record,
    data_name,
    end_from_json,
    end_to_json,
    positions_name,
    unit_name,
    unit_of,
)
from hookline._store.places import Place
from hookline._store.shards import POSITIONS, Shard
from hookline.errors import StoreError, did_you_mean

_PART = re.compile(r"[0-9]{4,9}")
_FILE = re.compile(r"([0-9]{8,15})-([0-9a-f]{16})(-[0-9]+)?\.safetensors")

_SYNCS = 4  # Files that wait for the disk at once.


class Unit:
    """One attempt at one unit. As a context manager, it is given up at the end of the block unless it was committed."""

    def __init__(self, place: Place, manifest: Manifest, unit: int) -> None:
        self.unit = unit
        self.attempt = os.urandom(8).hex()
        self._place = place
        self._arrays = manifest.arrays
        self._shards: dict[int, Shard] = {}
        self._positions: dict[int, Shard] = {}
        self._is_over = self._is_kept = False

    def append(self, array: int, rows: Tensor) -> None:
        """Write rows of an array straight to disk. Each array is fed by one thread at a time."""
        told = self._arrays[array]
        if rows.dtype != told.dtype or rows.shape[1:] != told.shape or not rows.dim() or not rows.is_cpu:
            found = f"{rows.dtype} of shape {tuple(rows.shape)} on {rows.device}"
            raise StoreError(f"rows of {told} were expected, on the CPU, but came as {found}")
        self._write(self._shards, array, data_name(array, self.unit, self.attempt), told, rows)

    def positions(self, group: int, positions: Tensor) -> None:
        """Write where in their samples the rows of a group of arrays were, where that is not 0, 1, 2, ...."""
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
        """Finish the files, wait for the disk, then create the record; False if another attempt was first.

        Args:
            samples: How many sample numbers the unit spans, those in `skipped` included.
            lengths: For each array the rows of each stored sample in stored order, or how many rows each one has.
            order: The stored samples as offsets from `first`, if they are not ascending.
            groups: For each array the group of its positions. Without it, arrays with equal lengths are one group,
                and groups are numbered as they come.
        """
        try:
            different, uses = _distinct(lengths)
            own = [group if group in self._positions else None for group in groups or uses]
            for array in range(len(self._arrays)):
                if array not in self._shards:
                    self.append(array, torch.empty(0, *self._arrays[array].shape, dtype=self._arrays[array].dtype))
            files, positions = self._finish()
            record = Record(
                self.unit, self.attempt, first, samples, tuple(files), different, tuple(uses),
                None if order is None else tuple(order), dict(skipped or {}), inputs, positions, tuple(own),
            )  # fmt: skip
            self._check(record)
        except BaseException:
            self.discard()
            raise
        return self._publish(record.to_json())

    def discard(self) -> None:
        """Remove what was written; nothing happens after a commit, or the second time."""
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
                shards[key] = Shard(self._place, name, array)
            if self._is_over:  # Asked once the file is there: it may have been made while another thread gave up.
                shards[key].discard()
                raise StoreError(f"unit {self.unit} takes no more rows: it was committed or given up")
            shards[key].append(rows)
        except BaseException:
            self.discard()
            raise

    def _finish(self) -> tuple[list[File], dict[int, File]]:
        """Finish every file, several at once: most of that is waiting for the disk."""
        ordered = [self._shards[array] for array in range(len(self._arrays))] + list(self._positions.values())
        if len(ordered) == 1:
            files = [ordered[0].finish()]
        else:
            with ThreadPoolExecutor(_SYNCS) as pool:
                files = list(pool.map(Shard.finish, ordered))
        count = len(self._arrays)
        return files[:count], dict(zip(self._positions, files[count:], strict=True))

    def _publish(self, record: bytes) -> bool:
        """Create the record. Whatever interrupts that, the files of a record that may be there stay."""
        self._is_kept = True
        try:
            self._is_kept = self._place.create(unit_name(self.unit), record)
        except BaseException as error:
            found = self._is_committed()
            self._is_kept = found is not False
            if not (found and isinstance(error, StoreError)):  # Over a network only the answer may be lost.
                raise
        finally:
            self.discard()
        return self._is_kept

    def _is_committed(self) -> bool | None:
        """Whether the record is of this attempt; None where nobody can tell."""
        try:
            return self.attempt.encode() in self._place.read(unit_name(self.unit))
        except FileNotFoundError:
            return False
        except OSError:
            return None

    def _check(self, record: Record) -> None:
        try:
            record.check(self._arrays)
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"unit {self.unit} can't be committed: {error}") from error


def begin(place: Place, manifest: Manifest) -> Manifest:
    """Create harvest.json, or return the one that is there; refuse a store of something else."""
    if MANIFEST not in place.names(""):
        place.create(MANIFEST, manifest.to_json())
    found = read_manifest(place)
    if found.hash != manifest.hash:
        remedy = "give another path" if committed(place) else "nothing is in it yet: remove it, or give another path"
        raise StoreError(f"{str(place)!r} is of another harvest: {_difference(found, manifest)}; {remedy}")
    return found


def begin_part(place: Place, manifest: Manifest) -> tuple[Place, Manifest]:
    """Begin to append to a store, or go on with a part that was begun: return its place and its manifest.

    Where there is no store yet, this begins one. The parts before it must be complete, and differ in their data only.
    """
    if MANIFEST not in place.names(""):
        place.create(MANIFEST, manifest.to_json())
    first = read_manifest(place)
    for part in (place, *parts(place)):
        found = read_manifest(part)
        if found.hash == manifest.hash:
            return part, found
        _check_complete(part, found)
    one, other = (replace(told, spec={**told.spec, "data": None}) for told in (first, manifest))  # That may differ.
    if one.hash != other.hash:
        raise StoreError(f"{str(place)!r} can't be appended to: {_difference(one, other)}; give another path")
    number = len(parts(place)) + 1
    place.child(f"{MORE}/{number:04d}").create(MANIFEST, manifest.to_json())
    return begin_part(place, manifest)  # Whoever was first: if it is another, its part comes before this one.


def end(place: Place, units: int) -> bool:
    """Say that the data ended after this many units, where that was not known before; False if it was said already."""
    created = place.create(END, end_to_json(units))
    told = how_many(place, read_manifest(place))
    if told != units:
        raise StoreError(f"{str(place)!r} ended after {told} units before, and now after {units}: is it the same data?")
    return created


def how_many(place: Place, manifest: Manifest) -> int | None:
    """Return how many units the store has when it is complete; None if the data have not ended yet."""
    if manifest.units is not None:
        return manifest.units
    try:
        return end_from_json(place.read(END), _named(place, END))
    except FileNotFoundError:
        return None


def committed(place: Place) -> set[int]:
    """Return the units that are done."""
    return {unit for name in place.names(UNITS) if (unit := unit_of(name)) is not None}


def read_record(place: Place, manifest: Manifest, unit: int) -> Record:
    """Return the record of a unit that is done."""
    name = unit_name(unit)
    return Record.from_json(place.read(name), _named(place, name), unit, manifest.arrays)


def parts(place: Place) -> list[Place]:
    """Return the places of the appended parts, in order."""
    names = [name for name in place.names(MORE) if _PART.fullmatch(name)]
    children = [place.child(f"{MORE}/{name}") for name in sorted(names, key=int)]
    inside = {child: child.names("") for child in children}
    for child, found in inside.items():
        if MANIFEST not in found and UNITS in found:
            raise StoreError(f"{_named(child, MANIFEST)} is missing; restore it, or remove its folder")
    return [child for child, found in inside.items() if MANIFEST in found]


def sweep(place: Place) -> list[str]:
    """Remove data files that no record names and no living writer holds; return their names."""
    removed = [name for folder in ("", UNITS) for name in place.remove_temporary(folder)]
    for folder in (f"{DATA}/{name}" for name in place.names(DATA)):
        removed += place.remove_temporary(folder)
        for found in _doubtful(place, folder):
            if place.remove_dead(f"{folder}/{found[0]}", partial(_is_of_record, place, found)):
                removed.append(f"{folder}/{found[0]}")
    for part in parts(place):
        removed += [f"{part}/{name}" for name in sweep(part)]
    return removed


def read_manifest(place: Place) -> Manifest:
    """Return the manifest of a store."""
    try:
        data = place.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        is_file = os.path.isfile(str(place))
        remedy = "a file that Cache.save wrote is read by hl.Cache.load" if is_file else "harvest to it first"
        raise StoreError(f"{str(place)!r} is not a store: it has no {MANIFEST}; {remedy}") from error
    return Manifest.from_json(data, _named(place, MANIFEST))


def _named(place: Place, name: str) -> str:
    return repr(f"{place}/{name}")


def _doubtful(place: Place, folder: str) -> list[re.Match[str]]:
    """Return the files of units that are not done, or that have several: to look into all would take long."""
    files = [found for name in place.names(folder) if (found := _FILE.fullmatch(name))]
    done, attempts = committed(place), Counter((found[1], found[3]) for found in files)
    return [found for found in files if int(found[1]) not in done or attempts[found[1], found[3]] > 1]


def _is_of_record(place: Place, found: re.Match[str]) -> bool:
    """Whether a data file belongs to a finished unit. A record that can't be read keeps its unit's files."""
    try:
        data = place.read(unit_name(int(found[1])))
    except FileNotFoundError:
        return False
    return found[2].encode() in data or b'"attempt"' not in data


def _check_complete(place: Place, manifest: Manifest) -> None:
    units, done = how_many(place, manifest), committed(place)
    if units is None or len(done) < units:
        found = f"{len(done)} of {'an unknown number of' if units is None else units} units"
        raise StoreError(f"{str(place)!r} has {found}; finish it before appending: run its harvest again")


def _distinct(lengths: Sequence[int | Sequence[int]]) -> tuple[tuple[int | tuple[int, ...], ...], list[int]]:
    """Return the different lengths, and for each array which of them."""
    numbers: dict[int | tuple[int, ...], int] = {}
    seen: dict[int, int] = {}  # By identity, since mostly all arrays are given one and the same list.
    uses = []
    for one in lengths:
        if id(one) not in seen:
            told = one if isinstance(one, int) else tuple(map(int, one))
            if isinstance(told, tuple) and told and len(set(told)) == 1:
                told = told[0]
            seen[id(one)] = numbers.setdefault(told, len(numbers))
        uses.append(seen[id(one)])
    return tuple(numbers), uses


def _difference(found: Manifest, wanted: Manifest) -> str:
    """Say how two manifests differ, in the words of the first difference."""
    ways = found.spec.get("digests"), wanted.spec.get("digests")
    if ways[0] != ways[1]:  # Then other digests say nothing.
        return ("another version of hookline or of Python began it, and knows models and functions by other digests "
                f"({ways[0] or 1}, those of this run {ways[1]}): only that version goes on with it")  # fmt: skip
    return _difference_of_arrays(found, wanted) or _difference_of_specs(found.spec, wanted.spec)


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


def _difference_of_specs(found: object, wanted: object, path: Iterable[str] = ()) -> str:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}, key=lambda key: (key in _DIGESTS, str(key))):
            told = _difference_of_specs(found.get(key), wanted.get(key), (*path, str(key)))
            if told:
                return told
        return ""
    listed = list(wanted) if isinstance(wanted, tuple) else wanted
    if found == listed:
        return ""
    name = ".".join(path)
    both = f"{_short(found)}, that of this run {_short(listed)}"
    if name == "batches.batch_size" and isinstance(found, int) and isinstance(listed, int):
        return (
            f"its batches are of {found} samples (batch_size={found} goes on with it), those of this run of {listed}; "
            "what is kept may depend on who shares a batch: a mean loss, batch statistics, rounding"
        )
    if name.startswith("model.code."):
        return f"the code of its {name.removeprefix('model.code.')} is another ({name} {both})"
    if name.startswith(("model.attributes.", "model.variables.")):
        return f"its {name} is {both} (a module that changes as it runs is known by a method fingerprint())"
    if name in _WORDS:
        return f"{_WORDS[name]} ({name} {both})"
    return f"its {name} is {both}"


_DIGESTS = ("digest", "fingerprint", "first", "weights")  # What says least, last.
_WORDS = {
    "model.weights": "its model has other weights or modules",
    **{
        one: f"its {one} is another, or has other values (if it changes as it runs, give it a method fingerprint())"
        for one in ("transform", "call", "loss")
    },
    **{f"data.{one}": "its data are others" for one in ("digest", "fingerprint", "first")},
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
