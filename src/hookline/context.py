"""Which blocks are open here: on this thread, in this asyncio task.

Every `with` block is a token. The set of those open here is one context variable, so that threads and tasks don't
see each other's blocks. While a user's function runs the set holds `RESTING` alone: all hooks rest, but for those of
blocks that the function itself opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Blocks = frozenset[object]

RESTING: object = object()
_resting: Blocks = frozenset((RESTING,))
open_blocks: ContextVar[Blocks] = ContextVar("open_blocks", default=frozenset())


def open_block(token: object) -> None:
    """Open a block here."""
    open_blocks.set(open_blocks.get() | {token})


def close_block(token: object) -> None:
    """Close a block; in any order, and also from another context than the one that opened it."""
    open_blocks.set(open_blocks.get() - {token})


@contextmanager
def resting() -> Iterator[None]:
    """Let all hooks rest: what is done to the model meanwhile is not captured or edited."""
    before = open_blocks.get()
    try:
        open_blocks.set(_resting)
        yield
    finally:
        open_blocks.set(before)


def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function while all hooks rest."""
    if torch.compiler.is_dynamo_compiling():
        return function(*args)  # Dynamo can't trace a context variable.
    before = open_blocks.get()
    try:
        open_blocks.set(_resting)
        return function(*args)
    finally:
        open_blocks.set(before)
