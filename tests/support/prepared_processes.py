"""Processes of multiprocessing that have torch and hookline imported already: importing them takes seconds."""

from __future__ import annotations

import functools
import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

from tests.support.running import environment

MODULES = [
    "torch.distributed.tensor.parallel",
    "hookline._harvest.harvest",
    "tests.support.parallel_models",
    "tests.support.ranks",
]


@functools.cache
def prepared_processes() -> ForkServerContext:
    """Return a context of multiprocessing. Its processes are forked from a server that has imported `MODULES`.

    They share no state with this process. Like a process that is spawned, each gets its arguments pickled. Its
    environment is that of the first call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # Not that of this process.
        for name, value in environment(PYTHONHASHSEED=seed).items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context
