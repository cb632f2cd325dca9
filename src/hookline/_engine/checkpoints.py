"""Activation checkpointing: a forward that autograd runs a second time, during backward.

What was captured in the first pass is not captured again. What was changed is changed again in the same way, call by
call, also when the block has been left since: the segment's own recomputation is wrapped in a `Replay`, which knows
what happened at each call of each watched module in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hookline._blocks import Blocks, is_called_in_backward, open_blocks
from hookline._cache.record import ticks
from hookline._engine.taps import NO_BLOCKS, Tap
from hookline._torch import graph_task, is_in_checkpoint, recomputations
from hookline._values.containers import Exchange
from hookline._values.nested import leaves
from hookline.errors import HooklineError

# Lets taps act for a while: modules.py, which knows how, puts that here.
attached: Callable[[list[Tap]], AbstractContextManager[Any]] = nullcontext
Count = tuple[int, bool]  # The number of a call, and whether it is wanted.

_replaying: ContextVar[Replay | None] = ContextVar("replaying", default=None)


class Event:
    """One call of a watched module: when it began, and which taps act on it, each with the number of the call."""

    __slots__ = ("aliases", "depth", "exchanged", "followed", "is_replayed", "marks", "new", "notes", "own", "stamp",
                 "taps", "task", "written")  # fmt: skip

    def __init__(self, taps: list[tuple[Tap, int]]) -> None:
        self.stamp = next(ticks)
        self.taps = taps
        self.notes: dict[Any, Any] = {}  # What users' functions leave for each other: see Call.
        self.marks: dict[Any, Any] | None = None  # Of edits in a checkpointed segment: what they made.
        self.is_replayed = False
        self.task: int | None = None  # The backward in which it is replayed.
        # The tensors whose gradients it follows, apart for inputs and outputs: see gradients.py.
        self.followed: dict[bool, list[Tensor]] = {}
        self.written: list[Tensor] = []  # Of a function: the arguments that it wrote into.
        self.depth = 0  # How many checkpointed segments it is in.
        # Of the tensors among its arguments whose gradients it follows: each with its alias, by the id of the first.
        self.aliases: dict[int, tuple[Tensor, Tensor]] = {}
        self.exchanged: Exchange | None = None  # What was put into the containers among its arguments.
        self.new: Tensor | None = None  # What it returned, if nobody else holds that.
        self.own: dict[int, Any] = {}  # The containers that it returned and nobody else holds, by their ids.

    @property
    def changes(self) -> bool:
        """Whether any of its taps may change what passes, or follows a gradient."""
        return any([tap.changes for tap, _ in self.taps])

    def exchange(self, port: str) -> Exchange:
        """Return what writes into the containers of a value: those of arguments are restored when the call is over.

        Of an output, only what nobody else holds is written to: it would stay changed.
        """
        if port in ("output", "grad_output"):
            return Exchange(self.own)
        if self.exchanged is None:
            self.exchanged = Exchange()
        return self.exchanged

    def inside(self, taps: list[tuple[Tap, int]], name: str, number: int) -> Event:
        """Return the call of a function within this call of a module."""
        event = Event(taps)
        event.is_replayed, event.task = self.is_replayed, self.task
        if self.marks is not None:
            event.stamp, event.marks = self.marks.setdefault((name, number), (event.stamp, {}))
        for tap, _ in taps:
            if tap.changes and not self.is_replayed and _depth() > self.depth:
                raise HooklineError(
                    f"'{tap.site}': {name!r} runs in a part of the forward that is checkpointed by itself, and can't "
                    "be changed again on its recomputation; checkpoint the whole module, or none of it"
                )
        return event

    def again(self, taps: list[tuple[Tap, int]], task: int) -> Event:
        """Return the same call on its recomputation."""
        event = Event(taps)
        event.stamp, event.marks, event.is_replayed, event.task = self.stamp, self.marks, True, task
        return event

    def check(self, tap: Tap, value: Any) -> None:
        """Hold an edit to what it made the first time: a recomputation that differs gives wrong gradients."""
        if self.marks is None:
            return
        tensors = [tensor.detach().double() for tensor in leaves(value) if tensor.is_floating_point()]
        marks = [torch.stack((tensor.mean(), tensor.abs().mean())) for tensor in tensors]
        first = self.marks.setdefault(tap, marks)
        if self.is_replayed and not all(map(_is_close, marks, first)):
            raise HooklineError(
                f"'{tap.site}': the edit made another value when checkpointing ran the forward again; it must not "
                "depend on state that changes, but may on call.number (with_call=True)"
            )


class Replay:
    """A segment's recomputation, with what happened in it the first time."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute
        self.parent = _replaying.get()
        self.events: dict[Any, list[Event]] = {}  # By what was called.
        self.left: dict[Any, deque[Event]] = {}
        self.task = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left = {called: deque(events) for called, events in self.events.items()}
        self.task = self.parent.task if self.parent is not None else graph_task()
        taps = {tap: None for events in self.events.values() for event in events for tap, _ in event.taps}
        before, blocks = _replaying.get(), open_blocks.get()
        try:
            _replaying.set(self)
            open_blocks.set(NO_BLOCKS)
            with attached(list(taps)):  # They may have been taken off since.
                return self.recompute(*args, **kwargs)
        finally:
            open_blocks.set(blocks)
            _replaying.set(before)


def event_of(called: Any, taps: Iterable[Tap], here: Blocks, count: Callable[[Tap], Count] = Tap.next_call) -> Event:
    """Return this call of a module, a method or an operation on a parameter: which of its taps act on it."""
    if graph_task() != -1 and not (is_called_in_backward(here) and any([tap.acts(here) for tap in taps])):
        return _event_again(called, taps)
    acting = []
    changes = False
    for tap in taps:
        if tap.acts(here):
            number, is_wanted = count(tap)
            changes = changes or tap.changes
            if is_wanted:
                acting.append((tap, number))
        elif tap.blocks:
            tap.pass_by(here)
    event = Event(acting)
    if changes:
        event.depth = _log(called, event)
    return event


def is_replaying() -> bool:
    """Whether a checkpointed segment is being recomputed here, in which hooks took part."""
    return graph_task() != -1 and _replaying.get() is not None


def is_only_backward() -> bool:
    """Whether a backward runs here that recomputes nothing in which hooks took part."""
    return graph_task() != -1 and _replaying.get() is None


def _event_again(called: Any, taps: Iterable[Tap]) -> Event:
    replay = _replaying.get()
    if replay is None:
        if is_in_checkpoint():
            return Event([])  # Torch recomputes what no hook of ours took part in.
        # On CUDA backward runs on a thread of autograd's own, where no block is open: any block counts.
        open_taps = [tap for tap in taps if (tap.active or tap.blocks) and tap.changes and not tap.site.is_gradient]
        for tap in taps:
            tap.session.recomputed = tap.session.recomputed or not tap.changes
        for tap in open_taps:
            if tap.wanted_call is not None:
                raise HooklineError(
                    f"'{tap.site}': backward runs the forward again, and which of its calls this is can't be told"
                )
        return Event([(tap, 0) for tap in open_taps])
    left = replay.left.get(called)
    if not left:
        return Event([])
    event = left.popleft()
    has_gradients = torch.is_grad_enabled()
    again = event.again([(tap, n) for tap, n in event.taps if has_gradients or not tap.site.is_gradient], replay.task)
    for inner in _segments():  # A checkpoint within the checkpoint, run for the first time since.
        inner.events.setdefault(called, []).append(event)
    return again


def _log(called: Any, event: Event) -> int:
    """Note a call in every checkpointed segment that is running for the first time; return how many there are."""
    kept = [(tap, number) for tap, number in event.taps if tap.changes]
    segments = _segments()
    for replay in segments:
        event.marks = {} if event.marks is None else event.marks
        logged = event.again(kept, -1)
        replay.events.setdefault(called, []).append(logged)
    return len(segments)


def _segments() -> list[Replay]:
    """Return the recomputation of each checkpointed segment that is running for the first time, wrapped."""
    found = []
    for holder, name in recomputations():
        replay = _wrapped(getattr(holder, name))
        setattr(holder, name, replay)
        found.append(replay)
    return found


def _depth() -> int:
    """Return how many checkpointed segments are running for the first time."""
    return len(recomputations())


def _wrapped(recompute: Callable[..., Any]) -> Replay:
    return recompute if isinstance(recompute, Replay) else Replay(recompute)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, equal_nan=True)
