"""One call of a module, method, function or parameter: what is called, and which taps act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hookline._cache.record import ticks
from hookline._engine.activation_checkpoint import replaying, wrapped
from hookline._engine.call_arguments import Parameters
from hookline._engine.tap import Tap
from hookline._open_blocks import Blocks, is_called_in_backward
from hookline._torch import graph_task, is_in_checkpoint, recomputations
from hookline._values.containers import Exchange
from hookline._values.nested import Arguments, leaves
from hookline.errors import HooklineError

Count = tuple[int, bool]  # The number of a call, and whether it is wanted.
Choices = tuple[tuple[Tap, ...], dict[Any, tuple[Tap, ...]]]  # Taps, and of these the ones for each function met.


class Called(Protocol):
    """What is called: a shadowed method of a module, or a function inside a forward."""

    name: str
    is_function: bool
    is_method: bool  # Whether it is a method that is called by itself, and not by a forward.
    found: Callable[..., Any] | None  # What is called instead of the class's own function.
    code: Any  # The code of the forward whose functions have taps.
    choices: Choices

    @property
    def parameters(self) -> Parameters:
        """The names of its parameters."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it."""

    def stand_in(self, value: Any, is_given: bool, passed: Arguments) -> Any:
        """Return what is given when it is skipped."""


class Event:
    """One call: when it began, and which taps act on it, each with the number of the call."""

    __slots__ = ("aliases", "depth", "exchanged", "followed", "is_replayed", "marks", "new", "notes", "own", "stamp",
                 "taps", "task", "written")  # fmt: skip

    def __init__(self, taps: list[tuple[Tap, int]]) -> None:
        self.stamp = next(ticks)
        self.taps = taps
        self.notes: dict[Any, Any] = {}  # What users' functions leave for each other: see Call.
        self.marks: dict[Any, Any] | None = None  # In a checkpointed segment: what edits made the first time.
        self.is_replayed = False
        self.task: int | None = None  # The backward in which it is replayed.
        # The tensors whose gradients it follows, apart for inputs and outputs: see gradients.py.
        self.followed: dict[bool, list[Tensor]] = {}
        self.written: list[Tensor] = []  # If this is a function: the arguments that it wrote into.
        self.depth = 0  # How many checkpointed segments it is in.
        # The arguments whose gradients it follows, each with its alias, by the id of the argument.
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

        In an output only containers that nobody else holds are written into: nothing restores them afterwards.
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
            if tap.changes and not self.is_replayed and len(recomputations()) > self.depth:
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
        is_close = partial(torch.allclose, rtol=1e-3, equal_nan=True)
        if self.is_replayed and not all(map(is_close, marks, first)):
            raise HooklineError(
                f"'{tap.site}': the edit made another value when checkpointing ran the forward again; it must not "
                "depend on state that changes, but may on call.number (with_call=True)"
            )


def event_of(called: Any, taps: Iterable[Tap], opened: Blocks, count: Callable[[Tap], Count] = Tap.next_call) -> Event:
    """Return this call of a module, a method or an operation on a parameter: which of its taps act on it."""
    if graph_task() != -1 and not (is_called_in_backward(opened) and any([tap.acts(opened) for tap in taps])):
        return _again(called, taps)
    acting = []
    changes = False
    for tap in taps:
        if tap.acts(opened):
            number, is_wanted = count(tap)
            changes = changes or tap.changes
            if is_wanted:
                acting.append((tap, number))
        elif tap.blocks:
            tap.pass_by(opened)
    event = Event(acting)
    if changes:
        event.depth = _log(called, event)
    return event


def _again(called: Any, taps: Iterable[Tap]) -> Event:
    """Return a call that runs in a backward: most often one that checkpointing runs again."""
    replay = replaying()
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
    event: Event = left.popleft()
    has_gradients = torch.is_grad_enabled()
    again = event.again([(tap, n) for tap, n in event.taps if has_gradients or not tap.site.is_gradient], replay.task)
    for inner in wrapped(recomputations()):  # A checkpoint within the checkpoint, run for the first time since.
        inner.events.setdefault(called, []).append(event)
    return again


def _log(called: Any, event: Event) -> int:
    """Note a call in every checkpointed segment that is running for the first time; return how many there are."""
    running = recomputations()
    if not running:
        return 0
    kept = [(tap, number) for tap, number in event.taps if tap.changes]
    event.marks = {}
    for replay in wrapped(running):
        replay.events.setdefault(called, []).append(event.again(kept, -1))
    return len(running)
