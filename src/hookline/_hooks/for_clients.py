"""What clients such as `hl.watch`, `hl.scan` and `hl.sweep` can do with hooks beyond the methods of `Hooks`.

observing            give what passes to objects of the client's own, for the time of a block
add_observers        the same, as hooks of a `Hooks`
changes_in           the hooks that have changed something in some modules
warn_unless_entered  name the call whose block has to be entered
raise_if_all_miss    raise if nothing passes at any place of some hooks
put_first            let hooks act before all others
session_of           what is known of the runs that fill a cache
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from hookline._cache.cache import Cache
from hookline._cache.record import Session
from hookline._engine.action import Apply, Observer, OutputObserver, Set, Skip
from hookline._engine.attach import attached, attached_to
from hookline._engine.tap import IGNORE, TOGETHER, WARN, Tap, hot_taps
from hookline._hooks.hooks import PLAIN, Hooks
from hookline._open_blocks import open_block, open_blocks
from hookline._sites.resolve import Found
from hookline.errors import Line

_to_front = itertools.count(-1, -1)


@contextmanager
def observing(places: Iterable[tuple[Found, Observer]]) -> Iterator[None]:
    """Let observers see what passes on this thread, also where `resting` lets all hooks rest."""
    taps, block = _taps(places, Session()), object()
    for tap in taps:
        tap.blocks = frozenset((block,))
    before = open_blocks.get()
    with attached(taps):
        try:
            open_block(block)
            yield
        finally:
            open_blocks.set(before)


def _taps(places: Iterable[tuple[Found, Observer]], session: Session) -> list[Tap]:
    taps: list[Tap] = []
    for place, observer in places:
        tap = Tap(place.site, place.module, observer, session, place.exact, "")
        tap.siblings = place.siblings
        if place.holders:
            tap.hold(place.holders)
        taps.append(tap)
    return taps


def add_observers(hooks: Hooks, places: Iterable[tuple[Found, Observer]]) -> None:
    """Add an observer at each place. Only a place that was named exactly warns if nothing passes there.

    An `OutputObserver` at a module's whole output is called by the hot path.
    """
    session, taps = session_of(hooks.cache), list[Tap]()
    for place, observer in places:
        if place.site[1:] == PLAIN and isinstance(observer, OutputObserver):
            tap = hot_taps([(place.site.path, place.module, place.siblings)], False, observer, session)[0]
        else:
            tap = _taps([(place, observer)], session)[0]
        tap.missing = WARN if place.exact else IGNORE
        taps.append(tap)
    hooks._add(taps)


def changes_in(modules: Iterable[nn.Module]) -> list[Tap]:
    """Return the hooks on these modules that put other values in, have done so, and act here."""
    here, taps = open_blocks.get(), [tap for module in modules for tap in attached_to(module)]
    return [tap for tap in taps if isinstance(tap.action, (Set, Apply, Skip)) and tap.fired and tap.acts(here)]


def warn_unless_entered(hooks: Hooks, verb: str, line: Line | None = None) -> None:
    """Warn if these hooks are dropped and nobody has entered them: the user made them by `hl.<verb>` on that line.

    Without a verb, nothing is said any more.
    """
    hooks._lifecycle.verb, hooks._lifecycle.added_at = verb, line


def raise_if_all_miss(hooks: Hooks) -> None:
    """Raise at the end of the block if nothing has passed at any of these hooks; a pattern alone would only warn."""
    group = object()
    for tap in hooks._taps:
        tap.group = group
        tap.missing = TOGETHER if tap.missing == WARN else tap.missing


def put_first(hooks: Hooks) -> None:
    """Let hooks act before all others at their places, and before those that were put first earlier."""
    for tap in hooks._taps:
        hooks._lifecycle.deactivate([tap])
        tap.order = next(_to_front)
        hooks._lifecycle.activate([tap])


def session_of(cache: Cache) -> Session:
    """Return what is known of the runs that fill a cache."""
    return cache._session
