"""Short texts by which data are known again when a run goes on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookline.harvesting.checksums import bytes_of
from hookline.values import children

_ROUNDS = 20  # Levels of nested data.


def digest(value: Any, before: str = "") -> str:
    """Return a text that another value would not have; with what came before it, of the whole series.

    >>> import torch
    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    found = hashlib.blake2b(before.encode(), digest_size=16)
    for piece in _pieces(value, 0):
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Return the bytes that make up a nested value."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {'nested' if value.is_nested else tuple(value.shape)}".encode()
        yield bytes_of(value)
        return
    parts = children(value) if depth < _ROUNDS else None
    if parts is not None:
        yield f"{len(parts)} parts".encode()
        for key, part in parts.items():
            yield repr(key).encode()
            yield from _pieces(part, depth + 1)
        return
    if isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        yield repr(value).encode()
        return
    array = getattr(value, "tobytes", None)  # numpy arrays and images.
    yield f"{type(value).__qualname__} {getattr(value, 'shape', getattr(value, 'size', ''))}".encode()
    if callable(array):
        yield array()
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif " object at 0x" not in (text := repr(value)):
        yield re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode()
    elif depth < _ROUNDS:
        yield from _pieces(vars(value) if hasattr(value, "__dict__") else None, depth + 1)
