"""Activation checkpointing: a forward that autograd runs a second time, during backward.

What was captured in the first pass is not captured again. What was changed is changed again in the same way, call by
call, also when the block has been left since: the segment's own recomputation is wrapped in a `Replay`, which knows
what happened at each call of each hooked module in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from hookline._engine.tap import NO_BLOCKS, Tap
from hookline._open_blocks import open_blocks
from hookline._torch import graph_task

_replaying: ContextVar[Replay | None] = ContextVar("replaying", default=None)


class Replay:
    """A segment's recomputation, with what happened in it the first time."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute
        self.parent = _replaying.get()
        self.events: dict[Any, list[Any]] = {}  # The calls in it, each an `Event`, by what was called.
        self.left: dict[Any, deque[Any]] = {}  # The calls that have not come again yet.
        self.task = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left = {called: deque(events) for called, events in self.events.items()}
        self.task = self.parent.task if self.parent is not None else graph_task()
        taps: list[Tap] = [tap for events in self.events.values() for event in events for tap, _ in event.taps]
        attach_for_now = taps[0].attach_for_now if taps else None
        before, blocks = _replaying.get(), open_blocks.get()
        try:
            _replaying.set(self)
            open_blocks.set(NO_BLOCKS)
            with (
                nullcontext() if attach_for_now is None else attach_for_now(list(dict.fromkeys(taps)))
            ):  # They may be off by now.
                return self.recompute(*args, **kwargs)
        finally:
            open_blocks.set(blocks)
            _replaying.set(before)


def replaying() -> Replay | None:
    """Return the segment that is being recomputed here, if hooks took part in it."""
    return _replaying.get()


def is_replaying() -> bool:
    """Return True if a checkpointed segment is being recomputed here, in which hooks took part."""
    return graph_task() != -1 and _replaying.get() is not None


def is_only_backward() -> bool:
    """Return True if a backward runs here that recomputes nothing in which hooks took part."""
    return graph_task() != -1 and _replaying.get() is None


def wrapped(recomputations: Iterable[tuple[Any, str]]) -> list[Replay]:
    """Wrap what recomputes these segments, each given as an object and an attribute of it, where that is not done."""
    found = []
    for holder, name in recomputations:
        recompute = getattr(holder, name)
        replay = recompute if isinstance(recompute, Replay) else Replay(recompute)
        setattr(holder, name, replay)
        found.append(replay)
    return found
