"""Activation checkpointing: a forward that autograd runs a second time, during backward.

Values that were captured in the first pass are not captured again. Edits are repeated in the same way, call by call,
even if their block was left before the backward. For this, the function that recomputes a segment is wrapped in a
`Replay`, which knows which taps acted on each call of each hooked module in the segment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from hookline._engine.tap import NO_BLOCKS, Tap
from hookline._open_blocks import open_blocks
from hookline._torch import graph_task

_replaying: ContextVar[Replay | None] = ContextVar("replaying", default=None)


class Replay:
    """A segment's recomputation, with the calls in which taps changed values or followed gradients the first time."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute
        self.parent = _replaying.get()
        self.events: dict[Any, list[Any]] = {}  # The calls in the segment, each an `Event`, by what was called.
        self.left: dict[Any, deque[Any]] = {}  # The calls that have not been repeated yet.
        self.task = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left = {called: deque(events) for called, events in self.events.items()}
        self.task = self.parent.task if self.parent is not None else graph_task()
        taps: list[Tap] = [tap for events in self.events.values() for event in events for tap, _ in event.taps]
        before, blocks = _replaying.get(), open_blocks.get()
        try:
            _replaying.set(self)
            open_blocks.set(NO_BLOCKS)
            with Tap.attach_for_now(list(dict.fromkeys(taps))):  # The taps may be detached by now.
                return self.recompute(*args, **kwargs)
        finally:
            open_blocks.set(blocks)
            _replaying.set(before)


def replaying() -> Replay | None:
    """Return the `Replay` that runs here, if there is one."""
    return _replaying.get()


def is_replaying() -> bool:
    """Return True if a `Replay` runs here, in a backward."""
    return graph_task() != -1 and _replaying.get() is not None


def is_only_backward() -> bool:
    """Return True if a backward runs here, but not in a `Replay`."""
    return graph_task() != -1 and _replaying.get() is None


def wrapped(recomputations: Iterable[tuple[Any, str]]) -> list[Replay]:
    """Wrap the functions that recompute these segments in a `Replay` each, unless they are wrapped already.

    Args:
        recomputations: For each segment, an object and the name of its attribute that holds the function.
    """
    found = []
    for holder, name in recomputations:
        recompute = getattr(holder, name)
        replay = recompute if isinstance(recompute, Replay) else Replay(recompute)
        setattr(holder, name, replay)
        found.append(replay)
    return found
