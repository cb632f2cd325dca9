"""Pinned host memory, and how much of it values may hold: when that is half of the limit, the oldest move out of it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from typing import Protocol

import torch
from torch import Tensor

Buffer = weakref.ref[torch.UntypedStorage]

limit = 2 << 30  # Bytes. A quarter of them may be on their way from a device at one time.


class Movable(Protocol):
    """What is in pinned memory until somebody reads it, or it has to move."""

    number: int
    is_moving: bool

    def arrive(self) -> None:
        """Wait until all of it is there."""

    def move(self) -> None:
        """Move to ordinary memory."""


class Pinned:
    """The pinned memory that copies hold. Torch itself sees to it that none is used again while anybody holds it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # Guards all of this, and is told when memory was freed.
        self.unread: weakref.WeakValueDictionary[int, Movable] = weakref.WeakValueDictionary()  # Oldest first.
        self.numbers = itertools.count()
        self.bytes = 0
        self.wanted = 0  # To how many bytes the thread brings them down.
        self.is_moving = False  # Whether it runs.
        self.held: dict[int, tuple[Buffer, int]] = {}  # What is held, by the id of its reference, and its size.
        self.freed: deque[Buffer] = deque()  # Memory may be freed at any moment, so nothing else is done then.
        self.buffers: Counter[int] = Counter()  # How many of each size are held,
        self.most: Counter[int] = Counter()  # and were at most: torch keeps those that were let go.
        self.leaving: deque[tuple[torch.cuda.Event, int]] = deque()  # Large copies and their sizes, oldest first.
        self.leaving_bytes = 0
        self.immortal: list[torch.UntypedStorage | None] = []

    def enter(self, copy: Movable) -> None:
        """Note a copy that nobody has read yet."""
        with self.changed:
            copy.number = next(self.numbers)
            self.unread[copy.number] = copy

    def take(self, like: Tensor) -> Tensor | None:
        """Return memory for a copy of a tensor, or None if there is no more."""
        size = 1 << (like.nbytes - 1).bit_length()  # As torch rounds it.
        if size > limit:
            return None
        with self.changed:
            if self.count() + size > limit // 2:
                self._relieve(size)
            while self.bytes + size > limit:
                if not self.is_moving:  # What was read is not ours to move.
                    return None
                self.changed.wait()
                self._relieve(size)
            try:
                buffer = torch.empty_like(like, device="cpu", pin_memory=True)
            except RuntimeError:  # The system gives no more.
                return None
            self.hold(buffer, size)
            return buffer

    def hold(self, buffer: Tensor, size: int) -> None:
        """Count the memory of a tensor until nobody has it any more."""
        reference = weakref.ref(buffer.untyped_storage(), self.freed.append)
        self.held[id(reference)] = reference, size
        self.bytes += size
        self.buffers[size] += 1
        if self.buffers[size] > self.most[size]:
            self._note_most(size)

    def count(self) -> int:
        """Return the bytes that are held now."""
        with self.changed:
            while self.freed:
                _, size = self.held.pop(id(self.freed.popleft()))
                self.bytes -= size
                self.buffers[size] -= 1
            return self.bytes

    def hold_for_ever(self) -> None:
        """Never free what there is, in a process that was forked: torch would ask CUDA, which is not there."""
        self.immortal = [reference() for reference, _ in self.held.values()]
        self.changed.release()

    def _relieve(self, size: int) -> None:
        """Let the thread make room for so many bytes, and then some; it ends by itself."""
        self.wanted = min(limit // 2, limit - size)
        if self.count() > self.wanted and self.unread and not self.is_moving:
            try:
                threading.Thread(target=self._move, name="hookline.offload").start()
                self.is_moving = True
            except RuntimeError:  # The interpreter is about to end.
                pass

    def _move(self) -> None:
        while True:
            with self.changed:
                oldest = next(iter(self.unread.values()), None) if self.count() > self.wanted else None
                if oldest is None:
                    self.is_moving = False
                    self.changed.notify_all()
                    return
                oldest.is_moving = True
                del self.unread[oldest.number]
            oldest.move()

    def queue(self, size: int) -> None:
        """Wait until so many more bytes may be on their way: until they are there they take memory on the device."""
        with self.changed:
            while self.leaving and (self.leaving_bytes + size > limit // 4 or self.leaving[0][0].query()):
                event, arrived = self.leaving.popleft()
                event.synchronize()
                self.leaving_bytes -= arrived

    def depart(self, event: torch.cuda.Event, size: int) -> None:
        """Note a large copy that is on its way until this event."""
        with self.changed:
            self.leaving.append((event, size))
            self.leaving_bytes += size

    def _note_most(self, size: int) -> None:
        self.most[size] = self.buffers[size]
        if sum(size * number for size, number in self.most.items()) > 2 * limit:  # Values of other shapes came.
            getattr(torch._C, "_host_emptyCache", lambda: None)()
            self.most = +self.buffers


memory = Pinned()
