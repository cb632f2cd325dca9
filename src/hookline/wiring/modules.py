"""Watching a module: its `forward`, or another method, is shadowed on the instance; taps act around the class's own.

One `Watch` for each, however many taps: it walks a short tuple of them, and the last to go takes the shadow away.
Nothing but that name in the instance's `__dict__` is touched. `_shadow` holds the hot path.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.actions import Skip
from hookline.context import RESTING, call_user, open_blocks
from hookline.copies import lazy_clone
from hookline.records import ticks
from hookline.sites import Site
from hookline.wiring import arguments, calls, checkpoints, forwards, functions, gradients, methods, parameters
from hookline.wiring.methods import Stand
from hookline.wiring.taps import Tap, blame

_current_graph_task = torch._C._current_graph_task_id
_changing = threading.RLock()


class Watch:
    """One watched module, or method of one: what was found there, and the taps on it."""

    module: nn.Module | None = None
    name = "forward"
    method: MethodType | Stand | None = None
    taps: tuple[Tap, ...] = ()
    around: tuple[Tap, ...] = ()  # Those that follow the forwards of a whole model: see forwards.py.
    sole: Tap | None = None  # The only tap, if it captures the whole output: the hot path.
    # What to call instead of the class's function, such as the forward that accelerate puts on an instance.
    found: Callable[..., Any] | None = None
    home: weakref.ref[nn.Module] | None = None
    pauses: tuple[Tap, ...] = ()  # Those that take away the mode of one above: see functions.py.
    is_traceable = True
    is_function = False
    code: CodeType | None = None  # Of the forward in which functions run that taps are on.
    parameters = arguments.NO_PARAMETERS

    before: Callable[..., Any] | None = None  # What the instance itself held, which somebody else put there.

    def __init__(self, module: nn.Module, name: str, before: Callable[..., Any] | None) -> None:
        kind = type(module)
        own = kind.__dict__.get(name) or methods.written_in(kind, name)
        self.module = module
        if name == "forward":
            self.method = MethodType(_shadow(self, kind.forward), module)
        else:
            self.name = name
            function = methods.shadow(self, name, own if before is None else before, attached)
            self.method = MethodType(function, module) if before is None else Stand(function, module, before)
        if before is not None or type(own) is not FunctionType:
            self.before = before
            self.found = before if before is not None else methods.bound(own, module)
            self.home = weakref.ref(module)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was found: somebody else's, or that of the class as it is now."""
        if self.found is not None and self.home is not None and self.home() is module:
            return self.found(*args, **kwargs)
        if type(self.before) is MethodType and not is_shadow(self.before):
            return self.before.__func__(module, *args, **kwargs)  # A copy of a module with a forward of its own.
        if self.name == "forward":
            return type(module).forward(module, *args, **kwargs)
        return methods.bound(methods.written_in(type(module), self.name), module)(*args, **kwargs)

    def current(self, module: nn.Module) -> Watch | None:
        """Return the watch that stands on the module now, in the place of this one."""
        return watch_of(module.__dict__.get(self.name), module)

    def site(self, site: Site, _number: int) -> Site:
        """Return the site of a call."""
        return site

    def stand_in(self, value: Any, _is_given: bool, _passed: arguments.Arguments) -> Any:
        """Return what is given when it is skipped."""
        return value

    def change(self, taps: Iterable[Tap]) -> None:
        """Set the taps. What the hot path needs is worked out here, not when the model runs."""
        ordered = sorted(taps, key=lambda tap: tap.order)
        self.choices: dict[Any, tuple[Tap, ...]] = {}  # Before the taps: another thread may be running.
        self.around = tuple(tap for tap in ordered if isinstance(tap.action, forwards.Forward))
        self.pauses = tuple(tap for tap in ordered if isinstance(tap.action, functions.Pause))
        self.taps = tuple(tap for tap in ordered if not isinstance(tap.action, (forwards.Forward, functions.Pause)))
        stops = any(tap.action.stops for tap in self.around)  # type: ignore[union-attr]
        self.is_traceable = not stops and all(tap.is_traceable for tap in self.taps)
        if any(tap.is_inside for tap in self.taps):
            own = self.found or type(self.module).forward  # type: ignore[union-attr]
            self.code = getattr(inspect.unwrap(own), "__code__", None)
        if any(tap.site.port not in ("output", "grad_output") or isinstance(tap.action, Skip) for tap in self.taps):
            self.parameters = self._parameters()
        self.sole = self.taps[0] if len(self.taps) == 1 and not self._is_special and self.taps[0].is_plain else None

    @property
    def _is_special(self) -> bool:
        return bool(self.around or self.pauses)

    @property
    def all(self) -> tuple[Tap, ...]:
        """Every tap on it."""
        return (*self.around, *self.pauses, *self.taps)

    def _parameters(self) -> arguments.Parameters:
        if self.found is not None:
            return arguments.read_parameters(self.found)
        return arguments.parameters_of(getattr(type(self.module), self.name))


def attach(taps: Iterable[Tap]) -> None:
    """Let taps act."""
    if "torch._dynamo.eval_frame" in sys.modules:
        _keep_dynamo_out()
    with _changing:
        for tap in taps:
            if tap.watch is not None:
                continue
            if tap.holders:
                parameters.attach(tap, attached)
                continue
            module, name = tap.module, tap.method
            before = module.__dict__.get(name)
            watch = watch_of(before, module) if before is not None else None
            if watch is not None:
                tap.watch = watch
                watch.change((*watch.all, tap))
                if tap.is_inside:
                    _pause_below(tap)
                continue
            tap.watch = watch = Watch(module, name, before)
            if tap.is_plain:
                watch.taps, watch.sole = (tap,), tap
            else:
                watch.change((tap,))
            module.__dict__[name] = watch.method
            if tap.is_inside:
                _pause_below(tap)


def _pause_below(tap: Tap) -> None:
    tap.pauses = functions.pauses_below(tap)
    attach(tap.pauses)


def detach(taps: Iterable[Tap]) -> None:
    """Take taps away; the last of a module leaves it as it was found."""
    with _changing:
        for tap in taps:
            watch: Any = tap.watch
            if watch is None:
                continue
            if tap.holders:
                parameters.detach(tap)
                continue
            others = watch.sole is not tap and tuple(one for one in watch.all if one is not tap)
            if others:
                watch.change(others)
            else:
                _leave(watch)
            tap.watch = None
            if tap.pauses:
                detach(tap.pauses)


@contextmanager
def attached(taps: list[Tap]) -> Iterator[None]:
    """Let taps act for a while."""
    missing = [tap for tap in taps if tap.watch is None]
    attach(missing)
    try:
        with gradients.settled():
            yield
    finally:
        detach(missing)


def attached_to(module: nn.Module) -> tuple[Tap, ...]:
    """Return the taps on a module, its methods and parameters, also when somebody has wrapped its forward since."""
    found: tuple[Tap, ...] = ()
    names = module.__dict__
    forward = names.get("forward")
    buried = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or () if _is_filled(cell)]
    for candidate in (*names.values(), getattr(forward, "__wrapped__", None), *buried):
        watch = watch_of(candidate, module)
        if watch is not None:
            found += (*watch.around, *watch.taps)
    return found + parameters.attached_to(module)


def watch_of(held: object, module: nn.Module) -> Watch | None:
    """Return the watch behind what a module holds, if that is one of hookline's shadows."""
    if not is_shadow(held):
        return None
    function: Any = held.__func__  # type: ignore[attr-defined]
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    watch: Watch = dict(cells)["watch"].cell_contents
    return watch if watch.module is module else None


def is_shadow(held: object) -> bool:
    """Whether what an instance holds is something that hookline put there, or left on a copy."""
    return methods.is_shadow(held, _shadow_codes)


def forget_locks() -> None:
    """Make the lock anew, in a process that was forked: the thread that held it may not exist there."""
    global _changing
    _changing = threading.RLock()


@cache
def _keep_dynamo_out() -> None:
    """Keep dynamo from compiling hookline's own functions where it can't trace the model, and from warning of them."""
    skip = sys.modules["torch._dynamo.eval_frame"].skip_code
    traced = (calls.trace, calls._trace_input, calls._skipped)
    ours = (calls, checkpoints, forwards, functions, gradients)
    found = [function for one in ours for function in vars(one).values()]
    found = [*(function for function in found if function not in traced), Tap.act, blame, call_user]
    for function in found:
        if isinstance(function, FunctionType):
            skip(function.__code__)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _leave(watch: Watch) -> None:
    module, method = watch.module, watch.method
    if module is None:
        return
    names = module.__dict__
    if names.get(watch.name) is method:  # Else somebody wrapped it meanwhile: theirs stays, ours passes through.
        if watch.before is None:
            del names[watch.name]
        else:
            names[watch.name] = watch.before
    watch.module = watch.method = watch.sole = None  # A copy of the module may hold the watch for longer.
    watch.taps = watch.around = ()
    if watch.pauses or watch.code is not None:
        watch.pauses, watch.choices = (), {}


def _shadow(watch: Watch, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that stands in for a module's forward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return calls.trace(watch, self, args, kwargs, attached)
        tap = watch.sole
        if tap is None or self is not watch.module or _current_graph_task() != -1:
            return calls.run(watch, self, args, kwargs, attached)
        here = open_blocks.get()
        if not tap.acts(here) if RESTING in here else not tap.active and tap.blocks.isdisjoint(here):
            return watch.forward(self, args, kwargs)
        stamp = next(ticks)
        if watch.found is None:
            output = type(self).forward(self, *args, **kwargs)  # Looked up now: lazy modules change their class.
        else:
            output = watch.found(*args, **kwargs)
        if tap.watch is None:  # Taken off while the module ran.
            return output
        tap.fired = True
        try:
            if type(output) is Tensor and output.is_cpu and tap.copies_on_write and not output.is_quantized:
                value = lazy_clone(output.detach() if output.requires_grad else output)
            else:
                value = tap.action.keep(output)  # type: ignore[union-attr]
        except Exception as error:
            value = _keep_otherwise(tap, output, error)
        record: Any = tap.record  # Every capture has one.
        number = tap.session.forwards
        if record.seen < number and record.stamp < stamp:  # The usual case of `put`, without the call.
            record.value = value
            record.stamp = stamp
            record.seen = number
            record.count += 1
        else:
            record.put(value, stamp, number)
        return output

    forward.__wrapped__ = own  # type: ignore[attr-defined]  # For inspect.signature(model.forward).
    return forward


def _keep_otherwise(tap: Tap, output: Any, error: Exception) -> Any:
    """Keep a value that torch refuses to copy on write; an error of any other kind names the site."""
    try:
        if not tap.copies_on_write or type(output) is not Tensor:
            blame(tap.site, error)
        try:
            return tap.action.keep(output)  # type: ignore[union-attr]
        except Exception as other:
            blame(tap.site, other)
    finally:
        del error  # Its traceback holds this frame, which would hold it, and with it the model.


_shadow_codes = frozenset((_shadow(None, len).__code__, methods.CODE))  # type: ignore[arg-type]
