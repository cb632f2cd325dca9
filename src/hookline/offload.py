"""Values of a CUDA device on their way to host memory, while the model runs on. Nobody waits but who reads one.

A large value is copied into pinned memory, on a stream of its own. Small ones wait on the device until there are enough
of them, or their block ends, or one is read: for the model, each copy takes longer than the value.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from hookline import pinned
from hookline.copies import unexpanded
from hookline.records import Guarded, Held
from hookline.refusals import refuse_recording
from hookline.sites import Site
from hookline.values import map_tensors

SMALL = 1 << 18  # Bytes.
ENOUGH = 1 << 22  # Bytes of small values.

_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1)
_asides: dict[int, torch.cuda.Stream] = {}  # One for each device, for large values.


class Arrived:
    """Stands for an event that has been waited for."""

    def synchronize(self) -> None:
        """Return at once."""


ARRIVED = Arrived()


class Copy(Held):
    """A tensor on its way to the host, or there."""

    __slots__ = ("__weakref__", "dtype", "event", "group", "is_landed", "is_moving", "number", "shape", "tensor")

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None, shape: torch.Size | None = None) -> None:
        self.tensor = tensor
        self.dtype = dtype  # To be cast to on the host.
        self.shape = shape  # To be expanded to.
        self.event: torch.cuda.Event | Arrived | None = None
        self.group: Group | None = None  # Of a small one.
        self.is_landed = self.is_moving = False
        self.number = -1

    def read(self, _site: Site) -> Tensor:
        """Return the tensor, once it is there."""
        return self.wait()

    def peek(self) -> Tensor:
        """Return the tensor, once it is there."""
        return self.wait()

    def wait(self) -> Tensor:
        """Wait for this copy alone, and return it: from now on it is a tensor like any other, and stays where it is."""
        if self.is_landed:
            return self.tensor
        if self.event is None and self.group is not None:
            self.group.leave()
        self.arrive()
        with pinned.memory.changed:
            while self.is_moving:
                pinned.memory.changed.wait()
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
            with pinned.memory.changed:
                self._land(tensor)
        except RuntimeError:  # There is no ordinary memory either, or the device failed: who reads it will know.
            pass
        finally:
            with pinned.memory.changed:
                self.is_moving = False
                pinned.memory.changed.notify_all()

    def _land(self, tensor: Tensor) -> None:
        if self.is_landed:  # Another thread was here first.
            return
        with torch.inference_mode(False):
            if self.dtype is not None:
                tensor = tensor.to(self.dtype)
            elif self.group is not None:
                tensor = tensor.clone()  # It would hold the whole group.
            self.tensor = tensor if self.shape is None else tensor.expand(self.shape)
        self.is_landed = True
        self.event = ARRIVED
        pinned.memory.unread.pop(self.number, None)

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


class Group:
    """Small values of one thread and stream, which leave together. Those that nobody holds any more stay behind."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = torch.cuda.current_stream(index)
        self.lock = threading.Lock()
        self.members: list[weakref.ref[Copy]] = []
        self.bytes = 0

    def add(self, copy: Copy) -> None:
        """Let a value, which is nobody else's, wait for the others."""
        with self.lock:
            copy.group = self
            self.members.append(weakref.ref(copy))
            self.bytes += copy.tensor.nbytes + 4096  # So that there are not too many.
        if self.bytes > ENOUGH:
            self.leave()

    def leave(self) -> None:
        """Send those that are waiting."""
        with self.lock, torch.cuda.device(self.index), torch.cuda.stream(self.stream), torch.inference_mode(False):
            found = [copy for member in self.members if (copy := member()) is not None]
            copies = [copy for copy in found if copy.event is None]  # Others left when this was interrupted.
            if copies:
                refuse_recording()
            for dtype in {copy.tensor.dtype for copy in copies}:
                alike = [copy for copy in copies if copy.tensor.dtype is dtype]
                try:
                    self._send(alike)
                except RuntimeError:  # The device is full: one by one, then.
                    for copy in alike:
                        copy.tensor, copy.event = copy.tensor.cpu(), ARRIVED
            self.members, self.bytes = [], 0

    def _send(self, copies: list[Copy]) -> None:
        flat = [copy.tensor.view(-1).view(torch.uint8) for copy in copies]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        buffer = pinned.memory.take(joined)
        event: torch.cuda.Event | Arrived = ARRIVED
        if buffer is None:
            buffer = joined.cpu()
        else:
            buffer.copy_(joined, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        for copy, part in zip(copies, buffer.split([one.numel() for one in flat]), strict=True):
            copy.tensor = part.view(copy.tensor.dtype).view(copy.tensor.shape)
            copy.event = event  # Only now: another thread may be about to read it.
            pinned.memory.enter(copy)


class _Waiting(threading.local):
    """The groups of a thread, by device and stream."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}


_waiting = _Waiting()


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
    stream = _raw_stream(index)
    if stream != 0:  # Nothing is ever recorded on the default stream.
        refuse_recording()
    _follow_forks()
    narrow = unexpanded(tensor)
    try:
        own = _own(narrow, dtype)
    except torch.cuda.OutOfMemoryError:  # A plain copy needs none.
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
    """Send the small values that this thread has let wait."""
    for group in _waiting.groups.values():
        if group.members and not torch.cuda.is_current_stream_capturing():
            group.leave()


@cache
def _follow_forks() -> None:
    """Let all copies arrive before this process is forked: the other one has no CUDA to wait for."""
    if hasattr(os, "register_at_fork"):
        parent, child = pinned.memory.changed.release, pinned.memory.hold_for_ever
        os.register_at_fork(before=_arrive, after_in_parent=parent, after_in_child=child)


def _arrive() -> None:
    try:
        flush()
    finally:
        pinned.memory.changed.acquire()
        while pinned.memory.is_moving:
            pinned.memory.changed.wait()
    for copy in pinned.memory.unread.values():
        copy.arrive()


def together(value: Any, copies: dict[int, Copy]) -> Any:
    """Return a value in which tensors stand in for copies, by their id, as one; itself, if there are none."""
    if not copies:
        return value
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
    """Return a tensor that nobody will write into, no larger than need be."""
    cast = tensor.dtype
    # Both sides round alike. Of floats as integers that's not so: they are cast on the host, as torch does it.
    if dtype is not None and dtype.is_floating_point and cast.is_floating_point and dtype.itemsize <= cast.itemsize:
        cast = dtype
    # Small ones are joined to one. A copy on write would do, but holds device memory until somebody asks.
    like = torch.contiguous_format if tensor.numel() * cast.itemsize <= SMALL else torch.preserve_format
    return tensor.to(cast, copy=True, memory_format=like)


def _leave_alone(copy: Copy, index: int) -> bool:
    """Send a large value; say whether there was memory for it."""
    own = copy.tensor
    buffer = pinned.memory.take(own)
    if buffer is None:
        return False
    pinned.memory.queue(own.nbytes)
    aside = _asides.get(index)
    if aside is None:
        aside = _asides.setdefault(index, torch.cuda.Stream(index))
    aside.wait_stream(torch.cuda.current_stream(index))
    with torch.cuda.stream(aside):
        buffer.copy_(own, non_blocking=True)
    own.record_stream(aside)  # A lazy clone would not do: torch passes over its memory, and uses it again too soon.
    event = torch.cuda.Event()
    event.record(aside)
    copy.tensor, copy.event = buffer, event
    pinned.memory.depart(event, own.nbytes)
    pinned.memory.enter(copy)
    return True
