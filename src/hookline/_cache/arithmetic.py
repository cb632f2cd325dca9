"""Compute with captured values: an operation of a value with a number, or of two values part by part."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from hookline._values.fit import same_values
from hookline._values.nested import ATOMS, children, describe, rebuild
from hookline.errors import EditError

Operation = Callable[[Any, Any], Any]


def is_number(value: Any) -> bool:
    """Return True for a number, but not for a boolean."""
    return isinstance(value, Number) and not isinstance(value, bool)


def divide_into(one: Any, other: Any) -> Any:
    """Return `other / one`, for a cache on the right side of the operator."""
    return other / one


def _computed(operation: Operation, one: Any, other: Any, site: str) -> Any:
    try:
        return operation(one, other)
    except ZeroDivisionError:
        if operation is divide_into:
            raise EditError(f"{site!r} has {describe(one)}, and {other!r} can't be divided by it") from None
        raise EditError(f"{site!r} has {describe(one)}, which would be divided by 0") from None


def scaled(operation: Operation, value: Any, number: Any, site: str) -> Any:
    """Return a value with every tensor and number in it multiplied or divided. Text, booleans and None stay."""
    if is_number(value) or (isinstance(value, Tensor) and value.dtype is not torch.bool):
        return _computed(operation, value, number, site)
    if isinstance(value, ATOMS):
        return value
    parts = children(value)
    if parts is None:
        raise EditError(f"{site!r} is {describe(value)}, which can't be multiplied; select(...) the other sites")
    return rebuild(value, {key: scaled(operation, part, number, site) for key, part in parts.items()})


def combined(operation: Operation, one: Any, other: Any, site: str) -> Any:
    """Combine two values: tensors and numbers by the operation. All other parts must be equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or torch.bool in (one.dtype, other.dtype):
            raise _unlike(one, other, site)
        return operation(one, other)
    if is_number(one) and is_number(other):
        return _computed(operation, one, other, site)
    parts, others = children(one), children(other)
    if parts is None and others is None and not isinstance(one, Tensor) and _is_same(one, other):
        return one
    if parts is None or others is None or list(parts) != list(others):
        raise _unlike(one, other, site)
    return rebuild(one, {key: combined(operation, part, others[key], site) for key, part in parts.items()})


def _is_same(one: Any, other: Any) -> bool:
    try:
        return same_values(one, other)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # For example arrays.
        return False


def _unlike(one: Any, other: Any, site: str) -> EditError:
    given, others = (repr(value[:40]) if isinstance(value, str) else describe(value) for value in (one, other))
    kind = "; only tensors of numbers and numbers add, subtract, multiply and divide; choose them with .select(...)"
    return EditError(f"{site!r} is {given} in one cache and {others} in the other{kind if given == others else ''}")
