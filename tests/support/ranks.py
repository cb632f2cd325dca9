"""Tests that run in two processes at once, as ranks of one gloo group.

A pair of processes is started once, and runs test after test: starting one takes as long as twenty tests.
`on_two_ranks` makes a test of a function of the rank. After a failure the pair is thrown away, for its ranks may not be
at the same place any more.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.states import hooks_left

WORLD = 2
SECONDS = 60.0  # In which a test has to end.


class Pair:
    """Two processes, started when they are first needed."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        atexit.register(self.stop)

    def run(self, module: str, name: str) -> None:
        """Run a function of a module of tests in both, and fail as it does."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((module, name))
        said = [_hear(pipe) for pipe in self._pipes]
        if any(said):
            self.stop()
            pytest.fail("\n".join(f"rank {rank}: {one}" for rank, one in enumerate(said) if one), pytrace=False)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(Path(tempfile.mkdtemp()) / "store")
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            self._pipes.append(mine)
            self._processes.append(context.Process(target=_work, args=(rank, store, theirs), daemon=True))
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _hear(pipe: Connection) -> str:
    try:
        return str(pipe.recv()) if pipe.poll(SECONDS) else "it did not come to its end"
    except EOFError:
        return "the process died"


PAIR = Pair()


def on_two_ranks(function: Callable[[int], None]) -> Callable[[], None]:
    """Make a test of a function of the rank, which runs in both processes at once."""

    @functools.wraps(function)
    def test() -> None:
        PAIR.run(function.__module__, function.__name__)

    test.__wrapped_on_ranks__ = function  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined]  # Else pytest takes the rank for a fixture.
    return test


def _work(rank: int, store: str, pipe: Connection) -> None:
    """Be one rank: run what is asked for, one thing after the other, and say how it went."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=20)
    joined = dist.FileStore(store, WORLD)
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=WORLD, timeout=patience)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_said(rank, *pipe.recv()))


def _said(rank: int, module: str, name: str) -> str:
    """Run one test; return what went wrong, or nothing."""
    function = getattr(importlib.import_module(module), name).__wrapped_on_ranks__
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            function(rank)
        return "" if not hooks_left() else f"hooks were left on {hooks_left()}"
    except BaseException:
        return traceback.format_exc()
