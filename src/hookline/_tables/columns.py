"""Columns side by side, within the width of a terminal: what is shortened, wrapped or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hookline._tables.cells import ELLIPSIS, cut, cut_name, pad, width, wrap
from hookline._tables.collapse import is_number

GAP = 2  # Blanks between columns.
_NARROW = 10  # A column up to here is left as it is.
_NAME, _TEXT = 24, 14  # To fewer columns neither is squeezed, rather something is left out.


@dataclass(frozen=True)
class Column:
    """One column: its header, its cells, and what they are. What takes a look at every cell is looked up once."""

    header: str
    cells: list[str]
    is_name: bool

    @cached_property
    def is_right(self) -> bool:
        """Whether it is set to the right: numbers are, unless they are names."""
        return not self.is_name and bool(self.cells) and all(map(is_number, self.cells))

    @cached_property
    def natural(self) -> int:
        """The width it takes as it is."""
        return max(map(width, (self.header, *self.cells)))

    @cached_property
    def least(self) -> int:
        """The width to which it may be squeezed."""
        if self.is_right or self.header == "":
            return self.natural
        return min(self.natural, max(_NAME if self.is_name else _TEXT, _NARROW))


class Grid(NamedTuple):
    """Columns as they are to be shown: for each row the lines of each cell, and what is left to say."""

    columns: list[Column]
    widths: list[int]
    rows: list[list[list[str]]]
    notes: list[str]

    def line(self, texts: Sequence[str]) -> list[str]:
        """Set one line of each cell to its place."""
        return [
            pad(text, room, column.is_right)
            for text, room, column in zip(texts, self.widths, self.columns, strict=True)
        ]


def arrange(columns: list[Column], limit: int | None, spare: Sequence[str] = ()) -> Grid:
    """Set columns side by side within `limit`, if there is one; `spare` ones are the first to go."""
    notes: list[str] = []
    if limit is not None and _total(columns) > limit:
        columns = _with_shorter_ranges(columns, limit)
        columns, notes = _with_fewer(columns, limit, spare)
    widths = _shares(columns, limit)
    cells = [_lines(column, room) for column, room in zip(columns, widths, strict=True)]
    return Grid(columns, widths, [list(row) for row in zip(*cells, strict=True)], notes)


def _total(columns: list[Column], least: bool = False) -> int:
    return sum(column.least if least else column.natural for column in columns) + GAP * (len(columns) - 1)


def _with_shorter_ranges(columns: list[Column], limit: int) -> list[Column]:
    """Write ranges of numbers with fewer digits; each number by itself stays what it is."""
    for digits in (3, 2):
        columns = [replace(column, cells=[_rounded(cell, digits) for cell in column.cells]) for column in columns]
        if _total(columns) <= limit:
            break
    return columns


def _rounded(cell: str, digits: int) -> str:
    if ELLIPSIS not in cell or not is_number(cell):
        return cell
    parts = [part if "," in part or part.isdigit() else f"{float(part):.{digits}g}" for part in cell.split(ELLIPSIS)]
    return ELLIPSIS.join(dict.fromkeys(parts))


def _with_fewer(columns: list[Column], limit: int, spare: Sequence[str]) -> tuple[list[Column], list[str]]:
    """Leave columns away until the others can be squeezed in: bars, what says one thing only, the spare, the last."""
    same: dict[str, str] = {}
    lost = set[str]()
    headers, columns = [column.header for column in columns], list(columns)
    while len(columns) > 1 and _total(columns, least=True) > limit:
        others = [column for column in columns if not column.is_name]
        constant = [column for column in others if len(column.cells) > 1 and len(set(column.cells)) == 1]
        bars = [column for column in others if not column.header]
        spared = [column for name in reversed(spare) for column in others if column.header == name]
        away = (bars or constant or spared or others or columns)[-1]
        columns.remove(away)
        if away in constant:
            same[away.header] = away.cells[0]
        elif away.header:
            lost.add(away.header)
    left_out = {
        "in every row: ": [f"{name} {same[name]}" for name in headers if same.get(name)],
        "too narrow for: ": [name for name in headers if name in lost],
    }
    return columns, [what + ", ".join(names) for what, names in left_out.items() if names]


def _shares(columns: list[Column], limit: int | None) -> list[int]:
    """Return how wide each column is: as it likes, or what is left, shared out among those that would have more."""
    if limit is None or _total(columns) <= limit:
        return [column.natural for column in columns]
    widths = [column.least for column in columns]
    left = limit - _total(columns, least=True)
    while left > 0:
        wanting = [index for index, column in enumerate(columns) if widths[index] < column.natural]
        for index in wanting[:left]:
            widths[index] += 1
        left -= len(wanting) or left
    return [max(1, min(room, limit)) for room in widths]


def _lines(column: Column, room: int) -> list[list[str]]:
    if not column.is_name:
        return [wrap(cell, room) if " " in cell else [cut(cell, room)] for cell in column.cells]
    short = [cut_name(cell, room) for cell in column.cells]
    if len(set(short)) < len(set(column.cells)):  # Cut, some would be the same name.
        return [wrap(cell, room) for cell in column.cells]
    return [[cell] for cell in short]
