"""Find bad values: the rule for what is bad, a quick check, a full count, and notes on a device.

The quick check (`is_suspicious`) costs one pass over a tensor; `examine` counts the bad elements of suspicious tensors
only. Reading a value from a GPU waits for the GPU, so `Flags` stores each value's largest element on the GPU and reads
all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from hookline import Site
from hookline._kernel import leaves
from hookline._torch import local_part, norms_together, stored_values

PIECE = 1 << 22  # The number of elements that `examine` reads at a time, so that its copies stay small.
_INFINITE = float("inf")
_QUICK = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_STRIDED = torch.strided


class Rule(NamedTuple):
    """What counts as bad: NaN always, Inf unless it is allowed, and values over the limit."""

    limit: float | None = None
    inf: bool = True
    below: bool = True  # False if -Inf is allowed: attention masks are full of it.


class Finding(NamedTuple):
    """What is wrong with a tensor: how many elements are bad, and where the first one is."""

    nan: int
    inf: int
    over: int
    elements: int
    first: tuple[int, ...]
    value: float

    @property
    def bad(self) -> int:
        """The number of bad elements."""
        return self.nan + self.inf + self.over


def checkable(value: Any) -> list[Tensor]:
    """Return the numbers of each floating-point or complex tensor in a value: see `numbers_in`."""
    found = [value] if isinstance(value, Tensor) else leaves(value)
    return [plain for tensor in found if (plain := numbers_in(tensor)) is not None]


def numbers_in(tensor: Tensor) -> Tensor | None:
    """Return a tensor's numbers, detached, dense and real; None if it has none or they can't be bad."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    tensor = local_part(tensor)
    if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return None
    if tensor.is_nested or tensor.layout is not torch.strided:
        tensor = stored_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # torch can't sum float8.
        tensor = tensor.to(torch.float32)
    return tensor if tensor.numel() else None


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Return True if a value is a plain dense tensor of floats, which needs no conversion: the usual case."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _QUICK
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def is_suspicious(plain: Tensor, limit: float | None) -> bool:
    """Return True if there may be a NaN, an Inf or a number over the limit. Waits for the device."""
    if limit is None:
        total = plain.sum(dtype=torch.float32) if plain.dtype is torch.float16 else plain.sum()
        return not -_INFINITE < total.item() < _INFINITE
    low, high = plain.aminmax()
    return not (low.item() >= -limit and high.item() <= limit)


def judged(plain: Tensor, rule: Rule) -> Tensor:
    """Return the numbers with allowed Infs set to 0, so that these don't hide numbers over the limit."""
    return plain.masked_fill(plain.isinf(), 0) if rule.limit is not None and not rule.inf else plain


def extreme(plain: Tensor, below: bool = True, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude as a tensor, NaN if there is one. Does not wait for the device."""
    dtype = torch.float64 if plain.dtype is torch.float64 else torch.float32
    if not below:
        found = plain.amax().to(dtype)
    elif plain.is_cpu:
        low, high = plain.aminmax()  # 20 times faster than the norm, which is not vectorised on the CPU.
        found = torch.maximum(high, -low).to(dtype)
    else:
        norm: Tensor = torch.linalg.vector_norm(plain, _INFINITE, dtype=dtype, out=out)
        return norm
    return found if out is None else out.copy_(found)


def is_bad(number: float, rule: Rule) -> bool:
    """Return True if a tensor with this largest magnitude is bad."""
    if math.isinf(number):
        return rule.inf
    return math.isnan(number) or (rule.limit is not None and number > rule.limit)


@torch.no_grad()
def examine(plain: Tensor, rule: Rule) -> Finding | None:
    """Count the bad elements and find the first one. Return None if there are none."""
    counts = [0, 0, 0]
    first: int | None = None
    value = 0.0
    begin = 0
    for piece in pieces(plain):
        bad = list(_bad(piece, rule))
        found = [int(part.count_nonzero()) for part in bad]
        if first is None and any(found):
            position = int(torch.stack(bad).any(0).to(torch.uint8).argmax())
            first, value = begin + position, piece[position].item()
        counts = [one + other for one, other in zip(counts, found, strict=True)]
        begin += len(piece)
    if first is None:
        return None
    nan, inf, over = counts
    return Finding(nan, inf, over, plain.numel(), _place(first, plain.shape), value)


def pieces(plain: Tensor) -> Iterator[Tensor]:
    """Yield the numbers as flat pieces of at most `PIECE` elements."""
    flat = plain.reshape(-1)
    return (flat[begin : begin + PIECE] for begin in range(0, len(flat), PIECE))


def _bad(piece: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.zeros_like(piece, dtype=torch.bool)
    inf = (piece.isinf() if rule.below else piece.isposinf()) if rule.inf else nothing
    over = (piece.abs() > rule.limit) & ~piece.isinf() if rule.limit is not None else nothing
    return piece.isnan(), inf, over


def _place(position: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        place.append(rest)
    return tuple(reversed(place))


def bad_gradients(
    found: list[tuple[nn.Parameter, Tensor]], rule: Rule, scale: float, reads_later: Callable[[Tensor], bool]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters whose gradients may be bad, with these gradients. Reads once for each device."""
    limit = None if rule.limit is None else rule.limit * scale
    bad = []
    by_device: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = {}
    for one, gradient in found:
        plain = gradient if is_plain(gradient) else numbers_in(gradient)
        if plain is None:
            continue
        if reads_later(plain):
            by_device.setdefault(plain.device, []).append((one, plain))
        elif is_suspicious(plain, limit):
            bad.append((one, plain))
    for pairs in by_device.values():
        norms = norms_together([plain for _, plain in pairs], float("inf"))
        numbers = torch.stack([norm.float() for norm in norms]).tolist()
        bad += [pair for pair, number in zip(pairs, numbers, strict=True) if is_bad(number / scale, rule)]
    return bad


ROOM = 1024  # The number of notes that fit into one buffer.


class Note(NamedTuple):
    """What is known about a value without waiting for its device."""

    site: Site
    number: int  # The number of the module's call.
    rule: Rule
    is_gradient: bool
    what: str


class Buffer:
    """Memory on one device for the largest element of each noted value."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False), torch.no_grad():  # So that the buffer can be written to in any mode.
            self.numbers = torch.zeros(ROOM, device=device, dtype=dtype)
            self.slots = self.numbers.unbind()
        self.notes: list[tuple[int, Note]] = []


class Flags:
    """The notes on all devices, in the order in which the values passed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Buffer] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, plain: Tensor, note: Note) -> bool:
        """Store the largest element of a value; return True if the buffer is full."""
        key = plain.device, torch.float64 if plain.dtype is torch.float64 else torch.float32
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = Buffer(*key)
        with torch.no_grad():
            extreme(judged(plain, note.rule), note.rule.below, buffer.slots[len(buffer.notes)])
        self._count += 1
        buffer.notes.append((self._count, note))
        return len(buffer.notes) == ROOM

    def read(self, scale: float = 1.0) -> list[tuple[Note, float]]:
        """Wait for the devices, return the notes of bad values in the order they passed, and discard all notes."""
        bad: list[tuple[int, Note, float]] = []
        for (device, _), buffer in self._buffers.items():
            notes, buffer.notes = buffer.notes, []
            if not notes:
                continue
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # Values may have been computed on any stream.
            for (order, note), number in zip(notes, buffer.numbers[: len(notes)].tolist(), strict=True):
                if is_bad(number / scale if note.is_gradient else number, note.rule):
                    bad.append((order, note, number))
        self._count = 0
        return [(note, number) for _, note, number in sorted(bad, key=lambda one: one[0])]

    def forget(self) -> None:
        """Discard all notes without waiting for a device."""
        for buffer in self._buffers.values():
            buffer.notes = []
        self._count = 0
