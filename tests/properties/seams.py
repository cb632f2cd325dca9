"""The functions through which the random models do everything that a hook may see, so that the oracle can intercept it.

Without an oracle, each just calls the module, runs the torch function, calls the method or reads the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

oracle: Any = None  # Set while an oracle runs its model.


def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module."""
    return child(*args, **kwargs) if oracle is None else oracle.call(child, child, args, kwargs)


def call_forward(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward."""
    return child.forward(*args, **kwargs) if oracle is None else oracle.call(child, child.forward, args, kwargs)


def function(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a torch function, a tensor method or an operator, which hookline knows by this name."""
    return run(*args, **kwargs) if oracle is None else oracle.function(name, run, args, kwargs)


def method(owner: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a module, or a function that is stored there under that name."""
    return getattr(owner, name)(*args, **kwargs) if oracle is None else oracle.method(owner, name, args, kwargs)


def read(owner: nn.Module, name: str) -> Tensor:
    """Read a parameter or a buffer."""
    return getattr(owner, name) if oracle is None else oracle.read(owner, name)


def segment(function: Callable[..., Any], x: Tensor, reentrant: bool) -> Any:
    """Run a part of a forward with activation checkpointing if a gradient is needed; the oracle runs it without."""
    if oracle is not None:
        return oracle.segment(function, x, reentrant)
    return checkpoint(function, x, use_reentrant=reentrant) if x.requires_grad else function(x)
