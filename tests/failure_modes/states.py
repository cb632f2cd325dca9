"""What a model is made of, to compare before and after."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that hooks could change on a model: its modules' attributes, hook tables, flags and numbers."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path} class"] = type(module)
        found[f"{path} order"] = list(vars(module))
        for key, value in vars(module).items():
            found[f"{path} {key}"] = _freeze(value)
    return found


def _freeze(value: Any) -> Any:
    """Return what compares equal exactly while `value` is the same object with the same content."""
    if isinstance(value, Tensor):
        return id(value), value._version, value.requires_grad, value.dtype, id(value.grad)
    if isinstance(value, dict):
        return id(value), [(key, _freeze(part)) for key, part in value.items()]
    return id(value)
