"""One call of a watched module, method or function: inputs, the call or what stands in for it, outputs.

`run` does it in Python, `trace` inside a graph that dynamo is tracing. Both are called by the shadows in shadow.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline._blocks import Blocks, is_called_in_backward, note_skip, open_blocks
from hookline._engine import arguments, checkpoints, functions, gradients, operands
from hookline._engine import stop as forwards
from hookline._engine.actions import NOTHING, Apply, Call, Skip, Stop
from hookline._engine.guards import refuse_tracing
from hookline._engine.operands import plain
from hookline._engine.taps import Sequences, Tap, blame
from hookline._torch import graph_task, is_rehearsal, is_transformed, uncompiled
from hookline._values import copies
from hookline._values.containers import Exchange, private_containers
from hookline._values.copies import is_private
from hookline._values.fit import wraps_own
from hookline._values.nested import leaves
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline._engine.functions import Function
    from hookline._engine.shadow import Watch

Taps = tuple[Tap, ...]


def run(watch: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward with any taps around it."""
    # The taps before the module: another thread that takes the last tap off empties the module first.
    around, taps = watch.around, watch.taps
    while module is not watch.module:  # This is a copy of the module, or the last tap is gone.
        again = watch.successor(module)
        if again is None:
            return watch.forward(module, args, kwargs)
        watch = again
        around, taps = watch.around, watch.taps
    if watch.pauses:
        return functions.without_modes(lambda: _run(watch, around, taps, module, args, kwargs))
    return _run(watch, around, taps, module, args, kwargs)


def _run(
    watch: Watch, around: Taps, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    here = open_blocks.get()
    refuse_tracing()
    if around and (graph_task() == -1 or is_called_in_backward(here)):
        following = forwards.following(around, here)
        if following:
            token = copies.begin(module, args, kwargs)
            try:
                output = forwards.follow(following, here, lambda: run_taps(watch, taps, module, args, kwargs, here))
            finally:
                copies.running.reset(token)
            return plain(output) if operands.in_use else output
    return run_taps(watch, taps, module, args, kwargs, here)


def run_taps(
    watch: Watch, taps: Taps, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], here: Blocks
) -> Any:
    """Run a module's forward with those taps that act here."""
    if not taps or is_rehearsal():
        return watch.forward(module, args, kwargs)
    called = module if watch.name == "forward" else (module, watch.name)
    event = checkpoints.event_of(called, taps, here)
    if not event.taps:
        return watch.forward(module, args, kwargs)
    return run_event(watch, module, (args, kwargs), event)


def run_event(watch: Watch | Function, module: nn.Module, passed: arguments.Arguments, event: checkpoints.Event) -> Any:
    """Run a call with its taps, and see to the gradients of what is written in place."""
    if gradients.is_unsettled() and any([tap.site.port[0] == "g" for tap, _ in event.taps]):
        with gradients.settled():  # The model's own forward does not run: settle at the end of this call.
            return pass_through(watch, module, passed, event)
    return pass_through(watch, module, passed, event)


def pass_through(
    watch: Watch | Function, module: nn.Module, passed: arguments.Arguments, event: checkpoints.Event
) -> Any:
    """Inputs, then the call or what stands in for it, then outputs; in each, taps in the order they were added."""
    skip: Tap | None = None
    taps, inside = event.taps, []
    if not watch.is_function and any([tap.is_inside for tap, _ in taps]):
        inside = [pair for pair in taps if pair[0].is_inside]
        taps = [pair for pair in taps if not pair[0].is_inside]
    follows = False
    try:
        for tap, number in taps:
            if isinstance(tap.action, Skip):
                skip = tap
                tap.fired = True
            elif tap.site.port == "grad_output":
                follows = True
            elif tap.site.port != "output":
                passed = _pass_input(tap, _call(tap, watch, module, passed, number, event), event, watch)
        given = gradients.given(passed, event) if follows else []  # Now: the call may write into containers.
        if skip is not None:
            skip.skipped_in = skip.session.forwards
            if not skip.site.member:
                note_skip(module)
            output = watch.stand_in(_skipped(skip, module, passed, watch), skip.action.value is not NOTHING, passed)  # type: ignore[union-attr]
        elif inside:
            output = functions.run(watch, module, passed, inside, event, pass_through)  # type: ignore[arg-type]
        else:
            output = watch.forward(module, *passed)
            if type(output) is Tensor:
                event.new = output if is_private(output) else None
            elif event.changes:
                event.own = private_containers(output)
    finally:
        exchanged = event.exchanged
        if exchanged is not None:
            try:
                exchanged.put_back()
            finally:
                exchanged.put_back()  # Again, if a Ctrl-C came in the first.
    for tap, number in taps:
        if tap.watch is None or isinstance(tap.action, Skip):  # Taken off while the module ran.
            continue
        if tap.site.port == "output":
            if tap.is_family and not _can_be_kept(output):
                continue
            output = act(tap, output, _call(tap, watch, module, passed, number, event), event)
        elif tap.site.port == "grad_output":
            call = _call(tap, watch, module, passed, number, event)
            output = gradients.watch_output(tap, output, call, event, given)
    return output


def _can_be_kept(output: Any) -> bool:
    """Whether a function gave what a pattern of functions means: a tensor, and none of a torch.func transform."""
    tensors = leaves(output)
    return bool(tensors) and not any(map(is_transformed, tensors))


def _call(
    tap: Tap,
    watch: Watch | Function,
    module: nn.Module,
    passed: arguments.Arguments,
    number: int,
    event: checkpoints.Event,
) -> Call:
    site = watch.site(tap.site, number) if tap.is_family else tap.site
    if getattr(tap.action, "with_call", False):
        if tap.sequences is None or number == 0:
            tap.sequences = Sequences()
        number = tap.sequences.number(number)
    return Call(site, module, *passed, number, event.notes, tap.session.model())


def act(tap: Tap, value: Any, call: Call, event: checkpoints.Event) -> Any:
    """Let a tap see a value; return what passes on."""
    if isinstance(tap.action, Stop):
        forwards.reached(tap)
        return value
    new = tap.act(value, call, event)
    if isinstance(tap.action, Apply):
        event.check(tap, new)
    return new


def _pass_input(tap: Tap, call: Call, event: checkpoints.Event, watch: Watch | Function) -> arguments.Arguments:
    """Let a tap see, and change, one or all of the arguments."""
    passed = (call.args, dict(call.kwargs))
    parameters = watch.parameters
    if tap.site.is_gradient:
        return gradients.watch_input(tap, passed, parameters, call, event)
    if tap.site.port.endswith("inputs"):
        bound = arguments.bind(passed, parameters)
        before = dict(bound)
        new = act(tap, bound, call, event)
        is_same = new is bound and len(new) == len(before) and all([new.get(k) is v for k, v in before.items()])
        return passed if is_same else arguments.unbind(new, passed, parameters)
    first = arguments.first(passed, parameters)
    if first is NOTHING:
        return passed
    new = act(tap, first, call, event)
    return passed if new is first else arguments.with_first(passed, parameters, new)


def _skipped(tap: Tap, module: nn.Module, passed: arguments.Arguments, watch: Watch | Function) -> Any:
    tap.fired = True
    try:
        # What is known of a class is not so of its methods, nor of a forward that somebody put on the instance.
        known = module if not tap.site.member and _runs_own(watch, module) else None
        return tap.action.output(known, arguments.first(passed, watch.parameters), passed)  # type: ignore[union-attr]
    except HooklineError as error:
        blame(tap.site, error)


def _runs_own(watch: Watch | Function, module: nn.Module) -> bool:
    """Whether the forward that would run is the class's, as far as its instance says."""
    found = None if is_dynamo_compiling() or watch.is_function else watch.found  # type: ignore[union-attr]
    return found is None or wraps_own(found, module)


_run_uncompiled = uncompiled(run)


def trace(watch: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same inside a graph that dynamo is tracing, where nothing is counted and every thread is meant."""
    if module is not watch.module:
        return getattr(type(module), watch.name)(module, *args, **kwargs)
    refuse_tracing()
    if not watch.is_traceable:
        return _run_uncompiled(watch, module, args, kwargs)
    for tap in watch.around:
        tap.session.ran = True
    skip = None
    exchange = Exchange()
    for tap in watch.taps:
        if isinstance(tap.action, Skip):
            skip = tap
        elif tap.site.port != "output":
            args, kwargs = _trace_input(tap, args, kwargs, watch, exchange)
    if skip is not None:
        output = _skipped(skip, module, (args, kwargs), watch)
    elif watch.found is not None:
        output = watch.found(*args, **kwargs)
    else:
        output = getattr(type(module), watch.name)(module, *args, **kwargs)
    exchange.put_back()
    for tap in watch.taps:
        if tap.site.port == "output" and not isinstance(tap.action, Skip):
            output = tap.trace(output)
    return output


def _trace_input(
    tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch, exchange: Exchange
) -> arguments.Arguments:
    parameters = watch.parameters
    if tap.site.port == "inputs":
        bound = arguments.bind((args, kwargs), parameters)
        return arguments.unbind(tap.trace(bound, exchange), (args, kwargs), parameters)
    first = arguments.first((args, kwargs), parameters)
    if first is NOTHING:
        return args, kwargs
    return arguments.with_first((args, kwargs), parameters, tap.trace(first, exchange))
