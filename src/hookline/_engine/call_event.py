"""One call of a module, method or function, or one read of a parameter: what is called, and which taps act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hookline._cache.record import ticks
from hookline._engine.action import SetByCall
from hookline._engine.activation_checkpoint import replaying, wrapped
from hookline._engine.call_arguments import Parameters
from hookline._engine.passing import Passing
from hookline._engine.sequences import passing_here
from hookline._engine.tap import Tap
from hookline._open_blocks import Blocks, Session, is_called_in_backward
from hookline._torch import graph_task, is_in_checkpoint, recomputations
from hookline._values.containers import Exchange
from hookline._values.nested import Arguments, leaves
from hookline.errors import HooklineError

Count = tuple[int, bool]  # The number of a call, and whether the tap acts on it.
Choices = tuple[tuple[Tap, ...], dict[Any, tuple[Tap, ...]]]  # Taps, and for each function that ran: those at it.


class Called(Protocol):
    """Something that is called: a shadowed method of a module, or a function inside a forward."""

    name: str
    is_function: bool
    is_method: bool  # Whether it is a method that is called directly, not by a forward.
    found: Callable[..., Any] | None  # The callable that is called instead of the class's function.
    code: Any  # The code of the forward or method, if there are taps on functions inside it.
    choices: Choices

    @property
    def parameters(self) -> Parameters:
        """The names of its parameters."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it."""

    def stand_in(self, value: Any, is_given: bool, passed: Arguments) -> Any:
        """Return the result of the call when it is skipped."""


class Event:
    """One call: when it began, and which taps act on it, each with the number of the call."""

    __slots__ = ("aliases", "depth", "exchanged", "followed", "is_replayed", "marks", "new", "notes", "own", "passing",
                 "stamp", "taps", "task", "written")  # fmt: skip

    def __init__(self, taps: list[tuple[Tap, int]]) -> None:
        self.stamp = next(ticks)
        self.taps = taps
        self.notes: dict[Any, Any] = {}  # What users' functions store for each other: see `Call.notes`.
        self.marks: dict[Any, Any] | None = None  # In a checkpointed segment: statistics of edited values.
        self.is_replayed = False
        self.task: int | None = None  # The number of the backward that replays it.
        # The tensors whose gradients it follows: outputs under True, arguments under False. See gradients.py.
        self.followed: dict[bool, list[Tensor]] = {}
        self.written: list[Tensor] = []  # For a function: the arguments that it wrote into.
        self.depth = 0  # How many checkpointed segments it is in.
        # The arguments whose gradients it follows, each with its alias, by the id of the argument.
        self.aliases: dict[int, tuple[Tensor, Tensor]] = {}
        self.exchanged: Exchange | None = None  # Writes into the containers among its arguments, and restores them.
        self.new: Tensor | None = None  # The tensor that it returned, if nobody else holds it.
        self.own: dict[int, Any] = {}  # The containers that it returned and that nobody else holds, by id.
        self.passing: Mapping[Session, Passing] | None = None  # The tokens that pass, if it is replayed.

    @property
    def changes(self) -> bool:
        """Whether any of its taps may change a value, or follows a gradient."""
        return any([tap.changes for tap, _ in self.taps])

    def passing_for(self, session: Session) -> Passing | None:
        """Return the tokens that pass in the forward that this call belongs to."""
        return (passing_here() if self.passing is None else self.passing).get(session)

    def exchange(self, port: str) -> Exchange:
        """Return the `Exchange` that writes into the containers of a value at this port.

        Containers among the arguments are restored when the call is over. Containers in an output are not restored, so
        only those that nobody else holds are written to.
        """
        if port in ("output", "grad_output"):
            return Exchange(self.own)
        if self.exchanged is None:
            self.exchanged = Exchange()
        return self.exchanged

    def inside(self, taps: list[tuple[Tap, int]], name: str, number: int) -> Event:
        """Return the event for a call of a function inside this call of a module."""
        event = Event(taps)
        event.is_replayed, event.task, event.passing = self.is_replayed, self.task, self.passing
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
        """Return the event for the recomputation of this call."""
        event = Event(taps)
        event.stamp, event.marks, event.is_replayed, event.task = self.stamp, self.marks, True, task
        event.passing = passing_here() if self.passing is None else self.passing
        return event

    def check(self, tap: Tap, value: Any) -> None:
        """Raise if an edit makes another value than in the first pass: that would give wrong gradients."""
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
    """Return the event for a call of a module or method, or a use of a parameter, with the taps that act on it."""
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
    """Return the event for a call that runs in a backward, usually because checkpointing recomputes it."""
    replay = replaying()
    if replay is None:
        if is_in_checkpoint():
            return Event([])  # A segment in which no tap changed anything.
        # On CUDA, backward runs on one of autograd's threads, where no block is open. A block on any thread counts.
        open_taps = [tap for tap in taps if (tap.active or tap.blocks) and tap.changes and not tap.site.is_gradient]
        for tap in taps:
            tap.session.recomputed = tap.session.recomputed or not tap.changes
        for tap in open_taps:
            if tap.wanted_call is not None or isinstance(tap.action, SetByCall):
                raise HooklineError(
                    f"'{tap.site}': backward runs the forward again, and hookline can't tell which of its calls this is"
                )
        return Event([(tap, 0) for tap in open_taps])
    left = replay.left.get(called)
    if not left:
        return Event([])
    event: Event = left.popleft()
    has_gradients = torch.is_grad_enabled()
    again = event.again([(tap, n) for tap, n in event.taps if has_gradients or not tap.site.is_gradient], replay.task)
    for inner in wrapped(recomputations()):  # Nested checkpoints that now run for the first time.
        inner.events.setdefault(called, []).append(event)
    return again


def _log(called: Any, event: Event) -> int:
    """Note a call in every checkpointed segment that runs in its first pass. Return the number of these segments."""
    running = recomputations()
    if not running:
        return 0
    kept = [(tap, number) for tap, number in event.taps if tap.changes]
    event.marks = {}
    for replay in wrapped(running):
        replay.events.setdefault(called, []).append(event.again(kept, -1))
    return len(running)
