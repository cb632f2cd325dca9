"""How much of a value a picture shows: bytes are shared fairly, and what is too large is thinned out evenly."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from hookline.display.kinds import DIMENSIONS
from hookline.exploring.quantise import FEWEST_LEVELS, MOST_LEVELS
from hookline.exploring.summaries import DIGITS, OF_TOKENS
from hookline.exploring.wholes import Pick

# Which dimensions are thinned out first, and down to how many; then the next, until the picture is small enough.
_STAGES: dict[str, list[tuple[str, int]]] = {
    "maps": [("sample", 1), ("row column", 28), ("channel", 8), ("row column", 8), ("channel", 1), ("row column", 1)],
    "attention": [("sample", 1), ("head", 4), ("query key", 48), ("head", 1), ("query key", 1)],
    "tokens": [("sample", 1), ("unit", 128), ("token", 48), ("unit", 16), ("token", 1), ("unit", 1)],
    "units": [("sample", 32), ("unit", 128), ("sample", 1), ("unit", 1)],
    "line": [("unit", 1)],
    "number": [],
}
_IN_A_ROW = ("sample", "token", "query key")  # Of these the first ones are shown, of the others one in so many.
WEIGHTS = {"attention": 6, "maps": 3}  # Pictures of pictures need more.
_OF_A_TOKEN = len(OF_TOKENS) * (DIGITS + 6)  # Bytes of its numbers in JSON.

_OF_A_LEVEL = 6  # Bytes of it in base64.


def whole_of(shape: Sequence[int]) -> list[Pick]:
    """Return the picks that leave nothing out."""
    return [Pick(0, size, 1) for size in shape]


def cost(kind: str, counts: Sequence[int]) -> int:
    """Return about how many bytes of a page a picture takes that is as exact as can be."""
    return _cost(kind, counts, min(MOST_LEVELS, prod(counts)))


def least_cost(kind: str, counts: Sequence[int]) -> int:
    """Return about how many bytes it takes at least, with few levels: a level takes the bytes of four elements."""
    return _cost(kind, counts, _few_levels(prod(counts)))


def levels_for(kind: str, counts: Sequence[int], bytes: float) -> int:
    """Return how many levels a picture of so many bytes may have: one for each number where there is room."""
    elements = prod(counts)
    room = (bytes - _cost(kind, counts, 0)) / _OF_A_LEVEL
    return max(_few_levels(elements), int(min(MOST_LEVELS, elements, max(room, 0))))


def _few_levels(elements: int) -> int:
    return min(elements, max(FEWEST_LEVELS, min(MOST_LEVELS, elements // 8)))


def _cost(kind: str, counts: Sequence[int], levels: int) -> int:
    tokens = counts[0] * counts[1] * _OF_A_TOKEN if kind == "tokens" else 0
    return ceil(4 * prod(counts) / 3) + _OF_A_LEVEL * levels + tokens + 160


def share(costs: Sequence[int], weights: Sequence[int], bytes: int) -> float:
    """Return how many bytes each may have at most, times its weight, so that all together have no more than there are.

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
    """Return which indices of each dimension a picture shows, so that it takes no more than so many bytes.

    >>> excerpt("tokens", (2, 6, 768), 4000)
    [Pick(start=0, count=1, step=1), Pick(start=0, count=6, step=1), Pick(start=0, count=256, step=3)]
    """
    picks = whole_of(shape)
    for names, fewest in _STAGES[kind]:
        if least_cost(kind, [pick.count for pick in picks]) <= bytes:
            break
        picks = _thinned(kind, picks, shape, names, fewest, bytes)
    return picks


def left_out(kind: str, shape: Sequence[int], picks: Sequence[Pick]) -> str:
    """Say what of a value a picture does not show: "1 of 2 samples, 384 of 768 units"."""
    missing = [
        f"{size - pick.count} of {size} {name}s"
        for name, size, pick in zip(DIMENSIONS[kind], shape, picks, strict=True)
        if pick.count < size
    ]
    return ", ".join(missing).replace("querys", "queries")


def _thinned(kind: str, picks: list[Pick], shape: Sequence[int], names: str, fewest: int, bytes: float) -> list[Pick]:
    """Return the picks with as much of some dimensions as fits, or their fewest."""
    dimensions = [DIMENSIONS[kind].index(name) for name in names.split()]
    longest = max(picks[dimension].count for dimension in dimensions)
    step = max(picks[dimension].step for dimension in dimensions)
    of = max(shape[dimension] for dimension in dimensions)
    low, high = 0, max(0, longest - fewest if names in _IN_A_ROW else of // fewest - step)  # How hard to thin out.
    while low < high:
        middle = (low + high) // 2
        cut = _cut(picks, shape, dimensions, names, longest - middle, step + middle)
        fits = least_cost(kind, [pick.count for pick in cut]) <= bytes
        low, high = (low, middle) if fits else (middle + 1, high)
    return _cut(picks, shape, dimensions, names, longest - low, step + low)


def _cut(
    picks: list[Pick], shape: Sequence[int], dimensions: Sequence[int], names: str, most: int, step: int
) -> list[Pick]:
    """Return the picks with some dimensions thinned out: to so many of the first ones, or to one in `step` of all."""
    found = list(picks)
    for dimension in dimensions:
        start, size, before = picks[dimension]
        in_a_row = Pick(start, min(size, most), before)
        found[dimension] = in_a_row if names in _IN_A_ROW else Pick(start, ceil(shape[dimension] / step), step)
    return found
