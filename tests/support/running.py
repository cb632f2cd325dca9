"""Running a function: on another thread, by reference counting alone, or for its warnings."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
