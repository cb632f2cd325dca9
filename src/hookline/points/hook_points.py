"""`HookPoint`, and `Points`: all hook points of one model by name, and the functions that act at them in a block.

A `HookPoint` holds its functions as handles, each of which is one hookline hook; without functions, the model has no
hooks. If transformer_lens is installed, hook points and hooked models are also instances of its classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._kernel import (
    NOTHING,
    Call,
    Names,
    describe,
    is_container,
    is_scripted,
    map_tensors,
    put_first,
    refuse_flags,
    refuse_numbers,
    short_form,
    unwrap,
)
from hookline._torch import known_version
from hookline.errors import EditError, HooklineError, NeverFired, SiteError, did_you_mean, warn

Kind = TypeVar("Kind", bound=type)
HookFunction = Callable[..., Any]
NameOrFilter = str | Callable[[str], bool]
AddToModel = Callable[["HookPoint", str, "HookCall"], Hooks]  # Adds a hook at one port of a point's module.
PORTS = {"fwd": "output", "bwd": "grad_output"}
SILENT, WARNS, RAISES = "ignore", "warn", "raise"  # What happens when nothing passes at a point: see when_missing.


@dataclass
class Handle:
    """One hook function of a point, and the hookline hook that calls it."""

    hook: Hooks
    is_permanent: bool
    context_level: int | None
    user_hook: HookFunction

    def matches(self, including_permanent: bool, level: int | None) -> bool:
        """Return True if these arguments of `remove_hooks` or `has_hooks` select this handle."""
        return (including_permanent or not self.is_permanent) and level in (None, self.context_level)


class HookPoint(nn.Module):
    """A place in a model to which hook functions can be added; they are called with `(tensor, hook=point)`.

    `auto_hook` creates one for every module. In your own model you can use it as an identity: `x = self.hook_mid(x)`.

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
        self._add_to_model: AddToModel | None = None  # None for a point that the model itself contains and calls.
        self._hooks: Hooks | None = None  # The hooks of a point that the model contains.

    def forward(self, x: Any) -> Any:
        """Return the value unchanged."""
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

        If it returns anything but None, that replaces the tensor.
        """
        refuse_flags(is_permanent=is_permanent, prepend=prepend)
        refuse_level(level)
        handles = self.handles(dir)
        hook_call = HookCall(hook, self, dir)
        added = self._put(hook_call) if self._add_to_model is None else self._add_to_model(self, PORTS[dir], hook_call)
        added.when_missing(WARNS)  # The hook stays for many runs, and some may have no gradients.
        if prepend:
            put_first(added)
        handle = Handle(added, is_permanent, level, hook)
        handles.insert(0 if prepend else len(handles), handle)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> None:
        """Add a hook that only `including_permanent=True` removes."""
        self.add_hook(hook, dir=dir, is_permanent=True)

    def remove_hooks(self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None) -> None:
        """Remove the hooks of one direction, or of "both"; with a level, only hooks added with that level."""
        refuse_flags(including_permanent=including_permanent)
        refuse_level(level)
        for one in _directions(dir):
            handles = self.handles(one)
            for handle in [handle for handle in handles if handle.matches(including_permanent, level)]:
                handle.hook.remove()
                handles.remove(handle)

    def has_hooks(self, dir: str = "both", including_permanent: bool = True, level: int | None = None) -> bool:
        """Return True if the point has hooks of one direction, or of either."""
        refuse_flags(including_permanent=including_permanent)
        refuse_level(level)
        handles = [handle for one in _directions(dir) for handle in self.handles(one)]
        return any(handle.matches(including_permanent, level) for handle in handles)

    def clear_context(self) -> None:
        """Empty `ctx`, where hook functions may store anything."""
        self.ctx = {}

    def layer(self) -> int:
        """Return the first number in the point's name: 3 for 'blocks.3.mlp.hook_point'."""
        number = next((part for part in (self.name or "").split(".") if part.isdigit()), None)
        if number is None:
            raise HooklineError(f"{self.name!r} has no layer number in it")
        return int(number)

    def handles(self, dir: str) -> list[Handle]:
        """Return the handles of one direction."""
        if dir not in PORTS:
            raise EditError(f"dir={dir!r} is not 'fwd' or 'bwd'")
        return self.fwd_hooks if dir == "fwd" else self.bwd_hooks

    def _put(self, hook_call: HookCall) -> Hooks:
        if self._hooks is None:
            self._hooks = Hooks(self)
        return self._hooks.edit(Site("", PORTS[hook_call.dir]), hook_call, with_call=True)

    def __repr__(self) -> str:
        return "HookPoint()"

    def __getstate__(self) -> dict[str, Any]:
        unhooked: dict[str, Any] = {"fwd_hooks": [], "bwd_hooks": [], "_add_to_model": None, "_hooks": None}
        return {**self.__dict__, **unhooked}


def refuse_level(level: Any) -> None:
    """Raise for a level that is not a whole number or None."""
    if level is not None:
        refuse_numbers(level=level)


def _directions(dir: str) -> tuple[str, ...]:
    return ("fwd", "bwd") if dir == "both" else (dir,)


def refuse_other(function: Any) -> None:
    """Raise for anything that can't be called."""
    if not callable(function):
        raise EditError(f"a hook is a function of (tensor, hook), not {type(function).__name__}")


def _refuse_arguments(function: HookFunction, error: TypeError) -> None:
    """Raise if a hook function can't be called with (tensor, hook=point), and say what it takes."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # A builtin may have no signature.
        return
    try:
        takes.bind(None, hook=None)
    except TypeError:
        raise EditError(f"a hook is called with (tensor, hook=point), and this one takes {takes}") from error


class HookCall:
    """A wrapper around a hook function: hookline passes it any structure, and the function gets its tensors one by one.

    It has no `__code__`, so that two closures of one function don't count as the same hook added twice.
    """

    def __init__(self, function: HookFunction, point: HookPoint, dir: str) -> None:
        refuse_other(function)
        self.function = function
        self.dir = dir
        self.called = False
        self._point = weakref.ref(point)  # Weak, since the model holds this object and must not hold its own hooks.
        self.passed: Any = NOTHING  # The latest value that was a structure, not a tensor.

    def __call__(self, value: Any, _call: Call) -> Any:
        """Return the value to pass on; None leaves it unchanged."""
        point = self._point()
        if point is None:
            return None
        if getattr(self.function, "takes_whole", False):
            return self.function(value, hook=point)
        if isinstance(value, Tensor):
            return self._apply(value, point)  # hookline notices if a tensor was modified in place.
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
        conversion = getattr(point, "hook_conversion", None)  # Set by transformer_lens's enable_reshape.
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


class HookToAdd(NamedTuple):
    """A hook function to add at one point in a block, and the `when_missing` of its hook."""

    point: Any  # A HookPoint, or a transformer_lens HookPoint inside the model.
    function: HookFunction
    dir: str
    when_missing: str


class Points:
    """The hook points of one model, by name. It refers to the model weakly; only added hooks keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: dict[str, HookPoint] = {}
        self._sites: dict[str, Site] = {}
        self._hooks: Hooks | None = None
        self._closed = False
        self._names: dict[Any, str | None] = {}  # The original names of points that the model contains.
        self._levels: list[int] = []
        self._reading = threading.Lock()

    @property
    def model(self) -> nn.Module:
        """The model that the points belong to."""
        model = self._model()
        if model is None or self._closed:
            raise HooklineError("this model was unwrapped, or is gone; hook it again with hl.auto_hook(model)")
        return model

    @property
    def level(self) -> int:
        """The level of the innermost open block; 0 if none is open."""
        return max(self._levels, default=0)

    def belongs_to(self, model: nn.Module) -> bool:
        """Return True if these points belong to this model, and not to a model that it was copied from."""
        return self._model() is model and not self._closed

    def read(self) -> dict[str, HookPoint]:
        """Return all points of the model's current modules, by name."""
        with self._reading:
            before = self._found
            places = {name: (site, manual) for name, site, manual in _places(self.model)}
            found = {}
            for name, (_, manual) in places.items():
                point = manual if manual is not None else before.get(name)
                if point is None or (manual is None and is_manual(point)):
                    point = self._make()
                elif manual is not None:
                    self._names.setdefault(point, point.name)
                point.name = name
                found[name] = point
            self._sites = {name: site for name, (site, _) in places.items()}
            self._found = found  # In one assignment, since other threads may read it.
        for name, point in before.items():
            if found.get(name) is not point:
                point.remove_hooks("both", including_permanent=True)
        return dict(found)

    def site(self, point: HookPoint, port: str = "output") -> Site:
        """Return the site of a point."""
        name = point.name or ""
        if self._found.get(name) is not point:
            raise HooklineError(f"{name!r} is not in the model any more")
        return self._sites[name]._replace(port=port)

    def choose(self, where: NameOrFilter) -> list[HookPoint]:
        """Return the points that a name or a filter of names selects."""
        found = self.read()
        if isinstance(where, str):
            if where not in found:
                raise SiteError(f"{where!r} is not a hook point of {self._title}{_near(where, found)}")
            return [found[where]]
        if not callable(where):
            raise SiteError(f"hooks are added by name or by a filter of names, not by {type(where).__name__}")
        chosen = [point for name, point in found.items() if where(name)]
        if not chosen:
            raise SiteError(f"the filter selects none of the {len(found)} hook points of {self._title}; see hook_dict")
        return chosen

    @contextmanager
    def opened(self, wanted: list[HookToAdd], reset: bool = True, clear_contexts: bool = False) -> Iterator[None]:
        """Add hook functions for a block on this thread, one level deeper. Without `reset` they stay afterwards."""
        level = self.level + 1
        self._levels.append(level)
        try:
            if reset:
                with self._block(wanted, level):
                    yield
            else:
                for point, function, dir, _ in wanted:
                    point.add_hook(function, dir=dir, level=level)
                yield
        finally:
            for point in list(self._found.values()) if reset else ():
                if point.fwd_hooks or point.bwd_hooks:
                    point.remove_hooks("both", level=level)
                if clear_contexts:
                    point.clear_context()
            self._levels.remove(level)

    @contextmanager
    def _block(self, wanted: list[HookToAdd], level: int) -> Iterator[None]:
        block = short_form(self.model)
        placed: list[tuple[HookToAdd, HookCall]] = []
        for one in wanted:
            if not isinstance(one.point, HookPoint):  # A transformer_lens point calls its functions itself.
                one.point.add_hook(one.function, dir=one.dir, level=level)
                continue
            hook_call = HookCall(one.function, one.point, one.dir)
            added = block.edit(self.site(one.point, PORTS[one.dir]), hook_call, with_call=True)
            one.point.handles(one.dir).append(Handle(added.when_missing(one.when_missing), False, level, one.function))
            placed.append((one, hook_call))
        if not placed:
            yield
            return
        with block:
            yield
        for one, hook_call in placed:
            if one.when_missing == RAISES and hook_call.passed is not NOTHING and not hook_call.called:
                raise NeverFired(f"{one.point.name!r} gives no tensor to hook, but {describe(hook_call.passed)}")

    def close(self) -> None:
        """Remove every hook from the model for good."""
        for point in self._found.values():
            point.remove_hooks("both", including_permanent=True)
        for point, name in self._names.items():
            point.name = name
        self._closed = True

    def _make(self) -> HookPoint:
        point: HookPoint = as_point(HookPoint)()
        home = weakref.ref(self)

        def add_to_model(point: HookPoint, port: str, hook_call: HookCall) -> Hooks:
            points = home()
            if points is None:
                raise HooklineError(f"{point.name!r} belongs to a hooked model that is gone; keep it in a variable")
            return points._stay(points.site(point, port), hook_call)

        point._add_to_model = add_to_model
        return point

    def _stay(self, site: Site, hook_call: HookCall) -> Hooks:
        if self._hooks is None or not len(self._hooks):
            self._hooks = Hooks(self.model)
        return self._hooks.edit(site, hook_call, with_call=True)

    @property
    def _title(self) -> str:
        return type(unwrap(self.model)).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_points, ()  # A copy of the model creates its own points.


def is_manual(point: nn.Module) -> bool:
    """Return True if a point is a module of the model itself, which its author added."""
    return point._add_to_model is None if isinstance(point, HookPoint) else is_lens_point(point)


def _near(where: str, found: dict[str, HookPoint]) -> str:
    if where + ".hook_point" in found:
        return f"; did you mean {where + '.hook_point'!r}?"
    return did_you_mean(where, found) or "; hook_dict has all of them"


def _places(model: nn.Module) -> Iterator[tuple[str, Site, Any]]:
    """Yield the name and the site of every point, and the point itself if it is part of the model."""
    seen: set[int] = set()
    for path, module in Names(model).once():
        prefix = path + "." if path else ""
        if is_scripted(module):
            continue
        if isinstance(module, HookPoint) or is_lens_point(module):
            yield path, Site(path), module
            continue
        if not is_container(module) and not (path and type(module).forward is nn.Sequential.forward):
            yield prefix + "hook_point", Site(path), None
        for key, parameter in module._parameters.items() if not _is_layer(module) else ():
            # A tied parameter has one point, like a tied module.
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}{key}.hook_point", Site(prefix + key, member="/*"), None


def _is_layer(module: nn.Module) -> bool:
    """Return True if a module's forward is torch's, which uses the parameters directly."""
    forward = type(module).forward
    return forward is not nn.Module.forward and str(getattr(forward, "__module__", "")).startswith("torch.")


def _no_points() -> None:
    return None


class Lens(NamedTuple):
    """The two transformer_lens classes that hook points and hooked models are instances of."""

    point: Any
    root: Any


@cache
def lens() -> Lens | None:
    """Return transformer_lens's HookPoint and HookedRootModule, or None if it is not installed."""
    if importlib.util.find_spec("transformer_lens") is None:
        return None
    try:
        package = importlib.import_module("transformer_lens")
        points = importlib.import_module("transformer_lens.hook_points")
    except Exception as error:  # transformer_lens imports many packages, any of which may be broken.
        warn(f"transformer_lens is installed but can't be imported ({error}); hookline's own hook points are used")
        return None
    root = getattr(package, "HookedRootModule", None) or points.HookedRootModule  # The class moved in version 3.
    return Lens(points.HookPoint, getattr(root, "HookedRootModule", root))


@cache
def as_point(kind: Kind) -> Kind:
    """Return a class of hook points, as a subclass of transformer_lens's HookPoint if that is installed."""
    found = lens()
    return kind if found is None else _both(kind, found.point)


@cache
def as_root(kind: Kind) -> Kind:
    """Return a class of hooked models, as a subclass of transformer_lens's HookedRootModule if that is installed."""
    found = lens()
    return kind if found is None else _both(kind, found.root)


def is_lens_point(module: nn.Module) -> bool:
    """Return True if a module is a transformer_lens HookPoint, which the model's author added."""
    points = sys.modules.get("transformer_lens.hook_points")
    return points is not None and isinstance(module, points.HookPoint)


def _both(kind: Any, other: type) -> Any:
    return type(kind.__name__, (kind, other), {"__module__": kind.__module__, "__doc__": kind.__doc__})
