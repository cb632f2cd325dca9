"""Functions on hooks for clients such as `hl.watch`, `hl.scan` and `hl.sweep`, beyond the methods of `Hooks`.

observing            pass values to the client's observers during a block
add_observers        add observers to a `Hooks`
changes_in           the hooks that have changed a value in some modules
arguments_by_name    the arguments of a call, by parameter name
what_ran             whether the model ran in a block, was compiled, or failed
take_misses          the hooks whose subscripts selected nothing in a block
raise_if_all_miss    raise if nothing passes at any of the hooks
put_first            let hooks act before all others
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from hookline._engine.action import Call, Observer, OutputObserver
from hookline._engine.attach import attached_for_now, taps_on
from hookline._engine.call_arguments import bind, parameters_of
from hookline._engine.tap import IGNORE, TOGETHER, WARN, Tap, plain_taps, tap_at
from hookline._hooks.hooks import PLAIN, Hook, Hooks
from hookline._open_blocks import Session, Token, not_left, open_blocks
from hookline._sites.language import Site
from hookline._sites.resolve import Found, Modules
from hookline._why_nothing_passed import ran_elsewhere

_to_front = itertools.count(-1, -1)


@contextmanager
def observing(places: Iterable[tuple[Found, Observer]]) -> Iterator[None]:
    """Let observers see the values that pass on this thread, even while `resting` pauses all hooks."""
    session, block = Session(), Token()
    taps = [tap_at(place, observer, session) for place, observer in places]
    for tap in taps:
        tap.blocks = frozenset((block,))
    before = open_blocks.get()
    with attached_for_now(taps):
        try:
            open_blocks.set(not_left() | {block})
            yield
        finally:
            open_blocks.set(before)


def add_observers(hooks: Hooks, places: Iterable[tuple[Found, Observer]]) -> None:
    """Add an observer at each place. If nothing passes, only places that were named exactly warn.

    An `OutputObserver` at a module's whole output is called by the hot path.
    """
    session, taps = hooks._lifecycle.session, list[Tap]()
    for place, observer in places:
        if place.site[1:] == PLAIN and isinstance(observer, OutputObserver):
            tap = plain_taps(
                [Modules([(place.site.path, place.module, place.siblings)], False, "output")], observer, session
            )[0]
        else:
            tap = tap_at(place, observer, session)
        tap.missing = WARN if place.exact else IGNORE
        taps.append(tap)
    hooks._add(taps)


def changes_in(modules: Iterable[nn.Module]) -> list[Hook]:
    """Return the patches, edits and skips on these modules that act here and have already fired."""
    here, taps = open_blocks.get(), [tap for module in modules for tap in taps_on(module)]
    changes = [tap for tap in taps if not tap.action.observes and tap.fired and tap.acts(here)]
    return [Hook(tap, lifecycle) for tap in changes if (lifecycle := tap.session.lifecycle()) is not None]


def arguments_by_name(call: Call) -> dict[str, Any]:
    """Return the arguments of a call of a module or method, by parameter name."""
    method = call.site.method
    own = getattr(type(call.module), method or "forward", None) or getattr(call.module, method)
    return bind((call.args, dict(call.kwargs)), parameters_of(own))


class Ran(NamedTuple):
    """What ran in a block."""

    forward: bool  # The model ran to the end.
    compiled: bool  # It ran inside a compiled graph.
    failed: bool  # A forward raised.
    elsewhere: str  # A message if the model ran on a thread or task where the block does not act; or "".


def what_ran(hooks: Hooks) -> Ran:
    """Return what ran since these hooks were last entered."""
    lifecycle, session = hooks._lifecycle, hooks._lifecycle.session
    elsewhere = ran_elsewhere(lifecycle.module) if session.others.ran else ""
    return Ran(session.any_forward, session.ran, session.failed > 0, elsewhere)


class Miss(NamedTuple):
    """A hook whose subscripts selected nothing."""

    site: Site
    problem: str  # The part of a message after the site.
    hint: str  # A likely reason, and what to write instead; or "".
    part: Any  # The captured value if the module was called once; otherwise None.


def take_misses(hooks: Hooks) -> list[Miss]:
    """Return the hooks whose subscripts selected nothing in this block. The end of the block won't warn about them."""
    session = hooks._lifecycle.session
    missed = [tap for tap in hooks._taps if tap.misses] if session.missed else []
    session.missed = False
    return [
        Miss(tap.site, tap.problem, tap.hint, tap.record.peek() if tap.record is not None and tap.count == 1 else None)
        for tap in missed
    ]


def raise_if_all_miss(hooks: Hooks) -> None:
    """Make the end of the block raise if nothing has passed at any of these hooks; a pattern alone would only warn."""
    group = object()
    for tap in hooks._taps:
        tap.group = group
        tap.missing = TOGETHER if tap.missing == WARN else tap.missing


def put_first(hooks: Hooks) -> None:
    """Let hooks act before all others at their places, including those that were put first earlier."""
    for tap in hooks._taps:
        hooks._lifecycle.deactivate([tap])
        tap.order = next(_to_front)
        hooks._lifecycle.activate([tap])
