"""Hook points: places of a model with the hook functions of TransformerLens, on hookline's hooks.

A `HookPoint` holds its functions as handles, each of them one hook of hookline's; with none, nothing is on the model.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._kernel import NOTHING, Call, map_tensors, put_first, refuse_flags, refuse_numbers
from hookline._torch import known_version
from hookline.errors import EditError, HooklineError

HookFunction = Callable[..., Any]
Place = Callable[["HookPoint", str, "Applied"], Hooks]
PORTS = {"fwd": "output", "bwd": "grad_output"}
SILENT, WARNS, RAISES = "ignore", "warn", "raise"  # What happens when nothing passes at a point: see when_missing.


@dataclass
class Handle:
    """One hook function of a point, and hookline's hook that calls it."""

    hook: Hooks
    is_permanent: bool
    context_level: int | None
    user_hook: HookFunction

    def matches(self, including_permanent: bool, level: int | None) -> bool:
        """Whether it is among those that a call means."""
        return (including_permanent or not self.is_permanent) and level in (None, self.context_level)


class HookPoint(nn.Module):
    """A place of a model to which hook functions can be added; they get `(tensor, hook=point)`.

    `auto_hook` makes one for every module. In a model of your own it is an identity: `x = self.hook_mid(x)`.

    >>> import torch
    >>> point = HookPoint()
    >>> _ = point.add_hook(lambda tensor, hook: tensor + 1)
    >>> point(torch.zeros(2))
    tensor([1., 1.])
    >>> point.remove_hooks()
    """

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.ctx: dict[Any, Any] = {}
        self.fwd_hooks: list[Handle] = []
        self.bwd_hooks: list[Handle] = []
        self._place: Place | None = None  # None: its author put it into a model, where it is called.
        self._hooks: Hooks | None = None  # What holds its hooks then.

    def forward(self, x: Any) -> Any:
        """Return the value as it is."""
        return x

    def add_hook(
        self,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Call `hook(tensor, hook=point)` on each tensor that passes ("fwd"), or each gradient ("bwd"), until removed.

        What it returns, unless None, takes the tensor's place.
        """
        refuse_flags(is_permanent=is_permanent, prepend=prepend)
        refuse_level(level)
        handles = self.handles(dir)
        applied = Applied(hook, self, dir)
        added = self._put(applied) if self._place is None else self._place(self, PORTS[dir], applied)
        added.when_missing(WARNS)  # A hook that stays meets runs without gradients too.
        if prepend:
            put_first(added)
        handle = Handle(added, is_permanent, level, hook)
        handles.insert(0 if prepend else len(handles), handle)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> None:
        """Add a hook that only `including_permanent=True` removes."""
        self.add_hook(hook, dir=dir, is_permanent=True)

    def remove_hooks(self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None) -> None:
        """Remove its hooks of one direction, or of "both"; with a level, only those that were added with it."""
        refuse_flags(including_permanent=including_permanent)
        refuse_level(level)
        for one in _directions(dir):
            handles = self.handles(one)
            for handle in [handle for handle in handles if handle.matches(including_permanent, level)]:
                handle.hook.remove()
                handles.remove(handle)

    def has_hooks(self, dir: str = "both", including_permanent: bool = True, level: int | None = None) -> bool:
        """Whether it has hooks of one direction, or of either."""
        refuse_flags(including_permanent=including_permanent)
        refuse_level(level)
        handles = [handle for one in _directions(dir) for handle in self.handles(one)]
        return any(handle.matches(including_permanent, level) for handle in handles)

    def clear_context(self) -> None:
        """Empty `ctx`, in which hooks keep what they like."""
        self.ctx = {}

    def layer(self) -> int:
        """Return the first number in its name: 3 for 'blocks.3.mlp.hook_point'."""
        number = next((part for part in (self.name or "").split(".") if part.isdigit()), None)
        if number is None:
            raise HooklineError(f"{self.name!r} has no number of a layer in it")
        return int(number)

    def handles(self, dir: str) -> list[Handle]:
        """Return the handles of one direction."""
        if dir not in PORTS:
            raise EditError(f"dir={dir!r} is not 'fwd' or 'bwd'")
        return self.fwd_hooks if dir == "fwd" else self.bwd_hooks

    def _put(self, applied: Applied) -> Hooks:
        if self._hooks is None:
            self._hooks = Hooks(self)
        return self._hooks.edit(Site("", PORTS[applied.dir]), applied, with_call=True)

    def __repr__(self) -> str:
        return "HookPoint()"

    def __getstate__(self) -> dict[str, Any]:
        unhooked: dict[str, Any] = {"fwd_hooks": [], "bwd_hooks": [], "_place": None, "_hooks": None}
        return {**self.__dict__, **unhooked}


def refuse_other(function: Any) -> None:
    """Raise for what is not a hook function."""
    if not callable(function):
        raise EditError(f"a hook is a function of (tensor, hook), not {type(function).__name__}")


def _refuse_arguments(function: HookFunction, error: TypeError) -> None:
    """Raise if a hook function does not take what it is called with, and say what that is."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # Of a builtin.
        return
    try:
        takes.bind(None, hook=None)
    except TypeError:
        raise EditError(f"a hook is called with (tensor, hook=point), and this one takes {takes}") from error


class Applied:
    """A hook function as hookline calls it, with a value of any structure: each tensor in it is given to the function.

    It has no `__code__`, by which hookline tells twins: two closures of one function are none.
    """

    def __init__(self, function: HookFunction, point: HookPoint, dir: str) -> None:
        refuse_other(function)
        self.function = function
        self.dir = dir
        self.called = False
        self._point = weakref.ref(point)  # The model holds this, and must not hold its own hooks by it.
        self.passed: Any = NOTHING  # The latest value that was not a tensor itself.

    def __call__(self, value: Any, _call: Call) -> Any:
        """Return what passes on; None leaves the value alone."""
        point = self._point()
        if point is None:
            return None
        if getattr(self.function, "takes_whole", False):
            return self.function(value, hook=point)
        if isinstance(value, Tensor):
            return self._apply(value, point)  # Also if it was written into: hookline tells that by itself.
        self.passed = value
        changed = False

        def apply(tensor: Tensor) -> Any:
            nonlocal changed
            before = known_version(tensor)
            new = self._apply(tensor, point)
            changed = changed or new is not tensor or known_version(tensor) != before
            return new

        new = map_tensors(apply, value)
        return new if changed else None

    def _apply(self, tensor: Tensor, point: HookPoint) -> Any:
        self.called = True
        conversion = getattr(point, "hook_conversion", None)  # What enable_reshape of transformer_lens sets.
        given = tensor if conversion is None else conversion.convert(tensor)
        try:
            new = self.function(given, hook=point)
        except TypeError as error:
            _refuse_arguments(self.function, error)
            raise
        if new is None:
            return tensor
        if self.dir == "bwd" and isinstance(new, tuple) and len(new) == 1:
            new = new[0]
        return new if conversion is None else conversion.revert(new)

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', type(self.function).__name__)} at {id(self):x}"


def refuse_level(level: Any) -> None:
    """Raise for what is not the level of a hook: a whole number, or None."""
    if level is not None:
        refuse_numbers(level=level)


def _directions(dir: str) -> tuple[str, ...]:
    return ("fwd", "bwd") if dir == "both" else (dir,)
