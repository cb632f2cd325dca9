"""Copies from a CUDA device to host memory, while the model keeps running. Only reading a value waits for its copy.

A large value is copied into pinned memory, on a separate stream. Small ones wait on the device until there are enough
of them, or their block ends, or one is read: starting a copy costs more than copying a small value.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import Counter, deque
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookline._cache.record import Guarded, StoredValue
from hookline._option_checks import bytes_of
from hookline._sites.language import Site
from hookline._torch import current_transform, empty_pinned_cache, raw_stream
from hookline._values.copy_or_share import refuse_recording, unexpanded
from hookline._values.nested import map_tensors

Buffer = weakref.ref[torch.UntypedStorage]


class Pinned:
    """The pinned memory that copies hold. Torch makes sure that none is reused while anybody holds it."""

    def __init__(self) -> None:
        self._limit = 2 << 30
        self.changed = threading.Condition()  # Guards all fields, and is notified when memory was freed.
        self.unread: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()  # Oldest first.
        self.numbers = itertools.count()
        self.bytes = 0
        self.wanted = 0  # The thread moves copies until at most this many bytes are held.
        self.is_moving = False  # Whether the thread that moves copies to ordinary memory runs.
        self.held: dict[int, tuple[Buffer, int]] = {}  # Buffers and their sizes, by the id of the reference.
        self.freed: deque[Buffer] = deque()  # Buffers may be freed at any moment: `count` handles them later.
        self.buffers: Counter[int] = Counter()  # Buffers in use, by size.
        self.most: Counter[int] = Counter()  # The most buffers ever in use, by size: torch keeps freed ones.
        self.leaving: deque[tuple[torch.cuda.Event, int]] = deque()  # Large copies and their sizes, oldest first.
        self.leaving_bytes = 0
        self.immortal: list[torch.UntypedStorage | None] = []

    @property
    def limit(self) -> int:
        """The most bytes that copies may hold. A quarter of them may be on their way from a device at one time."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | str) -> None:
        self._limit = bytes_of(limit)

    def enter(self, copy: Copy) -> None:
        """Note a copy that nobody has read yet."""
        with self.changed:
            copy.number = next(self.numbers)
            self.unread[copy.number] = copy

    def take(self, like: Tensor) -> Tensor | None:
        """Return pinned memory for a copy of a tensor, or None if there is no more."""
        size = 1 << (like.nbytes - 1).bit_length()  # Rounded up, as torch does.
        if size > self.limit:
            return None
        with self.changed:
            if self.count() + size > self.limit // 2:
                self._relieve(size)
            while self.bytes + size > self.limit:
                if not self.is_moving:  # All copies were read: they are the user's, and stay.
                    return None
                self.changed.wait()
                self._relieve(size)
            try:
                buffer = torch.empty_like(like, device="cpu", pin_memory=True)
            except RuntimeError:  # The system has no more pinned memory.
                return None
            self.hold(buffer, size)
            return buffer

    def hold(self, buffer: Tensor, size: int) -> None:
        """Count the memory of a tensor until nobody holds it any more."""
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
        """Never free the memory that is held, in a forked process: torch would call CUDA, which does not work there."""
        self.immortal = [reference() for reference, _ in self.held.values()]
        self.changed.release()

    def _relieve(self, size: int) -> None:
        """Let the thread make room for at least `size` bytes. Start it if it does not run; it ends by itself."""
        self.wanted = min(self.limit // 2, self.limit - size)
        if self.count() > self.wanted and self.unread and not self.is_moving:
            try:
                threading.Thread(target=self._move, name="hookline._engine.offload").start()
                self.is_moving = True
            except RuntimeError:  # The interpreter is shutting down.
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
        """Wait until a copy of `size` bytes may start. Until it arrives, it takes memory on the device."""
        with self.changed:
            while self.leaving and (self.leaving_bytes + size > self.limit // 4 or self.leaving[0][0].query()):
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
        # If the sizes in use have changed, free the buffers of earlier sizes, which torch keeps.
        if sum(size * number for size, number in self.most.items()) > 2 * self.limit:
            empty_pinned_cache()
            self.most = +self.buffers


pinned = Pinned()


SMALL = 1 << 18  # Bytes.
ENOUGH = 1 << 22  # Bytes of small values that leave together.

_asides: dict[int, torch.cuda.Stream] = {}  # The stream for large values, by device.


class Arrived:
    """Stands for an event that has been waited for already."""

    def synchronize(self) -> None:
        """Return at once."""


ARRIVED = Arrived()


class Copy(StoredValue):
    """A tensor on its way to the host, or already there."""

    __slots__ = ("__weakref__", "dtype", "event", "group", "is_landed", "is_moving", "number", "shape", "tensor")

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None, shape: torch.Size | None = None) -> None:
        self.tensor = tensor
        self.dtype = dtype  # The dtype to cast to on the host.
        self.shape = shape  # The shape to expand to.
        self.event: torch.cuda.Event | Arrived | None = None
        self.group: Group | None = None  # Small values leave together with others.
        self.is_landed = self.is_moving = False
        self.number = -1

    def read(self, _site: Site) -> Tensor:
        """Return the tensor, once it has arrived."""
        return self.wait()

    def peek(self) -> Tensor:
        """Return the tensor, once it has arrived."""
        return self.wait()

    def wait(self) -> Tensor:
        """Wait for this copy alone, and return its tensor. It is an ordinary tensor from then on, and is not moved."""
        if self.is_landed:
            return self.tensor
        if self.event is None and self.group is not None:
            self.group.leave()
        self.arrive()
        with pinned.changed:
            while self.is_moving:
                pinned.changed.wait()
            self._land(self.tensor)
        return self.tensor

    def arrive(self) -> None:
        """Wait for this copy, so that nobody has to later."""
        if self.event is not None:
            self.event.synchronize()
            self.event = ARRIVED

    def move(self) -> None:
        """Wait for this copy, and move it to ordinary memory."""
        try:
            self.arrive()
            with torch.inference_mode(False):
                tensor = self.tensor.clone() if self.dtype is None else self.tensor.to(self.dtype)
            with pinned.changed:
                self._land(tensor)
        except RuntimeError:  # There is no ordinary memory either, or the device failed: reading the value will raise.
            pass
        finally:
            with pinned.changed:
                self.is_moving = False
                pinned.changed.notify_all()

    def _land(self, tensor: Tensor) -> None:
        if self.is_landed:  # Another thread was here first.
            return
        with torch.inference_mode(False):
            if self.dtype is not None:
                tensor = tensor.to(self.dtype)
            elif self.group is not None:
                tensor = tensor.clone()  # A view would keep the whole group in memory.
            self.tensor = tensor if self.shape is None else tensor.expand(self.shape)
        self.is_landed = True
        self.event = ARRIVED
        pinned.unread.pop(self.number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.wait(), [])


class Copies(StoredValue):
    """A nested value with placeholders for the tensors that are on their way to the host."""

    __slots__ = ("copies", "value")

    def __init__(self, value: Any, copies: dict[int, Copy]) -> None:
        self.value = value
        self.copies = copies

    def read(self, site: Site) -> Any:
        """Return the value, once all of it has arrived."""
        return self._filled(self.value.read(site) if isinstance(self.value, StoredValue) else self.value)

    def peek(self) -> Any:
        """Return the value, once all of it has arrived."""
        return self._filled(self.value.peek() if isinstance(self.value, StoredValue) else self.value)

    def _filled(self, value: Any) -> Any:
        copies = self.copies
        return map_tensors(lambda tensor: copies[id(tensor)].wait() if id(tensor) in copies else tensor, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.read(Site("")), [])


class Group:
    """Small values of one thread and stream, which leave together. Those that nobody holds any more are not sent."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = torch.cuda.current_stream(index)
        self.lock = threading.Lock()
        self.members: list[weakref.ref[Copy]] = []
        self.bytes = 0

    def add(self, copy: Copy) -> None:
        """Let a value that nobody else holds wait for others. Send them all once there are enough."""
        with self.lock:
            copy.group = self
            self.members.append(weakref.ref(copy))
            self.bytes += copy.tensor.nbytes + 4096  # The extra 4096 limit how many values wait.
        if self.bytes > ENOUGH:
            self.leave()

    def leave(self) -> None:
        """Send the values that are waiting."""
        with self.lock, torch.cuda.device(self.index), torch.cuda.stream(self.stream), torch.inference_mode(False):
            found = [copy for member in self.members if (copy := member()) is not None]
            copies = [copy for copy in found if copy.event is None]  # Others were sent before an interruption.
            if copies:
                refuse_recording()
            for dtype in {copy.tensor.dtype for copy in copies}:
                alike = [copy for copy in copies if copy.tensor.dtype is dtype]
                try:
                    self._send(alike)
                except RuntimeError:  # The device is full: copy them one by one.
                    for copy in alike:
                        copy.tensor, copy.event = copy.tensor.cpu(), ARRIVED
            self.members, self.bytes = [], 0

    def _send(self, copies: list[Copy]) -> None:
        flat = [copy.tensor.view(-1).view(torch.uint8) for copy in copies]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        buffer = pinned.take(joined)
        event: torch.cuda.Event | Arrived = ARRIVED
        if buffer is None:
            buffer = joined.cpu()
        else:
            buffer.copy_(joined, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        for copy, part in zip(copies, buffer.split([one.numel() for one in flat]), strict=True):
            copy.tensor = part.view(copy.tensor.dtype).view(copy.tensor.shape)
            copy.event = event  # After the tensor: another thread may be about to read it.
            pinned.enter(copy)


class _Waiting(threading.local):
    """The groups of a thread, by device and stream."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}


_waiting = _Waiting()
in_use = False  # Whether this process has ever sent a value.


def send(tensor: Tensor, dtype: torch.dtype | None = None) -> Copy | None:
    """Copy a detached tensor to the host while the model keeps running, or return None where that can't be done.

    Later writes into the tensor do not affect the copy.
    """
    if not _is_plain(tensor):
        return None
    index = tensor.get_device()
    if torch.is_inference_mode_enabled():  # Autograd can't use a copy that is made in inference mode.
        with torch.inference_mode(False):
            return send(tensor, dtype)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return send(tensor, dtype)
    stream = raw_stream(index)
    if stream != 0:  # No CUDA graph is ever recorded on the default stream.
        refuse_recording()
    global in_use
    in_use = True
    _follow_forks()
    narrow = unexpanded(tensor)
    try:
        own = _own(narrow, dtype)
    except torch.cuda.OutOfMemoryError:  # A plain copy needs no device memory.
        return None
    copy = Copy(own, None if own.dtype is dtype else dtype, tensor.shape if narrow is not tensor else None)
    if own.nbytes > SMALL:
        return copy if _leave_alone(copy, index) else None
    group = _waiting.groups.get((index, stream))
    if group is None:
        group = _waiting.groups[index, stream] = Group(index)
    group.add(copy)
    return copy


def flush() -> None:
    """Send the small values of this thread that are waiting."""
    for group in _waiting.groups.values():
        if group.members and not torch.cuda.is_current_stream_capturing():
            group.leave()


@cache
def _follow_forks() -> None:
    """Wait for all copies before this process is forked: the child can't use CUDA, and so can't wait for them."""
    if hasattr(os, "register_at_fork"):
        parent, child = pinned.changed.release, pinned.hold_for_ever
        os.register_at_fork(before=_arrive, after_in_parent=parent, after_in_child=child)


def _arrive() -> None:
    try:
        flush()
    finally:
        pinned.changed.acquire()
        while pinned.is_moving:
            pinned.changed.wait()
    for copy in pinned.unread.values():
        copy.arrive()


def together(value: Any, copies: dict[int, Copy]) -> Any:
    """Return a value and its copies as one stored value. Without copies, return the value.

    Args:
        copies: The copies, each by the id of its placeholder in the value.
    """
    if not copies:
        return value
    return copies[id(value)] if isinstance(value, Tensor) else Copies(value, copies)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is plain memory. Torch would resolve a conjugate view before its copy has arrived."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and current_transform() is None
    )


def _own(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a copy that nobody will write into, no larger than necessary."""
    cast = tensor.dtype
    # Host and device round floats alike. They may convert floats to integers differently: that is left to the host.
    if dtype is not None and dtype.is_floating_point and cast.is_floating_point and dtype.itemsize <= cast.itemsize:
        cast = dtype
    # Small copies are joined later, so they are made contiguous. A copy-on-write clone would do instead of a copy,
    # but holds device memory until it is read.
    like = torch.contiguous_format if tensor.numel() * cast.itemsize <= SMALL else torch.preserve_format
    return tensor.to(cast, copy=True, memory_format=like)


def _leave_alone(copy: Copy, index: int) -> bool:
    """Send a large value by itself. Return False if there is no pinned memory for it."""
    own = copy.tensor
    buffer = pinned.take(own)
    if buffer is None:
        return False
    pinned.queue(own.nbytes)
    aside = _asides.get(index)
    if aside is None:
        aside = _asides.setdefault(index, torch.cuda.Stream(index))
    aside.wait_stream(torch.cuda.current_stream(index))
    with torch.cuda.stream(aside):
        buffer.copy_(own, non_blocking=True)
    own.record_stream(aside)  # Not a lazy clone: torch would ignore its memory here, and reuse it too soon.
    event = torch.cuda.Event()
    event.record(aside)
    copy.tensor, copy.event = buffer, event
    pinned.depart(event, own.nbytes)
    pinned.enter(copy)
    return True
