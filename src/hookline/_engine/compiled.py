"""Hooks under torch.compile: dynamo traces the functions here into the graph of the model.

A graph counts no calls and reads no clock, and its hooks act for every thread. Where dynamo can't trace a hook, the
graph breaks and the `uncompiled` version of the usual function runs in Python.

Two files ask `is_dynamo_compiling()` and then call the functions here: shadowed_forward.py, in the shadows of methods,
and parameters.py, in the property that reads a parameter. These places also deal with dynamo:

- `FunctionMode` in functions.py and `call_user` in _open_blocks.py step aside while dynamo traces.
- `share_tensor` in copy_or_share.py clones while dynamo traces it. That happens after a graph failed, when dynamo
  compiles functions of hookline one by one.
- `read_name` and `may_give_tensors` in functions.py have no cache: dynamo would warn about it.
- `Record.copy_out_of_graph` copies values out of the memory of a CUDA graph.
- `Lifecycle` refuses a block on a second thread, and calls `copy_out_of_graph`.
- attach.py calls `keep_dynamo_out`.
- `HOT_CODES` in shadowed_forward.py has a copy of the code for each class.
- model_forward.py notices that torch gave up compiling, and _hooks/diagnose.py reports it.
- `ValueCheck` in _watch/watch.py has a traced form that notes the largest element.

`tests/test_architecture.py` has the list of files that ask `is_dynamo_compiling()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
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
from hookline._engine.action import NOTHING, Action, Apply, Set, SetByCall, Skip
from hookline._engine.capture_action import Save
from hookline._engine.functions import is_followed, may_give_tensors, read_name
from hookline._engine.parameter_operations import OnOperation, Role, as_operands, make_operand
from hookline._engine.run_call import Shadowed
from hookline._engine.tap import Tap
from hookline._engine.unsupported_tracing import refuse_tracing
from hookline._open_blocks import OtherRuns, Session, call_user, current_task
from hookline._torch import TRACES_HOOKS, has_compiled, is_dynamo_loaded, uncompiled
from hookline._values import copy_or_share
from hookline._values.containers import Exchange
from hookline._values.fit import check_same_structure, fit
from hookline._values.nested import Arguments, get_part, map_tensors, put_part, rebuild, split
from hookline.errors import HooklineError


def is_traceable(tap: Tap) -> bool:
    """Return True if dynamo can trace a tap: it has nothing to count, nothing to raise and no tensor hook."""
    if not TRACES_HOOKS:
        return False
    action, site = tap.action, tap.site
    if site.is_gradient or site.call is not None or tap.star or tap.tokens or tap.is_inside or not action.is_traceable:
        return False
    if isinstance(action, Save):
        is_simple = not action.with_call and action.budget is None and not tap.is_family
        return is_simple and tap.record is not None and tap.record.keep == 1
    return action.gathering is None or not action.gathering.alike


_run_uncompiled = uncompiled(run_call.run)


def run_traced(shadow: Shadowed, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward, or another method, with the taps on it: see `run` in run_call.py."""
    if module is not shadow.module:
        return getattr(type(module), shadow.name)(module, *args, **kwargs)
    refuse_tracing()
    if not TRACES_HOOKS or not shadow.is_traceable:
        return _run_uncompiled(shadow, module, args, kwargs)
    for one in shadow.around:
        one.session.ran = True
    skip = None
    exchange = _TracedExchange()
    for tap in shadow.taps:
        if isinstance(tap.action, Skip):
            skip = tap
        elif tap.site.port != "output":
            args, kwargs = _pass_input(tap, args, kwargs, shadow, exchange)
    if skip is not None:
        output = _skip(skip, shadow, module, (args, kwargs))
    elif shadow.found is not None:
        output = shadow.found(*args, **kwargs)
    else:
        output = getattr(type(module), shadow.name)(module, *args, **kwargs)
    exchange.put_back()
    for tap in shadow.taps:
        if tap.site.port == "output" and not isinstance(tap.action, Skip):
            output = act_traced(tap, output)
    return output


def _pass_input(
    tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any], shadow: Shadowed, exchange: Exchange
) -> Arguments:
    port, parameters = tap.site.port, shadow.parameters
    value = call_arguments.take((args, kwargs), parameters, port)
    if value is NOTHING:
        return args, kwargs
    return call_arguments.put((args, kwargs), parameters, port, act_traced(tap, value, exchange))


def run_hot_traced(
    tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run_uncompiled: Callable[..., Any]
) -> Any:
    """Run the forward of a module whose shadow is on a hot path: see `hot_path` in shadowed_forward.py."""
    if TRACES_HOOKS and module is not tap.module:
        return type(module).forward(module, *args, **kwargs)
    refuse_tracing()
    if not TRACES_HOOKS or not tap.is_traceable or not tap.action.is_traceable:
        return run_uncompiled(tap, module, args, kwargs)
    return act_traced(tap, type(module).forward(module, *args, **kwargs))


def run_model_traced(
    tap: model_forward.ModelTap,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run_uncompiled: Callable[..., Any],
) -> Any:
    """Run the forward of a model with one `ModelTap`: see `model_path` in shadowed_forward.py."""
    if TRACES_HOOKS and module is not tap.module:
        return type(module).forward(module, *args, **kwargs)
    refuse_tracing()
    if not TRACES_HOOKS or tap.stops or tap.follows_tokens:
        return run_uncompiled(tap, module, args, kwargs)
    tap.session.ran = True
    return type(module).forward(module, *args, **kwargs)


class _TracedExchange(Exchange):
    """An `Exchange` without the table of replaced tensors and their threads, which dynamo can't trace."""

    def remember(self, old: Tensor, new: Tensor) -> Tensor:
        return old


def _skip(tap: Tap, shadow: Shadowed, module: nn.Module, passed: Arguments) -> Any:
    """Return the result of a skipped call. The shape of a given value is not checked."""
    action = tap.action
    assert isinstance(action, Skip)
    tap.fired = True
    first = call_arguments.first(passed, shadow.parameters)
    try:
        return _skipped(action, module if not tap.site.member else None, first)
    except HooklineError as error:
        acting.blame(tap.site, error)


def _skipped(action: Skip, module: nn.Module | None, first: Any) -> Any:
    if action.value is not NOTHING:
        return action.given_output(first)
    action.check_input(module, first)
    return _copied(first)


def act_traced(tap: Tap, value: Any, exchange: Exchange | None = None) -> Any:
    """Take the part that a tap is at, act on it, put the result back: see `change_part` in apply_to_part.py.

    This function does not call `change_part`: dynamo can't tell whether subscripts select anything, or whether two
    tuples are the same object.
    """
    tap.fired = True
    action = tap.action
    whole, rest = split(value, tap.subscripts)
    part = get_part(whole, rest)
    if isinstance(action, Save):
        _save(tap, action, part)
        return value
    # With dynamic=True the numbers in subscripts are symbols, and dynamo can't tell whether such a tuple is empty.
    is_whole = len(rest) == 0
    new = _changed(action, part, is_whole)
    if exchange is not None and not isinstance(part, Tensor):
        new = exchange.merge(new, part)
    if len(tap.subscripts) == 0:
        return new
    if isinstance(new, Tensor) and new is part:  # Dynamo can't compare tuples by identity.
        return value
    return put_part(value, tap.subscripts, new, rebuild if exchange is None else exchange.rebuild)


def _save(tap: Tap, action: Save, value: Any) -> None:
    """Store a copy of a value. The copy fuses with the operation that made the value."""
    record = tap.record
    assert record is not None
    value = map_tensors(Tensor.detach, value)
    if action.transform is not None:
        value = action.transform(_copied(value))  # The transform may write into its argument.
        if value is None:
            return
    device, dtype = action.options.device, action.options.dtype
    record.value = map_tensors(lambda tensor: tensor.to(device, dtype or tensor.dtype, copy=True), value)
    record.is_traced = True
    if action.clone is False:
        record.version = -1  # The value is a copy, so no version has to be checked.


def _changed(action: Action, value: Any, is_whole: bool) -> Any:
    """Return the value that an action puts in place of another. Copies are clones, which fuse with other operations."""
    if isinstance(action, Apply):
        return _apply(action, value, is_whole)
    if isinstance(action, Set) and action.check and action.number is not None and _takes_any_number(value):
        # For a Python number, dynamo would make a new graph whenever the number changes.
        return torch.empty_like(value, requires_grad=False).copy_(action.number)
    return action(value, None, is_whole)


def _takes_any_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def number_tensor(value: Any, model: nn.Module) -> Tensor | None:
    """Return a number as a tensor on the model's device; None for any other value, or if nothing was compiled yet."""
    if not has_compiled():
        return None
    if type(value) not in (int, float) or not abs(value) <= 1 << 53:
        return None
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type not in ("cpu", "cuda"):  # Other devices may have no float64.
        return None
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float64, device=device)


def _copied(value: Any, in_object: bool = False) -> Any:
    return map_tensors(Tensor.clone, value, in_objects=in_object)


def _apply(action: Apply, value: Any, is_whole: bool) -> Any:
    """Call a user's function on clones: dynamo knows neither the version of a tensor nor the identity of a tuple."""
    result = action.function(value if action.clone is False else _copied(value, in_object=True))
    if result is None:
        return value
    if action.check and not is_whole:
        return fit(result, value)
    if action.check:
        check_same_structure(result, value)
    return result if action.clone is False else _copied(result)


class ParameterTaps(Protocol):
    """The taps on the parameters of a module: `Reads` in parameters.py."""

    taps: dict[str, tuple[Tap, ...]]
    operations: dict[str, tuple[Tap, ...]]
    untraceable: set[str]


def read_traced(
    reads: ParameterTaps, name: str, value: Tensor, on_operation: OnOperation, read_uncompiled: Callable[..., Tensor]
) -> Tensor:
    """Return the value that is read in place of a parameter: see `Reads.read` in parameters.py."""
    if name in reads.untraceable and reads.taps.get(name):
        return read_uncompiled(reads, name, value)
    for tap in reads.taps.get(name, ()):
        value = act_traced(tap, value)
    return make_operand(value, ((reads, name),), on_operation) if reads.operations.get(name) else value


def operate_traced(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Role], run_uncompiled: Callable[..., Any]
) -> Any:
    """Run an operation on a parameter, with the taps on its operations: see `on_operation` in parameters.py."""
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
    result = _skipped(skips[-1], None, args[0]) if skips and not follows else function(*args, **kwargs)
    if follows:  # Dynamo can't turn the result into a subclass, but it can turn a view of it.
        return as_operands(result, lambda one: make_operand(one.view_as(one), origins, found[0].on_operation))
    if not isinstance(result, Tensor):
        return result
    for tap in taps:
        result = result if isinstance(tap.action, Skip) else act_traced(tap, result)
    return result


_codes_of: WeakKeyDictionary[type, dict[CodeType, CodeType]] = WeakKeyDictionary()
_kept: deque[type[nn.Module]] = deque(maxlen=256)


def code_for(kind: type, code: CodeType, copies: set[CodeType]) -> CodeType:
    """Return the copy of a shadow's code for one class, and add it to `copies`; the code itself without dynamo.

    Per code object, dynamo counts graphs and learns which sizes change. Classes must not share a code object.
    """
    if not is_dynamo_loaded():
        return code
    codes = _codes_of.setdefault(kind, {})
    if code not in codes:
        codes[code] = code.replace(co_name=f"{kind.__name__}.forward")
        copies.add(codes[code])
    return codes[code]


def keep_class(made: type[nn.Module]) -> None:
    """Keep a class alive that was made for hooked parameters: dynamo would compile again for a new one."""
    if is_dynamo_loaded():
        _kept.append(made)


@cache
def keep_dynamo_out() -> None:
    """Keep dynamo from compiling hookline's functions where it can't trace the model, and from warning about them.

    Most functions are listed by file: one that moves to a file not listed here is compiled again, and no test fails.
    """
    ours = (
        acting,
        run_call,
        activation_checkpoint,
        call_event,
        functions,
        gradients,
        model_forward,
        stop,
        copy_or_share,
    )
    found = [function for one in ours for function in vars(one).values()]
    found += [one for one in vars(_torch).values() if getattr(one, "__module__", None) == _torch.__name__]
    found += [Tap.pass_by, Exchange.remember, Skip.output, SetByCall.__call__, *vars(Apply).values()]
    found += [
        *vars(Session).values(),
        *vars(OtherRuns).values(),
        *vars(copy_or_share.Loan).values(),
        current_task,
        call_user,
    ]
    for function in found:
        if isinstance(function, FunctionType):
            _torch.keep_out_of_graphs(function.__code__)
