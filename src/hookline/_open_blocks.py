"""`with` blocks: which are open on this thread and in this asyncio task, and what ran in them.

Every `with` block is a token. The set of open blocks is one context variable, so that threads and tasks don't see each
other's blocks. While a function of a hook runs, the set also holds `RESTING` and a `Rest`: the hooks on that hook's
model are paused, except those of blocks that the function itself opens. A `Session` records what ran in the blocks of
one set of hooks.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from hookline._torch import graph_task
from hookline.errors import CacheFull, StoreError

Blocks = frozenset[object]

RESTING: object = object()  # In the set whenever a `Rest` is: the hot path checks only for this.
running_loop = asyncio._get_running_loop  # Returns the asyncio loop of this thread, or None. Torch imports asyncio.
open_blocks: ContextVar[Blocks] = ContextVar("open_blocks", default=frozenset())


def note_skip(module: nn.Module) -> None:
    """Note in the open blocks that a module was skipped: its hook may be gone when they end."""
    for token in open_blocks.get():
        if isinstance(token, Token):
            token.skipped |= {id(module)}


def not_left() -> Blocks:
    """Return the open blocks, without those that were left but could not be closed at that moment."""
    here = open_blocks.get()
    return here.difference([token() for token in left_blocks.copy()]) if left_blocks else here


def close_block(token: Token) -> None:
    """Close a block. Blocks may be closed in any order, and from another context than the one that opened them.

    During garbage collection the block is only marked as left. Before Python 3.12, setting a context variable at
    that moment may crash Python: it frees memory in which Python may be setting another one. No hook acts in a block
    that was left, so its token can stay in the set until another block opens or closes here.
    """
    within, before = token.opened
    token.opened = _NEVER_OPENED  # It holds the block itself.
    if list(_phases)[-1] == "start":  # One step: no other thread can move the keys while the list is made.
        left_blocks.add(weakref.ref(token, left_blocks.discard))
    elif open_blocks.get() is within and not left_blocks:
        open_blocks.set(before)  # The usual case. Hooks of the outer blocks know this set: see `hot_path`.
    else:
        open_blocks.set(not_left() - {token})


left_blocks = set[weakref.ref[object]]()
_NEVER_OPENED: tuple[Blocks | None, Blocks] = None, frozenset()
# The last key is the current phase of Python's garbage collector. A C function moves it there: in a Python function a
# Ctrl-C would be lost.
_phases = OrderedDict.fromkeys(("start", "stop"))


def follow_collector() -> None:
    """Track the phase of Python's garbage collector, on the Python versions where `close_block` needs it."""
    if sys.version_info < (3, 12):
        gc.callbacks.append(_phases.move_to_end)  # type: ignore[arg-type]  # The collector passes a dict as `last`.


class Token:
    """Stands for a `with` block in the set of open blocks."""

    skipped: frozenset[int] = frozenset()  # The ids of modules that were skipped while the block was open.
    opened = _NEVER_OPENED  # The set of open blocks with this one, and the set before it was opened.

    def is_on(self, _model: nn.Module) -> bool:
        """Return True if the block is open on this model, on a part of it or on a model that holds it."""
        return False


class OtherRuns:
    """Runs of the model on other threads and tasks. A block misses them, or their values get mixed up in it."""

    ran = False  # Whether the model ran on a thread or in a task where no block on it is open.
    are_mixed = False  # Whether several tasks, or threads at the same time, ran it in this block since the last read.
    _task: Callable[[], Any] | None = None  # The asyncio task that ran it last in this block, held weakly.
    _with_own: Blocks | None = None  # The last open blocks with another block on this model; runs in them are fine.

    def __getstate__(self) -> dict[str, Any]:
        return {"ran": self.ran}

    def note(self, model: nn.Module, here: Blocks) -> None:
        """Note a call of the model, or of a part of it, where the block does not act."""
        if here is self._with_own or RESTING in here:
            return
        if any(isinstance(token, Token) and token.is_on(model) for token in here):
            self._with_own = here
            return
        self.ran = True

    def begin(self, is_elsewhere: bool) -> None:
        """Note that a forward starts here. Two tasks, or threads at the same time, overwrite each other's values.

        Args:
            is_elsewhere: Whether another thread is running a forward in this block.
        """
        task = current_task()
        if is_elsewhere or (task is not None and self._task is not None and self._task() is not task):
            self.are_mixed = True
        if task is not None:
            self._task = weakref.ref(task)

    def take_mixed(self) -> bool:
        """Return True if values were mixed since the last call of this method."""
        are_mixed, self.are_mixed, self._task = self.are_mixed, False, None
        return are_mixed


class Generating(NamedTuple):
    """A generator that has opened a block. Its frame is not held: that would keep its variables alive."""

    frame: int  # The id of its frame.
    code: CodeType
    runner: tuple[int, int]  # The thread and the task that ran it when it opened the block.


def no_model() -> None:
    """Return None, as a weak reference to a model that is gone does."""


_NOT_COPIED = ("lifecycle", "generator", "kinds", "sequences", "passed")


class Session:
    """Facts about the forwards that fill a cache, mostly since the hooks were last entered. Keeps no model alive."""

    lifecycle: Callable[[], Any] = staticmethod(no_model)  # The `Lifecycle` of the hooks, held weakly.
    began = 0  # The number of forwards before the hooks were last entered.
    failed = 0  # The number of forwards since then that raised.
    broke = 0  # The number of the last forward that raised.
    was_full = False  # Whether that forward raised because the cache was full.
    stopped = False  # Whether a forward was ended early.
    ran = False  # Whether the model ran inside a compiled graph, where nothing can be counted.
    gave_up = False  # Whether the model ran uncompiled because torch makes no more graphs of it.
    missed = False  # Whether subscripts selected nothing of a value.
    backward = False  # Whether a backward went through the model's output; noted if hooks change gradients.
    rested = False  # Whether hooks were paused because a function of a hook on the same model ran.
    recomputed = False  # Whether captures ignored a forward inside a backward: a recomputation.
    warned_of: tuple[str, ...] = ()  # Reasons for missing gradients that a warning has named.
    generator: Generating | None = None  # The generator that opened the block, if one did.
    called = ""  # The callable that hl.run called, if it did not call the model itself.
    over = ""  # Why no more values will come.
    kinds: frozenset[type] = frozenset()  # The classes of the modules that the hooks are attached to.
    forked = False  # Whether this process was forked from the one that placed the hooks.

    forwards = 0  # The number of forwards of the model.
    # If hooks of this session ask for tokens: what has passed, for each thread and task (see _engine/sequences.py); and
    # the forwards, with the tick at which each began, for captures that keep several calls.
    sequences: weakref.WeakKeyDictionary[Any, Any] | None = None
    passed: deque[tuple[int, Any]] | tuple[tuple[int, Any], ...] | None = None
    running_on = 0  # The thread that is running a forward in these blocks; the last to begin if there are several.
    model: Callable[[], nn.Module | None] = staticmethod(no_model)  # The model that the hooks are on, held weakly.
    _others: OtherRuns | None = None

    @property
    def others(self) -> OtherRuns:
        """Runs on other threads and tasks since the hooks were last entered. Most blocks have none."""
        found = self._others
        if found is None:
            found = vars(self).setdefault("_others", OtherRuns())  # One step: another thread may ask too.
        return found

    def begin_forward(self) -> None:
        """Note that a forward starts on this thread. Its caller sets `running_on` to 0 when it is over."""
        thread = get_ident()
        if self.running_on or running_loop() is not None:
            self.others.begin(self.running_on not in (0, thread))
        self.running_on = thread

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        return kept | {"model": no_model}

    def restart(self) -> None:
        """Forget what was noted about earlier runs, at the beginning of a block."""
        self.began = self.forwards
        self.failed = 0
        self.ran = self.gave_up = self.stopped = self.rested = self.missed = self.backward = self.recomputed = False
        self.over = self.called = ""
        self.generator = None
        vars(self).pop("_others", None)
        self.running_on = 0
        self.sequences = None

    def fail(self, error: BaseException) -> None:
        """Note that the running forward ends with an exception."""
        self.failed += 1
        self.was_full = isinstance(error, (CacheFull, StoreError))
        self.broke = self.forwards

    @property
    def since(self) -> int:
        """The number of forwards since the hooks were last entered."""
        return self.forwards - self.began

    @property
    def any_forward(self) -> bool:
        """Whether the model has run to its end since the hooks were last entered."""
        return self.since > self.failed or self.ran


def current_task() -> Any:
    """Return the running asyncio task, or None."""
    loop = running_loop()
    return None if loop is None else asyncio.current_task(loop)


def current_runner() -> tuple[int, int]:
    """Return the ids of the running thread and asyncio task."""
    return get_ident(), id(current_task())


def overlap(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two models are the same, or one is a part of the other."""
    if one is other:
        return True
    return any(part is one for part in other.modules()) or any(part is other for part in one.modules())


class Rest:
    """Pauses the hooks on a model (None: on all models), except those of blocks that are opened later."""

    def __init__(self, model: nn.Module | None, blocks: Blocks) -> None:
        self.blocks = blocks
        self.is_of_user = model is not None  # If False, hookline itself runs the model.
        self.backward = graph_task()  # The backward that the function is called in, or -1.
        self._model = model
        self._modules: set[int] | None = None

    def covers(self, module: nn.Module) -> bool:
        """Return True if hooks on this module are paused. The modules are listed on the first call, which is rare."""
        if self._model is None:
            return True
        if self._modules is None:
            self._modules = {id(one) for one in self._model.modules()} | {id(self._model)}
        return id(module) in self._modules


def is_called_in_backward(here: Blocks) -> bool:
    """Return True if a function of a hook at a gradient runs here. A forward inside it is not a recomputation."""
    task = graph_task()
    return RESTING in here and any(isinstance(rest, Rest) and rest.backward == task for rest in here)


def acting(blocks: Blocks, active: bool, module: nn.Module, here: Blocks) -> bool:
    """Return True if a hook in these blocks, or active everywhere, acts here on its module: no `Rest` pauses it."""
    left = blocks & here
    for rest in here:
        if isinstance(rest, Rest) and rest.covers(module):
            left -= rest.blocks
            active = False
    return active or bool(left)


@contextmanager
def resting() -> Iterator[None]:
    """Pause all hooks: nothing that the model does in this block is captured or edited."""
    before = open_blocks.get()
    try:
        open_blocks.set(before | {RESTING, Rest(None, before)})
        yield
    finally:
        open_blocks.set(before)


def call_user(model: nn.Module | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function while the hooks on a model are paused."""
    if torch.compiler.is_dynamo_compiling():
        return function(*args)  # Dynamo can't trace a context variable.
    before = open_blocks.get()
    try:
        open_blocks.set(before | {RESTING, Rest(model, before)})
        return function(*args)
    finally:
        open_blocks.set(before)
