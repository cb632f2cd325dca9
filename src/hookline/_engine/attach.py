"""Attach taps to modules and detach them: `forward`, or another method, is shadowed on the instance.

At most three names in the instance's `__dict__` are touched: that of the method, and two methods that raise when
DataParallel replicates the module or torch.jit.script compiles it. Detaching the last tap leaves them as they were.
Taps on parameters are in parameters.py.
"""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hookline._engine import parameters
from hookline._engine.compiled import code_for, keep_dynamo_out
from hookline._engine.functions import Pause, entries_of, pauses_below
from hookline._engine.gradients import following_gradients
from hookline._engine.model_forward import ModelTap
from hookline._engine.shadowed_forward import (
    CODE,
    GONE,
    HOT_CODES,
    SCRIPT,
    Shadow,
    gone,
    hot_path,
    hot_tap_of,
    is_shadow,
    shadow_of,
    strip_shadows,
    unhooked,
    written_in,
)
from hookline._engine.tap import HotTap, Tap
from hookline._engine.unsupported_tracing import refuse_scripting
from hookline._open_blocks import Blocks, Session
from hookline._sites.members import method_names
from hookline._sites.tree import refuse_data_parallel
from hookline._torch import REPLICATE, cell_content, is_dynamo_loaded

# The classes of hooked modules, each with the reducer that copyreg had for it before, and the sessions of the hooks.
_reducers: dict[type, tuple[Any, set[Session]]] = {}
Common = tuple[dict[str, Any], CodeType | None]  # A shadow's attributes, and its code if the class has its own copy.
_WRITTEN = (FunctionType, staticmethod, classmethod)
_changing = threading.RLock()


def attach(taps: Iterable[Tap], acts_in: Blocks | None = None) -> None:
    """Attach taps to their modules.

    Args:
        acts_in: The open blocks in which the taps act, if known. Saves the first call from checking.
    """
    if is_dynamo_loaded():
        keep_dynamo_out()
    noted: dict[type, Common | None] = {}
    with _changing:
        for tap in taps:
            tap.acts_in = acts_in
            if tap.shadow is not None:
                continue
            module = tap.module
            names, kind = module.__dict__, type(module)
            if type(tap) is not HotTap or "forward" in names:
                _attach(tap)
                continue
            common = noted[kind] if kind in noted else _note(kind, noted, tap.session)
            if common is None:
                _attach(tap)
                continue
            # The usual case: a plain capture on a module whose forward nobody has replaced.
            function = hot_path(tap)
            function.__dict__, code = common
            if code is not None:
                function.__code__ = code
            names[REPLICATE] = refuse_data_parallel
            tap.shadow = names["forward"] = MethodType(function, module)


def _note(kind: type[nn.Module], noted: dict[type, Common | None], session: Session) -> Common | None:
    """Note and return what all shadows of a class share; None if its forward isn't a function (a staticmethod, say)."""
    _copy_unhooked(kind, session)
    is_function = type(kind.__dict__.get("forward") or written_in(kind, "forward")) is FunctionType
    noted[kind] = _common(kind) if is_function else None
    return noted[kind]


def _common(kind: type[nn.Module]) -> Common:
    # `__wrapped__` is for inspect.signature(model.forward).
    return {"__wrapped__": kind.forward}, code_for(kind, CODE, HOT_CODES)


def _attach(tap: Tap) -> None:
    """Attach one tap. If that fails, or Ctrl-C interrupts it, leave nothing of it behind."""
    try:
        _put_on(tap)
    except BaseException:
        detach((tap,))
        raise


def _put_on(tap: Tap) -> None:
    tap.attach_for_now = attached_for_now
    if tap.holders:
        parameters.attach(tap)
        for module, _ in tap.holders:
            _copy_unhooked(type(module), tap.session)
        return
    _copy_unhooked(type(tap.module), tap.session)
    module, name = tap.module, tap.method
    before = module.__dict__.get(name)
    plain = hot_tap_of(before, module) if before is not None else None
    shadow = shadow_of(before, module) if before is not None and plain is None else None
    if plain is not None:
        _leave_hot_path(plain, tap)
    elif shadow is not None:
        tap.shadow = shadow
        shadow.change((*shadow.all, tap))
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


def _leave_hot_path(plain: HotTap, tap: Tap) -> None:
    """Put a `HotTap` and a second tap on one `Shadow`. Build the shadow before anything changes, in case of Ctrl-C."""
    shadow = Shadow(plain.module, "forward", None)
    shadow.change((plain, tap))
    left: Any = plain.shadow
    plain.module.__dict__["forward"] = shadow.method
    plain.shadow = tap.shadow = shadow
    if SCRIPT not in plain.module.__dict__:
        plain.module.__dict__[SCRIPT] = refuse_scripting
    plain.acts_in = None
    left.__func__.__closure__[0].cell_contents = gone(shadow)  # Torch or other code may still call the old shadow.


def _take_hot_path(plain: HotTap, shadow: Shadow) -> None:
    """Move a `HotTap` back to the hot path, once it is alone on its module again."""
    function = hot_path(plain)
    function.__dict__, code = _common(type(plain.module))
    function.__code__ = code or function.__code__
    method, names = MethodType(function, plain.module), plain.module.__dict__
    if SCRIPT in names and names[SCRIPT] is refuse_scripting:
        del names[SCRIPT]
    names["forward"] = plain.shadow = method
    shadow.heir = weakref.ref(plain)  # Set before `leave`: another thread may be about to call the shadow.
    shadow.leave()


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


def detach(taps: Iterable[Tap]) -> None:
    """Detach taps. The last tap of a module leaves the module as it was found."""
    with _changing:
        for tap in taps:
            shadow: Any = tap.shadow
            if shadow is None:
                continue
            if type(shadow) is MethodType:
                names = tap.module.__dict__
                if names.get("forward") is shadow:  # Else somebody has wrapped it: their wrapper stays.
                    del names["forward"]
                if REPLICATE in names:
                    del names[REPLICATE]
                # A copy of the module may keep the shadow alive. It must not keep the tap and its values alive.
                shadow.__func__.__closure__[0].cell_contents = GONE  # type: ignore[index]  # It has a closure.
            elif tap.holders:
                parameters.detach(tap)
            else:
                _detach(tap, shadow)
            tap.shadow = tap.acts_in = None


def _detach(tap: Tap, shadow: Shadow) -> None:
    plain = shadow.remove(tap)
    if plain is not None:
        _take_hot_path(plain, shadow)
    if tap.helpers:
        detach(tap.helpers)
        tap.helpers = None  # They refer to the tap: the cycle would keep the model alive.


def _copy_unhooked(kind: type[nn.Module], session: Session) -> None:
    """Copy and pickle modules of a class without hookline's shadows, while any of them are hooked.

    A shallow copy would otherwise hold a shadow that is bound to the original module, and would run the original.
    """
    table = copyreg.dispatch_table
    if kind not in _reducers:
        _reducers[kind] = (table[kind] if kind in table else None), {session}  # noqa: SIM401  # Without a call.
        table[kind] = _reduce
    elif session not in _reducers[kind][1]:
        _reducers[kind][1].add(session)


def _reduce(module: nn.Module) -> Any:
    reduce, _ = _reducers.get(type(module), (None, None))
    reduced = reduce(module) if reduce is not None else module.__reduce_ex__(4)
    if type(reduced) is not tuple or len(reduced) < 3 or type(reduced[2]) is not dict:
        return reduced
    return (*reduced[:2], unhooked(module, reduced[2]), *reduced[3:])


def copy_as_before(session: Session) -> None:
    """Restore copyreg for the classes that a session hooked, except those on which other sessions have hooks."""
    with _changing:
        lifecycle = session.lifecycle()
        if lifecycle is not None and lifecycle.forward.owner is not None:  # Its hooks are still, or again, attached.
            return
        table = copyreg.dispatch_table
        for kind in tuple(_reducers):
            before, sessions = _reducers[kind]
            if sessions != {session}:
                sessions.discard(session)
                continue
            if table.get(kind) is not _reduce:
                pass  # Somebody has replaced our reducer since.
            elif before is not None:
                table[kind] = before
            else:
                del table[kind]
            del _reducers[kind]


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
            copy_as_before(session)


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


def model_taps(model: nn.Module) -> tuple[ModelTap, ...]:
    """Return the taps that follow the forwards of a model: one for each `Hooks` on it."""
    shadow = shadow_of(model.__dict__.get("forward"), model)
    return shadow.around if shadow is not None else ()


def forget_locks() -> None:
    """Make a new lock in a forked process: the thread that held the old one may not exist there."""
    global _changing
    _changing = threading.RLock()
