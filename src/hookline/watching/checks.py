"""Whether a tensor holds what it should not: a quick question for every value, an exact one for the few that fail it.

On the CPU the quick question is one sum, the cheapest pass that NaN and Inf can't get through unseen (a fifteenth of
`isnan().any()`); with a limit it is the smallest and the largest element. A sum may overflow where nothing is wrong:
then the exact look finds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hookline.values import leaves

PIECE = 1 << 22  # Elements that an exact look takes at a time: its copies stay small beside any model.
_INFINITE = float("inf")
_QUICK = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_STRIDED = torch.strided


class Rule(NamedTuple):
    """What is bad: NaN always, Inf unless it is allowed, and what is larger than a limit."""

    limit: float | None = None
    inf: bool = True
    below: bool = True  # Whether -Inf is bad too: a mask that is given to a model is full of it.


class Finding(NamedTuple):
    """What is wrong with a tensor: how many of its elements, and where the first of them is."""

    nan: int
    inf: int
    over: int
    elements: int
    first: tuple[int, ...]
    value: float

    @property
    def bad(self) -> int:
        """How many elements are bad."""
        return self.nan + self.inf + self.over


def checkable(value: Any) -> list[Tensor]:
    """Return the tensors of a value that can be bad: those of fractions, as plain dense numbers."""
    found = [value] if isinstance(value, Tensor) else leaves(value)
    return [plain for tensor in found if (plain := numbers_in(tensor)) is not None]


def numbers_in(tensor: Tensor) -> Tensor | None:
    """Return a tensor's numbers without graph, layout or imaginary part; None where nothing can be bad, or is there."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)  # Of a DTensor, this rank's part.
    if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return None
    if tensor.is_nested or tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # Float8 has no sums.
        tensor = tensor.to(torch.float32)
    return tensor if tensor.numel() else None


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of plain numbers as it is, but for its graph: the usual case."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _QUICK
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def is_suspicious(plain: Tensor, limit: float | None) -> bool:
    """Whether plain numbers may hold NaN, Inf or one over a limit. It waits for the device."""
    if limit is None:
        total = plain.sum(dtype=torch.float32) if plain.dtype is torch.float16 else plain.sum()
        return not -_INFINITE < total.item() < _INFINITE
    low, high = plain.aminmax()
    return not (low.item() >= -limit and high.item() <= limit)


def judged(plain: Tensor, rule: Rule) -> Tensor:
    """Return plain numbers without an Inf that is allowed, where it would hide what is over a limit."""
    return plain.masked_fill(plain.isinf(), 0) if rule.limit is not None and not rule.inf else plain


def extreme(plain: Tensor, below: bool = True, out: Tensor | None = None) -> Tensor:
    """Return the largest size of an element as a tensor, NaN if there is one. It waits for nothing."""
    dtype = torch.float64 if plain.dtype is torch.float64 else torch.float32
    if not below:
        found = plain.amax().to(dtype)
    elif plain.is_cpu:
        low, high = plain.aminmax()  # A twentieth of the norm, which is not vectorised there.
        found = torch.maximum(high, -low).to(dtype)
    else:
        return torch.linalg.vector_norm(plain, _INFINITE, dtype=dtype, out=out)  # type: ignore[no-any-return]
    return found if out is None else out.copy_(found)


def is_bad(number: float, rule: Rule) -> bool:
    """Whether the largest size of an element says that a tensor is bad."""
    if math.isinf(number):
        return rule.inf
    return math.isnan(number) or (rule.limit is not None and number > rule.limit)


@torch.no_grad()
def examine(plain: Tensor, rule: Rule) -> Finding | None:
    """Count what is bad in plain numbers and find the first of it; None if all is well."""
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
    """Return the numbers flat, a piece at a time."""
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
