"""Let one tap act on one value: take the part that its subscripts select, act on it, put the result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from hookline import _why_nothing_passed as why
from hookline._cache.budget import Budget
from hookline._cache.record import EMPTY, Record
from hookline._engine import parameter_operations
from hookline._engine.action import NOTHING, Apply, Call, Stop
from hookline._engine.call_event import Event
from hookline._engine.capture_action import Save
from hookline._engine.stop import reached
from hookline._engine.tap import Tap
from hookline._engine.unsupported_tracing import refuse_tracers
from hookline._sites.language import Site
from hookline._values.containers import Exchange
from hookline._values.nested import get_part, is_empty, put_part, selects_nothing, split, take_part
from hookline.errors import EditError, HooklineError, SiteError, add_note
from hookline.parallel.gather import Gathering


def act(tap: Tap, value: Any, call: Call, event: Event) -> Any:
    """Let a tap act on a value. Return the value that the model continues with."""
    action = tap.action
    if isinstance(action, Stop):
        reached(tap)
        return value
    try:
        if isinstance(action, Save):
            tap.fired = True
            _save(tap, action, value, call, event)
            return value
        seen = parameter_operations.plain(value) if parameter_operations.in_use else value
        new = _change(tap, seen, call, event)
        new = value if new is seen else new
    except Exception as error:
        explain(tap, value, call.site, error)
    if isinstance(action, Apply):
        event.check(tap, new)
    return new


def change_nested(tap: Tap, output: Any, call: Call, own: dict[int, Any]) -> Any:
    """Let a tap change the output of a module that has no other tap. Return the value that the model continues with.

    Args:
        own: The containers in the output that nobody else holds.
    """
    event = Event([(tap, call.number)])
    event.own = own
    return act(tap, output, call, event)


def explain(tap: Tap, value: Any, site: Site, error: Exception) -> NoReturn:
    """Raise an error of a tap with its site, and with the likely reason if it is one of hookline's."""
    try:
        is_short = isinstance(error, SiteError) and tap.subscripts
        is_longer = isinstance(error, EditError) and error.is_longer
        short = why.why_short(tap, value) if is_short or is_longer else ""
        blame(site, type(error)(f"{error}{short}") if short else error)
    finally:
        del error  # Break a reference cycle: see `blame`.


def _change(tap: Tap, value: Any, call: Call, event: Event) -> Any:
    """Let the tap's action change the parts of a value that the tap is at. Return the value that passes on."""
    action = tap.action
    if type(value) is not Tensor and not action.observes:  # A scan with fake tensors only observes.
        refuse_tracers(value)
    if not tap.subscripts and isinstance(value, Tensor) and action.gathering is None:
        tap.fired = True
        return action(value, call, True)
    exchange = event.exchange(tap.site.port)
    given, found = value, False
    for subscripts in tap.places(value):
        there = tap.call_at(call, subscripts)

        def change(part: Any, is_whole: bool, there: Call = there) -> Any:
            tap.fired = True
            return action(part, there, is_whole)

        value, is_there = change_part(value, subscripts, change, exchange, action.gathering, call.site)
        found = found or is_there
    if not found:
        tap.miss(given)
    return value


def change_part(
    value: Any,
    subscripts: tuple[Any, ...],
    change: Callable[[Any, bool], Any],
    exchange: Exchange,
    gathering: Gathering | None,
    site: Site,
) -> tuple[Any, bool]:
    """Take the part of a value at some subscripts, let `change` act on it, and put the result back.

    Return the value that passes on, and whether the subscripts select anything in it.

    Args:
        change: Called with the part and `is_whole`, which is False if the part is a part of a tensor.
        exchange: Puts the result into the containers of the value.
        gathering: Gathers a sharded value from all ranks, and shards the result again afterwards.
    """
    held, rest = split(value, subscripts)  # The first subscripts lead through containers to a tensor, the rest into it.
    where = subscripts[: len(subscripts) - len(rest)]
    if is_empty(held) and selects_nothing(value, where):
        return value, False
    is_there = False

    def changed(whole: Any) -> Any:
        nonlocal is_there
        part, is_there = take_part(whole, rest)
        new = change(part, not rest) if is_there else part
        return whole if new is part else put_part(whole, rest, new)

    new = changed(held) if gathering is None else gathering.change(held, site, changed)
    if new is not held:
        value = put_part(value, where, exchange.merge(new, held), exchange.rebuild)
    return value, is_there


def _save(tap: Tap, action: Save, value: Any, call: Call, event: Event) -> None:
    """Store the parts of a value that the tap is at."""
    forward, site, stamp = tap.session.forwards, call.site, event.stamp
    if not tap.subscripts:
        whole = value if action.gathering is None else action.gathered(value, site)
        _put(tap.record_at(site), action.keep(whole, call, whole is event.new), stamp, forward, action.budget)
        return
    found = False
    for subscripts in tap.places(value):
        held, rest = split(value, subscripts)
        part = get_part(action.gathered(held, site), rest)
        found = found or not is_empty(part) or not selects_nothing(value, subscripts)
        if part is None and tap.star:
            continue
        if part is None:
            raise HooklineError(why.none_passes(tap.module))
        kept = action.keep_part(part, bool(rest), tap.call_at(call, subscripts))
        _put(tap.record_at(site, subscripts), kept, stamp, forward, action.budget)
    if not found:
        tap.miss(value)


def _put(record: Record, kept: Any, stamp: Any, forward: int, budget: Budget | None) -> None:
    if kept is not NOTHING:
        record.put(kept if budget is None else budget.hold(kept, record, stamp), stamp, forward)
        return
    record.has_gaps = True
    if record.value is EMPTY or record.reason:
        record.explain(why.NOTHING_KEPT)


def blame(site: Site, error: Exception) -> NoReturn:
    """Raise an error with the site where it occurred: in the text of a hookline error, as a note on any other."""
    if isinstance(error, HooklineError) and not str(error).startswith("'"):
        raise type(error)(f"'{site}': {error}") from None
    if not isinstance(error, HooklineError):
        add_note(error, f"raised at '{site}'")
    try:
        raise error
    finally:
        del error  # Break a reference cycle: the traceback holds this frame, and with it the model.
