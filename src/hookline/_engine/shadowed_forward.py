"""Shadows: the callables that a hooked module holds in place of its `forward` or another method.

Most hooked modules have one plain tap at their whole output. Its class says which function replaces the forward:

| tap | what it does | function |
|---|---|---|
| `HotTap` | keeps the latest value | `hot_path` |
| `KeepingTap` | keeps several calls, or has a stop beside it | `keeping_path` |
| `HotGradientTap` | keeps the gradient; may have a `HotTap` beside it | `hot_gradient_path` |
| `ChangingTap` | patches or edits | `changing_path` |
| `ModelTap` | counts the forwards of a model | `model_path` |

Each of these functions does what `run` in run_call.py does in the common case, and calls `run` in all other cases. A
module with several taps, or with any other tap, has one `Shadow` for each hooked method, which loops over its taps.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from sys import getrefcount
from threading import get_ident
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from hookline._cache.record import ticks
from hookline._engine import call_arguments, compiled, gradients, parameter_operations, sequences
from hookline._engine.action import Call, OutputObserver, Set, Skip
from hookline._engine.activation_checkpoint import is_replaying
from hookline._engine.apply_to_part import blame, change_nested, explain
from hookline._engine.call_event import Choices, Event
from hookline._engine.capture_action import copy_new_on_cuda
from hookline._engine.functions import EntryTap, Pause, entering
from hookline._engine.model_forward import ModelTap, note_failure, note_stop, run_model_forward, warn_of_generator
from hookline._engine.run_call import call_of, passing_for, run, run_event
from hookline._engine.stop import STOPPED, reached, run_until
from hookline._engine.tap import ChangingTap, HotGradientTap, HotTap, KeepingTap, Tap
from hookline._engine.unsupported_tracing import refuse_scripting, refuse_tracing
from hookline._open_blocks import RESTING, Session, open_blocks, running_loop
from hookline._sites.language import Site
from hookline._sites.tree import refuse_data_parallel
from hookline._torch import (
    REPLICATE,
    count_holders,
    current_transform,
    gradient_hooks,
    graph_task,
    has_compiled,
    is_dynamo_loaded,
    is_pipelining_loaded,
    is_rehearsal,
    is_traced_now,
    lazy_clone,
    recomputations,
    saving_hooks,
    uncompiled,
)
from hookline._values.containers import private_containers
from hookline._values.copy_or_share import ALONE, ALONE_IN_MEMORY, RunningForward, current_forward, is_result
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
_NO_CONTAINERS = {Tensor, nn.Parameter, type(None), bool, int, float, str}
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
        # The forward is looked up now: lazy modules change their class. Python calls it faster with plain arguments.
        if len(args) == 1 and not kwargs:
            output = type(self).forward(self, args[0])
        else:
            output = type(self).forward(self, *args, **kwargs)
        if tap.shadow is None:  # Detached while the module ran.
            return output
        tap.fired = True
        record = tap.record
        action = tap.action
        number, version = tap.session.forwards, -1
        value: Any
        try:
            is_tensor = type(output) is Tensor
            # Copy on write only if nobody else holds the output or its memory: see _values/copy_or_share.py.
            if (
                is_tensor
                and action.copies_on_write
                and getrefcount(output) == ALONE
                and not output.is_quantized
                and (count_holders(output.untyped_storage()._cdata) == ALONE_IN_MEMORY or is_result(output))
            ):
                if output.is_cpu:
                    value = lazy_clone(output.detach() if output.requires_grad else output)
                else:
                    copied = copy_new_on_cuda(output) if output.is_cuda and action.copies_on_device else None
                    value = action.keep(output, None, True) if copied is None else copied
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


def hot_gradient_path(held: HotGradientTap) -> Any:
    """Make the function that replaces the forward of a module with one `HotGradientTap`, and perhaps a `HotTap`.

    The rules of `hot_path` hold here too: the names of the variables, and that no other variable may hold `output`.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held
        if is_dynamo_compiling():
            return compiled.run_hot_traced(tap, self, args, kwargs, _otherwise_uncompiled)
        opened = _open_blocks()
        beside: Any = tap.beside  # A `HotTap`.
        if (
            tap.acts_in is not opened
            or (beside is not None and beside.acts_in is not opened)
            or self is not tap.module
            or graph_task() != -1
        ):
            return _otherwise(tap, self, args, kwargs)
        if is_traced_now():
            refuse_tracing()
        # Without gradients, perhaps in a checkpoint (see call_event.py), or not called by the model (see `run_event`).
        if not is_grad_enabled() or saving_hooks(True) is not None or gradients.is_outermost():
            return run(shadow_for(tap), self, args, kwargs)
        given = None
        for one in (*args, *kwargs.values()) if kwargs else args:
            if type(one) not in _NO_CONTAINERS:
                given = gradients.tensors_in((args, kwargs))  # Read now: the call may write into containers.
                break
        stamp = next(ticks)
        output = type(self).forward(self, *args, **kwargs)
        is_tensor = type(output) is Tensor
        is_alone = is_tensor and getrefcount(output) == ALONE
        if beside is not None and beside.shadow is not None:  # Else it was detached while the module ran.
            keep_output(beside, output, stamp, is_alone and beside.action.clone is None and is_result(output))
        if tap.shadow is None:
            return output
        if is_alone and output.requires_grad and not output.is_leaf and gradient_hooks(output) is None:
            gradients.follow_new(tap, output, self, (args, kwargs), stamp)
            return output
        own = {} if is_tensor else private_containers(output)
        return follow_otherwise(tap, output, self, (args, kwargs), stamp, own, given)

    return forward


def changing_path(held: ChangingTap) -> Any:
    """Make the function that replaces the forward of a module with one `ChangingTap`. See `hot_path`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held
        if is_dynamo_compiling():
            return compiled.run_hot_traced(tap, self, args, kwargs, _otherwise_uncompiled)
        if tap.acts_in is not _open_blocks() or self is not tap.module or graph_task() != -1:
            return _otherwise(tap, self, args, kwargs)
        if is_traced_now() or recomputations():  # A checkpoint: see call_event.py.
            return run(shadow_for(tap), self, args, kwargs)
        number = tap.count
        tap.count = number + 1
        output = type(self).forward(self, *args, **kwargs)
        if tap.shadow is None:  # Detached while the module ran.
            return output
        if type(output) is not Tensor or tap.action.gathering is not None or parameter_operations.in_use:
            call = call_of(tap, tap.site, self, (args, kwargs), number, {}, passing_for(tap))
            return change_nested(tap, output, call, private_containers(output))
        tap.fired = True
        try:
            if isinstance(tap.action, Set):
                return tap.action(output, None, True)
            is_new = getrefcount(output) == ALONE and is_result(output)
            call = call_of(tap, tap.site, self, (args, kwargs), number, {}, passing_for(tap))
            return tap.action(output, call, True, is_new)
        except Exception as error:
            explain(tap, output, tap.site, error)

    return forward


def keeping_path(held: KeepingTap) -> Any:
    """Make the function that replaces the forward of a module with one `KeepingTap`, and perhaps a stop.

    The rules of `hot_path` hold here too: the names of the variables, and that no other variable may hold `output`.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held
        if is_dynamo_compiling():
            return compiled.run_hot_traced(tap, self, args, kwargs, _otherwise_uncompiled)
        opened, stop = _open_blocks(), tap.beside
        acts = tap.acts_in is opened and (stop is None or stop.acts_in is opened)
        if not acts or self is not tap.module or graph_task() != -1:
            return _otherwise(tap, self, args, kwargs)
        if is_traced_now():
            refuse_tracing()
        stamp = next(ticks)
        output = type(self).forward(self, *args, **kwargs)
        is_alone = type(output) is Tensor and tap.action.clone is None and getrefcount(output) == ALONE
        if tap.shadow is not None:  # Else it was detached while the module ran.
            keep_output(tap, output, stamp, is_alone and is_result(output))
        if stop is not None and stop.shadow is not None:
            reached(stop)
        return output

    return forward


def model_path(held: ModelTap) -> Any:
    """Make the function that replaces the forward of a model whose only tap is a `ModelTap`. See `hot_path`.

    It is `run_model_forward` for one `Hooks`, without what is rarely needed.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tap = held
        if is_dynamo_compiling():
            return compiled.run_model_traced(tap, self, args, kwargs, _otherwise_uncompiled)
        if tap.acts_in is not _open_blocks() or self is not tap.module or graph_task() != -1:
            return _otherwise(tap, self, args, kwargs)
        if is_traced_now():
            refuse_tracing()
        if (
            tap.has_gradients
            or tap.everywhere
            or tap.parents
            or (is_dynamo_loaded() and has_compiled())
            or is_pipelining_loaded()
            or current_transform() is not None
        ):
            run = partial(type(self).forward, self, *args, **kwargs)
            return run_model_forward((tap,), _open_blocks(), self, (args, kwargs), run)
        session = tap.session
        session.forwards += 1
        if session.running_on or running_loop() is not None:
            session.begin_forward()
        else:  # What `begin_forward` does in the usual case, without a call.
            session.running_on = get_ident()
        if session.generator is not None:
            warn_of_generator(tap)
        waiting = tap.left(_open_blocks()) if tap.stops else None
        running = RunningForward(self, args, kwargs)
        token = current_forward.set(running)
        try:
            if tap.follows_tokens:
                sequences.begin(session, running)
            if waiting:
                output = run_until(waiting, partial(type(self).forward, self, *args, **kwargs), self)
            else:
                output = type(self).forward(self, *args, **kwargs)
        except BaseException as error:
            note_failure(tap, error)
            raise
        finally:
            session.running_on = 0
            current_forward.reset(token)
        if output is STOPPED:
            return note_stop((tap,))
        return parameter_operations.plain(output) if parameter_operations.in_use else output

    return forward


def keep_output(tap: HotTap, output: Any, stamp: int, is_new: bool) -> None:
    """Keep the output of a module: what `hot_path` does inline."""
    action = tap.action
    tap.fired = True
    try:
        whole = output if action.gathering is None else action.gathered(output, tap.site)
        value = action.keep(whole, None, is_new and whole is output)
    except Exception as error:
        value = _keep_otherwise(tap, output, error)
    record, number = tap.record, tap.session.forwards
    if not record.order:
        record.order = next(ticks)
    if record.keep == 1 and record.seen < number and record.stamp < stamp:  # See `hot_path`.
        record.value = value
        record.version = -1
        record.stamp = stamp
        record.seen = number
        record.count += 1
    else:
        record.put(value, stamp, number)


def follow_otherwise(
    tap: HotGradientTap,
    output: Any,
    module: nn.Module,
    passed: Arguments,
    stamp: int,
    own: dict[int, Any],
    given: list[Tensor] | None,
) -> Any:
    """Follow the gradient of an output that somebody else holds, that has hooks already, or that has no graph."""
    event = Event([(tap, tap.count)])
    event.stamp, event.own = stamp, own
    call = Call(tap.site, module, *passed, tap.count, event.notes, tap.session.model())
    if given is None:
        given = gradients.tensors_in(passed)
    return gradients.follow_output(tap, output, call, event, given)


def _otherwise(tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that the hot path can't run. If its taps act in these open blocks, note that, and try again."""
    opened, method = open_blocks.get(), tap.shadow
    if is_rehearsal() and not isinstance(tap, ModelTap):
        return type(module).forward(module, *args, **kwargs)
    if type(method) is not MethodType or module is not tap.module or graph_task() != -1 or RESTING in opened:
        return run(shadow_for(tap), module, args, kwargs)
    taps = hot_group(tap)
    acting = [one for one in taps if one.active or not one.blocks.isdisjoint(opened)]
    if not acting:
        for one in taps:
            one.pass_by(opened)
        return type(module).forward(module, *args, **kwargs)
    if len(acting) < len(taps):
        return run(shadow_for(tap), module, args, kwargs)
    for one in taps:
        one.acts_in = opened
        if not one.active and one.blocks.isdisjoint(opened):  # Another thread has deactivated it meanwhile.
            one.acts_in = None
    return method(*args, **kwargs)


def hot_group(tap: Tap) -> tuple[Tap, ...]:
    """Return the taps that share the hot shadow of a tap, one or two, in the order in which they act."""
    beside = tap.beside
    return (tap,) if beside is None else tuple(sorted((tap, beside), key=_order))


def shadow_for(tap: Tap) -> Shadow:
    """Return the `Shadow` of a tap. A tap on the hot path has none: make one that runs the call in the same way."""
    held = tap.shadow  # Read once: another thread may change it.
    if isinstance(held, Shadow):
        return held
    shadow = object.__new__(Shadow)
    if held is not None:
        shadow.module = tap.module
        shadow.around, shadow.taps = ((tap,), ()) if isinstance(tap, ModelTap) else ((), hot_group(tap))
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
    heir: weakref.ref[Tap] | None = None  # The last remaining tap, which moved to the hot path.
    pauses: tuple[Tap, ...] = ()  # Taps that remove the `FunctionMode` of a parent: see functions.py.
    entries: tuple[EntryTap, ...] = ()  # Taps that check whether a method is called directly: see functions.py.
    choices: Choices
    is_traceable = True
    untraceable: frozenset[Tap] = frozenset()  # The taps that dynamo can't trace.
    doing: dict[Any, list[Tap]] | None = None  # The taps by their purpose, once somebody has asked: see `same`.
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
            function.__code__ = compiled.code_for(kind, _SHADOW_CODE, _CODES)
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

    def change(self, taps: Iterable[Tap]) -> None:
        """Set the taps, and work out what a call needs to know about them."""
        groups: tuple[list[Any], ...] = ([], [], [], [])
        untraceable = set[Tap]()
        for tap in sorted(taps, key=_order):
            groups[self._group(tap, untraceable)].append(tap)
        self._set(tuple(map(tuple, groups)), frozenset(untraceable))
        self.doing = None

    def add(self, tap: Tap) -> None:
        """Add a tap. The others are not looked at again if it acts after them: there may be many."""
        groups = self._groups
        untraceable = set[Tap]()
        number = self._group(tap, untraceable)
        if groups[number] and groups[number][-1].order > tap.order:
            self.change((*self.all, tap))
            return
        self._set((*groups[:number], (*groups[number], tap), *groups[number + 1 :]), self.untraceable | untraceable)
        if self.doing is not None:
            self.doing.setdefault(tap.purpose, []).append(tap)

    def _group(self, tap: Tap, untraceable: set[Tap]) -> int:
        """Return the number of the tap's group in `_groups`, and prepare the shadow for a call with this tap."""
        if isinstance(tap, ModelTap):
            number, is_traceable = 0, not (tap.stops or tap.follows_tokens)
        elif isinstance(tap.action, Pause):
            return 1
        elif isinstance(tap, EntryTap):
            number, is_traceable = 2, not tap.action.tap.is_inside
        else:
            number, is_traceable = 3, compiled.is_traceable(tap)
            if tap.is_inside:
                kind: Any = type(self.module)
                self.code = getattr(inspect.unwrap(self.found or kind.forward), "__code__", None)
            if tap.site.port not in _OUTPUTS or isinstance(tap.action, Skip):
                self.parameters = self._parameters()
        if not is_traceable:
            untraceable.add(tap)
        return number

    def _set(self, groups: tuple[Any, ...], untraceable: frozenset[Tap]) -> None:
        self.untraceable = untraceable
        self.is_traceable = not untraceable
        around, pauses, entries, taps = groups
        self.choices = taps, {}  # In one assignment, before `taps`: another thread may be running the module.
        self.around, self.pauses, self.entries, self.taps = around, pauses, entries, taps

    @property
    def _groups(self) -> tuple[Any, ...]:
        return self.around, self.pauses, self.entries, self.taps

    @property
    def all(self) -> tuple[Tap, ...]:
        """All taps on the method."""
        return (*self.around, *self.pauses, *self.entries, *self.taps)

    def remove(self, tap: Tap) -> Tap | None:
        """Remove a tap; restore the module after the last one. Return a tap that can use the hot path now, if any."""
        groups = [_without(group, tap) for group in self._groups]
        number = sum(map(len, groups))
        if not number:
            self.leave()
            return None
        last: Tap = next(group[0] for group in groups if group)
        if number == 1 and last.make_shadow is not None and self.is_untouched:
            return last
        self._set(tuple(groups), self.untraceable - {tap})
        alike = self.doing.get(tap.purpose, []) if self.doing is not None else []
        if tap in alike:
            alike.remove(tap)
        else:
            self.doing = None  # A function that changes the variables it closes over has another purpose now.
        return None

    def same(self, tap: Tap) -> list[Tap]:
        """Return the taps on the method that do the same at the same place."""
        if self.doing is None:
            self.doing = {}
            for one in self.taps:
                self.doing.setdefault(one.purpose, []).append(one)
        return self.doing.get(tap.purpose, [])

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
        self.around = self.pauses = self.entries = self.taps = ()
        self.choices = (), {}
        self.doing = None
        if self.untraceable:
            self.untraceable = frozenset()


def _without(taps: tuple[Any, ...], tap: Tap) -> tuple[Any, ...]:
    if taps and taps[-1] is tap:
        return taps[:-1]
    if tap not in taps:
        return taps
    at = taps.index(tap)
    return taps[:at] + taps[at + 1 :]


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
        elif not is_of_hookline(held):
            left[name] = held
    return left


def hot_tap_of(held: object, module: nn.Module) -> Tap | None:
    """Return the tap behind an attribute of a module, if the attribute is a shadow on the hot path."""
    if type(held) is not MethodType or getattr(held.__func__, "__code__", None) not in HOT_CODES:
        return None
    function: Any = held.__func__
    tap: Tap = function.__closure__[0].cell_contents
    return tap if tap.module is module and tap.shadow is held else None


def is_shadow(held: object) -> bool:
    """Return True if `held` is one of hookline's shadows, on the original or a copy, judging by its code object."""
    if type(held) is MethodType or type(held) is ShadowedCallable:
        code = getattr(held.__func__, "__code__", None) if type(held.__func__) is FunctionType else None
        return code in _CODES or code in HOT_CODES
    return False


def is_of_hookline(held: object) -> bool:
    """Return True if hookline put this attribute on a module: a shadow, or a function that refuses to go on."""
    return is_shadow(held) or held is refuse_scripting or held is refuse_data_parallel


def gone(shadow: Shadow | None = None) -> HotTap:
    """Return a placeholder for a removed tap. A copy of the module, or torch, may still call the tap's old shadow."""
    tap = HotTap(Site(""), _NO_MODULE, OutputObserver(), Session(), False, "")
    tap.shadow = shadow
    return tap


_NO_MODULE = nn.Module()
_NO_SHADOW = object.__new__(Shadow)
GONE = gone()
_HOT_CODE = hot_path(GONE).__code__
_SHADOW_CODE = cast("FunctionType", _shadow(_NO_SHADOW, len)).__code__
_METHOD_CODE = cast("FunctionType", _method_shadow(_NO_SHADOW, "", len)).__code__
_GRADIENT_CODE = hot_gradient_path(cast("HotGradientTap", GONE)).__code__
_MODEL_CODE = model_path(cast("ModelTap", GONE)).__code__
_CHANGING_CODE = changing_path(cast("ChangingTap", GONE)).__code__
_KEEPING_CODE = keeping_path(cast("KeepingTap", GONE)).__code__
# Plus a copy for each class, if dynamo is in use.
HOT_CODES = {_HOT_CODE, _GRADIENT_CODE, _MODEL_CODE, _CHANGING_CODE, _KEEPING_CODE}
_CODES = {_SHADOW_CODE, _METHOD_CODE}
HotTap.make_shadow = staticmethod(hot_path)
HotGradientTap.make_shadow = staticmethod(hot_gradient_path)
ChangingTap.make_shadow = staticmethod(changing_path)
KeepingTap.make_shadow = staticmethod(keeping_path)
ModelTap.make_shadow = staticmethod(model_path)
