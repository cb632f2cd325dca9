"""Let one tap act on one value: take the part that its subscripts select, act on it, put the result back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from hookline import _why_nothing_passed as why
from hookline._cache.budget import Budget
from hookline._cache.record import EMPTY, Record
from hookline._cache.token_pieces import given_tokens, put_tokens
from hookline._engine import parameter_operations
from hookline._engine.action import NOTHING, Apply, Call, Set, Stop
from hookline._engine.call_event import Event
from hookline._engine.capture_action import Save
from hookline._engine.generate_call import is_in_encoder
from hookline._engine.passing import choose
from hookline._engine.stop import reached
from hookline._engine.tap import Tap
from hookline._engine.unsupported_tracing import refuse_tracers
from hookline._sites.calls import Calls
from hookline._sites.language import Site
from hookline._values.containers import Exchange
from hookline._values.nested import get_part, is_empty, put_part, selects_nothing, split, take_part
from hookline._values.tokens import Chosen, Tokens
from hookline.errors import EditError, HooklineError, SiteError, add_note
from hookline.parallel.gather import Gathering


def act(tap: Tap, value: Any, call: Call, event: Event) -> Any:
    """Let a tap act on a value. Return the value that the model continues with."""
    action = tap.action
    if isinstance(action, Stop):
        if _is_last(tap, value, call, event):
            reached(tap)
        return value
    try:
        if isinstance(action, Save):
            tap.fired = tap.fired or not tap.tokens
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
    for place in places(tap, value, event):
        there = _call_at(tap, call, place)

        def change(part: Any, is_whole: bool, there: Call = there, place: Place = place) -> Any:
            tap.fired = True
            if place.chosen is None or tap.tokens is None:
                return action(part, there, is_whole)
            here = _set_of_tokens(action, tap.tokens, place, part) if isinstance(action, Set) else action
            new = here(part, there, False)
            # Even if the named tokens are the whole value, the result is put in as into a part.
            return put_part(part, (...,), new) if is_whole and new is not part and not _is_like(new, part) else new

        if not place.subscripts and isinstance(value, Tensor) and action.gathering is None:
            value, found = change(value, True), True
            continue
        value, is_there = change_part(value, place.subscripts, change, exchange, action.gathering, call.site)
        found = found or is_there
    if not found and not tap.tokens:
        tap.miss(given)
    return value


def _call_at(tap: Tap, call: Call, place: Place) -> Call:
    """Return the call as the user's function gets it: with the exact place, and the rows that the value has."""
    there = tap.call_at(call, place.named)
    rows = None if place.chosen is None or not tap.action.with_call else place.chosen.rows
    return there if rows is None else there._replace(rows=rows)


def _is_like(new: Any, part: Tensor) -> bool:
    return isinstance(new, Tensor) and new.shape == part.shape and new.dtype == part.dtype


class Place(NamedTuple):
    """One part of a value that a tap acts on."""

    subscripts: tuple[Any, ...]
    named: tuple[Any, ...]  # The subscripts with the tokens as they were named.
    chosen: Chosen | None = None  # Which of the named tokens are there.
    dim: int = 0  # The dimension of the part that counts them.
    is_cut: bool = False  # Whether some of the tokens that pass are not in this value.

    @property
    def is_later_piece(self) -> bool:
        """Whether tokens that were named before these have passed in an earlier call."""
        slots = self.chosen.slots if self.chosen is not None else range(1)
        return slots.start > 0 if isinstance(slots, range) else any(row[0] > 0 for row in slots)

    def each_token(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the number of each token that is there, where they are named for each row."""
        chosen = self.chosen
        if chosen is None or isinstance(chosen.slots, range):
            return
        rows = range(len(chosen.slots)) if chosen.rows is None else chosen.rows
        yield from ((row, slot) for row, slots in zip(rows, chosen.slots, strict=True) for slot in slots)


def places(tap: Tap, value: Any, event: Event) -> Iterable[Place]:
    """Return the parts of a value that a tap acts on. None if its tokens don't pass in this call."""
    tokens = tap.tokens
    if tokens is None:
        return [Place(subscripts, subscripts) for subscripts in tap.places(value)]
    passing = event.passing_for(tap.session)
    found = [
        Place(subscripts, named, chosen, dim, is_cut)
        for named in tap.places(value)
        for subscripts, chosen, dim, is_cut in choose(value, named, passing, tap.module, tap.session.model(), tap)
    ]
    if not found:
        tap.pass_over(passing)
    if tokens.part == "rows" and tap.changes:  # A mask may be longer than the sequence.
        if tap.rows_left is None:
            tap.rows_left = {(row, slot) for row, own in enumerate(tokens.rows) for slot in range(len(own))}
        for place in found if tap.rows_left else ():
            tap.rows_left.difference_update(place.each_token())
    if passing is not None and _depends_on_end_of_prompt(tap):
        passing.note_end_of_prompt()
    return found


def _depends_on_end_of_prompt(tap: Tap) -> bool:
    """Return True if a tap has to know where the prompt ends when its first piece passes."""
    tokens = tap.tokens
    if tokens is None or not tokens.counts_back or is_in_encoder(tap.session.model(), tap.module):
        return False
    return tap.changes or tokens.index != -1  # A capture keeps the last one that passed, which is right.


def _is_last(tap: Tap, value: Any, call: Call, event: Event) -> bool:
    """Return True if a stop is reached: at its last call, and when its last token has passed."""
    wanted = tap.wanted_call
    if isinstance(wanted, Calls) and wanted.last is not None and int(call.number) < wanted.last:
        return False
    if tap.tokens is None:
        return True
    passing = event.passing_for(tap.session)
    if passing is None or passing.width is None or is_in_encoder(tap.session.model(), tap.module):
        return bool([*places(tap, value, event)])
    has_passed = passing.has_passed(tap.tokens)
    if not has_passed:
        tap.problem, tap.hint = f"did not fire: not all of these tokens passed; {passing.describe()}", ""
    return has_passed


def _set_of_tokens(action: Set, tokens: Tokens, place: Place, part: Tensor) -> Set:
    """Return the `Set` for the tokens that pass in this call, out of one with a value for all that were named."""
    given, chosen = action.value, place.chosen
    if not isinstance(given, Tensor) or chosen is None:
        return action
    return Set(given_tokens(given, part, tokens, chosen, place.dim), action.check, None, action.gathering)


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
    for place in places(tap, value, event):
        held, rest = split(value, place.subscripts)
        part = get_part(action.gathered(held, site), rest)
        found = found or not is_empty(part) or not selects_nothing(value, place.subscripts)
        if part is None and tap.star:
            continue
        if part is None:
            raise HooklineError(why.none_passes(tap.module))
        if place.chosen is not None:
            _refuse_pieces(tap, place, event)
        kept = action.keep_part(part, bool(rest), _call_at(tap, call, place))
        record = tap.record_at(site, place.named)
        if place.chosen is None or action.transform is not None:
            _put(record, kept, stamp, forward, action.budget)
        else:
            passing = event.passing_for(tap.session)
            assert tap.tokens is not None
            put_tokens(record, kept, place.chosen, tap.tokens, place.dim, passing, stamp, forward)
    if tap.tokens:
        tap.fired = tap.fired or found
    elif not found:
        tap.miss(value)


def _refuse_pieces(tap: Tap, place: Place, event: Event) -> None:
    """Raise if the tokens that pass in this call can't be put together with those of other calls."""
    passing = event.passing_for(tap.session)
    if passing is None or place.chosen is None:
        return
    if passing.step == 0 and place.is_later_piece and not place.is_cut:
        raise HooklineError(
            f"the first of these tokens passed before, and are in the cache; name those from '@{passing.first}:' on"
        )
    if passing.owner is not None and passing.owner.lost_rows:
        raise HooklineError(
            "the number of rows changed in the middle of a sequence, so it is unknown which row is which"
        )
    if passing.beams > 1 and passing.step:
        raise HooklineError(
            "beam search goes on from other rows at each step, so the calls of a row are no sequence; run the model "
            "once more on the ids that it returned"
        )
    if place.is_cut:
        raise HooklineError(
            f"some of these tokens don't get here: of {passing.width} tokens the head gets the last {passing.kept} "
            "(logits_to_keep); name those, or capture before the head"
        )


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
