"""States to compare before and after: of a model, of the bits of tensors, and of hookline in this process.

This is the one helper of the tests that looks inside the process: at what hookline may leave behind where no model
shows it.
"""

from __future__ import annotations

import copyreg
import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _open_blocks
from hookline._engine import attach, parameter_operations
from hookline._hooks import lifecycle
from hookline._kernel import leaves


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


def left_in_process() -> list[str]:
    """Return what is left of blocks that have ended, apart from models, in words."""
    found = ["a block is open"] if _open_blocks.not_left() else []
    found += ["a mode is on"] if modes_left() else []
    return found + (["operands of parameters are in use"] if parameter_operations.in_use else [])


def classes_left() -> list[str]:
    """Return the classes of modules that `copy` still copies in hookline's way."""
    return [kind.__name__ for kind, reduce in copyreg.dispatch_table.items() if reduce is attach._reduce]


def take_off_everything() -> None:
    """Take every hook off and close every block, so that one failure stays one."""
    for one in lifecycle.lifecycles():
        one.detach_all()
    _open_blocks.open_blocks.set(frozenset())
