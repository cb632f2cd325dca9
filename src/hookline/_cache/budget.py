"""A limit on the bytes that captures may keep in memory. Values over the limit are refused or moved to disk.

Each captured value goes through `Budget.hold`, which returns a `CountedValue` to put in the record. When the record
drops that object, its bytes no longer count; no call is needed.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hookline._cache.file import Later, Problem, check, read_file, write_file
from hookline._cache.record import EMPTY, Guarded, Record, StoredValue
from hookline._sites.language import Site
from hookline._torch import stored_indices, stored_values, unseen_by_modes_and_subclasses, wraps_tensors
from hookline._values.copy_or_share import address, unexpanded
from hookline._values.nested import leaves, map_tensors
from hookline.errors import CacheFull, StaleValue, StoreError


class Unwritable(Exception):
    """The reason why a tensor can't be written to any disk."""


class Folder:
    """A new folder inside another one, created when the first tensor is written."""

    def __init__(self, parent: str | None) -> None:
        self.parent = parent  # None: the system's folder for temporary files.
        self.path = ""
        self._numbers = itertools.count()

    def write(self, tensor: Tensor) -> OnDisk:
        """Write a tensor to a file. Raise Unwritable if no file can hold it, StoreError if the disk fails."""
        _check(tensor)
        if not self.path:
            self._make()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # Another stream may still have to write it.
        path = os.path.join(self.path, f"{next(self._numbers)}.safetensors")
        write_file(path, {"": [_packed(tensor)]}, scratch=True)
        return OnDisk(self, path, tensor)

    def _make(self) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix="hookline-", dir=self.parent)
        except OSError as error:
            raise StoreError(f"no folder can be made there: {error.strerror or error}") from error
        weakref.finalize(self, _remove, self.path, os.getpid())  # Also runs when the interpreter exits.

    def __repr__(self) -> str:
        return repr(self.path or self.parent or tempfile.gettempdir())


class OnDisk(Later):
    """A tensor that is on disk. The file is deleted when this object is freed."""

    def __init__(self, folder: Folder, path: str, tensor: Tensor) -> None:
        super().__init__(tensor.dtype, tensor.shape)
        self.folder = folder  # Held so that the folder lives as long as its files.
        self.path = path
        self.device = tensor.device
        self.order = _order(tensor)
        self.packed = _packed(tensor).shape
        weakref.finalize(self, _unlink, path, os.getpid()).atexit = False  # At exit, the whole folder is removed.

    def read(self) -> Tensor:
        """Return the tensor, with its original memory order."""
        packed = next(iter(read_file(self.path).get("", ())), None)
        if not isinstance(packed, Tensor) or (packed.dtype, packed.shape) != (self.dtype, self.packed):
            raise StoreError(f"{self.path!r} is damaged: it is not what was moved to disk; run the forward again")
        with torch.inference_mode(False):
            places = [self.order.index(dimension) for dimension in range(len(self.order))]
            return packed.permute(places).expand(self.shape).to(self.device)


def _check(tensor: Tensor) -> None:
    try:
        check(tensor)
    except Problem as problem:
        raise Unwritable(problem.what) from None


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor in memory order, outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _packed(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, with expanded dimensions reduced to one element."""
    return (unexpanded(tensor) if tensor.numel() else tensor).permute(_order(tensor))


def _unlink(path: str, process: int) -> None:
    if os.getpid() == process:  # A forked process has copies of these objects, but the files belong to its parent.
        with suppress(OSError):
            os.unlink(path)


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


Memories = frozenset[tuple[int, int]]  # Address and bytes of each memory. Several values may share one.
REMEDY = "keep fewer sites or calls or a smaller dtype, raise the limit"


class CountedValue(StoredValue):
    """A value that counts toward a budget. Its tensors are in memory, or on disk and read again each time."""

    shell: Any = None  # The value with meta tensors, after its tensors were moved to disk.
    files: Sequence[OnDisk] = ()  # The files of its tensors.
    stale = ""  # Why it can't be read any more.
    stuck = ""  # Why it can't be moved to disk.

    def __init__(self, value: Any, site: Site, number: int, memories: Memories, dropped: deque[int]) -> None:
        self.value = value  # EMPTY once its tensors are on disk.
        self.site = site
        self.number = number
        self.memories = memories
        self.dropped = dropped  # Receives its number when it is freed.

    def read(self, site: Site) -> Any:
        """Return the value, from memory or from disk."""
        value = self.value  # Read once: another thread may be moving it to disk.
        if value is not EMPTY:
            return value.read(site) if isinstance(value, StoredValue) else value
        if self.stale:
            raise StaleValue(self.stale)
        try:
            return self._filled([file.read() for file in self.files])
        except StoreError as error:
            problem = str(error).partition(";")[0]
            raise StoreError(
                f"'{site}' was moved to disk and can't be read back: {problem}; run the model again"
            ) from error

    def peek(self) -> Any:
        """Return the value; if it is on disk, one of the same shape without memory."""
        value = self.value
        if value is EMPTY:
            return self.shell
        return value.peek() if isinstance(value, StoredValue) else value

    def stored(self, site: Site) -> Any:
        """Return the value for a file. Tensors on disk are not read until they are written to it."""
        return self._filled(self.files) if self.files else self.read(site)

    def move(self, folder: Folder) -> None:
        """Move its tensors to disk. If that raises, nothing has changed. A value that is stale by now is dropped."""
        files: list[OnDisk] = []

        def place(tensor: Tensor) -> Tensor:
            files.append(folder.write(tensor))
            return _shape_of(tensor)

        try:
            self.shell = map_tensors(place, self.read(self.site))
        except StaleValue as error:
            self.shell = map_tensors(_shape_of, self.peek())
            self.stale = str(error)
        self.files = files
        self.value = EMPTY

    def _filled(self, tensors: Iterable[Any]) -> Any:
        parts = iter(tensors)
        return map_tensors(lambda _: next(parts), self.shell)

    def __del__(self) -> None:
        self.dropped.append(self.number)  # Nothing else is safe here: `__del__` may run at any moment, on any thread.

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredValue:
        if self.value is EMPTY:
            return self  # A value on disk does not change any more.
        return Guarded(copy.deepcopy(self.read(self.site), memo), [])

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.read(self.site), [])  # A copy counts toward no budget, and needs no file of this process.


class Budget:
    """A limit in bytes, and the values in memory that count toward it. Memory that values share counts once."""

    def __init__(self, limit: int, folder: Folder | None = None) -> None:
        self.limit = limit
        self.folder = folder  # None: values over the limit are refused.
        self._held = 0
        self._kept: OrderedDict[int, weakref.ref[CountedValue]] = OrderedDict()  # Values in memory, oldest first.
        self._memories: dict[int, Memories] = {}  # The memories of each value.
        self._uses: dict[tuple[int, int], int] = {}  # How many values use each memory.
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        self._lock = threading.RLock()

    def hold(self, value: Any, record: Record, stamp: Any) -> Any:
        """Make room for a value, and return what to put in its record. Raise CacheFull if there is no room."""
        leaving = record.leaving(value, stamp)
        if leaving is value:
            return value  # The record has a later call already, and will not keep this one.
        try:
            return self.hold_part(value, record.site, leaving)
        except CacheFull as error:
            if record.keep == 1 or record.value is EMPTY:
                record.explain(f"'{record.site}' was not kept: {error}")
            raise

    def hold_part(self, value: Any, site: Site, leaving: Any) -> Any:
        """Hold a value, or a part of one. `leaving` is the old value in the record; its room becomes free."""
        memories = memories_of(value)
        if not memories:
            return value
        with self._lock:
            self._forget_dropped()
            kept = CountedValue(value, site, next(self._numbers), memories, self._dropped)
            self._count(kept)
            try:
                self._make_room(kept, _kept_in(leaving))
            except BaseException:
                self._discount(kept.number)
                raise
        return kept

    def _make_room(self, new: CountedValue, leaving: list[CountedValue]) -> None:
        while self._held > self.limit and (total := self._held - self._bytes_of(leaving)) > self.limit:
            oldest = next((one for one in self._in_memory() if not one.stuck and one not in leaving), None)
            if oldest is None or self.folder is None:
                raise CacheFull(self._why_full(total, self._bytes_of([new])))
            self._move(oldest, self.folder)

    def _move(self, kept: CountedValue, folder: Folder) -> None:
        try:
            with unseen_by_modes_and_subclasses():  # These operations are not part of the model.
                kept.move(folder)
        except Unwritable as problem:
            kept.stuck = f"'{kept.site}' can't be moved to disk, since it is or holds {problem}"
            return
        except StoreError as error:
            found = getattr(error.__cause__, "strerror", None) or error
            raise StoreError(
                f"the oldest value, {self._bytes_of([kept]):,} bytes of '{kept.site}', could not be moved to {folder}: "
                f"{found}; make room there, or spill to another folder. What was kept so far is still there"
            ) from error
        self._discount(kept.number)

    def _why_full(self, total: int, more: int) -> str:
        found = f"{more:,} bytes more than the {total - more:,} already kept would exceed the limit of {self.limit:,}"
        if self.folder is None:
            return f"{found}; {REMEDY}, or move the oldest to disk with spill=True. What was kept so far is still there"
        stuck = next(kept.stuck for kept in self._in_memory() if kept.stuck)
        return f"{found}, and nothing is left to move to disk: {stuck}; {REMEDY}"

    def _count(self, kept: CountedValue) -> None:
        self._kept[kept.number] = weakref.ref(kept)
        self._memories[kept.number] = kept.memories
        for memory in kept.memories:
            uses = self._uses[memory] = self._uses.get(memory, 0) + 1
            self._held += memory[1] if uses == 1 else 0

    def _discount(self, number: int) -> None:
        self._kept.pop(number, None)
        for memory in self._memories.pop(number, ()):
            self._uses[memory] -= 1
            if not self._uses[memory]:
                del self._uses[memory]
                self._held -= memory[1]

    def _forget_dropped(self) -> None:
        while self._dropped:
            self._discount(self._dropped.popleft())

    def _in_memory(self) -> Iterable[CountedValue]:
        for reference in self._kept.values():
            kept = reference()
            if kept is not None:
                yield kept

    def _bytes_of(self, some: list[CountedValue]) -> int:
        """Return the bytes that only these values hold."""
        uses = Counter(memory for one in some if one.number in self._kept for memory in one.memories)
        return sum(memory[1] for memory, count in uses.items() if count == self._uses[memory])

    def __repr__(self) -> str:
        return f"limit={self.limit}" + (f", spill={self.folder}" if self.folder is not None else "")


def memories_of(value: Any) -> Memories:
    """Return the memory that the tensors of a value hold. A view holds its whole storage."""
    found = []
    for tensor in leaves(value.peek() if isinstance(value, StoredValue) else value):
        for part in _dense_parts(tensor):
            where = address(part)
            size = part.untyped_storage().nbytes() if where else part.numel() * part.element_size()
            if size and not part.is_meta:
                found.append((where or -id(part), size))
    return frozenset(found)


def _dense_parts(tensor: Any) -> list[Tensor]:
    """Return the dense tensors that a sparse tensor, or one that wraps others, consists of."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return [tensor]
    if wraps_tensors(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # A DTensor names its mesh too.
        return [part for one in inner if isinstance(one, Tensor) for part in _dense_parts(one)]
    if tensor.layout is torch.sparse_coo:
        return [stored_indices(tensor), stored_values(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _kept_in(held: Any) -> list[CountedValue]:
    """Return the counted values in what a record holds; a gradient may have several parts."""
    parts = [held] if isinstance(held, StoredValue) else getattr(held, "arrived", {}).values()
    return [part for part in parts if isinstance(part, CountedValue)]


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a meta tensor that shows the shape and dtype of a tensor on disk."""
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    shape.is_on_disk = True  # type: ignore[attr-defined]
    return shape
