"""Whether two values are the same: their structure, dtypes, shapes and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.values import children


def same(one: Any, other: Any) -> bool:
    """Return True if two values have the same structure and numbers. A NaN equals a NaN; devices may differ."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or _same_tensors(one.detach(), other.detach())
    if type(one) is not type(other):
        return False
    parts, others = children(one), children(other)
    if parts is None or others is None:
        return one is other or bool(one == other) or bool(one != one and other != other)
    return list(parts) == list(others) and all(same(part, others[key]) for key, part in parts.items())


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.is_nested and other.is_nested:
        return same(list(one.unbind()), list(other.unbind()))
    if (one.dtype, one.layout, one.shape) != (other.dtype, other.layout, other.shape):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    other = other.to(one.device)
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal |= one.isnan() & other.isnan()
    return bool(equal.all())
