"""Run a function on another thread, without garbage collection, or to collect warnings; run Python in a new process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a new thread; return its result, or the exception it raises."""
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
    """Turn off garbage collection, so that only reference counting frees objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def said(run: Callable[[], Any]) -> list[str]:
    """Run a function, and return its warnings as text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found]


ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables for a new Python process, with `more` added."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


def python(*arguments: object, fails: bool = False, command: Sequence[str] = (sys.executable,), **more: str) -> str:
    """Run Python with `more` in its environment, and return its stdout, followed by its stderr if it must fail."""
    line = [*command, *map(str, arguments)]
    done = subprocess.run(line, env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + (done.stderr if fails else "")
