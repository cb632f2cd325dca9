"""Begin a store, append to it and end it; refuse to go on with the store of another harvest, and say how it differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hookline._store.manifest import (
    END,
    MANIFEST,
    MORE,
    Manifest,
    committed,
    end_to_json,
    how_many,
    parts,
    read_manifest,
)
from hookline._store.storage import Storage
from hookline.errors import StoreError, did_you_mean

_DIGESTS = ("digest", "fingerprint", "first", "weights")  # What says least, last.
_WORDS = {
    "model.weights": "its model has other weights or modules",
    **{
        one: f"its {one} is another, or has other values (if it changes as it runs, give it a method fingerprint())"
        for one in ("transform", "call", "loss")
    },
    **{f"data.{one}": "its data are others" for one in ("digest", "fingerprint", "first")},
}


def begin(storage: Storage, manifest: Manifest) -> Manifest:
    """Create harvest.json, or return the one that is there; refuse a store of something else."""
    if MANIFEST not in storage.names(""):
        storage.create(MANIFEST, manifest.to_json())
    found = read_manifest(storage)
    if found.hash != manifest.hash:
        remedy = "give another path" if committed(storage) else "nothing is in it yet: remove it, or give another path"
        raise StoreError(f"{str(storage)!r} is of another harvest: {_difference(found, manifest)}; {remedy}")
    return found


def begin_part(storage: Storage, manifest: Manifest) -> tuple[Storage, Manifest]:
    """Begin to append to a store, or go on with a part that was begun: return its storage and its manifest.

    Where there is no store yet, this begins one. The parts before it must be complete, and differ in their data only.
    """
    if MANIFEST not in storage.names(""):
        storage.create(MANIFEST, manifest.to_json())
    first = read_manifest(storage)
    for part in (storage, *parts(storage)):
        found = read_manifest(part)
        if found.hash == manifest.hash:
            return part, found
        _check_complete(part, found)
    one, other = (replace(each, spec={**each.spec, "data": None}) for each in (first, manifest))  # Data may differ.
    if one.hash != other.hash:
        raise StoreError(f"{str(storage)!r} can't be appended to: {_difference(one, other)}; give another path")
    number = len(parts(storage)) + 1
    storage.child(f"{MORE}/{number:04d}").create(MANIFEST, manifest.to_json())
    return begin_part(storage, manifest)  # If another process was first, its part comes before this one.


def end(storage: Storage, units: int) -> bool:
    """Say that the data ended after this many units, where that was not known before; False if it was said already."""
    created = storage.create(END, end_to_json(units))
    before = how_many(storage, read_manifest(storage))
    if before != units:
        raise StoreError(
            f"{str(storage)!r} ended after {before} units before, and now after {units}: is it the same data?"
        )
    return created


def _check_complete(storage: Storage, manifest: Manifest) -> None:
    units, done = how_many(storage, manifest), committed(storage)
    if units is None or len(done) < units:
        found = f"{len(done)} of {'an unknown number of' if units is None else units} units"
        raise StoreError(f"{str(storage)!r} has {found}; finish it before appending: run its harvest again")


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
            difference = _difference_of_specs(found.get(key), wanted.get(key), (*path, str(key)))
            if difference:
                return difference
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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
