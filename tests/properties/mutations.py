"""Ways to break the core on purpose, one at a time. The properties must notice each.

A mutation is a context that wraps or replaces a few internals of hookline. It names the property that must notice it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from hookline import _open_blocks as context
from hookline._cache import record as records
from hookline._engine import action, call_arguments, call_event, gradients, run_call, shadowed_forward, stop
from hookline._engine.capture_action import Save
from hookline._hooks import diagnose, hooks, lifecycle
from hookline._values import containers as exchange
from hookline._values import copy_or_share
from hookline._values import nested as values

Break = Callable[[], contextlib.AbstractContextManager[Any]]
MUTATIONS: list[Mutation] = []


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One way to break the core."""

    name: str
    apply: Break
    caught_by: str
    seed: int  # A case that notices it, tried first.


def mutation(caught_by: str = "oracle", *, seed: int) -> Callable[[Break], Break]:
    """Register a function that returns a context in which the core is broken."""

    def add(apply: Break) -> Break:
        MUTATIONS.append(Mutation(apply.__name__.replace("_", " "), apply, caught_by, seed))
        return apply

    return add


@contextlib.contextmanager
def instead(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Call `new(real, ...)` instead of an internal function, in every module that has imported it."""
    real = getattr(owner, name)
    owners = [module for module in _modules() if vars(module).get(name) is real] or [owner]
    with contextlib.ExitStack() as stack:
        for one in owners:
            stack.enter_context(mock.patch.object(one, name, lambda *args, **kwargs: new(real, *args, **kwargs)))
        yield


@contextlib.contextmanager
def everywhere(new: Any, *names: str) -> Iterator[None]:
    """Replace these names with `new` in every module of hookline that has them."""
    with contextlib.ExitStack() as stack:
        for module in _modules():
            for name in names:
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, new))
        yield


def _modules() -> list[Any]:
    return [module for name, module in sys.modules.items() if name.split(".")[0] == "hookline"]


def _itself(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


@mutation(seed=30)
def nothing_is_copied_when_captured() -> Any:
    return everywhere(_itself, "lazy_clone", "share_tensor", "copy_tensor")


@mutation(seed=47)
def parts_are_not_copied_when_captured() -> Any:
    return everywhere(_itself, "copy_tensor")


@mutation(seed=15)
@contextlib.contextmanager
def inputs_are_captured_after_the_forward() -> Iterator[None]:
    late: list[tuple[Any, ...]] = []

    def pass_input(real: Any, tap: Any, call: Any, *rest: Any) -> Any:
        if tap.action.kind != "capture" or tap.site.is_gradient:
            return real(tap, call, *rest)
        late.append((real, tap, call, *rest))
        return call.args, dict(call.kwargs)

    def forward(real: Any, shadowed: Any, module: Any, *rest: Any) -> Any:
        mine = [one for one in late if one[2].module is module]
        late[:] = [one for one in late if one[2].module is not module]
        output = real(shadowed, module, *rest)
        for act, *given in mine:
            act(*given)
        return output

    with instead(run_call, "_pass_input", pass_input), instead(shadowed_forward.Shadow, "forward", forward):
        yield


@mutation(seed=10)
def hooks_stay_when_a_block_ends_with_an_exception() -> Any:
    return instead(hooks.Hooks, "__exit__", lambda real, self, kind, *rest: None if kind else real(self, kind, *rest))


@mutation(seed=45)
def dropped_hooks_stay() -> Any:
    return instead(lifecycle.Lifecycle, "drop", lambda real, self: None)


@mutation(seed=4)
def the_forward_that_was_found_is_not_put_back() -> Any:
    def leave(real: Any, shadowed: Any) -> None:
        shadowed.before = None
        real(shadowed)

    return instead(shadowed_forward.Shadow, "leave", leave)


@mutation(seed=225)
def calls_are_numbered_when_they_end() -> Any:
    def put(real: Any, record: Any, value: Any, stamp: Any, *rest: Any) -> None:
        real(record, value, next(records.ticks) if isinstance(stamp, int) else stamp, *rest)

    return instead(records.Record, "put", put)


@mutation(seed=78)
def a_copy_of_the_model_is_hooked_too() -> Any:
    def run(real: Any, shadowed: Any, module: Any, *rest: Any) -> Any:
        home = shadowed.module
        if home is None:
            return real(shadowed, module, *rest)
        shadowed.module = module
        try:
            return real(shadowed, module, *rest)
        finally:
            shadowed.module = home

    return instead(run_call, "run", run)


@mutation(seed=6)
def capturing_draws_a_random_number() -> Any:
    def keep(real: Any, *args: Any) -> Any:
        torch.rand(())
        return real(*args)

    return instead(Save, "keep", keep)


@mutation(seed=18)
def a_transform_draws_the_models_random_numbers() -> Any:
    def transformed(_real: Any, save: Any, value: Any, _call: Any) -> Any:
        own = values.map_tensors(lambda tensor: copy_or_share.share_tensor(tensor.detach()), value)
        return context.call_user(None, save.transform, own)

    return instead(Save, "_transformed", transformed)


@mutation(seed=1)
def hooks_act_in_reverse_order() -> Any:
    def change(real: Any, shadowed: Any, given: Any) -> None:
        real(shadowed, given)
        shadowed.taps = shadowed.taps[::-1]

    return instead(shadowed_forward.Shadow, "change", change)


@mutation(seed=6)
def parts_are_written_into_the_models_own_tensor() -> Any:
    def put(tensor: torch.Tensor, subscripts: Any, new: Any) -> torch.Tensor:
        part = tensor.data
        for subscript in subscripts[:-1]:
            part = part[subscript]
        part[subscripts[-1]] = new.detach() if isinstance(new, torch.Tensor) else new
        return tensor

    return mock.patch.object(values, "_put_in_tensor", put)


@mutation(seed=30)
def a_patch_hands_out_the_callers_tensor() -> Any:
    return mock.patch.object(copy_or_share, "share_tensor", _itself)


@mutation(seed=25)
def captures_keep_the_graph() -> Any:
    def keep(real: Any, save: Any, value: Any, call: Any = None, _is_new: bool = False) -> Any:
        usual = save.options.detach and save.clone is None and save.transform is None
        return value.clone() if usual and isinstance(value, torch.Tensor) else real(save, value, call)

    return instead(Save, "keep", keep)


@mutation(seed=2)
def the_cache_holds_the_model() -> Any:
    def make(real: Any, self: Any, model: Any, active: bool = True) -> None:
        real(self, model, active)
        self._cache.model = model

    return instead(hooks.Hooks, "__init__", make)


@mutation(seed=47)
def the_call_count_is_not_restarted() -> Any:
    def enter(real: Any, self: Any, entered: Any, *args: Any, **kwargs: Any) -> Any:
        counts = [tap.count for tap in entered]
        block = real(self, entered, *args, **kwargs)
        for tap, count in zip(entered, counts, strict=True):
            tap.count = count
        return block

    return instead(lifecycle.Lifecycle, "enter", enter)


@mutation(seed=42)
def any_call_is_the_one_asked_for() -> Any:
    def event_of(real: Any, module: Any, taps: Any, *rest: Any) -> Any:
        for tap in taps:
            tap.count = tap.site.call or 0
        return real(module, taps, *rest)

    return instead(call_event, "event_of", event_of)


@mutation(seed=3)
def a_recomputation_is_captured_again() -> Any:
    def event_again(_real: Any, _module: Any, taps: Any, *_: Any) -> Any:
        return call_event.Event([(tap, 0) for tap in taps if tap.active or tap.blocks])

    return instead(call_event, "_again", event_again)


@mutation(seed=1)
def a_recomputation_is_not_edited() -> Any:
    return instead(call_event, "_again", lambda real, *_: call_event.Event([]))


@mutation(seed=4)
def hooks_do_not_rest_while_a_function_runs() -> Any:
    return everywhere(lambda _model, function, *args: function(*args), "call_user")


@mutation(seed=8)
def a_skipped_module_runs() -> Any:
    def skipped(real: Any, tap: Any, called: Any, module: Any, passed: Any) -> Any:
        called.forward(module, *passed)
        return real(tap, called, module, passed)

    return instead(run_call, "_skip", skipped)


@mutation(seed=16)
def a_stop_is_not_heard() -> Any:
    return instead(stop, "reached", lambda real, tap: None)


@mutation(seed=8)
def nothing_is_said_of_sites_that_never_fired() -> Any:
    return instead(diagnose, "speak", lambda real, _: None)


@mutation(seed=12)
def one_call_too_many_is_kept() -> Any:
    return instead(hooks, "_calls_of", lambda real, keep: calls + 1 if (calls := real(keep)) else calls)


@mutation(seed=42)
def the_input_is_the_last_argument() -> Any:
    def first(real: Any, given: Any, parameters: Any) -> Any:
        return given[0][-1] if given[0] else real(given, parameters)

    return instead(call_arguments, "first", first)


@mutation(seed=334)
def a_gradient_of_an_input_counts_all_its_uses() -> Any:
    return instead(gradients, "_hook_gradients", lambda real, *given: real(*given[:-1], lambda tensor: tensor))


@mutation(seed=5)
def backward_passes_are_not_told_apart() -> Any:
    def save(real: Any, arrival: Any, *rest: Any) -> None:
        with everywhere(lambda: 0, "graph_task"):
            real(arrival, *rest)

    return instead(gradients.Arrival, "_save", save)


@mutation(caught_by="contexts", seed=2)
def blocks_act_on_every_thread() -> Any:
    return everywhere(Shared(), "open_blocks")


class Shared:
    """Stands in for a context variable that all contexts share."""

    def __init__(self) -> None:
        self.value: Any = frozenset()

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> Any:
        before, self.value = self.value, value
        return before

    def reset(self, before: Any) -> None:
        self.value = before


@mutation(seed=59)
def a_failed_forward_hides_nothing() -> Any:
    return instead(context.Session, "fail", lambda real, session, error: None)


@mutation(caught_by="itself", seed=2)
def a_patch_is_put_in_a_moment_late() -> Any:
    def nearly(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.0000001 if tensor.is_floating_point() else tensor

    put_in = lambda self, value, *rest: values.map_tensors(nearly, copy_or_share.share(value))  # noqa: E731
    return mock.patch.object(action.Set, "__call__", put_in)


@mutation(caught_by="containers", seed=42)
def containers_are_rebuilt_instead_of_exchanged() -> Any:
    return instead(exchange.Exchange, "rebuild", lambda real, self, *given: values.rebuild(*given))


@mutation(caught_by="containers", seed=42)
def what_is_exchanged_in_a_container_stays_there() -> Any:
    return instead(exchange.Exchange, "put_back", lambda real, self: None)


@mutation(caught_by="containers", seed=156)
def each_argument_gets_an_alias_of_its_own() -> Any:
    def with_aliases(real: Any, value: Any, aliases: Any, *rest: Any) -> Any:
        own = {key: (tensor, copy_or_share.alias_of(alias)) for key, (tensor, alias) in aliases.items()}
        return real(value, own, *rest)

    return instead(gradients, "_with_aliases", with_aliases)


@mutation(caught_by="containers", seed=124)
def an_alias_has_the_strides_of_a_new_tensor() -> Any:
    return everywhere(lambda tensor: tensor.view_as(tensor), "alias_of")


@mutation(caught_by="containers", seed=27)
def what_a_call_writes_into_a_container_counts_as_given() -> Any:
    def follow_output(real: Any, tap: Any, value: Any, call: Any, event: Any, _given: Any) -> Any:
        return real(tap, value, call, event, gradients.given((call.args, dict(call.kwargs)), event))

    return instead(gradients, "follow_output", follow_output)
