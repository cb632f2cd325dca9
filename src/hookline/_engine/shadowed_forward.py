"""Shadows: the callables that a hooked module holds in place of its `forward` or another method.

Most hooked modules have one plain tap: a capture of the whole output. These need only `hot_path`. All others have one
`Shadow` for each hooked method, which loops over a short tuple of taps.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from sys import getrefcount
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline._cache.record import ticks
from hookline._engine import call_arguments, compiled
from hookline._engine.action import Call, OutputObserver, Skip
from hookline._engine.activation_checkpoint import is_replaying
from hookline._engine.apply_to_part import blame
from hookline._engine.call_event import Choices, Event
from hookline._engine.functions import EntryTap, Pause, entering
from hookline._engine.model_forward import ModelTap
from hookline._engine.run_call import pass_through, run, run_event
from hookline._engine.tap import HotTap, Tap
from hookline._engine.unsupported_tracing import refuse_scripting
from hookline._open_blocks import RESTING, Session, open_blocks
from hookline._sites.language import Site
from hookline._torch import (
    MODULE_CALL,
    REPLICATE,
    count_holders,
    frame_at,
    frames,
    graph_task,
    is_rehearsal,
    lazy_clone,
    uncompiled,
    variables,
)
from hookline._values.copy_or_share import ALONE, ALONE_IN_MEMORY, is_result
from hookline._values.nested import Arguments


class ShadowedCallable:
    """The shadow of a callable that was stored on a module instance.

    If the shadow is copied or pickled, the result is the original callable, without the shadow.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, held: Callable[..., Any]) -> None:
        self.__func__ = function
        self.__self__ = module
        self.__wrapped__ = held

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # The keywords of a partial, or the attributes of a function.

    def __reduce__(self) -> tuple[Any, ...]:
        return cast, (None, self.__wrapped__)  # `cast` returns its second argument, and exists without hookline.


def _method_shadow(shadow: Shadow, name: str, own: Any) -> Callable[..., Any]:
    """Make the function that replaces a method."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return compiled.run_traced(shadow, self, args, kwargs)
        return run(shadow, self, args, kwargs)

    functools.update_wrapper(method, own)  # For inspect.signature, and the function's attributes.
    method.__name__ = name  # Pickle finds a bound method by this name.
    return method


def written_in(kind: type, name: str) -> Any:
    """Return an attribute of a class as it is written there, unbound: a function, a staticmethod, a builtin."""
    return inspect.getattr_static(kind, name, None)


def bound(own: Any, module: nn.Module) -> Callable[..., Any]:
    """Bind an attribute of a class to an instance, as `module.name` would."""
    found: Callable[..., Any] = own.__get__(module, type(module)) if hasattr(own, "__get__") else own
    return found


_open_blocks = open_blocks.get
_OUTPUTS = ("output", "grad_output")
SCRIPT = "__prepare_scriptable__"  # torch.jit.script calls this first, if a module has it.
_order = operator.attrgetter("order")


def hot_path(held: HotTap) -> Any:
    """Make the function that replaces the forward of a module with one `HotTap`: the hot path.

    It uses only the tap and its record: no loops, no strings, and no allocation except the value. Everything that can
    be computed when hooks are added or removed is computed then.

    Two rules constrain its code. `running_calls` reads the variables `tap`, `self`, `args` and `kwargs` from its frame.
    And no other variable may hold `output`: the higher reference count would cause every value to be copied.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held  # Read once: detaching, perhaps on another thread, replaces it with `GONE`.
        if is_dynamo_compiling():
            return compiled.run_hot_traced(tap, self, args, kwargs, _otherwise_uncompiled)
        # `acts_in` is the set of open blocks in which the tap was last found to act. If the same set is open now, the
        # tap acts.
        if tap.acts_in is not _open_blocks() or self is not tap.module or graph_task() != -1:
            return _otherwise(tap, self, args, kwargs)
        stamp = next(ticks)
        output = type(self).forward(self, *args, **kwargs)  # Looked up now: lazy modules change their class.
        if tap.shadow is None:  # Detached while the module ran.
            return output
        tap.fired = True
        record = tap.record
        action = tap.action
        number, version = tap.session.forwards, -1
        try:
            is_tensor = type(output) is Tensor
            # Copy on write only if nobody else holds the output or its memory: see _values/copy_or_share.py.
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
                value = output.detach()  # Even if it has no graph yet: an autograd.Function may attach it to one later.
                version = value._version
            else:
                is_new = is_tensor and action.clone is None and getrefcount(output) == ALONE and is_result(output)
                whole = output if action.gathering is None else action.gathered(output, tap.site)
                value = action.keep(whole, None, is_new and whole is output)
        except Exception as error:
            value = _keep_otherwise(tap, output, error)
        if not record.order:
            record.order = next(ticks)
        # The usual case. `record.put` handles the others: a second call in one forward of the model, a call that began
        # before the stored one, and a record that holds a reason for having no value. Python switches threads only at
        # calls and loops, and the lines up to `return` have neither.
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


def _otherwise(tap: HotTap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that the hot path can't run. If the tap acts in these open blocks, note that, and try again."""
    opened, method = open_blocks.get(), tap.shadow
    if is_rehearsal():
        return type(module).forward(module, *args, **kwargs)
    if type(method) is not MethodType or module is not tap.module or graph_task() != -1 or RESTING in opened:
        return run(shadow_for(tap), module, args, kwargs)
    if not tap.active and tap.blocks.isdisjoint(opened):
        tap.pass_by(opened)
        return type(module).forward(module, *args, **kwargs)
    tap.acts_in = opened
    if not tap.active and tap.blocks.isdisjoint(opened):  # Another thread has deactivated it meanwhile.
        tap.acts_in = None
    return method(*args, **kwargs)


def shadow_for(tap: Tap) -> Shadow:
    """Return the `Shadow` of a tap. A tap on the hot path has none: make one that runs the call in the same way."""
    held = tap.shadow  # Read once: another thread may change it.
    if isinstance(held, Shadow):
        return held
    shadow = object.__new__(Shadow)
    if held is not None:
        shadow.module = tap.module
        shadow.taps = (tap,)
    return shadow


_otherwise_uncompiled = uncompiled(_otherwise)


def _keep_otherwise(tap: HotTap, output: Any, error: Exception) -> Any:
    """Keep a value that torch refuses to copy on write. An error of any other kind is raised with the site."""
    action = tap.action
    try:
        if type(output) is not Tensor or not (action.copies_on_write or action.refers):
            blame(tap.site, error)
        try:
            return action.keep(action.gathered(output, tap.site))
        except Exception as other:
            blame(tap.site, other)
    finally:
        del error  # Break a reference cycle: the traceback holds this frame, and with it the model.


class Shadow:
    """One shadowed method of a module, most often its forward: the callable that was there, and the taps on it."""

    module: nn.Module | None = None
    name = "forward"
    method: MethodType | ShadowedCallable | None = None
    taps: tuple[Tap, ...] = ()
    # What to call instead of the class's function, such as the forward that accelerate puts on an instance.
    found: Callable[..., Any] | None = None
    around: tuple[ModelTap, ...] = ()  # Taps that follow the forwards of a whole model: see model_forward.py.
    home: weakref.ref[nn.Module] | None = None
    heir: weakref.ref[HotTap] | None = None  # The last remaining tap, which moved to the hot path.
    pauses: tuple[Tap, ...] = ()  # Taps that remove the `FunctionMode` of a parent: see functions.py.
    entries: tuple[EntryTap, ...] = ()  # Taps that check whether a method is called directly: see functions.py.
    choices: Choices
    is_traceable = True
    is_function = is_method = False
    code: CodeType | None = None  # The code of the method, if functions inside it have taps.
    parameters = call_arguments.NO_PARAMETERS

    before: Callable[..., Any] | None = None  # The callable that somebody else had put on the instance.

    def __init__(self, module: nn.Module, name: str, before: Callable[..., Any] | None) -> None:
        kind = type(module)
        own = kind.__dict__.get(name) or written_in(kind, name)
        self.module = module
        self.name = name
        if name == "forward":
            function: Any = _shadow(self, kind.forward)
            function.__code__ = compiled.code_for(kind, _SHADOW_CODE, _CODES) or function.__code__
            self.method = MethodType(function, module)
        else:
            function = _method_shadow(self, name, own if before is None else before)
            self.method = MethodType(function, module) if before is None else ShadowedCallable(function, module, before)
        if before is not None or type(own) is not FunctionType:
            self.before = before
            self.found = before if before is not None else bound(own, module)
            self.home = weakref.ref(module)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the callable that the shadow replaced: the one on the instance, or the class's current method."""
        if self.entries and module is self.module:
            event = entering(self.entries, self.name, module)
            if event is not None:
                own = self.found or bound(written_in(type(module), self.name), module)
                return run_event(MethodCall(own, event), module, (args, kwargs), event)
        if self.found is not None and self.home is not None and self.home() is module:
            return self.found(*args, **kwargs)
        if type(self.before) is MethodType and not is_shadow(self.before):
            return self.before.__func__(module, *args, **kwargs)  # `module` is a copy of a module with its own forward.
        if self.name == "forward":
            return type(module).forward(module, *args, **kwargs)
        return bound(written_in(type(module), self.name), module)(*args, **kwargs)

    def successor(self, module: nn.Module) -> Shadow | None:
        """Return the shadow that is on the module now, for a caller that still holds this one."""
        plain = self.heir() if self.heir is not None else None
        if plain is not None and plain.module is module:
            now = plain.shadow
            # Not if the tap now shadows a callable that somebody put there later: that callable may call this shadow.
            if type(now) is MethodType or (isinstance(now, Shadow) and now.found is None):
                return shadow_for(plain)
        if is_replaying():  # A checkpointed segment holds the shadow that was here in its first pass.
            return shadow_of(module.__dict__.get(self.name), module)
        return None

    def stand_in(self, value: Any, _is_given: bool, _passed: Arguments) -> Any:
        """Return the result of the call when it is skipped."""
        return value

    def change(self, taps: tuple[Tap, ...]) -> None:
        """Set the taps, and work out what a call needs to know about them."""
        around: list[ModelTap] = []
        pauses: list[Tap] = []
        entries: list[EntryTap] = []
        others: list[Tap] = []
        is_traceable = True
        sees_inside = sees_arguments = False
        for tap in sorted(taps, key=_order) if len(taps) > 1 else taps:
            if isinstance(tap, ModelTap):
                around.append(tap)
                is_traceable = is_traceable and not tap.action.stops
            elif isinstance(tap, EntryTap):
                entries.append(tap)
                is_traceable = is_traceable and not tap.action.tap.is_inside
            elif isinstance(tap.action, Pause):
                pauses.append(tap)
            else:
                others.append(tap)
                is_traceable = is_traceable and compiled.is_traceable(tap)
                sees_inside = sees_inside or tap.is_inside
                sees_arguments = sees_arguments or tap.site.port not in _OUTPUTS or isinstance(tap.action, Skip)
        if sees_inside:
            kind: Any = type(self.module)
            self.code = getattr(inspect.unwrap(self.found or kind.forward), "__code__", None)
        if sees_arguments:
            self.parameters = self._parameters()
        self.is_traceable = is_traceable
        chosen = tuple(others)
        self.choices = chosen, {}  # In one assignment, before `taps`: another thread may be running the module.
        self.around, self.pauses, self.entries, self.taps = tuple(around), tuple(pauses), tuple(entries), chosen

    @property
    def all(self) -> tuple[Tap, ...]:
        """All taps on the method."""
        return (*self.around, *self.pauses, *self.entries, *self.taps)

    def remove(self, tap: Tap) -> HotTap | None:
        """Remove a tap; restore the module after the last one. Return a tap that can use the hot path now, if any."""
        every = self.all
        if every == (tap,) or not every:
            self.leave()
            return None
        others = tuple([one for one in every if one is not tap])
        last = others[0]
        if len(others) == 1 and isinstance(last, HotTap) and self.is_untouched:
            return last
        self.change(others)
        return None

    def _parameters(self) -> call_arguments.Parameters:
        if self.found is not None:
            return call_arguments.read_parameters(self.found)
        return call_arguments.parameters_of(getattr(type(self.module), self.name))

    @property
    def is_untouched(self) -> bool:
        """Whether the module uses its class's method, and nobody has replaced the shadow."""
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
        # If the module holds another callable, somebody has wrapped our shadow. Their wrapper stays, and the shadow
        # only passes the call on.
        if method is not None and names.get(self.name) is method:
            if self.before is None:
                del names[self.name]
            else:
                names[self.name] = self.before
            if self.name == "forward":
                names.pop(REPLICATE, None)
        # Clear `module` first: see `run` in run_call.py. Clear the rest too, as a copy may keep the shadow alive.
        self.module = self.method = None
        self.taps = ()
        if self.around:
            self.around = ()
        self.choices = (), {}
        if self.pauses or self.entries:
            self.pauses = self.entries = ()


class MethodCall(Shadow):
    """One direct call of a method. Taps on functions inside act as they do in a forward of its module."""

    is_method = True

    def __init__(self, method: Callable[..., Any], event: Event) -> None:
        held = event.taps[0][0].shadow
        self.found = method
        self.code = getattr(inspect.unwrap(method), "__code__", None)
        self.choices = held.choices if isinstance(held, Shadow) else ((), {})  # Else another thread has detached it.

    def forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method."""
        own: Any = self.found
        return own(*args, **kwargs)


def _shadow(shadow: Shadow, own: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that replaces a module's forward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return compiled.run_traced(shadow, self, args, kwargs)
        return run(shadow, self, args, kwargs)

    return functools.update_wrapper(forward, own, (), ())  # `__wrapped__`, for inspect.signature(model.forward).


def shadow_of(held: object, module: nn.Module) -> Shadow | None:
    """Return the `Shadow` behind an attribute of a module, if hookline put it there."""
    if not is_shadow(held):
        return None
    plain = hot_tap_of(held, module)
    if plain is not None:
        return shadow_for(plain)
    shadow = _behind(held)
    return shadow if shadow is not None and shadow.module is module else None


def _behind(held: Any) -> Shadow | None:
    """Return the `Shadow` behind a callable on a module; None for the hot path."""
    function: Any = held.__func__
    if function.__code__ in HOT_CODES:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    found: Shadow = dict(cells)["shadow"].cell_contents
    return found


def strip_shadows(module: nn.Module) -> None:
    """Take hookline's shadows off a module, whatever state they are in, and put back what they replaced."""
    left = unhooked(module, module.__dict__)
    for name in list(module.__dict__):
        if name in left:
            module.__dict__[name] = left[name]
        else:
            del module.__dict__[name]


def unhooked(module: nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without hookline's shadows, but with the callables that these replaced."""
    left = {}
    for name, held in names.items():
        shadow = _behind(held) if is_shadow(held) else None
        if shadow is not None and shadow.before is not None:
            is_own = shadow.home is not None and shadow.home() is module  # Else this is a copy of that module.
            left[name] = shadow.before if is_own else held
        elif not is_shadow(held) and name != REPLICATE and held is not refuse_scripting:
            left[name] = held
    return left


def hot_tap_of(held: object, module: nn.Module) -> HotTap | None:
    """Return the tap behind an attribute of a module, if the attribute is a shadow on the hot path."""
    if type(held) is not MethodType or getattr(held.__func__, "__code__", None) not in HOT_CODES:
        return None
    function: Any = held.__func__
    tap: HotTap = function.__closure__[0].cell_contents
    return tap if tap.module is module and tap.shadow is held else None


def is_shadow(held: object) -> bool:
    """Return True if `held` is one of hookline's shadows, on the original or a copy, judging by its code object."""
    if type(held) is MethodType or type(held) is ShadowedCallable:
        code = getattr(held.__func__, "__code__", None) if type(held.__func__) is FunctionType else None
        return code in _CODES or code in HOT_CODES
    return False


def running_calls() -> list[Call]:
    """Return the module calls that are running on this thread, innermost first, read from their frames.

    The hot path passes only the value to an action. To report an error, the action finds the rest of the call here. The
    call of a module without hooks has the site ''. Variables of `hot_path` and `pass_through` are read by their names.
    """
    found = []
    for frame in frames(frame_at(1)):
        held = variables(frame) if frame.f_code in HOT_CODES or frame.f_code is _PASSING else {}
        tap = held.get("tap")
        if "self" in held and tap is not None and tap.record is not None:
            found.append(Call(tap.site, held["self"], held["args"], held["kwargs"], tap.record.count, {}))
        elif "event" in held and held["event"].taps and not held["called"].is_function:
            tap, number = held["event"].taps[0]
            args, kwargs = held["passed"]
            name = held["called"].name
            site = Site(tap.path, member="" if name == "forward" else f"{name}()")
            found.append(Call(site, held["module"], args, kwargs, number, {}))
        elif frame.f_code is MODULE_CALL:
            held = variables(frame)
            if not found or found[-1].module is not held["self"] or found[-1].site.member:
                found.append(Call(Site(""), held["self"], held["args"], held["kwargs"], 0, {}))
    return found


def gone(shadow: Shadow | None = None) -> HotTap:
    """Return a placeholder for a removed tap. A copy of the module, or torch, may still call the tap's old shadow."""
    tap = HotTap(Site(""), _NO_MODULE, OutputObserver(), Session(), False, "")
    tap.shadow = shadow
    return tap


_NO_MODULE = nn.Module()
_NO_SHADOW = object.__new__(Shadow)
GONE = gone()
CODE = hot_path(GONE).__code__
_SHADOW_CODE = cast("FunctionType", _shadow(_NO_SHADOW, len)).__code__
_METHOD_CODE = cast("FunctionType", _method_shadow(_NO_SHADOW, "", len)).__code__
HOT_CODES = {CODE}  # Plus a copy for each class, if dynamo is in use.
_CODES = {_SHADOW_CODE, _METHOD_CODE}
_PASSING = pass_through.__code__
