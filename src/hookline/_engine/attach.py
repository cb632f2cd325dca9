"""Attach taps to modules and detach them: `forward`, or another method, is shadowed on the instance.

At most three names in the instance's `__dict__` are touched: that of the method, and two methods that raise when
DataParallel replicates the module or torch.jit.script compiles it. Detaching the last tap leaves them as they were.
Taps on parameters are in parameters.py.
"""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hookline._engine import parameters
from hookline._engine.action import Around
from hookline._engine.compiled import code_for, keep_dynamo_out
from hookline._engine.functions import Pause, entries_of, pauses_below
from hookline._engine.gradients import following_gradients
from hookline._engine.model_forward import ModelTap
from hookline._engine.running_calls import call_around
from hookline._engine.shadowed_forward import (
    GONE,
    HOT_CODES,
    SCRIPT,
    Shadow,
    gone,
    hot_group,
    hot_path,
    hot_tap_of,
    is_shadow,
    shadow_of,
    strip_shadows,
    unhooked,
    written_in,
)
from hookline._engine.tap import HotGradientTap, HotTap, KeepingTap, StopTap, Tap
from hookline._engine.unsupported_tracing import refuse_scripting
from hookline._open_blocks import Blocks, Session
from hookline._sites.members import method_names
from hookline._sites.tree import refuse_data_parallel
from hookline._torch import REPLICATE, cell_content, is_dynamo_loaded

# The classes of hooked modules, each with the reducer that copyreg had for it before, and the sessions of the hooks.
_reducers: dict[type, tuple[Any, set[Session]]] = {}
_OWNERS = {HotGradientTap, KeepingTap}  # Taps that may share their shadow.
_WRITTEN = (FunctionType, staticmethod, classmethod)
_changing = threading.RLock()


def attach(taps: Sequence[Tap], acts_in: Blocks | None = None) -> None:
    """Attach taps to their modules.

    Args:
        acts_in: The open blocks in which the taps act, if known. Saves the first call from checking.
    """
    has_dynamo = is_dynamo_loaded()
    if has_dynamo:
        keep_dynamo_out()
    if HotGradientTap in map(type, taps):  # A `HotTap` can join a `HotGradientTap`, but not the other way.
        taps = sorted(taps, key=lambda tap: type(tap) is not HotGradientTap)
    noted: dict[type, dict[str, Any] | None] = {}
    codes: dict[tuple[type, Any], CodeType] = {}
    with _changing:
        for tap in taps:
            tap.acts_in = acts_in
            if tap.shadow is not None:
                continue
            module, make = tap.module, tap.make_shadow
            names, kind = module.__dict__, type(module)
            if make is None or "forward" in names:
                if not _share(tap, names):
                    _attach(tap)
                continue
            if kind not in noted:
                noted[kind] = _prepare_class(kind, tap.session)
            shared = noted[kind]
            if shared is None:
                _attach(tap)
                continue
            # The usual case: a plain hook on a module whose forward nobody has replaced.
            function = make(tap)
            function.__dict__ = shared
            if has_dynamo:
                if (kind, make) not in codes:
                    codes[kind, make] = code_for(kind, function.__code__, HOT_CODES)
                function.__code__ = codes[kind, make]
            method = MethodType(function, module)
            # No function is called until the shadow is in place: Ctrl-C interrupts Python only at a call.
            names[REPLICATE] = refuse_data_parallel
            if make is not hot_path and SCRIPT not in names:
                names[SCRIPT] = refuse_scripting
            tap.shadow = names["forward"] = method


def _attach(tap: Tap) -> None:
    """Attach one tap. If that fails, or Ctrl-C interrupts it, leave nothing of it behind."""
    try:
        _put_on(tap)
    except BaseException:
        detach((tap,))
        raise


def _put_on(tap: Tap) -> None:
    if tap.holders:
        parameters.attach(tap)
        for module, _ in tap.holders:
            _prepare_class(type(module), tap.session)
        return
    _prepare_class(type(tap.module), tap.session)
    module, name = tap.module, tap.method
    before = module.__dict__.get(name)
    plain = hot_tap_of(before, module) if before is not None else None
    shadow = shadow_of(before, module) if before is not None and plain is None else None
    if plain is not None:
        _leave_hot_path(plain, tap)
    elif shadow is not None:
        tap.shadow = shadow
        shadow.add(tap)
    else:
        tap.shadow = shadow = Shadow(module, name, before)
        shadow.change((tap,))
        if name == "forward":
            # No function is called until the shadow is in place: Ctrl-C interrupts Python only at a call.
            module.__dict__[REPLICATE] = refuse_data_parallel
            if SCRIPT not in module.__dict__:
                module.__dict__[SCRIPT] = refuse_scripting
        module.__dict__[name] = shadow.method
    if tap.is_inside and not isinstance(tap.action, Pause):
        _add_helpers(tap)
    elif tap.method != "forward" and not tap.action.observes:
        others = [name for name in ("forward", *_written_methods(module)) if name != tap.method]
        tap.helpers = entries_of(tap, others)
        attach(tap.helpers)


def _share(tap: Tap, names: dict[str, Any]) -> bool:
    """Let a tap share the shadow of another one: a capture that of a gradient, a stop that of a capture.

    Return False if it can't.
    """
    if type(tap) is not HotTap and type(tap) is not StopTap:
        return False
    plain = hot_tap_of(names.get("forward"), tap.module)
    if plain is None or plain.beside is not None:
        return False
    if type(tap) is HotTap:
        shares = type(plain) is HotGradientTap and tap.order < plain.order  # It acts first.
    else:
        shares = type(plain) is KeepingTap
    if shares:
        _prepare_class(type(tap.module), tap.session)  # The tap may outlive the other, and then has its own shadow.
        tap.shadow, plain.beside = plain.shadow, tap
    return shares


def _leave_hot_path(plain: Tap, tap: Tap) -> None:
    """Put the taps of a hot shadow and another tap on one `Shadow`. It is built first, in case of Ctrl-C."""
    shadow = Shadow(plain.module, "forward", None)
    taps = hot_group(plain)
    shadow.change((*taps, tap))
    left: Any = plain.shadow
    plain.module.__dict__["forward"] = shadow.method
    tap.shadow = shadow
    for one in taps:
        one.shadow = shadow
        one.acts_in = None
    plain.beside = None
    if SCRIPT not in plain.module.__dict__:
        plain.module.__dict__[SCRIPT] = refuse_scripting
    left.__func__.__closure__[0].cell_contents = gone(shadow)  # Torch or other code may still call the old shadow.


def _take_hot_path(plain: Tap, make: Callable[..., Any], shadow: Shadow) -> None:
    """Move a tap back to its hot path, once it is alone on its module again."""
    function = make(plain)
    function.__wrapped__ = type(plain.module).forward
    function.__code__ = code_for(type(plain.module), function.__code__, HOT_CODES)
    method, names = MethodType(function, plain.module), plain.module.__dict__
    names["forward"] = plain.shadow = method
    shadow.heir = weakref.ref(plain)  # Set before `leave`: another thread may be about to call the shadow.
    shadow.leave()  # Takes the refusal to be scripted with it.
    if type(plain) is not HotTap and SCRIPT not in names:
        names[SCRIPT] = refuse_scripting


def _leave_alone(tap: Tap, beside: Tap) -> None:
    """Detach a tap that shares its shadow, and leave the tap beside it on a `Shadow`."""
    shadow = Shadow(tap.module, "forward", None)
    shadow.change((beside,))
    left: Any = tap.shadow
    if tap.module.__dict__.get("forward") is left:
        tap.module.__dict__["forward"] = shadow.method
    beside.shadow = shadow
    beside.acts_in = tap.beside = tap.shadow = tap.acts_in = None
    left.__func__.__closure__[0].cell_contents = gone(shadow)


def _add_helpers(tap: Tap) -> None:
    """Attach the helper taps that a tap on a function needs: see functions.py."""
    tap.helpers = pauses_below(tap)
    if tap.site.within is None:  # `within` counts forwards, not calls of other methods.
        tap.helpers += entries_of(tap, _written_methods(tap.module))
    attach(tap.helpers)


def _written_methods(module: nn.Module) -> list[str]:
    """Return the methods that a module's classes define, except those that somebody replaced on the instance."""
    kind, held = type(module), module.__dict__
    names = [name for name in method_names(module) if name not in held or is_shadow(held[name])]
    return [name for name in names if type(written_in(kind, name)) in _WRITTEN]


def detach(taps: Sequence[Tap], session: Session | None = None) -> None:
    """Detach taps. The last tap of a module leaves the module as it was found.

    Args:
        session: If given, its classes are copied as before afterwards, unless others have hooks on them.
    """
    if not _OWNERS.isdisjoint(map(type, taps)):  # Last, since the shadow is theirs: see `hot_gradient_path`.
        taps = sorted(taps, key=lambda tap: type(tap) in _OWNERS)
    with _changing:
        for tap in taps:
            shadow: Any = tap.shadow
            if shadow is None:
                continue
            if type(shadow) is MethodType:
                cell: Any = shadow.__func__.__closure__[0]  # type: ignore[index]  # It has a closure.
                if cell.cell_contents is not tap:  # It shares the shadow of another.
                    cell.cell_contents.beside = None
                elif tap.beside is not None:
                    _leave_alone(tap, tap.beside)
                else:
                    names = tap.module.__dict__
                    if "forward" in names and names["forward"] is shadow:  # Else somebody has wrapped it: that stays.
                        del names["forward"]
                    if REPLICATE in names:
                        del names[REPLICATE]
                    if SCRIPT in names and names[SCRIPT] is refuse_scripting:
                        del names[SCRIPT]
                    # A copy of the module may keep the shadow alive. It must not keep the tap and its values alive.
                    cell.cell_contents = GONE
            elif tap.holders:
                parameters.detach(tap)
            else:
                _detach(tap, shadow)
            tap.shadow = tap.acts_in = None
        if session is not None:
            _copy_as_before(session)


def _detach(tap: Tap, shadow: Shadow) -> None:
    last = shadow.remove(tap)
    if last is not None and last.make_shadow is not None:
        _take_hot_path(last, last.make_shadow, shadow)
    if tap.helpers:
        detach(tap.helpers)
        tap.helpers = None  # They refer to the tap: the cycle would keep the model alive.


def _prepare_class(kind: type[nn.Module], session: Session) -> dict[str, Any] | None:
    """Copy and pickle modules of a class without hookline's shadows, while any of them are hooked.

    A shallow copy would otherwise hold a shadow that is bound to the original module, and would run the original.

    Returns: The `__dict__` that all hot shadows of this class share; None if its forward is no function.
    """
    if kind not in session.kinds:
        table = copyreg.dispatch_table
        session.kinds |= {kind}
        if kind in _reducers:
            _reducers[kind][1].add(session)
        else:
            _reducers[kind] = (table[kind] if kind in table else None), {session}  # noqa: SIM401  # Without a call.
            table[kind] = _reduce
    own = kind.__dict__.get("forward") or written_in(kind, "forward")
    return {"__wrapped__": own} if type(own) is FunctionType else None  # For inspect.signature(model.forward).


def _reduce(module: nn.Module) -> Any:
    reduce, _ = _reducers.get(type(module), (None, None))
    reduced = reduce(module) if reduce is not None else module.__reduce_ex__(4)
    if type(reduced) is not tuple or len(reduced) < 3 or type(reduced[2]) is not dict:
        return reduced
    return (*reduced[:2], unhooked(module, reduced[2]), *reduced[3:])


def _copy_as_before(session: Session) -> None:
    """Restore copyreg for the classes that a session hooked, except those on which other sessions have hooks."""
    lifecycle = session.lifecycle()
    if lifecycle is not None and lifecycle.is_attached:  # Its hooks are still, or again, attached.
        return
    table = copyreg.dispatch_table
    for kind in session.kinds:
        if kind not in _reducers:  # Ctrl-C has interrupted this function before.
            continue
        before, sessions = _reducers[kind]
        sessions.discard(session)
        if sessions:
            continue
        if kind in table and table[kind] is _reduce:  # Else somebody has replaced our reducer since.
            if before is None:
                del table[kind]
            else:
                table[kind] = before
        del _reducers[kind]
    session.kinds = frozenset()


def strip(module: nn.Module) -> None:
    """Remove everything that hookline put on a module, even if no `Hooks` knows about it any more."""
    with _changing:
        detach(taps_on(module))
        strip_shadows(module)
        parameters.strip(module)


@contextmanager
def attached_for_now(taps: list[Tap]) -> Iterator[None]:
    """Attach the taps that are detached, for the duration of a `with` block."""
    missing = [tap for tap in taps if tap.shadow is None]
    try:
        attach(missing)
        with following_gradients():
            yield
    finally:
        detach(missing)
        for session in {tap.session for tap in missing}:
            detach((), session)


Tap.attach_for_now = staticmethod(attached_for_now)
Around.find = staticmethod(call_around)


def taps_on(module: nn.Module) -> tuple[Tap, ...]:
    """Return the taps on a module, its methods and its parameters, even if somebody has wrapped its forward since."""
    found: tuple[Tap, ...] = ()
    names = module.__dict__
    forward = names.get("forward")
    cells = getattr(forward, "__closure__", None) or ()
    buried = [held for cell in cells if (held := cell_content(cell)) is not None]
    for candidate in (*names.values(), getattr(forward, "__wrapped__", None), *buried):
        shadow = shadow_of(candidate, module)
        if shadow is not None:
            found += (*shadow.around, *shadow.taps)
    return found + parameters.parameter_taps_on(module)


def same_taps(tap: Tap) -> list[Tap]:
    """Return the taps that do the same at the same place as one that is about to be attached."""
    shadow = shadow_of(tap.module.__dict__.get(tap.method), tap.module)
    if shadow is not None and not tap.holders:
        return shadow.same(tap)
    return [one for one in taps_on(tap.module) if one.purpose == tap.purpose]


def model_taps(model: nn.Module) -> tuple[ModelTap, ...]:
    """Return the taps that follow the forwards of a model: one for each `Hooks` on it."""
    shadow = shadow_of(model.__dict__.get("forward"), model)
    return shadow.around if shadow is not None else ()


def forget_locks() -> None:
    """Make a new lock in a forked process: the thread that held the old one may not exist there."""
    global _changing
    _changing = threading.RLock()
