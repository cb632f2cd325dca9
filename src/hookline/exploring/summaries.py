"""Exact numbers of a whole value, and of each token of the part that is shown, as a page has them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookline.display.kinds import UNIT
from hookline.display.measures import MEASURES
from hookline.exploring.wholes import PIECE, Pick, Whole
from hookline.stats import numbers_of_pieces

BINS = 64
OF_TOKENS = ("norm", "mean", "std", "abs", "max")
DIGITS = 6  # Of the numbers of tokens, which are for a picture.


def number(value: float) -> float | str:
    """Return a number for JSON, which has none that is not finite.

    >>> number(0.5), number(float("nan")), number(float("-inf"))
    (0.5, 'nan', '-inf')
    """
    return value if math.isfinite(value) else str(value)


class Summary:
    """The statistics and the histogram of a whole value, exact in 64 bits whatever its dtype and size."""

    @torch.no_grad()
    def __init__(self, whole: Whole) -> None:
        self.elements = whole.elements
        few = list(whole.pieces()) if self.elements <= PIECE else None  # No longer than this, whatever holds the whole.
        self.numbers = numbers_of_pieces(few or whole.pieces())
        self.finite = round(self.elements * (1 - self.numbers.nan - self.numbers.inf))
        self.counts = [0] * BINS
        self.sizes = 0.0
        self.has_plus_inf = False
        alive: Tensor | None = None
        for piece in few or whole.pieces():
            alive = self._add(piece, UNIT.get(whole.kind), alive)
        self.dead = None if alive is None or not len(alive) else float((~alive).double().mean())
        self.seen = 0 if alive is None or not len(alive) else self.elements // len(alive)  # Elements of each unit.

    @property
    def rms(self) -> float:
        """The root of the mean square: the size of an element."""
        return self.numbers.norm / math.sqrt(self.finite) if self.finite else float("nan")

    @property
    def is_constant(self) -> bool:
        """Whether every one of several elements is the same number."""
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
        """Count a piece, and return which units had something else than zero up to now."""
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
        if len(piece.shape) == 1:  # Each element is a unit, and a piece has some of them.
            return here if alive is None else torch.cat((alive, here))
        return here if alive is None else alive | here


def of_tokens(whole: Whole, picks: list[Pick]) -> dict[str, Any]:
    """Return one number of each kind for every token that is shown, over all its units."""
    part = whole.part([*picks[:2], Pick(0, whole.shape[2], 1)])
    return {name: _rows(MEASURES[name](part, (2,))) for name in OF_TOKENS}


def _rows(values: Tensor) -> list[list[float | str]]:
    return [[number(float(f"{value:.{DIGITS}g}")) for value in row] for row in values.tolist()]
