"""Say in words how the specification of a job differs from the one that began in the same place.

A specification is plain JSON: the digests of the model and of functions, and the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_DIGESTS = ("digest", "fingerprint", "first", "weights")  # Compared last: a message about them says least.
_WORDS = {
    "model.weights": "its model has other weights or modules",
    **{
        one: f"its {one} differs, or has other values (if it changes as it runs, give it a method fingerprint())"
        for one in ("transform", "call", "loss", "metric", "edit")
    },
    "values": "the values that it puts in differ",
    "against": "the values that it puts in differ (against=)",
    "inputs": "its inputs differ (run=)",
    **{f"data.{one}": "its data differ" for one in ("digest", "fingerprint", "first")},
}


def difference_of_versions(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return why two specifications can't be compared, or ""."""
    ways = found.get("digests"), wanted.get("digests")
    if ways[0] == ways[1]:
        return ""
    return ("another version of hookline or of Python began it, with other digests of models and functions "
            f"({ways[0] or 1}, those of this run {ways[1]}): only that version can go on with it")  # fmt: skip


def difference_of_specs(found: object, wanted: object, path: Iterable[str] = ()) -> str:
    """Return a description of the first difference between two specifications, or ""."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}, key=lambda key: (key in _DIGESTS, str(key))):
            difference = difference_of_specs(found.get(key), wanted.get(key), (*path, str(key)))
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
            f"its batches have {found} samples (batch_size={found} continues it), those of this run have {listed}; "
            "values may depend on which samples share a batch: a mean loss, batch statistics, rounding"
        )
    if name.startswith("model.code."):
        return f"the code of its {name.removeprefix('model.code.')} differs ({name} {both})"
    if name.startswith(("model.attributes.", "model.variables.")):
        return f"its {name} is {both} (give a module that changes as it runs a method fingerprint())"
    if name in _WORDS:
        return f"{_WORDS[name]} ({name} {both})"
    return f"its {name} is {both}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
