"""The arguments of a module, a method or a torch function, for the oracle: the first one, or all by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# Torch's names for the parameters of its functions. `_two` is for functions with exactly two operands.
_one = inspect.signature(lambda input, *args: None)
_two = inspect.signature(lambda input, other: None)
FUNCTIONS: dict[str, inspect.Signature] = {
    **dict.fromkeys(("add", "add_", "sub", "mul", "mul_", "div", "matmul", "gt", "eq", "remainder"), _two),
    "pow": inspect.signature(lambda input, exponent: None),
    "linear": inspect.signature(lambda input, weight, bias=None: None),
    "embedding": inspect.signature(lambda input, weight: None),
    "layer_norm": inspect.signature(lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: None),
    "conv1d": inspect.signature(lambda input, weight, bias, stride, padding, dilation, groups: None),
    "where": inspect.signature(lambda condition, input, other: None),
    "einsum": inspect.signature(lambda equation, *operands: None),
    "cat": inspect.signature(lambda tensors, dim=0: None),
    "stack": inspect.signature(lambda tensors, dim=0: None),
    "scaled_dot_product_attention": inspect.signature(lambda query, key, value: None),
}
# Functions whose arguments torch passes on as written, without adding defaults, so that ":inputs" is known exactly.
AS_WRITTEN = ("add", "sub", "mul", "div", "matmul", "pow", "where", "cat", "stack", "scaled_dot_product_attention")


def of_module(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward."""
    forward = module.__dict__.get("forward")
    return inspect.signature(forward if forward is not None else type(module).forward.__get__(module))


def of_method(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method, or `_one` for a builtin without a signature."""
    try:
        return inspect.signature(method)
    except ValueError:
        return _one


def of_function(name: str) -> inspect.Signature:
    """Return the signature of a torch function."""
    return FUNCTIONS.get(name, _one)


class Arguments:
    """The arguments of a call, with the signature of the callee."""

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs, self.signature = args, kwargs, signature

    @property
    def is_empty(self) -> bool:
        return not self.args and not self.kwargs

    def first(self) -> Any:
        """Return the first argument, however it was passed."""
        if self.is_empty:
            return None
        return self.args[0] if self.args else self.kwargs[self._first_name()]

    def by_name(self) -> dict[str, Any]:
        """Return all arguments by the names of their parameters."""
        return {**self.signature.bind_partial(*self.args).arguments, **self.kwargs}

    def change(self, port: str, function: Callable[[Any], Any]) -> None:
        """Replace the first argument, or all of them, with the result of `function`."""
        if port.endswith("inputs"):
            self._replace_all(function(self.by_name()))
        elif self.args:
            self.args = (function(self.args[0]), *self.args[1:])
        else:
            name = self._first_name()
            self.kwargs = {**self.kwargs, name: function(self.kwargs[name])}

    def _first_name(self) -> str:
        return next(name for name in self.signature.parameters if name in self.kwargs)

    def _replace_all(self, values: dict[str, Any]) -> None:
        positional: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += values.get(name, ())
            elif len(positional) < len(self.args):
                positional.append(values[name])
        self.args = tuple(positional)
        taken = list(self.signature.parameters)[: len(positional)]
        variadic = [name for name, one in self.signature.parameters.items() if one.kind is one.VAR_POSITIONAL]
        self.kwargs = {name: value for name, value in values.items() if name not in (*taken, *variadic)}
