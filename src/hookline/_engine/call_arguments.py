"""A call's arguments as one value: the first, or all of them by their parameter names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from hookline._engine.action import NOTHING
from hookline._values.nested import Arguments
from hookline.errors import EditError


class Parameters(NamedTuple):
    """The names of a function's parameters: those that may be passed by position, and the `*args`."""

    positional: tuple[str, ...]
    rest: str  # The name of `*args`.
    only: int = 0  # How many of the positional ones can't be passed by keyword.
    takes_rest: bool = False  # Whether there is an `*args`.


NO_PARAMETERS = Parameters((), "args")


@lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Read the signature of a class's forward."""
    found = read_parameters(function)
    return found._replace(positional=found.positional[1:], only=max(found.only - 1, 0))  # Without self.


def read_parameters(function: Callable[..., Any]) -> Parameters:
    """Read the signature of any callable."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return NO_PARAMETERS
    positional = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p.name for p in found if p.kind is p.VAR_POSITIONAL]
    only = sum(p.kind is p.POSITIONAL_ONLY for p in found)
    return Parameters(tuple(positional), rest[0] if rest else "args", only, bool(rest))


parameters_of_function = lru_cache(maxsize=1024)(read_parameters)


def take(arguments: Arguments, parameters: Parameters, port: str) -> Any:
    """Return the value at an input port: all arguments by name, or the first one, or NOTHING if there is none."""
    return bind(arguments, parameters) if port.endswith("inputs") else first(arguments, parameters)


def put(arguments: Arguments, parameters: Parameters, port: str, new: Any) -> Arguments:
    """Return the arguments with `new` in place of the value that `take` returned."""
    place = unbind if port.endswith("inputs") else with_first
    return place(arguments, parameters, new)


def first(arguments: Arguments, parameters: Parameters) -> Any:
    """Return the first argument, passed by position or by keyword, or NOTHING."""
    args, kwargs = arguments
    if args:
        return args[0]
    if parameters.positional and parameters.positional[0] in kwargs:
        return kwargs[parameters.positional[0]]
    return next(iter(kwargs.values()), NOTHING)


def with_first(arguments: Arguments, parameters: Parameters, new: Any) -> Arguments:
    """Return the arguments with `new` as the first one."""
    args, kwargs = arguments
    if args:
        return (new, *args[1:]), kwargs
    names = parameters.positional
    name = names[0] if names and names[0] in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: new}


def bind(arguments: Arguments, parameters: Parameters) -> dict[str, Any]:
    """Return all arguments by name. Extra positional ones are a tuple under the name of `*args`."""
    args, kwargs = arguments
    bound: dict[str, Any] = dict(zip(parameters.positional, args, strict=False))
    if len(args) > len(parameters.positional):
        bound[parameters.rest] = args[len(parameters.positional) :]
    return {**bound, **kwargs}


def unbind(arguments: Arguments, parameters: Parameters, bound: dict[str, Any]) -> Arguments:
    """Return a dict of arguments as positional and keyword arguments, each passed as it was before."""
    args, before = arguments
    has_rest = len(args) > len(parameters.positional) or (parameters.takes_rest and parameters.rest not in before)
    rest = bound.get(parameters.rest, ()) if has_rest else ()
    count = len(parameters.positional) if rest else max(len(args), parameters.only)
    names: list[str] = []
    for name in parameters.positional[:count]:
        if name not in bound:
            break
        names.append(name)
    after = parameters.positional[len(names) :]  # Arguments after one that is left out are passed by keyword.
    stuck = [name for name in after[: parameters.only - len(names)] if name in bound] if len(names) < count else []
    if stuck or (rest and after):
        raise EditError(f"{after[0]!r} is left out, and what comes after it can only be passed by position")
    taken = (*names, parameters.rest) if has_rest else names
    kwargs = {name: value for name, value in bound.items() if name not in taken}
    return (*(bound[name] for name in names), *rest), kwargs
