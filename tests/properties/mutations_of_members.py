"""More ways to break the core on purpose, for methods, functions and parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from hookline._engine import activation_checkpoint, call_event, functions, parameters, shadowed_forward
from hookline._engine.tap import Tap
from tests.properties.mutations import instead, mutation


@mutation(caught_by="members", seed=8)
def functions_of_children_count_as_the_modules_own() -> Any:
    return instead(functions.FunctionMode, "_is_own", lambda real, *given: True)


@mutation(caught_by="members", seed=13)
def functions_of_helpers_do_not_count() -> Any:
    def is_own(real: Any, inside: Any, frame: Any) -> bool:
        return real(inside, frame) and frame.f_back.f_code.co_name == "forward"

    return instead(functions.FunctionMode, "_is_own", is_own)


@mutation(caught_by="members", seed=10)
@contextlib.contextmanager
def functions_are_not_counted_anew_in_each_call() -> Iterator[None]:
    counts: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()

    def make(real: Any, inside: Any, shadowed: Any, module: Any, *rest: Any) -> None:
        real(inside, shadowed, module, *rest)
        inside.counts = counts.setdefault(module, {})

    with instead(functions.FunctionMode, "__init__", make):
        yield


@mutation(caught_by="members", seed=82)
def what_is_made_of_a_function_in_place_is_not_written_back() -> Any:
    return instead(functions.Function, "finish", lambda real, self, output: None if self.name == "setitem" else output)


@mutation(caught_by="members", seed=82)
def an_edited_argument_of_a_function_in_place_is_not_written_back() -> Any:
    def forward(_real: Any, self: Any, _module: Any, args: Any, kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        return args[0] if self.name == "setitem" else result

    return instead(functions.Function, "forward", forward)


@mutation(caught_by="members", seed=223)
def patterns_of_functions_act_last() -> Any:
    def meant(real: Any, *given: Any) -> Any:
        return tuple(sorted(real(*given), key=lambda tap: tap.is_family))

    return instead(functions, "_meant_for", meant)


@mutation(caught_by="members", seed=36)
def which_call_of_the_module_a_function_is_in_does_not_matter() -> Any:
    wanted = property(lambda tap: None if tap.is_inside else tap.site.call)
    return mock.patch.object(Tap, "wanted_call", wanted)


@mutation(caught_by="members", seed=34)
def a_recomputation_has_no_functions() -> Any:
    def inside(real: Any, outer: Any, taps: Any, *rest: Any) -> Any:
        return real(outer, [] if outer.is_replayed else taps, *rest)

    return instead(call_event.Event, "inside", inside)


@mutation(caught_by="members", seed=3)
def methods_stay_on_the_instance() -> Any:
    return instead(shadowed_forward.Shadow, "leave", lambda real, one: real(one) if one.name == "forward" else None)


@mutation(caught_by="members", seed=20)
def stored_callables_are_not_put_back() -> Any:
    def leave(real: Any, shadowed: Any) -> None:
        if isinstance(shadowed.method, shadowed_forward.ShadowedCallable):
            shadowed.before = shadowed.method
        real(shadowed)

    return instead(shadowed_forward.Shadow, "leave", leave)


@mutation(caught_by="members", seed=15)
def a_module_keeps_the_class_that_reads_its_parameters() -> Any:
    def dress(real: Any, module: Any, reads: Any) -> None:
        kind = type(module)
        real(module, reads)
        if parameters.KEY not in module.__dict__:
            module.__class__ = kind

    return instead(parameters, "_set_class", dress)


@mutation(caught_by="members", seed=2)
def a_tied_parameter_is_hooked_under_one_name_only() -> Any:
    def attach(real: Any, tap: Any, *rest: Any) -> None:
        tap.holders = tap.holders[:1]
        real(tap, *rest)

    return instead(parameters, "attach", attach)


@mutation(caught_by="members", seed=101)
def views_of_a_parameter_are_operations_on_it() -> Any:
    return instead(parameters, "is_followed", lambda real, *given: False)


@mutation(caught_by="members", seed=106)
def what_is_looked_up_in_a_parameter_is_followed_too() -> Any:
    return instead(parameters, "is_followed", lambda real, name, args: name == "getitem" or real(name, args))


@mutation(caught_by="members", seed=5)
def operations_on_a_parameter_are_not_counted_anew_in_each_forward() -> Any:
    def next_operation(real: Any, tap: Any, name: str) -> Any:
        tap.counted = tap.session.forwards
        tap.counts = tap.counts or {}
        return real(tap, name)

    return instead(Tap, "next_operation", next_operation)


@mutation(caught_by="members", seed=52)
def operations_of_a_recomputation_are_not_edited() -> Any:
    return instead(activation_checkpoint, "is_replaying", lambda real: False)


@mutation(caught_by="members", seed=2)
def a_parameter_is_read_as_it_was_when_it_was_hooked() -> Any:
    def read(real: Any, reads: Any, name: str, value: Any) -> Any:
        first = reads.__dict__.setdefault("first", {}).setdefault(name, value)
        return real(reads, name, first)

    return instead(parameters.Reads, "read", read)
