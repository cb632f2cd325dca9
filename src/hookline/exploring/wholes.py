"""A value of any size as real numbers of 64 bits, a piece at a time: a tensor, rows of a store, or a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.display.kinds import UNIT, full_shape, kind_of, shaped
from hookline.store.rows import Rows

PIECE = 1 << 20  # Elements taken at a time.
_FEW_ROWS = 8  # Of a store, which tell the kind of all.


class Pick(NamedTuple):
    """Which indices of one dimension are shown: `count` of them from `start` on, `step` apart."""

    start: int
    count: int  # type: ignore[assignment]  # Hides tuple.count, which nobody needs here.
    step: int

    def slice(self) -> slice:
        """Return it as Python's."""
        return slice(self.start, self.start + (self.count - 1) * self.step + 1, self.step)


class Whole:
    """All of a value, with the dimensions of its kind. With `minus`, one value less another."""

    def __init__(self, source: Tensor | Rows, kind: str, minus: Tensor | Rows | None = None) -> None:
        self.kind = kind
        self._source = source
        self._minus = minus
        self.shape = full_shape(source.shape, kind)
        self._joined = prod(source.shape[1 : len(source.shape) - len(self.shape) + 1])  # Samples in each of its rows.

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def pieces(self) -> Iterator[Tensor]:
        """Return all of it, in parts that have every unit."""
        unit = UNIT.get(self.kind, -1)
        for rows in self._rows():
            for piece in _cut(rows, [dim for dim in range(len(self.shape)) if dim != unit or self.kind == "line"]):
                yield self._real(piece)

    def part(self, picks: Sequence[Pick]) -> Tensor:
        """Return the part that a picture shows."""
        parts = []
        for source in self._sources():
            near = source
            if source.shape:  # Rows past the last that is shown need not be read.
                leads = 0 if self.shape[0] > 1 else max(0, len(self.shape) - len(source.shape))
                pick = picks[leads]
                near = source[: (pick.start + (pick.count - 1) * pick.step) // self._joined + 1]
            parts.append(self._dense(near)[tuple(pick.slice() for pick in picks)])
        return self._real(parts)

    def _sources(self) -> list[Tensor | Rows]:
        return [self._source] if self._minus is None else [self._source, self._minus]

    def _dense(self, source: Tensor | Rows) -> Tensor:
        return shaped(source if isinstance(source, Tensor) else source[:], self.kind)

    def _rows(self) -> Iterator[list[Tensor]]:
        """Return the source, and what is taken from it: as they are in memory, some rows at a time from a disk."""
        sources = self._sources()
        if all(isinstance(source, Tensor) for source in sources):
            yield [self._dense(source) for source in sources]
            return
        rows = len(sources[0])
        step = max(1, PIECE * rows // max(1, self.elements))
        for start in range(0, rows, step):
            yield [self._dense(source[start : start + step]) for source in sources]

    def _real(self, parts: list[Tensor]) -> Tensor:
        """Return numbers of 64 bits; complex ones by their size, that of the difference where there are two."""
        wide = [part.to("cpu", torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        value = wide[0] if len(wide) == 1 else wide[0] - wide[1]
        return value.abs() if value.is_complex() else value


def kind_of_source(source: Tensor | Rows) -> str:
    """Return the kind of picture for a value; of rows on disk, the first ones tell."""
    return kind_of(source if isinstance(source, Tensor) else source[:_FEW_ROWS])


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor of any layout as one that can be sliced; a nested one as a line of all its elements."""
    tensor = tensor.detach()
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=tensor.dtype)
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.dequantize() if tensor.is_quantized else tensor


def _cut(parts: list[Tensor], dims: list[int]) -> Iterator[list[Tensor]]:
    """Cut tensors of one shape into pieces along some dimensions, the first ones first."""
    if parts[0].numel() <= PIECE or not dims:
        yield parts
        return
    size = parts[0].shape[dims[0]]
    rows = max(1, PIECE * size // parts[0].numel())
    for start in range(0, size, rows):
        count = min(rows, size - start)
        yield from _cut([part.narrow(dims[0], start, count) for part in parts], dims[1:])
