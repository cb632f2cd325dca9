"""The default device, and loops over container modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

Container = TypeVar("Container", nn.ModuleList, nn.Sequential, nn.ModuleDict)


def get_device() -> str:
    """Return the kind of device to compute on: "cuda", "mps" or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def iterate_module(module: nn.ModuleList | nn.Sequential | nn.ModuleDict) -> Iterable[tuple[Any, nn.Module]]:
    """Return the modules of a container with their indices, or those of a `ModuleDict` with their names."""
    if isinstance(module, nn.ModuleDict):
        return module.items()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return enumerate(module)
    raise TypeError(f"{type(module).__name__} is not a ModuleList, Sequential or ModuleDict")


def process_container_module(container: Container, process_func: Callable[[Any], Any]) -> Container:
    """Return a container of the same type with each module replaced by `process_func(module)`."""
    iterate_module(container)  # Raises if it is not a container.
    processed = OrderedDict((name, process_func(module)) for name, module in container._modules.items())
    if isinstance(container, nn.ModuleList):
        return type(container)(processed.values())
    return type(container)(processed)
