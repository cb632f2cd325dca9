"""Running a function on another thread, and bringing back what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
