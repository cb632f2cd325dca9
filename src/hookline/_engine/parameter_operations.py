"""A parameter as an operand: a tensor subclass that notices when an operation takes it. Used by parameters.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookline._torch import make_subclass, outside_all_modes, unseen_by_subclasses
from hookline._values.containers import Exchange
from hookline._values.nested import leaves, map_tensors

_SPARE = outside_all_modes(lambda: torch.empty(0))
living: WeakValueDictionary[tuple[int, bool], Operand] = WeakValueDictionary()  # The operands that somebody holds.
changing = threading.RLock()  # Guards `living`.
in_use: set[int] = set()  # The ids of the taps at operations on parameters.
OnOperation = Callable[[Any, tuple[Any, ...], dict[str, Any], list["Role"]], Any]


class Role(NamedTuple):
    """The tensor that an operand stands in for, and the parameters that it comes from."""

    plain: Tensor
    origins: tuple[Any, ...]  # Which parameters it comes from: see parameters.py.
    on_operation: OnOperation


class Operand(Tensor):
    """An alias of a parameter, or of a view or cast of one. Operations that take it go through `on_operation`."""

    role: Role

    @property
    def plain(self) -> Tensor:
        """The tensor that it stands in for."""
        return self.role.plain

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the plain tensors that the operands among its arguments stand in for."""
        found: list[Role] = []
        plain_args = tuple([_plain(one, found) for one in args])
        plain_kwargs = {name: _plain(one, found) for name, one in (kwargs or {}).items()}
        if not found:  # The operand is in a container that `_plain` does not look into.
            with unseen_by_subclasses():
                return function(*args, **(kwargs or {}))
        return found[0].on_operation(function, plain_args, plain_kwargs, found)


def operand_of(tensor: Tensor, origins: tuple[Any, ...], on_operation: OnOperation) -> Tensor:
    """Return the operand of a tensor. As long as it is alive, it is always the same: models compare weights by `is`.

    A tensor without plain memory, such as a DTensor, is returned as it is.
    """
    key = id(tensor), torch.is_grad_enabled()
    with changing:
        made = living.get(key)
        if made is None or made.role.plain is not tensor:
            try:
                made = _make(tensor, origins, on_operation)
            except RuntimeError:  # A sparse tensor.
                return tensor
            if made is not None:
                living[key] = made
    return tensor if made is None else made


def _make(tensor: Tensor, origins: tuple[Any, ...], on_operation: OnOperation) -> Operand | None:
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return make_operand(tensor, origins, on_operation)
    if type(tensor).__name__ == "FakeTensor":
        return _fill(make_subclass(Operand, _SPARE), tensor, origins, on_operation)
    return None


def make_operand(tensor: Tensor, origins: tuple[Any, ...], on_operation: OnOperation) -> Operand:
    """Make an operand of a tensor."""
    return _fill(tensor.as_subclass(Operand), tensor, origins, on_operation)


def _fill(made: Operand, tensor: Tensor, origins: tuple[Any, ...], on_operation: OnOperation) -> Operand:
    made.role = Role(tensor, origins, on_operation)
    made._is_param = isinstance(tensor, torch.nn.Parameter)  # For isinstance(operand, nn.Parameter).
    return made


def as_operands(result: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Return the result of an operation with an operand for each tensor, also inside tuples and lists."""
    if isinstance(result, Tensor):
        return make(result)
    return type(result)([as_operands(one, make) for one in result]) if isinstance(result, (tuple, list)) else result


def plain(value: Any) -> Any:
    """Return a value with plain tensors in place of its operands, in the same containers."""
    if not any([isinstance(tensor, Operand) for tensor in leaves(value)]):
        return value
    return map_tensors(lambda tensor: _plain(tensor, []), value, rebuild=Exchange().rebuild)


def _plain(value: Any, found: list[Role]) -> Any:
    if isinstance(value, Operand):
        role = getattr(value, "role", None)
        if role is None:  # Another thread has just turned it into a plain tensor.
            return value
        found.append(role)
        return role.plain
    if type(value) in (tuple, list):
        return type(value)([_plain(one, found) for one in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_plain(one, found) for one in value))
    return value
