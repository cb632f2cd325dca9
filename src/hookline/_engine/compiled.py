"""Inside a graph that dynamo is tracing: what it needs differently.

Dynamo traces these functions into the model's graph, where nothing is counted, no clock is read and every thread is
meant. What it can't trace runs in Python: the `uncompiled` twin of the usual function breaks the graph there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from hookline import _torch
from hookline._engine import (
    activation_checkpoint,
    call_arguments,
    call_event,
    functions,
    gradients,
    model_forward,
    run_call,
    stop,
)
from hookline._engine import apply_to_part as acting
from hookline._engine.action import NOTHING, Apply, Skip
from hookline._engine.functions import is_followed, may_give_tensors, read_name
from hookline._engine.keep import Save
from hookline._engine.parameter_operand import Role, as_operands, make_operand
from hookline._engine.run_call import Shadowed, skipped
from hookline._engine.tap import Tap
from hookline._engine.tracing_guards import refuse_tracing
from hookline._open_blocks import OtherRuns, call_user, current_task
from hookline._torch import uncompiled
from hookline._values.containers import Exchange
from hookline._values.copies import Loan, address, share, state_of
from hookline._values.fit import agree, fit
from hookline._values.nested import get_part, map_tensors, put_part, rebuild, split


def is_traceable(tap: Tap) -> bool:
    """Return True if dynamo can trace a tap: nothing to count, nothing to raise, no tensor hook."""
    action, site = tap.action, tap.site
    if site.is_gradient or site.call is not None or tap.star or tap.is_inside or not action.is_traceable:
        return False
    if isinstance(action, Save):
        is_simple = not action.with_call and action.budget is None and not tap.is_family
        return is_simple and tap.record is not None and tap.record.keep == 1
    return action.gathering is None or not action.gathering.alike


_run_uncompiled = uncompiled(run_call.run)


def run(shadow: Shadowed, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward, or another method, with the taps on it: see `run` in run_call.py."""
    if module is not shadow.module:
        return getattr(type(module), shadow.name)(module, *args, **kwargs)
    refuse_tracing()
    if not shadow.is_traceable:
        return _run_uncompiled(shadow, module, args, kwargs)
    for one in shadow.around:
        one.session.ran = True
    skip = None
    exchange = Exchange()
    for tap in shadow.taps:
        if isinstance(tap.action, Skip):
            skip = tap
        elif tap.site.port != "output":
            args, kwargs = _pass_input(tap, args, kwargs, shadow, exchange)
    if skip is not None:
        output, _ = skipped(skip, shadow, module, (args, kwargs))
    elif shadow.found is not None:
        output = shadow.found(*args, **kwargs)
    else:
        output = getattr(type(module), shadow.name)(module, *args, **kwargs)
    exchange.put_back()
    for tap in shadow.taps:
        if tap.site.port == "output" and not isinstance(tap.action, Skip):
            output = act(tap, output)
    return output


def _pass_input(
    tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any], shadow: Shadowed, exchange: Exchange
) -> call_arguments.Arguments:
    parameters = shadow.parameters
    if tap.site.port == "inputs":
        bound = call_arguments.bind((args, kwargs), parameters)
        return call_arguments.unbind(act(tap, bound, exchange), (args, kwargs), parameters)
    first = call_arguments.first((args, kwargs), parameters)
    if first is NOTHING:
        return args, kwargs
    return call_arguments.with_first((args, kwargs), parameters, act(tap, first, exchange))


def run_plain(
    tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run_uncompiled: Callable[..., Any]
) -> Any:
    """Run the forward of a module with one plain tap: see `hot_path` in shadow.py."""
    if module is not tap.module:
        return type(module).forward(module, *args, **kwargs)
    refuse_tracing()
    if not tap.action.is_traceable:
        return run_uncompiled(tap, module, args, kwargs)
    return act(tap, type(module).forward(module, *args, **kwargs))


def act(tap: Tap, value: Any, exchange: Exchange | None = None) -> Any:
    """Take the part that a tap is at, act on it, put the result back: see act.py."""
    tap.fired = True
    action = tap.action
    whole, rest = split(value, tap.subscripts)
    part = get_part(whole, rest)
    if isinstance(action, Save):
        _save(tap, action, part)
        return value
    # With dynamic=True the numbers in subscripts are symbols, and dynamo can't tell whether such a tuple is empty.
    is_whole = len(rest) == 0
    new = _apply(action, part, is_whole) if isinstance(action, Apply) else action(part, None, is_whole)
    if exchange is not None and not isinstance(part, Tensor):
        new = exchange.merge(new, part)
    if len(tap.subscripts) == 0:
        return new
    if isinstance(new, Tensor) and new is part:  # Dynamo can't compare tuples so.
        return value
    return put_part(value, tap.subscripts, new, rebuild if exchange is None else exchange.rebuild)


def _save(tap: Tap, action: Save, value: Any) -> None:
    """Keep a value: a copy, which fuses with what made it."""
    record = tap.record
    assert record is not None
    value = map_tensors(Tensor.detach, value)
    if action.transform is not None:
        value = action.transform(value)
        if value is None:
            return
    device, dtype = action.options.device, action.options.dtype
    record.value = map_tensors(lambda tensor: tensor.to(device, dtype or tensor.dtype, copy=True), value)
    record.is_traced = True
    if action.clone is False:
        record.version = -1  # It is a copy, whatever was there before.


def _apply(action: Apply, value: Any, is_whole: bool) -> Any:
    """Call a user's function. To dynamo neither versions nor the identity of a tuple mean anything."""
    result = action.function(value if action.clone is False else share(value, objects=True))
    if result is None:
        return value
    if action.check and not is_whole:
        return fit(result, value)
    if action.check:
        agree(result, value)
    return result if action.clone is False else share(result)


def operate(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Role], run_uncompiled: Callable[..., Any]
) -> Any:
    """Run an operation that takes a parameter with taps on such operations: see `follow` in parameters.py."""
    if not may_give_tensors(function):
        return function(*args, **kwargs)
    name = read_name(function)
    origins = found[0].origins
    for one in found[1:]:
        origins = origins + tuple([origin for origin in one.origins if origin not in origins])
    taps = [tap for reads, key in origins for tap in reads.operations.get(key, ()) if tap.wants(name)]
    follows = is_followed(name, args)
    if taps and not follows and any([key in reads.untraceable for reads, key in origins]):
        return run_uncompiled(function, name, args, kwargs, origins)
    skips = []
    for tap in taps:
        if isinstance(tap.action, Skip):
            tap.fired = True
            skips.append(tap.action)
    result = skips[-1].output(None, args[0]) if skips and not follows else function(*args, **kwargs)
    if follows:  # Dynamo can't make a subclass of the very same tensor.
        return as_operands(result, lambda one: make_operand(one.view_as(one), origins, found[0].follow))
    if not isinstance(result, Tensor):
        return result
    for tap in taps:
        result = result if isinstance(tap.action, Skip) else act(tap, result)
    return result


@cache
def keep_dynamo_out() -> None:
    """Keep dynamo from compiling hookline's own functions where it can't trace the model, and from warning of them."""
    ours = (acting, run_call, activation_checkpoint, call_event, functions, gradients, model_forward, stop)
    found = [function for one in ours for function in vars(one).values() if function is not skipped]
    found += [one for one in vars(_torch).values() if getattr(one, "__module__", None) == _torch.__name__]
    found += [Tap.pass_by, *vars(OtherRuns).values(), *vars(Loan).values()]
    found += [current_task, call_user, state_of, address]
    for function in found:
        if isinstance(function, FunctionType):
            _torch.keep_out_of_graphs(function.__code__)
