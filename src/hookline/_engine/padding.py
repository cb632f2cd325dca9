"""Where a sequence has padding, as far as the masks tell that a model is given. They are read when somebody asks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.errors import HooklineError

_UNREADABLE = (
    "the model was given a mask that does not tell which tokens are padding; give it a mask of shape (batch, tokens) "
    "with 1 for tokens and 0 for padding, or position_ids"
)


class Noted(NamedTuple):
    """What one forward was given, until it is read."""

    mask: Tensor | None  # None for a mask of another form than (row, column).
    positions: Any
    first: int  # The columns before this forward.
    width: int
    is_whole: bool  # Whether the mask is of all columns up to the end of this forward, or beyond.


class Padding:
    """The padding of one sequence of rows. Columns behind those that a mask told of hold tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.real: Tensor | None = None  # Where tokens are, (row, column), on the CPU; None if there is no padding.
        self.known = 0  # The columns that masks told of.
        self._totals: tuple[Tensor, list[int]] | None = None  # How many tokens each row of a `real` has.
        self._noted: list[Noted] = []

    def note(self, mask: Any, positions: Any, first: int, width: int, rows: int) -> None:
        """Note what a forward was given. A mask of all columns makes those before it unnecessary."""
        if mask is None:
            return
        is_plain = isinstance(mask, Tensor) and mask.dim() == 2
        is_whole = is_plain and mask.shape[1] >= first + width
        if is_whole:
            self._noted, self.rows = [], rows
        self._noted.append(Noted(mask if is_plain else None, positions, first, width, is_whole))

    def read(self) -> Tensor | None:
        """Return where tokens are, (row, column); None if there is no padding so far."""
        noted, self._noted = self._noted, []
        for one in noted:
            if one.mask is None:
                self._read_positions(one)
            elif one.is_whole:
                self.real, self.known = _real_of(one.mask, self.rows), int(one.mask.shape[1])
                if self.real is not None and one.mask.is_floating_point() and not self.real.any():
                    raise HooklineError(_UNREADABLE)  # A mask that is added to scores hides nothing where it is 0.
            elif one.mask.shape[1] < one.width:
                raise HooklineError(_UNREADABLE)
            else:  # A mask of this forward, or of a window that ends with it.
                self._add(_real_of(one.mask[:, -one.width :], self.rows), one.first, one.width)
        return self.real

    def totals(self) -> list[int]:
        """Return how many tokens each row has in the columns of `real`."""
        assert self.real is not None
        if self._totals is None or self._totals[0] is not self.real:
            self._totals = self.real, self.real.sum(1).tolist()
        return self._totals[1]

    def _add(self, real: Tensor | None, first: int, width: int) -> None:
        """Add what a mask tells of one forward; None for no padding."""
        if real is not None or (self.real is not None and self.real.shape[1] > first):
            before = torch.ones(self.rows, 0, dtype=torch.bool) if self.real is None else self.real
            between = torch.ones(len(before), max(0, first - before.shape[1]), dtype=torch.bool)
            now = torch.ones(len(before), width, dtype=torch.bool) if real is None else real
            if len(now) == len(before):
                self.real = torch.cat([before[:, :first], between, now], 1)
        self.known = first + width

    def _read_positions(self, noted: Noted) -> None:
        """Read position ids, where the mask has another shape."""
        positions, first = noted.positions, noted.first
        if self.known and first and noted.width == 1:
            return  # A new token.
        known = self.real if self.real is not None else torch.ones(self.rows, 0, dtype=torch.bool)
        starts = (known.sum(1) + first - known.shape[1]).tolist()
        is_unknown = not isinstance(positions, Tensor) or positions.dim() != 2
        if is_unknown or (not self.known and first and bool((positions[:, 0] != first).any())):
            raise HooklineError(_UNREADABLE)
        self._add(_real_by_positions(positions.expand(self.rows, -1).tolist(), starts), first, noted.width)


def _real_of(mask: Tensor, rows: int) -> Tensor | None:
    """Return where a mask of (row, column) has tokens, on the CPU; None if it has no padding."""
    if type(mask) is not Tensor or mask.is_meta:
        raise HooklineError("which tokens are padding can't be read from this mask, which holds no numbers")
    mask = mask.cpu()
    real = mask != 0
    is_plain = mask.dtype is torch.bool or bool(((mask == 0) | (mask == 1)).all())
    if not is_plain:
        raise HooklineError(_UNREADABLE)
    if bool(real.all()):
        return None
    return real.expand(rows, -1) if len(real) == 1 else real


def _real_by_positions(positions: list[list[int]], starts: list[int]) -> Tensor | None:
    """Return where position ids stand for tokens: those that count on from a start. None if all do."""
    real = torch.ones(len(positions), len(positions[0]), dtype=torch.bool)
    for row, (own, start) in enumerate(zip(positions, starts, strict=True)):
        runs = [range(at, at + _counts_on(own, at)) for at, position in enumerate(own) if position == start]
        longest = max(runs, key=lambda run: (len(run), run.start), default=range(0))
        rest = [*own[: longest.start], None, *own[longest.stop :]]
        # Sequences packed into one row begin at 0 again. Padding has the same position in all its columns.
        if len({*rest} - {None}) <= 1 and len(rest) > 1 and (runs or start):
            real[row] = False
            real[row, longest.start : longest.stop] = True
    return None if bool(real.all()) else real


def _counts_on(positions: list[int], at: int) -> int:
    """Return how many positions from `at` on go up by one each."""
    end = at + 1
    while end < len(positions) and positions[end] == positions[end - 1] + 1:
        end += 1
    return end - at
