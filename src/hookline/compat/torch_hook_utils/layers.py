"""Layers made of functions: Lambda, Sample, and a Sequential that also accepts functions."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class Lambda(nn.Module):
    """A function as a layer, with some arguments bound. Bound positional arguments come before the layer's input.

    >>> import torch
    >>> Lambda(torch.clamp, min=0)
    Lambda(f=functools.partial(torch.clamp, min=0))
    """

    def __init__(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.f = functools.partial(f, *args, **kwargs) if args or kwargs else f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)

    def extra_repr(self) -> str:
        return "" if isinstance(self.f, nn.Module) else f"f={_name(self.f)}"  # A module is shown as a child.


class Sample(Lambda):
    """Draws a sample from its input, a distribution: `rsample()` if `differentiable`, else `sample()`."""

    def __init__(self, differentiable: bool = False) -> None:
        super().__init__(operator.methodcaller("rsample" if differentiable else "sample"))
        self.differentiable = differentiable

    def extra_repr(self) -> str:
        return f"differentiable={self.differentiable}"


class Sequential(nn.Sequential):
    """A chain of modules and functions, named by number, by keyword or by a mapping. The first one gets all arguments.

    >>> Sequential(twice=lambda x: 2 * x, same=nn.Identity())(3)
    6
    """

    def __init__(self, *modules: Any, **named: Any) -> None:
        if modules and named:
            raise AssertionError("can only use *args or **kwargs, not both")
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            named = dict(modules[0])
        elif modules:
            named = {str(number): module for number, module in enumerate(modules)}
        super().__init__(OrderedDict((name, _module(one)) for name, one in named.items()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self if len(self) else [nn.Identity()]
        output = first(*args, **kwargs)
        for module in others:
            output = module(output)
        return output


def _module(one: Any) -> Any:
    """Return a function as a layer, and anything else as it is. torch refuses objects that are not modules."""
    return Lambda(one) if callable(one) and not isinstance(one, nn.Module) else one


def _name(function: Any) -> str:
    """Return the name of a function as written in code."""
    if isinstance(function, functools.partial):
        bound = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"functools.partial({', '.join([_name(function.func), *bound])})"
    name = getattr(function, "__name__", None)
    if name is None:
        return repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else str(name)
