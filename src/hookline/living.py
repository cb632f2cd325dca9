"""Which ledgers have hooks on a model now, who keeps them alive, and what becomes of them in a fork."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, _GeneratorContextManager
from functools import cache, partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hookline.context import Blocks, current_runner, follow_collector, open_blocks
from hookline.errors import warn
from hookline.records import Generating
from hookline.wiring.modules import copy_as_before, forget_locks

if TYPE_CHECKING:
    from hookline.hooks import Hooks
    from hookline.ledger import Block, Ledger

GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DRIVERS = ("contextlib", "_pytest", "pytest_asyncio", "anyio", "pluggy")
Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

_living: dict[int, weakref.ref[Ledger]] = {}


class Owner:
    """Held by the `Hooks` of a ledger alone: when nobody holds that any more its hooks come off.

    The ledger can't know by itself: while hooks are attached the model holds it. A `Hooks` has two: Python ignores a
    Ctrl-C in the `__del__` of the first, and the second does what is left to do.
    """

    ledger: Ledger | None = None

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        ledger = self.ledger
        # Bound early: at the end of Python modules are empty.
        if ledger is not None and not ledger.is_dropped and not _is_finalizing():
            ledger.drop()


@cache
def look_at_exit() -> None:
    """Let Python warn at its end of short forms that a variable still holds, and that nobody has entered."""
    atexit.register(_warn_of_waiting, os.getpid())


def _warn_of_waiting(process: int) -> None:
    if os.getpid() != process or hasattr(sys, "last_value"):
        return  # This is a fork, whose parent may enter them yet, or the program has failed before it could.
    # Asking the garbage collector once costs no block anything: a list of those that wait would.
    found = {id(one.ledger): one.ledger for one in gc.get_objects() if type(one) is Owner and one.ledger is not None}
    for ledger in found.values():
        if ledger.verb:
            ledger.warn_of_unused()
            ledger.verb = ""


class Leaving(partial[None]):
    """What a `with` statement calls at its end: a bound `__exit__` that leaves the block even if it is never called.

    Only the statement holds it. If Ctrl-C comes just before it is called, or just before `__enter__` returns, Python
    drops it. A traceback that somebody keeps holds the `Hooks`, but not this.
    """

    before: Blocks | None = None  # The blocks that were open before the statement.

    def __del__(self) -> None:
        hooks: Hooks = self.args[0]
        if not hooks._open or self.before is None:
            return
        here = open_blocks.get() - self.before
        for block in [block for block in still_open(hooks) if block in here]:
            hooks._ledger.leave(block, KeyboardInterrupt, over=hooks._brief)


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


def block(
    function: Callable[Parameters, Generator[Value, None, None]],
) -> Callable[Parameters, AbstractContextManager[Value]]:
    """Make a `with` block of a generator function, as contextlib.contextmanager does; it has to be entered."""

    @wraps(function)
    def make(*args: Parameters.args, **kwargs: Parameters.kwargs) -> AbstractContextManager[Value]:
        return Unstarted(function, args, kwargs)

    return make


class Exit:
    """Makes an `__exit__` of a function: each `with` statement gets a `Leaving` of its own."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __get__(self, hooks: Hooks | None, _kind: type | None = None) -> Callable[..., None]:
        if hooks is None:
            return self.function
        leaving = Leaving(self.function, hooks)
        leaving.before = open_blocks.get()
        return leaving


def still_open(hooks: Hooks) -> list[Block]:
    """Return the blocks that were entered by `with hooks` and not left yet, and forget the others."""
    for block in list(hooks._open):
        if block not in hooks._ledger.blocks:
            hooks._open.pop(block, None)  # Another thread may have done so.
    return list(hooks._open)


def yielding(frame: FrameType) -> Generating | None:
    """Return the generator that a frame is of, unless a context manager, a fixture or the like runs it: on purpose."""
    driver: FrameType | None = frame
    while driver is not None and driver.f_code.co_flags & GENERATOR:  # One that another yields from has no other.
        driver = driver.f_back
    name = driver.f_globals.get("__name__", "") if driver is not None else ""
    return None if name.split(".")[0] in _DRIVERS else Generating(id(frame), frame.f_code, current_runner())


def note(ledger: Ledger) -> None:
    """Remember a ledger that has hooks on a model, as long as it lives."""
    key = id(ledger)
    _living[key] = weakref.ref(ledger, lambda _: _living.pop(key, None))
    _follow_process()


def forget(ledger: Ledger) -> None:
    """Forget a ledger whose hooks are off."""
    _living.pop(id(ledger), None)
    copy_as_before(ledger.session)


def ledgers() -> list[Ledger]:
    """Return those that have hooks on a model now."""
    return [ledger for reference in list(_living.values()) if (ledger := reference()) is not None]


def leave_all() -> None:
    """Take every hook off, in a process that was forked from one with hooks: they belong to the other one."""
    forget_locks()
    for ledger in ledgers():
        ledger.session.forked = True
        ledger.detach_all()


@cache
def _follow_process() -> None:
    """Follow what happens to the process, from the first hooks on: importing hookline changes nothing."""
    follow_collector()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_all)
