"""`with` blocks: which are open here, on this thread and in this asyncio task, and which have to be entered.

Every `with` block is a token. The set of those open here is one context variable, so that threads and tasks don't
see each other's blocks. While a function of a hook runs the set holds `RESTING` and a `Rest` too: the hooks on that
hook's model rest, but for those of blocks that the function itself opens. `must_enter` makes a block of a generator,
which warns if it is never entered.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from hookline._torch import graph_task
from hookline.errors import warn

Blocks = frozenset[object]

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
RESTING: object = object()  # In the set while any `Rest` is: the hot path looks for this alone.
open_blocks: ContextVar[Blocks] = ContextVar("open_blocks", default=frozenset())


def open_block(token: object) -> None:
    """Open a block here."""
    open_blocks.set(not_left() | {token})


def note_skip(module: nn.Module) -> None:
    """Let the blocks that are open here know that a module was skipped: its hook may be gone when they end."""
    for token in open_blocks.get():
        if isinstance(token, Token):
            token.skipped |= {id(module)}


def not_left() -> Blocks:
    """Return what is open here, without the blocks that were left and could not be closed at that moment."""
    here = open_blocks.get()
    return here.difference([token() for token in tuple(_left)]) if _left else here


def close_block(token: object) -> None:
    """Close a block; in any order, and also from another context than the one that opened it.

    Not while Python collects garbage: before Python 3.12 a context variable that is set then may free memory in which
    Python is just setting another, and Python crashes. Nothing acts in a block that was left, so its token may wait
    until another block opens or closes here.
    """
    if next(reversed(_phases)) == "start":
        _left.add(weakref.ref(token, _left.discard))
    else:
        open_blocks.set(not_left() - {token})


_left = set[weakref.ref[object]]()
# The last key is the phase that Python's garbage collector is in. A function in C moves it there: in one in Python a
# Ctrl-C would be lost.
_phases = OrderedDict.fromkeys(("start", "stop"))


def follow_collector() -> None:
    """Note from now on which phase Python's garbage collector is in, where `close_block` has to know."""
    if sys.version_info < (3, 12):
        gc.callbacks.append(_phases.move_to_end)  # type: ignore[arg-type]  # A dict is given for `last`.


class Token:
    """Stands for a `with` block in the set of those open here."""

    skipped: frozenset[int] = frozenset()  # The ids of modules that a hook has skipped while it was open.

    def is_on(self, _model: nn.Module) -> bool:
        """Whether the block is open on this model, on a part of it or on one that it is a part of."""
        return False


class OtherRuns:
    """Who else runs the model while a block is open: where the block does not act, or beside each other in it."""

    ran = False  # On a thread or in a task where the block does not act, and no other on this model does.
    are_mixed = False  # Several tasks, or threads at the same time, in this block, and nothing was read in between.
    _task: Callable[[], Any] | None = None  # The asyncio task that ran it last in this block, held weakly.
    _thread = 0  # The one on which the model runs in this block, begun last.
    _with_own: Blocks | None = None  # What was open where another block on this model is, seen last.

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

    def begin(self) -> OtherRuns:
        """Note a forward in the block: the values of several tasks, or of threads at the same time, replace others."""
        thread, task = get_ident(), current_task()
        if self._thread != thread and self._thread:
            self.are_mixed = True
        self._thread = thread
        if task is not None:
            if self._task is not None and self._task() is not task:
                self.are_mixed = True
            self._task = weakref.ref(task)
        return self

    def end(self) -> None:
        """Note that it is over."""
        self._thread = 0

    def take_mixed(self) -> bool:
        """Return whether several ran the model since this was last asked."""
        are_mixed, self.are_mixed, self._task = self.are_mixed, False, None
        return are_mixed


def current_task() -> Any:
    """Return the asyncio task that runs here, if one does."""
    asyncio = sys.modules.get("asyncio")
    loop = asyncio._get_running_loop() if asyncio is not None else None
    return asyncio.current_task(loop) if asyncio is not None and loop is not None else None


def current_runner() -> tuple[int, int]:
    """Return the thread and the asyncio task that run here, by their ids."""
    return get_ident(), id(current_task())


def overlap(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models are the same, or one is a part of the other."""
    if one is other:
        return True
    return any(part is one for part in other.modules()) or any(part is other for part in one.modules())


class Rest:
    """Hooks that rest: those on a model, or on all, that were there before."""

    def __init__(self, model: nn.Module | None, blocks: Blocks) -> None:
        self.blocks = blocks
        self.is_of_user = model is not None  # Else hookline itself runs the model.
        self.backward = graph_task()  # The backward that the function is called in, or -1.
        self._model = model
        self._modules: set[int] | None = None

    def covers(self, module: nn.Module) -> bool:
        """Whether hooks on a module rest. The modules are looked up when first asked for, which is seldom."""
        if self._model is None:
            return True
        if self._modules is None:
            self._modules = {id(one) for one in self._model.modules()} | {id(self._model)}
        return id(module) in self._modules


def is_called_in_backward(here: Blocks) -> bool:
    """Whether a function of a hook at a gradient runs here. What it runs is not a recomputation."""
    task = graph_task()
    return RESTING in here and any(isinstance(rest, Rest) and rest.backward == task for rest in here)


def acting(blocks: Blocks, active: bool, module: nn.Module, here: Blocks) -> bool:
    """Whether a hook in these blocks, or active everywhere, acts on its module while others rest."""
    left = blocks & here
    for rest in here:
        if isinstance(rest, Rest) and rest.covers(module):
            left -= rest.blocks
            active = False
    return active or bool(left)


@contextmanager
def resting() -> Iterator[None]:
    """Let all hooks rest: what is done to the model meanwhile is not captured or edited."""
    before = open_blocks.get()
    try:
        open_blocks.set(before | {RESTING, Rest(None, before)})
        yield
    finally:
        open_blocks.set(before)


def call_user(model: nn.Module | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function while the hooks on a model rest."""
    if torch.compiler.is_dynamo_compiling():
        return function(*args)  # Dynamo can't trace a context variable.
    before = open_blocks.get()
    try:
        open_blocks.set(before | {RESTING, Rest(model, before)})
        return function(*args)
    finally:
        open_blocks.set(before)


class Unstarted(_GeneratorContextManager[Any, None, None]):
    """A block made of a generator. It warns if it is dropped without having been entered."""

    is_used = False

    def __enter__(self) -> Any:
        self.is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self.is_used = True  # As a decorator: each call enters a block like this one.
        return super().__call__(function)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.is_used and not _is_finalizing():
            name = self.func.__name__
            warn(f"{name} was never entered and did nothing; write `with {name}(...):`")


def must_enter(
    function: Callable[Parameters, Generator[Value, None, None]],
) -> Callable[Parameters, AbstractContextManager[Value]]:
    """Make a `with` block of a generator function, as contextlib.contextmanager does; it has to be entered."""

    @wraps(function)
    def make(*args: Parameters.args, **kwargs: Parameters.kwargs) -> AbstractContextManager[Value]:
        return Unstarted(function, args, kwargs)

    return make
