"""One call of a hooked module, method or function: its inputs, the call or its replacement, its outputs.

The shadows in shadowed_forward.py call `run`. compiled.py does the same inside a graph that dynamo is tracing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from hookline._engine import call_arguments, functions, gradients
from hookline._engine.action import NOTHING, Call, Skip
from hookline._engine.apply_to_part import act, blame
from hookline._engine.call_event import Called, Event, event_of
from hookline._engine.model_forward import ModelTap, run_model_forward
from hookline._engine.sequences import passing_here
from hookline._engine.tap import Sequences, Tap
from hookline._engine.unsupported_tracing import refuse_tracing
from hookline._open_blocks import Blocks, is_called_in_backward, note_skip, open_blocks
from hookline._sites.language import Site
from hookline._torch import graph_task, is_rehearsal, is_traced, is_transformed
from hookline._values.containers import private_containers
from hookline._values.copy_or_share import is_private
from hookline._values.fit import wraps_own
from hookline._values.nested import Arguments, leaves
from hookline.errors import HooklineError

Taps = tuple[Tap, ...]


class Shadowed(Called, Protocol):
    """A shadowed method of a module, with the taps on it."""

    module: nn.Module | None
    taps: Taps
    around: tuple[ModelTap, ...]
    pauses: Taps
    is_traceable: bool

    def successor(self, module: nn.Module) -> Shadowed | None:
        """Return the shadow that is on the method now, if it has replaced this one."""


def run(shadow: Shadowed, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward, or another method, with its taps."""
    # The taps are read before the module: another thread that detaches the last tap clears the module first.
    around, taps = shadow.around, shadow.taps
    while module is not shadow.module:  # This is a copy of the module, or the last tap is gone.
        again = shadow.successor(module)
        if again is None:
            return shadow.forward(module, args, kwargs)
        shadow = again
        around, taps = shadow.around, shadow.taps
    if shadow.pauses:
        return functions.without_modes(lambda: _run(shadow, around, taps, module, (args, kwargs)))
    return _run(shadow, around, taps, module, (args, kwargs))


def _run(shadow: Shadowed, around: tuple[ModelTap, ...], taps: Taps, module: nn.Module, passed: Arguments) -> Any:
    opened = open_blocks.get()
    if is_traced():
        refuse_tracing()
    if around and (graph_task() == -1 or is_called_in_backward(opened)):
        run_taps = partial(_run_taps, shadow, taps, module, passed, opened)
        return run_model_forward(around, opened, module, passed, run_taps)
    return _run_taps(shadow, taps, module, passed, opened)


def _run_taps(shadow: Shadowed, taps: Taps, module: nn.Module, passed: Arguments, opened: Blocks) -> Any:
    """Run a module's forward with the taps that act where these blocks are open."""
    if not taps or is_rehearsal():
        return shadow.forward(module, *passed)
    event = event_of(module if shadow.name == "forward" else (module, shadow.name), taps, opened)
    if not event.taps:
        return shadow.forward(module, *passed)
    return run_event(shadow, module, passed, event)


def run_event(called: Called, module: nn.Module, passed: Arguments, event: Event) -> Any:
    """Run a call with its taps, and follow gradients through tensors that are written in place."""
    if any([tap.site.port[0] == "g" for tap, _ in event.taps]) and gradients.is_outermost():
        with gradients.following_gradients():  # The model's own forward does not run: this call is the outermost.
            return pass_through(called, module, passed, event)
    return pass_through(called, module, passed, event)


def pass_through(called: Called, module: nn.Module, passed: Arguments, event: Event) -> Any:
    """Let taps act on the inputs, run the call or its replacement, and let taps act on the outputs.

    At each step taps act in the order in which they were added. `running_calls` reads the variables `called`, `module`,
    `passed` and `event` from this frame, by these names.
    """
    skip: Tap | None = None
    taps, inside = event.taps, []
    if not called.is_function and any([tap.is_inside for tap, _ in taps]):
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
                passed = _pass_input(tap, _call(tap, called, module, passed, number, event), event, called)
        given = gradients.given(passed, event) if follows else []  # Read now: the call may write into containers.
        if skip is not None:
            output = _skip(skip, called, module, passed)
        elif inside:
            output = functions.run_seeing_functions(called, module, passed, inside, event, pass_through)
        else:
            output = called.forward(module, *passed)
            # `is_private` and `private_containers` count references: no other variable may hold `output` here.
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
                exchanged.put_back()  # Runs again if Ctrl-C interrupted the first attempt.
    for tap, number in taps:
        if tap.shadow is None or isinstance(tap.action, Skip):  # No shadow: detached while the module ran.
            continue
        if tap.site.port == "output":
            if tap.is_family and not _can_be_kept(output):
                continue
            output = act(tap, output, _call(tap, called, module, passed, number, event), event)
        elif tap.site.port == "grad_output":
            call = _call(tap, called, module, passed, number, event)
            output = gradients.follow_output(tap, output, call, event, given)
    return output


def _can_be_kept(output: Any) -> bool:
    """Return True if a pattern of functions can capture this result.

    The result must contain tensors, and none of them may belong to a torch.func transform.
    """
    tensors = leaves(output)
    return bool(tensors) and not any(map(is_transformed, tensors))


def _call(tap: Tap, called: Called, module: nn.Module, passed: Arguments, number: int, event: Event) -> Call:
    site = tap.site
    if tap.is_family:  # A pattern of functions: name the one that runs.
        site = site._replace(member=f"/{called.name}", call=number)
    elif tap.is_each:
        site = site._replace(call=number)
    passing = event.passing_for(tap.session) if tap.action.with_call else None
    return call_of(tap, site, module, passed, number, event.notes, passing)


def call_of(
    tap: Tap, site: Site, module: nn.Module, passed: Arguments, number: int, notes: dict[Any, Any], passing: Any = None
) -> Call:
    """Return the call that a tap acts on. `notes` is for all taps of this call."""
    if tap.action.with_call:
        if tap.sequences is None or number == 0:
            tap.sequences = Sequences()
        number = tap.sequences.number(number)
    return Call(site, module, *passed, number, notes, tap.session.model(), passing)


def _pass_input(tap: Tap, call: Call, event: Event, called: Called) -> Arguments:
    """Let a tap act on one or all of the arguments. Return the arguments to pass on."""
    passed = (call.args, dict(call.kwargs))
    parameters = called.parameters
    if tap.site.is_gradient:
        return gradients.follow_input(tap, passed, parameters, call, event)
    port = tap.site.port
    value = call_arguments.take(passed, parameters, port)
    if value is NOTHING:
        return passed
    before = dict(value) if port == "inputs" else None  # With clone=False an edit may write into it.
    new = act(tap, value, call, event)
    if new is value and (before is None or _is_same(before, new)):
        return passed
    return call_arguments.put(passed, parameters, port, new)


def _is_same(before: dict[str, Any], new: dict[str, Any]) -> bool:
    return len(new) == len(before) and all([new.get(name) is value for name, value in before.items()])


def _skip(tap: Tap, called: Called, module: nn.Module, passed: Arguments) -> Any:
    """Return the result of a skipped call."""
    action = tap.action
    assert isinstance(action, Skip)
    tap.skipped_in = tap.session.forwards
    if not tap.site.member:
        note_skip(module)
    # `Skip.output` knows what the forward of some classes returns. That does not hold for their other methods, or for a
    # forward that somebody put on the instance.
    is_own = not tap.site.member and (called.found is None or wraps_own(called.found, module))
    try:
        first = call_arguments.first(passed, called.parameters)
        value = action.output(module if is_own else None, first, passed)
    except HooklineError as error:
        blame(tap.site, error)
    return called.stand_in(value, action.value is not NOTHING, passed)


def passing_for(tap: Tap) -> Any:
    """Return the tokens that pass in this forward, if the function of a tap can ask for them."""
    return passing_here().get(tap.session) if tap.action.with_call else None
