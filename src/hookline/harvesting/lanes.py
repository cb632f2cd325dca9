"""Threads that write, while the model runs on: bounded in bytes, in order, and what goes wrong reaches the caller."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

Work = Callable[[], object]


class Lanes:
    """Some threads with a queue each. Whoever gives them work waits while too many bytes are on their way."""

    def __init__(self, number: int, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._queues: list[deque[tuple[Work, int]]] = [deque() for _ in range(number)]
        self._bytes = 0
        self._running = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Lanes:
        for queue in self._queues:
            thread = threading.Thread(target=self._write, args=(queue,), name="hookline.harvest", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def put(self, lane: int, work: Work, nbytes: int = 0) -> None:
        """Let a lane do some work after what it has; raise what has gone wrong in any of them."""
        with self._changed:
            while self._error is None and self._bytes and self._bytes + nbytes > self._limit:
                self._changed.wait()
            self._raise()
            self._bytes += nbytes
            self._queues[lane % len(self._queues)].append((work, nbytes))
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all is done."""
        self.until(lambda: not (self._running or any(self._queues)))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the work that was given has made something true; raise what has gone wrong."""
        with self._changed:
            while self._error is None and not condition():
                self._changed.wait()
            self._raise()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            for queue in self._queues:
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, queue: deque[tuple[Work, int]]) -> None:
        while True:
            with self._changed:
                while not queue and not self._is_over:
                    self._changed.wait()
                if self._is_over:
                    return
                work, nbytes = queue.popleft()
                self._running += 1
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                del work  # It holds what was written.
                with self._changed:
                    self._running -= 1
                    self._bytes -= nbytes
                    self._changed.notify_all()


class Countdown:
    """Calls a function when it has been told so many times."""

    def __init__(self, number: int, function: Work) -> None:
        self._left = number
        self._function = function
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._function()
