"""States to compare before and after: the attributes of a model, the values and the bits of tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from hookline._hooks import lifecycle
from hookline._values.nested import leaves


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that hooks could change on a model: the attributes, hook tables and flags of its modules."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path} class"] = type(module)
        found[f"{path} order"] = list(vars(module))
        for key, value in vars(module).items():
            found[f"{path} {key}"] = _freeze(value)
    return found


def _freeze(value: Any) -> Any:
    """Return a key that stays equal as long as `value` is the same object with the same content."""
    if isinstance(value, Tensor):
        return id(value), value._version, value.requires_grad, value.dtype, id(value.grad)
    if isinstance(value, dict):
        return id(value), [(key, _freeze(part)) for key, part in value.items()]
    return id(value)


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of any dtype on any device, in the order of its elements."""
    memory = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone().untyped_storage()
    return ctypes.string_at(memory.data_ptr(), memory.nbytes()) if memory.nbytes() else b""


def same(one: Any, other: Any) -> bool:
    ones, others = leaves(one), leaves(other)
    return len(ones) == len(others) > 0 and all(torch.equal(*pair) for pair in zip(ones, others, strict=True))


def modes_left() -> int:
    """Return the number of active torch function modes."""
    return torch._C._len_torch_function_stack()


def hooks_left() -> list[str]:
    """Return the sites that are hooked at the moment, on any model."""
    return [str(tap.site) for one in lifecycle.lifecycles() for tap in one.taps if tap.shadow is not None]
