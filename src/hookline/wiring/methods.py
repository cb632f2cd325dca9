"""Methods: shadowed on the instance like a forward, and left as found."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Set
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.wiring import calls

if TYPE_CHECKING:
    from hookline.wiring.watches import Watch


class Stand:
    """Stands in for a callable that an instance holds itself. A copy or a pickle of it is one of that callable."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, held: Callable[..., Any]) -> None:
        self.__func__ = function
        self.__self__ = module
        self.__wrapped__ = held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # The keywords of a partial, what is noted on a function.

    def __reduce__(self) -> tuple[Any, ...]:
        return cast, (None, self.__wrapped__)  # Gives the second back, and is there without hookline.


def shadow(watch: Watch, name: str, own: Any) -> Callable[..., Any]:
    """Make the function that stands in for a method."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return calls.trace(watch, self, args, kwargs)
        return calls.run(watch, self, args, kwargs)

    functools.update_wrapper(method, own)  # For inspect.signature, and what is noted on the function.
    method.__name__ = name  # Pickle looks a bound method up by it.
    return method


def written_in(kind: type, name: str) -> Any:
    """Return what a class has under a name, as it is written there: a function, a staticmethod, a builtin."""
    return inspect.getattr_static(kind, name, None)


def bound(own: Any, module: nn.Module) -> Callable[..., Any]:
    """Return what reading such a thing on an instance would give."""
    return own.__get__(module, type(module)) if hasattr(own, "__get__") else own  # type: ignore[no-any-return]


def is_shadow(held: object, codes: Set[Any]) -> bool:
    """Whether what an instance holds is one of hookline's, known by its code."""
    if type(held) is MethodType or type(held) is Stand:
        return type(held.__func__) is FunctionType and held.__func__.__code__ in codes
    return False


CODE = shadow(None, "", None).__code__  # type: ignore[arg-type]
