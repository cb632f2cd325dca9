"""How captured values are spread, at a glance: from a few of their elements, and without disturbing any."""

from __future__ import annotations

from hookline.copies import is_replayed_over
from hookline.errors import HooklineError
from hookline.records import EMPTY, Held, Record
from hookline.stats import Histogram, glimpse
from hookline.values import leaves


def spread(record: Record | None) -> Histogram | None:
    """Return how the latest value is spread; None if it is on disk, was overwritten, or can't be looked at."""
    if record is None:
        return None
    try:
        tensors = leaves(record.peek()) if record.value is not EMPTY and _is_right(record) else []
        if any(tensor.is_meta or is_replayed_over(tensor) for tensor in tensors):  # Of what is on disk, just the shape.
            return None
        return glimpse(tensors)
    except (HooklineError, RuntimeError, NotImplementedError):  # A picture is not worth an error.
        return None


def _is_right(record: Record) -> bool:
    """Whether the value is what passed; a HooklineError says no."""
    record.guard()
    value = record.value
    if isinstance(value, Held) and not any(tensor.is_meta for tensor in leaves(value.peek())):
        value.read(record.site)
    return True
