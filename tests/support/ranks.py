"""Tests that run in two processes at once, as ranks of one gloo group.

A pair of processes is started once, and runs test after test: starting a pair takes as long as twenty tests.
`on_two_ranks` turns a function of the rank into a test. After a failure the pair is replaced, because its ranks may be
at different places.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hookline.parallel import ranks
from tests.support.prepared_processes import prepared_processes
from tests.support.states import hooks_left

WORLD = 2
SECONDS = 300.0  # The time limit of a test, on the busiest machine.
GRACE = 10.0  # The time limit of a rank after the other has failed: it may be waiting for that one.


class Pair:
    """Two processes, started when they are first needed."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        atexit.register(self.stop)

    def run(self, module: str, name: str) -> None:
        """Run a function of a test module in both processes, and fail if it fails in one of them."""
        if not self._processes:
            self._start()
        said = ["it was interrupted"]
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # The process died: `_received` says so.
                    pipe.send((module, name))
            said = self._hear()
        finally:
            if any(said):
                self.stop()
        if any(said):
            pytest.fail("\n".join(f"rank {rank}: {one}" for rank, one in enumerate(said) if one), pytrace=False)

    def _hear(self) -> list[str]:
        """Wait for both ranks; return what went wrong in each, or nothing."""
        said: dict[Any, str] = {}
        while len(said) < WORLD:
            seconds = GRACE if any(said.values()) else SECONDS
            heard = wait([pipe for pipe in self._pipes if pipe not in said], seconds)
            said.update({pipe: _received(pipe) for pipe in heard})
            if not heard:
                said = {pipe: said.get(pipe, f"it did not end within {seconds:g} s") for pipe in self._pipes}
        return [said[pipe] for pipe in self._pipes]

    def _start(self) -> None:
        context = prepared_processes()
        store = str(Path(tempfile.mkdtemp()) / "store")
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            self._pipes.append(mine)
            self._processes.append(context.Process(target=_work, args=(rank, store, theirs), daemon=True))
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        """Kill both processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _received(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except (EOFError, OSError):  # OSError if it died before it read what was sent.
        return "the process died"


PAIR = Pair()


def on_two_ranks(function: Callable[[int], None]) -> Callable[[], None]:
    """Turn a function of the rank into a test that runs it in both processes at once."""

    @functools.wraps(function)
    def test() -> None:
        PAIR.run(function.__module__, function.__name__)

    test.__wrapped_on_ranks__ = function  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined]  # Otherwise pytest takes the rank for a fixture.
    return test


def _work(rank: int, store: str, pipe: Connection) -> None:
    """Be one rank: run the requested tests one after the other, and send back each result."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=SECONDS)
    ranks.PATIENCE = SECONDS
    joined = dist.FileStore(store, WORLD)
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=WORLD, timeout=patience)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_said(rank, *pipe.recv()))


def _said(rank: int, module: str, name: str) -> str:
    """Run one test; return the error as text, or an empty text."""
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
