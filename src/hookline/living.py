"""Which ledgers have hooks on a model now, who keeps them alive, and what becomes of them in a fork."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from hookline.wiring.modules import forget_locks

if TYPE_CHECKING:
    from hookline.ledger import Ledger

_living: dict[int, weakref.ref[Ledger]] = {}


class Owner:
    """Held by the `Hooks` of a ledger alone: when nobody holds that any more its hooks come off.

    The ledger can't know by itself: while hooks are attached the model holds it.
    """

    ledger: Ledger | None = None

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.ledger is not None and not _is_finalizing():  # Bound early: at the end of Python modules are empty.
            self.ledger.drop()


def note(ledger: Ledger) -> None:
    """Remember a ledger that has hooks on a model, as long as it lives."""
    key = id(ledger)
    _living[key] = weakref.ref(ledger, lambda _: _living.pop(key, None))
    _follow_forks()


def forget(ledger: Ledger) -> None:
    """Forget a ledger whose hooks are off."""
    _living.pop(id(ledger), None)


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
def _follow_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_all)
