"""A value as a page shows it: statistics and a histogram of the whole value, and an excerpt with one byte per number.

excerpt, share       which part of a value is shown, so that all values fit into the bytes of a page
FullValue, Summary   a whole value, read piece by piece, and its statistics
quantise             numbers as one byte each
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._plot.plot_data import DIMENSIONS, MEASURES, UNIT, full_shape, kind_of, shaped
from hookline._stats import numbers_of_pieces
from hookline._store.rows import Rows

MOST_LEVELS = 252
FEWEST_LEVELS = 16
MINUS_INF, PLUS_INF, NAN = 253, 254, 255  # The codes of elements that are not finite.
_LARGEST = torch.finfo(torch.float32).max
PIECE = 1 << 20  # The number of elements that are read at a time.
_FEW_ROWS = 8  # The number of a store's rows that decide the kind of picture.
BINS = 64
OF_TOKENS = ("norm", "mean", "std", "abs", "max")
DIGITS = 6  # The significant digits of a token's statistics.
# The order in which dimensions are thinned out until the picture is small enough, and how far each may be thinned out.
_STAGES: dict[str, list[tuple[str, int]]] = {
    "maps": [("sample", 1), ("row column", 28), ("channel", 8), ("row column", 8), ("channel", 1), ("row column", 1)],
    "attention": [("sample", 1), ("head", 4), ("query key", 48), ("head", 1), ("query key", 1)],
    "tokens": [("sample", 1), ("unit", 128), ("token", 48), ("unit", 16), ("token", 1), ("unit", 1)],
    "units": [("sample", 32), ("unit", 128), ("sample", 1), ("unit", 1)],
    "line": [("unit", 1)],
    "number": [],
}
_IN_A_ROW = ("sample", "token", "query key")  # These show their first indices, other dimensions every n-th index.
WEIGHTS = {"attention": 6, "maps": 3}  # Kinds that draw several pictures of a value get more bytes.
_OF_A_TOKEN = len(OF_TOKENS) * (DIGITS + 6)  # The bytes that a token's statistics take in JSON.
_OF_A_LEVEL = 6  # The bytes that a level takes in base64.


class Pick(NamedTuple):
    """Which indices of one dimension are shown: `length` of them from `start` on, `step` apart."""

    start: int
    length: int
    step: int

    def slice(self) -> slice:
        """Return the indices as a slice."""
        return slice(self.start, self.start + (self.length - 1) * self.step + 1, self.step)


def pick_all(shape: Sequence[int]) -> list[Pick]:
    """Return picks that take every index."""
    return [Pick(0, size, 1) for size in shape]


def cost(kind: str, counts: Sequence[int]) -> int:
    """Return about how many bytes a picture takes with as many levels as are useful."""
    return _cost(kind, counts, min(MOST_LEVELS, prod(counts)))


def least_cost(kind: str, counts: Sequence[int]) -> int:
    """Return about how many bytes a picture takes with few levels; a level takes as much as four elements."""
    return _cost(kind, counts, _few_levels(prod(counts)))


def levels_for(kind: str, counts: Sequence[int], bytes: float) -> int:
    """Return how many levels a picture of `bytes` bytes may have: one for each element if there is room."""
    elements = prod(counts)
    room = (bytes - _cost(kind, counts, 0)) / _OF_A_LEVEL
    return max(_few_levels(elements), int(min(MOST_LEVELS, elements, max(room, 0))))


def _few_levels(elements: int) -> int:
    return min(elements, max(FEWEST_LEVELS, min(MOST_LEVELS, elements // 8)))


def _cost(kind: str, counts: Sequence[int], levels: int) -> int:
    tokens = counts[0] * counts[1] * _OF_A_TOKEN if kind == "tokens" else 0
    return ceil(4 * prod(counts) / 3) + _OF_A_LEVEL * levels + tokens + 160


def share(costs: Sequence[int], weights: Sequence[int], bytes: int) -> float:
    """Return the most bytes that each picture may take, per unit of its weight, so that all fit into `bytes`.

    >>> share([10, 10, 500, 900], [1, 1, 1, 1], 420)
    200.0
    """
    left, waiting = float(bytes), sorted(zip(costs, weights, strict=True), key=lambda one: one[0] / one[1])
    total = sum(weights)
    for cost, weight in waiting:
        if cost / weight > left / total:
            return max(left, 0) / total
        left, total = left - cost, total - weight
    return float("inf")


def excerpt(kind: str, shape: Sequence[int], bytes: float) -> list[Pick]:
    """Return which indices of each dimension a picture shows, so that it takes at most `bytes` bytes.

    >>> excerpt("tokens", (2, 6, 768), 4000)
    [Pick(start=0, length=1, step=1), Pick(start=0, length=6, step=1), Pick(start=0, length=256, step=3)]
    """
    picks = pick_all(shape)
    for names, fewest in _STAGES[kind]:
        if least_cost(kind, [pick.length for pick in picks]) <= bytes:
            break
        picks = _thinned(kind, picks, shape, names, fewest, bytes)
    return picks


def left_out(kind: str, shape: Sequence[int], picks: Sequence[Pick]) -> str:
    """Describe the indices that a picture leaves out: "1 of 2 samples, 384 of 768 units"."""
    missing = [
        f"{size - pick.length} of {size} {name}s"
        for name, size, pick in zip(DIMENSIONS[kind], shape, picks, strict=True)
        if pick.length < size
    ]
    return ", ".join(missing).replace("querys", "queries")


def _thinned(kind: str, picks: list[Pick], shape: Sequence[int], names: str, fewest: int, bytes: float) -> list[Pick]:
    """Return the picks with some dimensions thinned out as little as needed, but not below `fewest`."""
    dimensions = [DIMENSIONS[kind].index(name) for name in names.split()]
    longest = max(picks[dimension].length for dimension in dimensions)
    step = max(picks[dimension].step for dimension in dimensions)
    of = max(shape[dimension] for dimension in dimensions)
    low, high = 0, max(0, longest - fewest if names in _IN_A_ROW else of // fewest - step)  # How much to thin out.
    while low < high:
        middle = (low + high) // 2
        cut = _cut_excerpt(picks, shape, dimensions, names, longest - middle, step + middle)
        fits = least_cost(kind, [pick.length for pick in cut]) <= bytes
        low, high = (low, middle) if fits else (middle + 1, high)
    return _cut_excerpt(picks, shape, dimensions, names, longest - low, step + low)


def _cut_excerpt(
    picks: list[Pick], shape: Sequence[int], dimensions: Sequence[int], names: str, most: int, step: int
) -> list[Pick]:
    """Return the picks with some dimensions thinned out: to the first `most` indices, or to every `step`-th."""
    found = list(picks)
    for dimension in dimensions:
        start, size, before = picks[dimension]
        in_a_row = Pick(start, min(size, most), before)
        found[dimension] = in_a_row if names in _IN_A_ROW else Pick(start, ceil(shape[dimension] / step), step)
    return found


class FullValue:
    """A whole value with the dimensions of its kind of picture; with `minus`, the difference of two values."""

    def __init__(self, source: Tensor | Rows, kind: str, minus: Tensor | Rows | None = None) -> None:
        self.kind = kind
        self._source = source
        self._minus = minus
        self.shape = full_shape(source.shape, kind)
        # The number of samples in each row of the source.
        self._joined = prod(source.shape[1 : len(source.shape) - len(self.shape) + 1])

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the whole value in pieces, each of which has all units."""
        unit = UNIT.get(self.kind, -1)
        for rows in self._rows():
            for piece in _cut(rows, [dim for dim in range(len(self.shape)) if dim != unit or self.kind == "line"]):
                yield self._real(piece)

    def part(self, picks: Sequence[Pick]) -> Tensor:
        """Return the part of the value that a picture shows."""
        parts = []
        for source in self._sources():
            near = source
            if source.shape:  # Rows after the last one in the picture are not read.
                leads = 0 if self.shape[0] > 1 else max(0, len(self.shape) - len(source.shape))
                pick = picks[leads]
                near = source[: (pick.start + (pick.length - 1) * pick.step) // self._joined + 1]
            parts.append(self._dense(near)[tuple(pick.slice() for pick in picks)])
        return self._real(parts)

    def _sources(self) -> list[Tensor | Rows]:
        return [self._source] if self._minus is None else [self._source, self._minus]

    def _dense(self, source: Tensor | Rows) -> Tensor:
        return shaped(source if isinstance(source, Tensor) else source[:], self.kind)

    def _rows(self) -> Iterator[list[Tensor]]:
        """Yield the source and `minus` as tensors: whole if they are in memory, some rows at a time from disk."""
        sources = self._sources()
        if all(isinstance(source, Tensor) for source in sources):
            yield [self._dense(source) for source in sources]
            return
        rows = len(sources[0])
        step = max(1, PIECE * rows // max(1, self.elements))
        for start in range(0, rows, step):
            yield [self._dense(source[start : start + step]) for source in sources]

    def _real(self, parts: list[Tensor]) -> Tensor:
        """Return float64 numbers; for complex ones the magnitude (of the difference, if there are two values)."""
        wide = [part.to("cpu", torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        value = wide[0] if len(wide) == 1 else wide[0] - wide[1]
        return value.abs() if value.is_complex() else value


def kind_of_source(source: Tensor | Rows) -> str:
    """Return the kind of picture for a value; for rows on disk, the first few rows decide."""
    return kind_of(source if isinstance(source, Tensor) else source[:_FEW_ROWS])


def _cut(parts: list[Tensor], dims: list[int]) -> Iterator[list[Tensor]]:
    """Cut tensors of one shape into small pieces along `dims`, in this order."""
    if parts[0].numel() <= PIECE or not dims:
        yield parts
        return
    size = parts[0].shape[dims[0]]
    rows = max(1, PIECE * size // parts[0].numel())
    for start in range(0, size, rows):
        count = min(rows, size - start)
        yield from _cut([part.narrow(dims[0], start, count) for part in parts], dims[1:])


def number(value: float) -> float | str:
    """Return a number for JSON, which has no NaN and no infinity.

    >>> number(0.5), number(float("nan")), number(float("-inf"))
    (0.5, 'nan', '-inf')
    """
    return value if math.isfinite(value) else str(value)


class Summary:
    """The statistics and the histogram of a whole value, computed in float64 for any dtype and size."""

    @torch.no_grad()
    def __init__(self, whole: FullValue) -> None:
        self.elements = whole.elements
        few = list(whole.pieces()) if self.elements <= PIECE else None  # A small value is read only once.
        self.numbers = numbers_of_pieces(few or whole.pieces())
        self.finite = round(self.elements * (1 - self.numbers.nan - self.numbers.inf))
        self.counts = [0] * BINS
        self.sizes = 0.0
        self.has_plus_inf = False
        alive: Tensor | None = None
        for piece in few or whole.pieces():
            alive = self._add(piece, UNIT.get(whole.kind), alive)
        self.dead = None if alive is None or not len(alive) else float((~alive).double().mean())
        self.seen = 0 if alive is None or not len(alive) else self.elements // len(alive)  # Elements per unit.

    @property
    def rms(self) -> float:
        """The root of the mean square: the typical magnitude of an element."""
        return self.numbers.norm / math.sqrt(self.finite) if self.finite else float("nan")

    @property
    def is_constant(self) -> bool:
        """True if there are several elements and all are equal."""
        return self.elements == self.finite > 1 and self.numbers.min == self.numbers.max

    def stats(self) -> dict[str, Any]:
        """Return the statistics for JSON."""
        found: dict[str, Any] = {name: number(value) for name, value in self.numbers._asdict().items()}
        mean_size = self.sizes / self.finite if self.finite else float("nan")
        found |= {"rms": number(self.rms), "abs": number(mean_size), "dead": self.dead, "elements": self.elements}
        return found

    def histogram(self) -> dict[str, Any]:
        """Return the histogram for JSON."""
        return {"low": number(self.numbers.min), "high": number(self.numbers.max), "counts": self.counts}

    def _add(self, piece: Tensor, unit: int | None, alive: Tensor | None) -> Tensor | None:
        """Add a piece to the counts, and return which units have had a nonzero element so far."""
        low, high = self.numbers.min, self.numbers.max
        finite = piece if self.finite == self.elements else piece[piece.isfinite()]
        if finite.numel():
            self.sizes += float(finite.abs().sum())
            limits = (low, high) if low < high else (low - 0.5, low + 0.5)
            counted = torch.histc(finite, BINS, *limits).long().tolist()
            self.counts = [one + other for one, other in zip(self.counts, counted, strict=True)]
        if self.numbers.inf:
            self.has_plus_inf = self.has_plus_inf or bool((piece == float("inf")).any())
        if unit is None or not piece.numel():
            return alive
        here = (piece != 0).movedim(unit, 0).reshape(piece.shape[unit], -1).any(1)
        if len(piece.shape) == 1:  # Each element is a unit, and a piece has only some units.
            return here if alive is None else torch.cat((alive, here))
        return here if alive is None else alive | here


def of_tokens(whole: FullValue, picks: list[Pick]) -> dict[str, Any]:
    """Return statistics over all units for every token in the picture."""
    part = whole.part([*picks[:2], Pick(0, whole.shape[2], 1)])
    return {name: _rows(MEASURES[name](part, (2,))) for name in OF_TOKENS}


def _rows(values: Tensor) -> list[list[float | str]]:
    return [[number(float(f"{value:.{DIGITS}g}")) for value in row] for row in values.tolist()]


class Quantised(NamedTuple):
    """Ascending levels (float32), a code for each element (uint8), and the largest difference from the true values."""

    levels: Tensor
    codes: Tensor
    error: float

    def as_json(self) -> dict[str, object]:
        """Return levels and codes for JSON: little-endian bytes as base64."""
        packed = struct.pack(f"<{len(self.levels)}f", *self.levels.tolist())
        return {"levels": _text(packed), "codes": _text(_bytes(self.codes)), "error": self.error}


def quantise(value: Tensor, most: int = MOST_LEVELS) -> Quantised:
    """Return real numbers as codes. A value with few distinct numbers is exact, in float32.

    >>> quantise(torch.tensor([0.0, 2.0, 2.0, float("nan")]))
    Quantised(levels=tensor([0., 2.]), codes=tensor([  0,   1,   1, 255], dtype=torch.uint8), error=0.0)
    """
    value = value.detach().to("cpu", torch.float64)
    is_finite = value.isfinite()
    finite = value if is_finite.all() else value[is_finite]
    levels = levels_of(finite.reshape(-1), most)
    wide = levels.double()
    codes = torch.bucketize(value.contiguous(), (wide[1:] + wide[:-1]) / 2).to(torch.uint8)
    error = (finite - wide[codes.long() if finite is value else codes[is_finite].long()]).abs() if len(levels) else None
    if finite is not value:
        codes[value == float("-inf")] = MINUS_INF
        codes[value == float("inf")] = PLUS_INF
        codes[value.isnan()] = NAN
    return Quantised(levels, codes, 0.0 if error is None or not error.numel() else float(error.max()))


def levels_of(finite: Tensor, most: int = MOST_LEVELS) -> Tensor:
    """Return the levels for some numbers: every distinct number if there are few, else half even steps, half quantiles.

    The even steps bound the error by a fraction of the range. The quantiles tell apart numbers that lie close together,
    which a few outliers would otherwise hide.
    """
    if not finite.numel():
        return torch.zeros(0)
    ordered = finite.sort().values
    each = ordered.unique_consecutive()
    if len(each) > most:
        places = torch.linspace(0, len(ordered) - 1, most // 2).long()
        steps = torch.linspace(float(ordered[0]), float(ordered[-1]), most - most // 2, dtype=torch.float64)
        each = torch.cat((ordered[places], steps)).sort().values
    levels: Tensor = each.clamp(-_LARGEST, _LARGEST).float().unique_consecutive()
    return levels


def _bytes(codes: Tensor) -> bytearray:
    data = bytearray(codes.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(codes.reshape(-1))
    return data


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
