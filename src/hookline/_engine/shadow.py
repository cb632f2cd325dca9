"""What stands on a module while it is watched, in the place of its `forward` or another method.

Most modules that are watched have one plain tap: a capture of the whole output. For them `hot_path` is all there is.
For all others there is one `Watch` for each method, however many taps: its shadow walks a short tuple of
them.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Set
from sys import getrefcount
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline._blocks import RESTING, open_blocks
from hookline._cache.record import Session, ticks
from hookline._engine import arguments, calls, checkpoints, functions
from hookline._engine import stop as forwards
from hookline._engine.actions import Call, Skip, Stop
from hookline._engine.guards import refuse_scripting, refuse_tracing
from hookline._engine.taps import Tap, blame
from hookline._sites.language import Site
from hookline._torch import (
    MODULE_CALL,
    REPLICATE,
    count_holders,
    frame_at,
    frames,
    graph_task,
    is_dynamo_loaded,
    is_rehearsal,
    lazy_clone,
    uncompiled,
    variables,
)
from hookline._values.copies import ALONE, ALONE_IN_MEMORY, is_result


class CallableShadow:
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


def method_shadow(watch: Watch, name: str, own: Any) -> Callable[..., Any]:
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


def is_method_shadow(held: object, codes: Set[Any]) -> bool:
    """Whether what an instance holds is one of hookline's, known by its code."""
    if type(held) is MethodType or type(held) is CallableShadow:
        return type(held.__func__) is FunctionType and held.__func__.__code__ in codes
    return False


METHOD_CODE = method_shadow(None, "", None).__code__  # type: ignore[arg-type]


_open_blocks = open_blocks.get
_OUTPUTS = ("output", "grad_output")
SCRIPT = "__prepare_scriptable__"  # This torch.jit.script calls first, if a module has it.
_order = operator.attrgetter("order")


def hot_path(held: Tap) -> Any:
    """Make the function that stands in for the forward of a module with one plain tap: the hot path.

    It looks at nothing but the tap and its record: no loop, no text, nothing allocated but the value. What can be
    worked out when hooks change is not worked out here.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held  # Once: when the hook comes off, on another thread maybe, GONE is put there.
        if is_dynamo_compiling():
            return _trace(tap, self, args, kwargs)
        # The very set of open blocks in which the tap is known to act: nobody has to look into it.
        if tap.here is not _open_blocks() or self is not tap.module or graph_task() != -1:
            return _otherwise(tap, self, args, kwargs)
        stamp = next(ticks)
        output = type(self).forward(self, *args, **kwargs)  # Looked up now: lazy modules change their class.
        if tap.watch is None:  # Taken off while the module ran.
            return output
        tap.fired = True
        record: Any = tap.record
        action: Any = tap.action
        number, version = tap.session.forwards, -1
        try:
            is_tensor = type(output) is Tensor
            # Only if nobody else holds the output or its memory: see _values/copies.py.
            if (
                is_tensor
                and action.copies_on_write
                and output.is_cpu
                and getrefcount(output) == ALONE
                and not output.is_quantized
                and (count_holders(output.untyped_storage()._cdata) == ALONE_IN_MEMORY or is_result(output))
            ):
                value = lazy_clone(output.detach() if output.requires_grad else output)
            elif is_tensor and action.refers:
                value = output.detach()  # Always: an autograd function may make its output a part of the graph later.
                version = value._version
            else:
                is_new = is_tensor and action.clone is None and getrefcount(output) == ALONE and is_result(output)
                whole = output if action.gathering is None else action.whole(output, tap.site)
                value = action.keep(whole, None, is_new and whole is output)
        except Exception as error:
            value = _keep_otherwise(tap, output, error)
        if not record.order:
            record.order = next(ticks)
        # Else it is the second call in one forward of the model, or one that began before what is there, or a value
        # that is explained away. No call comes from here on: Python changes threads only at one.
        if record.seen < number and record.stamp < stamp:
            record.value = value
            record.version = version
            record.stamp = stamp
            record.seen = number
            record.count += 1
            return output
        record.put(value, stamp, number, version)
        return output

    return forward


def _otherwise(tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that the hot path can't do, or not yet: whether the tap acts here is looked up once."""
    here, method = open_blocks.get(), tap.watch
    if is_rehearsal():
        return type(module).forward(module, *args, **kwargs)
    if type(method) is not MethodType or module is not tap.module or graph_task() != -1 or RESTING in here:
        return calls.run(watch_for(tap), module, args, kwargs)
    if not tap.active and tap.blocks.isdisjoint(here):
        tap.pass_by(here)
        return type(module).forward(module, *args, **kwargs)
    tap.here = here
    if not tap.active and tap.blocks.isdisjoint(here):  # Another thread has let it rest meanwhile.
        tap.here = None
    return method(*args, **kwargs)


def watch_for(tap: Tap) -> Watch:
    """Return the watch that a tap of the hot path would have."""
    held = tap.watch  # Once: another thread may change it.
    if isinstance(held, Watch):
        return held
    watch = object.__new__(Watch)
    if held is not None:
        watch.module = tap.module
        watch.taps = (tap,)
    return watch


def _trace(tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hot path inside a graph that dynamo is tracing."""
    if module is not tap.module:
        return type(module).forward(module, *args, **kwargs)
    refuse_tracing()
    if not tap.action.is_traceable:  # type: ignore[union-attr]
        return _otherwise_uncompiled(tap, module, args, kwargs)
    return tap.trace(type(module).forward(module, *args, **kwargs))


_otherwise_uncompiled = uncompiled(_otherwise)


def _keep_otherwise(tap: Tap, output: Any, error: Exception) -> Any:
    """Keep a value that torch refuses to copy on write; an error of any other kind names the site."""
    try:
        if type(output) is not Tensor or not (tap.action.copies_on_write or tap.action.refers):  # type: ignore[union-attr]
            blame(tap.site, error)
        try:
            return tap.action.keep(tap.action.whole(output, tap.site))  # type: ignore[union-attr]
        except Exception as other:
            blame(tap.site, other)
    finally:
        del error  # Its traceback holds this frame, which would hold it, and with it the model.


class Watch:
    """One watched module, or method of one: what was found there, and the taps on it."""

    module: nn.Module | None = None
    name = "forward"
    method: MethodType | CallableShadow | None = None
    taps: tuple[Tap, ...] = ()
    # What to call instead of the class's function, such as the forward that accelerate puts on an instance.
    found: Callable[..., Any] | None = None
    around: tuple[Tap, ...] = ()  # Those that follow the forwards of a whole model: see stop.py.
    home: weakref.ref[nn.Module] | None = None
    heir: weakref.ref[Tap] | None = None  # The tap that was left alone, and went to the hot path.
    pauses: tuple[Tap, ...] = ()  # Those that take away the mode of one above: see functions.py.
    entries: tuple[Tap, ...] = ()  # Those that have to know when it is called by itself: see functions.py.
    choices: tuple[tuple[Tap, ...], dict[Any, tuple[Tap, ...]]]  # The taps, and what functions.py knows of them.
    is_traceable = True
    is_function = is_method = False
    code: CodeType | None = None  # Of the forward in which functions run that taps are on.
    parameters = arguments.NO_PARAMETERS

    before: Callable[..., Any] | None = None  # What the instance itself held, which somebody else put there.

    def __init__(self, module: nn.Module, name: str, before: Callable[..., Any] | None) -> None:
        kind = type(module)
        own = kind.__dict__.get(name) or written_in(kind, name)
        self.module = module
        self.name = name
        if name == "forward":
            function: Any = _shadow(self, kind.forward)
            function.__code__ = code_for(kind, False) or function.__code__
            self.method = MethodType(function, module)
        else:
            function = method_shadow(self, name, own if before is None else before)
            self.method = MethodType(function, module) if before is None else CallableShadow(function, module, before)
        if before is not None or type(own) is not FunctionType:
            self.before = before
            self.found = before if before is not None else bound(own, module)
            self.home = weakref.ref(module)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was found: somebody else's, or that of the class as it is now."""
        if self.entries and module is self.module:
            event = functions.entering(self, module)
            if event is not None:
                own = self.found or bound(written_in(type(module), self.name), module)
                return calls.run_event(MethodCall(own, event), module, (args, kwargs), event)
        if self.found is not None and self.home is not None and self.home() is module:
            return self.found(*args, **kwargs)
        if type(self.before) is MethodType and not is_shadow(self.before):
            return self.before.__func__(module, *args, **kwargs)  # A copy of a module with a forward of its own.
        if self.name == "forward":
            return type(module).forward(module, *args, **kwargs)
        return bound(written_in(type(module), self.name), module)(*args, **kwargs)

    def successor(self, module: nn.Module) -> Watch | None:
        """Return what watches the module in the place of this one, which somebody holds from before."""
        plain = self.heir() if self.heir is not None else None
        now = plain.watch if plain is not None and plain.module is module else None
        # Not one over what somebody put there meanwhile: that may call this one.
        if type(now) is MethodType or (isinstance(now, Watch) and now.found is None):
            return watch_for(plain)  # type: ignore[arg-type]
        if checkpoints.is_replaying():  # A segment holds the shadow of then.
            return watch_of(module.__dict__.get(self.name), module)
        return None

    def site(self, site: Site, _number: int) -> Site:
        """Return the site of a call."""
        return site

    def stand_in(self, value: Any, _is_given: bool, _passed: arguments.Arguments) -> Any:
        """Return what is given when it is skipped."""
        return value

    def change(self, taps: tuple[Tap, ...]) -> None:
        """Set the taps, and work out what a call needs to know of them."""
        around, pauses, entries, others = [], [], [], []
        is_traceable = True
        sees_inside = sees_arguments = False
        for tap in sorted(taps, key=_order) if len(taps) > 1 else taps:
            action = tap.action
            if isinstance(action, forwards.Forward):
                around.append(tap)
                is_traceable = is_traceable and not action.stops
            elif isinstance(action, functions.Pause):
                pauses.append(tap)
            elif isinstance(action, functions.MethodEntry):
                entries.append(tap)
                is_traceable = is_traceable and not action.tap.is_inside
            else:
                others.append(tap)
                is_traceable = is_traceable and tap.is_traceable
                sees_inside = sees_inside or tap.is_inside
                sees_arguments = sees_arguments or tap.site.port not in _OUTPUTS or isinstance(action, Skip)
        if sees_inside:
            own = self.found or type(self.module).forward  # type: ignore[union-attr]
            self.code = getattr(inspect.unwrap(own), "__code__", None)
        if sees_arguments:
            self.parameters = self._parameters()
        self.is_traceable = is_traceable
        chosen = tuple(others)
        self.choices = chosen, {}  # In one step, and before the taps: another thread may be running.
        self.around, self.pauses, self.entries, self.taps = tuple(around), tuple(pauses), tuple(entries), chosen

    @property
    def all(self) -> tuple[Tap, ...]:
        """Every tap on it."""
        return (*self.around, *self.pauses, *self.entries, *self.taps)

    def _parameters(self) -> arguments.Parameters:
        if self.found is not None:
            return arguments.read_parameters(self.found)
        return arguments.parameters_of(getattr(type(self.module), self.name))

    @property
    def is_untouched(self) -> bool:
        """Whether the module is as its class made it, but for the shadow."""
        module = self.module
        return self.found is None and module is not None and module.__dict__.get(self.name) is self.method

    def leave(self) -> None:
        """Leave the module as it was found."""
        module, method = self.module, self.method
        if module is None:
            return
        names = module.__dict__
        if self.name == "forward" and SCRIPT in names and names[SCRIPT] is refuse_scripting:
            del names[SCRIPT]
        # Else somebody wrapped it meanwhile: theirs stays, ours passes through.
        if method is not None and names.get(self.name) is method:
            if self.before is None:
                del names[self.name]
            else:
                names[self.name] = self.before
            if self.name == "forward":
                names.pop(REPLICATE, None)
        # The module first: see calls.run. All of it: a copy of the module may hold the watch for longer.
        self.module = self.method = None
        self.taps = ()
        if self.around:
            self.around = ()
        self.choices = (), {}
        if self.pauses or self.entries:
            self.pauses = self.entries = ()


class MethodCall(Watch):
    """One call of a method by itself, which counts as a forward of its module for the functions inside."""

    is_method = True

    def __init__(self, method: Callable[..., Any], event: checkpoints.Event) -> None:
        held = event.taps[0][0].watch
        self.found = method
        self.code = getattr(inspect.unwrap(method), "__code__", None)
        self.choices = held.choices if isinstance(held, Watch) else ((), {})  # Else another thread has taken it off.

    def forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        return self.found(*args, **kwargs)  # type: ignore[misc]


def _shadow(watch: Watch, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that stands in for a module's forward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return calls.trace(watch, self, args, kwargs)
        return calls.run(watch, self, args, kwargs)

    forward.__wrapped__ = own  # type: ignore[attr-defined]  # For inspect.signature(model.forward).
    return forward


def watch_of(held: object, module: nn.Module) -> Watch | None:
    """Return the watch behind what a module holds, if that is one of hookline's shadows."""
    if not is_shadow(held):
        return None
    plain = plain_tap(held, module)
    if plain is not None:
        return watch_for(plain)
    watch = _behind(held)
    return watch if watch is not None and watch.module is module else None


def _behind(held: Any) -> Watch | None:
    """Return the watch that a shadow was made with; the hot path has none."""
    function: Any = held.__func__
    if function.__code__ in _PLAIN_CODES:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return dict(cells)["watch"].cell_contents  # type: ignore[no-any-return]


def strip(module: nn.Module) -> None:
    """Take hookline's shadows off a module, whatever state they are in, and put back what they stand over."""
    left = unhooked(module, module.__dict__)
    for name in list(module.__dict__):
        if name in left:
            module.__dict__[name] = left[name]
        else:
            del module.__dict__[name]


def unhooked(module: nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Return what a module holds without hookline's shadows, and with what they stand over."""
    left = {}
    for name, held in names.items():
        watch = _behind(held) if is_shadow(held) else None
        if watch is not None and watch.before is not None:
            is_own = watch.home is not None and watch.home() is module  # Else this is a copy of that module.
            left[name] = watch.before if is_own else held
        elif not is_shadow(held) and name != REPLICATE and held is not refuse_scripting:
            left[name] = held
    return left


def plain_tap(held: object, module: nn.Module) -> Tap | None:
    """Return the tap behind what a module holds, if that is on the hot path."""
    if type(held) is not MethodType or getattr(held.__func__, "__code__", None) not in _PLAIN_CODES:
        return None
    tap: Tap = held.__func__.__closure__[0].cell_contents  # type: ignore[index]
    return tap if tap.module is module and tap.watch is held else None


def is_shadow(held: object) -> bool:
    """Whether what an instance holds is something that hookline put there, or left on a copy."""
    return is_method_shadow(held, _CODES)


def running() -> list[Call]:
    """Return the calls of modules that are running here, innermost first, from their frames.

    The hot path hands an action nothing but the value; what else there is of its call is of use when something is
    wrong. The call of a module that is not watched has the site ''.
    """
    found = []
    for frame in frames(frame_at(1)):
        held = variables(frame) if frame.f_code in _PLAIN_CODES or frame.f_code is _PASSING else {}
        tap = held.get("tap")
        if "self" in held and tap is not None and tap.record is not None:
            found.append(Call(tap.site, held["self"], held["args"], held["kwargs"], tap.record.count, {}))
        elif "event" in held and held["event"].taps and not held["watch"].is_function:
            tap, number = held["event"].taps[0]
            args, kwargs = held["passed"]
            name = held["watch"].name
            site = Site(tap.path, member="" if name == "forward" else f"{name}()")
            found.append(Call(site, held["module"], args, kwargs, number, {}))
        elif frame.f_code is MODULE_CALL:
            held = variables(frame)
            if not found or found[-1].module is not held["self"] or found[-1].site.member:
                found.append(Call(Site(""), held["self"], held["args"], held["kwargs"], 0, {}))
    return found


def code_for(kind: type, is_plain: bool) -> CodeType | None:
    """Return the code of a shadow as one of a class's own, where dynamo is in use.

    Dynamo counts graphs, and learns which sizes change, by code: models of different classes have nothing to do with
    each other.
    """
    if not is_dynamo_loaded():
        return None
    codes = _codes_of.get(kind)
    if codes is None:
        name = f"{kind.__name__}.forward"
        codes = _codes_of[kind] = CODE.replace(co_name=name), _WATCHING.replace(co_name=name)
        _PLAIN_CODES.add(codes[0])
        _CODES.update(codes)
    return codes[0] if is_plain else codes[1]


def gone(watch: Watch | None = None) -> Tap:
    """Return what stands for a tap in a shadow that is off its module: it may be held by a copy of that."""
    tap = Tap(Site(""), None, Stop(), Session(), False, "")  # type: ignore[arg-type]
    tap.watch = watch
    return tap


GONE = gone()
CODE = hot_path(GONE).__code__
_WATCHING: CodeType = _shadow(None, len).__code__  # type: ignore[arg-type]
_codes_of: weakref.WeakKeyDictionary[type, tuple[CodeType, CodeType]] = weakref.WeakKeyDictionary()
_PLAIN_CODES = {CODE}
_CODES = {CODE, _WATCHING, METHOD_CODE}
_PASSING = calls.pass_through.__code__
