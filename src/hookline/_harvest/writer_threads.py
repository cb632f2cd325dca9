"""Threads that write rows while the model runs. Memory is bounded, and errors reach the caller.

Ctrl-C may interrupt the caller between any two instructions, so it takes no lock: if it never released the lock, every
thread would hang. Work and results travel through `SimpleQueue`, which is written in C.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

import torch
from torch import Tensor


class BufferPool:
    """Reusable buffers whose sizes are powers of two. The pool grows to the most buffers in use at one time."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}

    def copy(self, tensor: Tensor) -> PooledCopy:
        """Return a copy of a CPU tensor in a buffer. The caller gives the buffer back with `give_back`."""
        size = 1 << max(tensor.nbytes - 1, 0).bit_length()
        try:
            buffer = self._of(size).pop()
        except IndexError:
            buffer = torch.empty(size, dtype=torch.uint8)
        own = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return PooledCopy(own.copy_(tensor), buffer, self)

    def give_back(self, buffer: Tensor) -> None:
        """Make a buffer available again."""
        self._of(len(buffer)).append(buffer)

    def _of(self, size: int) -> deque[Tensor]:
        return self._free.setdefault(size, deque())


class PooledCopy:
    """A copy of a tensor, and the pool's buffer that holds it."""

    def __init__(self, tensor: Tensor, buffer: Tensor, staging: BufferPool) -> None:
        self.tensor = tensor
        self._buffer = buffer
        self._staging = staging

    def give_back(self) -> None:
        """Give the buffer back. The tensor must not be used afterwards."""
        self._staging.give_back(self._buffer)


Work = Callable[[], object]
Queue = SimpleQueue[tuple[Work, int] | None]


class WriterThreads:
    """Threads with one queue each. A single caller gives them work, and waits while too many bytes are queued."""

    def __init__(self, number: int, limit: int) -> None:
        self._limit = limit
        self._queues: list[Queue] = [SimpleQueue() for _ in range(number)]
        self._done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()  # Bytes and error of finished work.
        self._bytes = self._left = 0  # Bytes and pieces of work in the queues, as far as the caller knows.
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> WriterThreads:
        for queue in self._queues:
            thread = threading.Thread(target=self._write, args=(queue,), name="hookline.harvest", daemon=True)
            thread.start()
            self._threads.append(thread)  # Last: a thread whose start was interrupted may never run. Don't join it.
        return self

    def put(self, thread: int, work: Work, nbytes: int = 0) -> None:
        """Queue work on a thread. Raises the first error that any thread has reported."""
        self.until(lambda: not self._bytes or self._bytes + nbytes <= self._limit)
        self._bytes += nbytes
        self._left += 1
        self._queues[thread % len(self._queues)].put((work, nbytes))

    def finish(self) -> None:
        """Wait until all work is done."""
        self.until(lambda: not self._left)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until finished work makes the condition true. Raises the first error that any thread has reported."""
        while self._note_done(wait=False):
            pass
        while not condition():
            self._note_done(wait=True)

    def stop(self) -> None:
        """Make each thread end after its current work. May be called again if the first call was interrupted."""
        self._is_over = True
        for queue in self._queues:
            queue.put(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def _note_done(self, wait: bool) -> bool:
        """Count one finished piece of work; return False if there is none."""
        try:
            nbytes, error = self._done.get(wait)
        except Empty:
            return False
        self._bytes -= nbytes
        self._left -= 1
        if error is not None:
            raise error
        return True

    def _write(self, queue: Queue) -> None:
        while (given := queue.get()) is not None and not self._is_over:
            work, nbytes = given
            error = None
            try:
                work()
            except BaseException as failure:
                error = failure
            del work, given  # Free the tensors that were written.
            self._done.put((nbytes, error))
            del error  # Its traceback holds this frame, which would keep it alive.


class Countdown:
    """Calls a function on its own `number`-th call."""

    def __init__(self, number: int, function: Work) -> None:
        self._calls = itertools.count(1)
        self._number = number
        self._function = function

    def __call__(self) -> None:
        if next(self._calls) == self._number:  # `next` on a count is atomic.
            self._function()
