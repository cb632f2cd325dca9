"""Values of a CUDA device on their way to host memory, while the model runs on.

They are copied into pinned memory, large ones on a stream of their own, and nobody waits but who reads one. When all
of them hold half of `limit`, a thread moves the oldest that nobody has read yet on to ordinary memory.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from hookline.copies import unexpanded
from hookline.records import Guarded, Held
from hookline.refusals import refuse_recording
from hookline.sites import Site
from hookline.values import map_tensors

limit = 2 << 30  # Bytes of pinned memory that values may hold. A quarter of it may be on its way at one time.
SMALL = 1 << 18  # Bytes that are copied sooner than another stream could be told to.

_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1)
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # Those that models run on. Asking torch takes 4 µs each time.
_asides: dict[int, torch.cuda.Stream] = {}  # One for each device, for large values.


class Copy(Held):
    """A tensor on its way to the host, or there."""

    __slots__ = ("__weakref__", "dtype", "event", "is_moving", "number", "shape", "tensor")

    def __init__(
        self, tensor: Tensor, event: torch.cuda.Event, dtype: torch.dtype | None, shape: torch.Size | None
    ) -> None:
        self.tensor = tensor
        self.event: torch.cuda.Event | None = event
        self.dtype = dtype  # To be cast to on the host.
        self.shape = shape  # To be expanded to.
        self.is_moving = False
        self.number = pinned.enter(self)

    def read(self, _site: Site) -> Tensor:
        """Return the tensor, once it is there."""
        return self.wait()

    def peek(self) -> Tensor:
        """Return the tensor, once it is there."""
        return self.wait()

    def wait(self) -> Tensor:
        """Wait for this copy alone, and return it: from now on it is a tensor like any other, and stays where it is."""
        event = self.event
        if event is not None:
            event.synchronize()
            with pinned.changed:
                while self.is_moving:
                    pinned.changed.wait()
                self._land(self.tensor)
        return self.tensor

    def move(self) -> None:
        """Wait for this copy, and move it to ordinary memory."""
        try:
            if self.event is not None:
                self.event.synchronize()
                with torch.inference_mode(False):
                    tensor = self.tensor.clone() if self.dtype is None else self.tensor.to(self.dtype)
                with pinned.changed:
                    self._land(tensor)
        except RuntimeError:  # There is no ordinary memory either, or the device failed: who reads it will know.
            pass
        finally:
            with pinned.changed:
                self.is_moving = False
                pinned.changed.notify_all()

    def _land(self, tensor: Tensor) -> None:
        if self.event is None:  # Another thread was here first.
            return
        with torch.inference_mode(False):
            tensor = tensor if self.dtype is None else tensor.to(self.dtype)
            self.tensor = tensor if self.shape is None else tensor.expand(self.shape)
        self.event = None
        pinned.unread.pop(self.number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.wait(), [])


class Copies(Held):
    """A nested value of which some tensors are on their way: others stand in for them."""

    __slots__ = ("copies", "value")

    def __init__(self, value: Any, copies: dict[int, Copy]) -> None:
        self.value = value
        self.copies = copies

    def read(self, site: Site) -> Any:
        """Return the value, once all of it is there."""
        return self._filled(self.value.read(site) if isinstance(self.value, Held) else self.value)

    def peek(self) -> Any:
        """Return the value, once all of it is there."""
        return self._filled(self.value.peek() if isinstance(self.value, Held) else self.value)

    def _filled(self, value: Any) -> Any:
        copies = self.copies
        return map_tensors(lambda tensor: copies[id(tensor)].wait() if id(tensor) in copies else tensor, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.read(Site("")), [])


class Pinned:
    """The pinned memory that copies hold. Torch itself sees to it that none is used again while anybody holds it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # Guards all of this, and is told when memory was freed.
        self.unread: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()  # Oldest first.
        self.numbers = itertools.count()
        self.bytes = 0
        self.wanted = 0  # To how many bytes the thread brings them down.
        self.is_moving = False  # Whether it runs.
        self.buffers: Counter[int] = Counter()  # How many of each size are held,
        self.most: Counter[int] = Counter()  # and were at most: torch keeps those that were let go.
        self.freed: deque[int] = deque()  # Sizes. Memory may be freed at any moment, so nothing else is done then.
        self.leaving: deque[tuple[torch.cuda.Event, int]] = deque()  # Large copies and their sizes, oldest first.
        self.leaving_bytes = 0

    def enter(self, copy: Copy) -> int:
        """Note a copy that nobody has read yet."""
        with self.changed:
            number = next(self.numbers)
            self.unread[number] = copy
            return number

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
            self.bytes += size
            self.buffers[size] += 1
            if self.buffers[size] > self.most[size]:
                self._note_most(size)
        weakref.finalize(buffer.untyped_storage(), self.freed.append, size).atexit = False
        return buffer

    def count(self) -> int:
        """Return the bytes that are held now."""
        with self.changed:
            while self.freed:
                size = self.freed.popleft()
                self.bytes -= size
                self.buffers[size] -= 1
            return self.bytes

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


pinned = Pinned()


def send(tensor: Tensor, dtype: torch.dtype | None = None) -> Copy | None:
    """Copy a detached tensor to the host behind the model's back, or return None where that can't be done.

    What the model writes into it later does not matter.
    """
    if not _is_plain(tensor):
        return None
    index = tensor.get_device()
    if torch.is_inference_mode_enabled():  # Autograd could not use a copy that is made there.
        with torch.inference_mode(False):
            return send(tensor, dtype)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return send(tensor, dtype)
    if _raw_stream(index) != 0:  # Nothing is ever recorded on the default stream.
        refuse_recording()
    narrow = unexpanded(tensor)
    try:
        own = _own(narrow, dtype)
    except torch.cuda.OutOfMemoryError:  # A copy on the host needs none.
        return None
    buffer = pinned.take(own)
    if buffer is None:
        return None
    event = _copy_in_order(buffer, own, index) if own.nbytes <= SMALL else _copy_aside(buffer, own, index)
    later = dtype if dtype not in (None, own.dtype) else None
    return Copy(buffer, event, later, tensor.shape if narrow is not tensor else None)


def together(value: Any, copies: dict[int, Copy]) -> Held:
    """Return a value in which tensors stand in for copies, by their id, as one."""
    return copies[id(value)] if isinstance(value, Tensor) else Copies(value, copies)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but memory; of conjugate views torch would finish the copy before it has come."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and peek_interpreter_stack() is None
    )


def _own(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return what to send: what nobody will write into before it has left, and no larger than need be."""
    # Both sides round alike. Of floats as integers that's not so: they are cast on the host, as torch does it.
    floats = dtype is not None and dtype.is_floating_point and tensor.is_floating_point()
    if dtype not in (None, tensor.dtype) and floats and dtype.itemsize <= tensor.itemsize:
        return tensor.to(dtype)
    # A small one is copied in order with what the model does; torch would wait for one with gaps.
    return tensor if tensor.nbytes <= SMALL and tensor.is_contiguous() else tensor.clone()


def _copy_in_order(buffer: Tensor, own: Tensor, index: int) -> torch.cuda.Event:
    buffer.copy_(own, non_blocking=True)
    event = torch.cuda.Event()
    event.record(_current_stream(index))
    return event


def _copy_aside(buffer: Tensor, own: Tensor, index: int) -> torch.cuda.Event:
    pinned.queue(own.nbytes)
    aside = _asides.get(index)
    if aside is None:
        aside = _asides.setdefault(index, torch.cuda.Stream(index))
    aside.wait_stream(_current_stream(index))
    with torch.cuda.stream(aside):
        buffer.copy_(own, non_blocking=True)
    own.record_stream(aside)
    event = torch.cuda.Event()
    event.record(aside)
    pinned.depart(event, own.nbytes)
    return event


def _current_stream(index: int) -> torch.cuda.Stream:
    key = (index, _raw_stream(index))
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(index)
    return stream
