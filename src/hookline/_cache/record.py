"""The values that one capture has kept at one site, call by call, and checks that they can still be read."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hookline._sites.calls import Calls
from hookline._sites.language import Site, SiteOnDemand
from hookline._stats import Histogram, glimpse
from hookline._torch import is_replayed_over, is_transformed, version_of
from hookline._values.copy_or_share import address, share_for_now
from hookline._values.nested import leaves, map_tensors
from hookline.errors import HooklineError, StaleValue, warn


class _Empty:
    def __reduce__(self) -> str:
        return "EMPTY"  # Copying and unpickling return the same object.


EMPTY: Any = _Empty()
Source = tuple[Tensor, int, Tensor | None]  # A tensor with shared memory, its version at the capture, its copy.
NEVER = 1 << 62
INSIDE_TRANSFORM = "a value inside vmap, grad or another torch.func transform can't leave it; return it instead"
ticks = itertools.count(1)  # One clock for all calls, so that they can be sorted.


class StoredValue:
    """A stand-in for a value that has to be checked, fetched or refused when it is read."""

    __slots__ = ()

    def read(self, site: Site) -> Any:
        """Return the value as it was when it passed the site; raise if that is not possible."""
        raise NotImplementedError

    def peek(self) -> Any:
        """Return a value of the same shape for a description, even if the value was overwritten."""
        raise NotImplementedError

    def stored(self, site: Site) -> Any:
        """Return the value for a file; tensors on disk may stay a `Later`."""
        return self.read(site)

    def kept(self) -> StoredValue:
        """Return what another cache keeps, where nothing more comes."""
        return self


class Guarded(StoredValue):
    """A value and the tensors it shares memory with, each with its version at the capture.

    Tensors that are part of the graph have spares: copy-on-write copies that replace them once they are overwritten.
    """

    __slots__ = ("sources", "spares", "value")

    def __init__(self, value: Any, sources: list[Source], spares: dict[int, Guarded] | None = None) -> None:
        self.value = value
        self.sources = sources
        self.spares = spares

    def read(self, site: Site) -> Any:
        """Return the value as it was when it was captured; raise if the model has overwritten it since."""
        if self.spares:
            self._replace_overwritten(self.spares, site)
        for source, version, copy in self.sources:
            if version_of(source) != version and (copy is None or address(source) == address(copy) != 0):
                raise StaleValue(_overwritten(site, version, source, is_copy=copy is not None))
        # Sources that no longer share memory with their copy can't change the value, so they are dropped.
        self.sources = [one for one in self.sources if one[2] is None or address(one[0]) == address(one[2])]
        return self.value

    def peek(self) -> Any:
        """Return the value unchecked."""
        return self.value

    def _replace_overwritten(self, spares: dict[int, Guarded], site: Site) -> None:
        """Replace tensors that were overwritten with their spares."""
        others = {
            id(own): spares[id(own)].read(site)
            for own, version, _ in self.sources
            if id(own) in spares and (version_of(own) != version or _has_parted(own, spares[id(own)].value))
        }
        if others:
            self.value = map_tensors(lambda tensor: others.get(id(tensor), tensor), self.value)
            self.sources = [one for one in self.sources if id(one[0]) not in others]

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.read(Site("")), [])  # The copy shares no memory, and torch counts its writes from 0.


def _overwritten(site: Site, version: int, source: Tensor, is_copy: bool) -> str:
    """Return the error text. For a copy-on-write copy we only know that torch counted a write, not that bytes changed.

    A CUDA foreach function may have written to the shared memory, or torch may have counted a write that changes no
    memory, such as `x.copy_(x)` or `x.unsqueeze_(0)`. Count, address and sharing are the same in both cases. Only the
    bytes differ, and comparing those would mean reading every value when it is captured.
    """
    counted = f"(version {version}, now {version_of(source)})"
    if is_copy:
        return (
            f"'{site}' may have been overwritten after it was captured {counted}: torch counted a write that made no "
            "copy, by a foreach function or one that changes nothing, such as x.copy_(x); capture it with clone=True"
        )
    return f"'{site}' was overwritten in place after it was captured {counted}; capture it with clone=True"


def _has_parted(own: Tensor, spare: Tensor) -> bool:
    """Return True if a tensor was written through `.data`, which does not raise its version.

    After a write it no longer shares memory with its spare. Reading may end the sharing too, so values are compared.
    """
    if not own.is_cpu or address(own) == address(spare):
        return False
    return not torch.equal(own, spare)


class Lost(StoredValue):
    """A stand-in for a value whose memory was reused before the value was read."""

    __slots__ = ("like",)

    def __init__(self, value: Any) -> None:
        self.like = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), value)

    def read(self, site: Site) -> Any:
        """Raise: the value is gone."""
        raise StaleValue(
            f"'{site}' is gone: it was in the memory of a CUDA graph, which another compiled run has reused; "
            "read it before that run, or compile without CUDA graphs (mode='default')"
        )

    def peek(self) -> Any:
        """Return a meta tensor for each tensor of the value."""
        return self.like


class Record:
    """The calls kept of one site. `keep` is how many; None is all.

    Defaults are class attributes, so that creating a record is fast: each captured module needs one.
    """

    __slots__ = ("__dict__", "__weakref__", "count", "order", "path", "seen", "stamp", "value", "version")

    path: str  # The path of a hot tap's site: see tap.py.
    value: Any  # The value of the call that began last.
    version: int  # For a reference to the model's own tensor: its version at the capture; otherwise -1.
    stamp: Any  # When the call of `value` began.
    count: int  # Calls so far.
    seen: int  # The forward in which it last fired; NEVER sends the hot path to `put`.
    order: int  # When it first fired.
    site = SiteOnDemand()
    port = "output"  # The port of a hot tap's site.
    keep: int | None = 1
    repeated = False  # Whether it fired several times in one forward.
    is_traced = False  # Whether a compiled graph stored the value, and may reuse its memory.
    read_at = -1  # The number of forwards when it was last read.
    read_stamp: Any = -1  # The stamp of the value that was read then.
    reason = ""  # Why there is nothing to read.
    has_gaps = False  # Whether it is unknown which calls the values belong to, as others were not kept.
    family: dict[Site, Record] | None = None  # For `[*]` and `/*`: a record for each site seen so far.

    def __init__(self, site: Site, keep: int | None = 1) -> None:
        # `plain_taps` in _engine/tap.py sets the same fields directly: keep both in sync.
        self.site = site
        self.path = site.path
        self.value = EMPTY
        self.stamp = self.seen = self.version = -1
        self.count = self.order = 0
        if keep != 1:
            self.keep = keep
            self.calls: list[tuple[Any, Any]] = []  # (stamp, value)

    def put(self, value: Any, stamp: Any, forward: int, version: int = -1) -> None:
        """Keep the value of the call that began at `stamp`."""
        value = value if version < 0 else Guarded(value, [(value, version, None)])
        if not self.order:
            order = next(ticks)
            if not self.order:  # Otherwise another thread was faster.
                self.order, self.stamp = order, stamp
        elif self.seen == forward and forward and self.site.port != "param":  # Parameters are often read twice.
            self.repeated = True
        self.seen = forward
        self.count += 1
        if self.reason:
            self.reason = ""
        if self.keep != 1:
            self._put_call(value, stamp)
        if stamp >= self.stamp:  # A recursive module's first call ends last; input and output must be of the same call.
            self.stamp = stamp
            self.value = value
            self.version = -1

    def leaving(self, value: Any, stamp: Any) -> Any:
        """Return the value that `put(value, stamp)` would drop: an older one, `value` itself, or EMPTY for none."""
        if not self.order or (self.keep != 1 and (self.keep is None or len(self.calls) < self.keep)):
            return EMPTY
        first, there = (self.stamp, self.value) if self.keep == 1 else self.calls[0]
        return value if stamp < first else there

    def _put_call(self, value: Any, stamp: Any) -> None:
        if not self.calls or self.calls[-1][0] <= stamp:  # The usual case; bisect could switch threads.
            self.calls.append((stamp, value))
        else:
            bisect.insort(self.calls, (stamp, value), key=operator.itemgetter(0))
        if self.keep is not None and len(self.calls) > self.keep:
            del self.calls[0]
            self.has_gaps = True

    def explain(self, reason: str) -> None:
        """Record why there is nothing to read, until the next value comes."""
        self.reason = reason
        self.seen = NEVER
        for record in (self.family or {}).values():
            record.explain(reason)

    def copy_out_of_graph(self) -> None:
        """Copy a value that a compiled graph has stored on CUDA: a replay of its CUDA graph would overwrite it."""
        self.is_traced = False
        if isinstance(self.value, StoredValue):  # It was stored by Python code, at a graph break.
            return
        try:
            self.value = map_tensors(_out_of_graph, self.value)
        except StaleValue:
            self.value = Lost(self.value)

    def guard(self) -> None:
        """Wrap a reference that the hot path stored, so that reading it checks for writes."""
        while self.version >= 0:
            value, version = self.value, self.version
            guarded = Guarded(value, [(value, version, None)])
            if self.value is value:  # Otherwise another thread has put a new value.
                self.value, self.version = guarded, -1

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.guard()
        return super().__reduce_ex__(max(protocol, 2))  # Protocols 0 and 1 don't support slots.

    def latest(self) -> Any:
        """Return the latest value."""
        self.guard()
        if self.is_traced:
            self.copy_out_of_graph()
        if self.repeated and self.keep == 1 and "#-1" not in str(self.site):  # `#-1` asks for the latest alone.
            self.repeated = False
            warn(
                f"'{self.site}' fired several times in one forward and only the latest is kept; "
                f"keep='all' keeps every call, '#n' in the site chooses one"
            )
        return read_value(self.value, self.site)

    def each(self) -> Iterator[Any]:
        """Yield the values kept, oldest first. Values on disk are read one at a time."""
        return (read_value(value, self.site) for value in self._held())

    def stored(self) -> list[Any]:
        """Return the values kept, for a file."""
        return [read_value(value, self.site, "stored") for value in self._held()]

    def unread(self) -> list[Any]:
        """Return the values kept, for another cache. They are checked and loaded when that cache is read."""
        return [
            value.kept() if isinstance(value, StoredValue) else read_value(value, self.site) for value in self._held()
        ]

    def _held(self) -> list[Any]:
        self.guard()
        if self.is_traced:
            self.copy_out_of_graph()
        if self.keep == 1:
            return [] if self.value is EMPTY else [self.value]
        return [value for _, value in self.calls]

    def stamps(self) -> list[Any]:
        """Return when each call kept began, oldest first. For a gradient that is (backward pass, call)."""
        if self.keep == 1:
            return [] if self.value is EMPTY else [self.stamp]
        return [stamp for stamp, _ in self.calls]

    def peek(self) -> Any:
        """Return the latest value, overwritten or not."""
        return _look(self.value)

    def peek_all(self) -> list[Any]:
        """Return every value kept, overwritten or not."""
        return [self.peek()] if self.keep == 1 else [_look(value) for _, value in self.calls]

    def restart(self) -> None:
        """Note that calls are counted from 0 again. Values of before stay, and their numbers come a second time."""
        self.has_gaps = self.keep != 1 and self.value is not EMPTY
        for record in (self.family or {}).values():
            record.restart()

    def clear(self) -> None:
        """Forget every value."""
        if not isinstance(self.site.call, Calls):
            self.has_gaps = False
        elif self.value is not EMPTY:  # The count goes on: the next value of `#1:` is not that of call 1.
            self.has_gaps = self.seen != NEVER
        self.value = EMPTY
        self.version = self.stamp = -1
        if self.keep != 1:
            self.calls = []
        self.count = self.order = 0
        self.seen = NEVER
        self.repeated = False
        self.family = None if self.family is None else {}


class GradientRecord(Record):
    """The record of a hot tap at the gradient of a module's output."""

    __slots__ = ()

    port = "grad_output"


def _out_of_graph(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    if is_replayed_over(tensor):
        raise StaleValue
    try:
        return tensor.clone()
    except RuntimeError as error:
        if "CUDAGraphs" in str(error):
            raise StaleValue from None
        raise


def read_value(value: Any, site: Site, how: str = "read") -> Any:
    """Return a value that a record holds, as it was when it passed the site."""
    if isinstance(value, StoredValue):
        return getattr(value, how)(site)
    return _look(value, lambda part: getattr(part, how)(site) if isinstance(part, StoredValue) else part)


def _look(value: Any, read: Callable[[Any], Any] = lambda part: part) -> Any:
    if type(value) is Tensor:
        if is_transformed(value):
            raise HooklineError(INSIDE_TRANSFORM)
        if not value.is_inference():
            return value
        with torch.inference_mode(False):  # Autograd can't use a tensor from inference mode.
            return share_for_now(value)
    if isinstance(value, StoredValue):
        return value.peek()
    build = getattr(type(value), "build_gradient", None)  # The gradient of a nested value: see _engine/gradients.py.
    return value if build is None else build(value, read)


def spread(record: Record | None) -> Histogram | None:
    """Return a histogram of the latest value; None if it is on disk, was overwritten, or can't be read."""
    if record is None:
        return None
    try:
        tensors = leaves(record.peek()) if record.value is not EMPTY and _is_right(record) else []
        if any(tensor.is_meta or is_replayed_over(tensor) for tensor in tensors):  # On disk, or overwritten.
            return None
        return glimpse(tensors)
    except (HooklineError, RuntimeError, NotImplementedError):  # A missing histogram is better than an error.
        return None


def _is_right(record: Record) -> bool:
    """Return True if the value is as it passed; raise a HooklineError if not."""
    record.guard()
    value = record.value
    if isinstance(value, StoredValue) and not any(tensor.is_meta for tensor in leaves(value.peek())):
        value.read(record.site)
    return True
