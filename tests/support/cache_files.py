"""Files of caches: compare values bit for bit, and list the files that a writer left behind."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import torch

from hookline._cache import file as files
from tests.support.states import bits

TEMPORARY = files._TEMPORARY


def same(left: Any, right: Any) -> bool:
    """Return True if two values have the same types and the same bits."""
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def leftovers(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if name.endswith(TEMPORARY)]
