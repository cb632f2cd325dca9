"""Resume an interrupted harvest: what the manifest records, and what a later run compares with it.

A harvest is resumed only if model, data and options are the same. `specification` returns the record of them for the
manifest, `begin_or_resume` compares it, and `check_skipped_batches` compares the batches that a resumed run skips.
`compared_data` and `not_compared` say in words what is compared and what is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from hookline._harvest.data import SAMPLES_COMPARED, Source
from hookline._harvest.run_batch import RowOptions
from hookline._jobs.fingerprints import DIGESTS, function_text, names_written, reconcile
from hookline._store.disk_format import Manifest, committed, has_manifest, read_manifest, read_record
from hookline._store.storage import Storage
from hookline._store.writer import begin, begin_part
from hookline.errors import StoreError

_NEVER_COMPARED = (
    "files and environment variables that code reads",
    "compiled code",
    "hooks and patches on the model",
    "autocast and torch's other settings",
)


def specification(
    model: Mapping[str, Any], source: Source, sorts: bool, options: RowOptions, opaque: set[str]
) -> dict[str, Any]:
    """Return the specification that identifies a harvest (model, data, options), as plain JSON.

    Args:
        model: The digest of the model.
        opaque: A set, to which the names of classes are added whose contents can't be compared.
    """
    rows = options.rows if isinstance(options.rows, Mapping) else {"": options.rows}
    return {
        "digests": DIGESTS,
        "model": model,
        "data": source.known(),
        "batches": {"batch_size": source.batch_size, "sort_by_length": sorts},
        "rows": {str(name): function_text(rule, opaque) for name, rule in rows.items()},
        "dtype": None if options.dtype is None else str(options.dtype),
        "transform": function_text(options.transform, opaque),
        "columns": {name: function_text(column, opaque) for name, column in (options.columns or {}).items()},
        "call": function_text(options.call, opaque),
        "calls": options.calls,
        "loss": function_text(options.loss, opaque),
    }


def begin_or_resume(
    storage: Storage, manifest: Manifest, model: Mapping[str, Any], *, append: bool, unit: int | None
) -> tuple[Storage, Manifest]:
    """Begin a store or resume it; return the storage to write to (with `append`, that of a part) and its manifest.

    Args:
        model: The current digest of the model. Attributes that the model writes as it runs are not compared.
    """
    if has_manifest(storage):
        same = reconcile(model, read_manifest(storage).spec.get("model", {}))
        manifest = replace(manifest, spec={**manifest.spec, "model": same})
    part, found = begin_part(storage, manifest) if append else (storage, begin(storage, manifest))
    if unit is not None and found.plan["unit"] != unit:
        raise StoreError(f"{str(storage)!r} has units of {found.plan['unit']}, not {unit}; leave unit= out")
    return part, found


def check_skipped_batches(storage: Storage, manifest: Manifest, unit: int, digest: str) -> None:
    """Raise if the batches of a finished unit are not the ones that were harvested."""
    if unit in committed(storage) and read_record(storage, manifest, unit).inputs not in ("", digest):
        size = manifest.plan["unit"]
        raise StoreError(
            f"the data are not those of the store: batches {unit * size} to {(unit + 1) * size - 1} have changed since "
            "they were harvested; give the same data in the same order, or another path"
        )


def compared_data(spec: Mapping[str, Any], batch_size: int | None) -> str:
    """Describe how a resumed run compares the data."""
    known = spec["data"]
    if "batches" in known:
        return "every batch that is skipped"
    by = "fingerprint()" if "fingerprint" in known else f"{SAMPLES_COMPARED} samples spread over them"
    return f"their number, {by}, batches of {batch_size}"


def not_compared(spec: Mapping[str, Any], model: Mapping[str, Any], opaque: Set[str]) -> list[str]:
    """Describe what a resumed run does not compare."""
    some = ["the other samples"] if "digest" in spec["data"] else []
    wrote = ["what the forward writes: " + ", ".join(names)] if (names := names_written(model)) else []
    inside = ["the contents of " + ", ".join(sorted(opaque))] if opaque else []
    return [*some, *wrote, *inside, *_NEVER_COMPARED]
