"""Run a function on another thread, without garbage collection, or for its warnings; run Python in a new process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the exception it raises, on a thread of its own."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let reference counting alone free things."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def said(run: Callable[[], Any]) -> list[str]:
    """Return what a run warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found]


ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of such a process, with `more` in it."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


def python(*arguments: object, fails: bool = False, **more: str) -> str:
    """Run Python with `more` in its environment, and return what it prints; what it says too if it is to fail."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + (done.stderr if fails else "")


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python with some code, and do not wait for it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
