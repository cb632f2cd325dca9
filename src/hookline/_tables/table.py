"""A table as text that fits the terminal, in colours, and as HTML; counts and sizes as text.

Table     rows under a header, and how they are laid out
Tabular   base class for objects that print as a table: they define `_table()`
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookline._tables.notebooks import Picture, render
from hookline._tables.terminal import (
    ELLIPSIS,
    GAP,
    Column,
    Grid,
    arrange,
    clean,
    collapse,
    cut_name,
    is_terminal,
    terminal_width,
    wrap,
)

ENOUGH_ROWS = 24  # Longer tables show repeated rows as one.
MOST_ROWS = 60

Shown = tuple[list[list[str]], dict[int, str], list[str]]  # Rows; {row number: text to show before it}; notes.


class Line(NamedTuple):
    """One line: its kind ("title", "header", "rule", "row" or "note"), and its cells, each as wide as its column."""

    kind: str
    cells: list[str]
    columns: Sequence[str] = ("",)

    def __str__(self) -> str:
        return (" " * GAP).join(self.cells).rstrip()


@dataclass(frozen=True)
class Table:
    """Rows under a header, and how to shorten them if they don't fit.

    >>> print(Table(("site", "calls"), [("h.0", 1), ("h.1.mlp", 12)]))
    site     calls
    ───────  ─────
    h.0          1
    h.1.mlp     12

    Args:
        names: The header of the column with names of places in a model.
        alike: The columns whose numbers must be equal in merged rows. Numbers in other columns become ranges.
        spare: The columns to drop first if not all fit.
        weights: How much each row matters. With weights, rows are not merged; if there are too many, the heaviest are
            shown.
        pictures: Returns the histogram of a row, by its number, for a notebook; or None.
        empty: The text to show if there are no rows.
        every: The code that shows every row, for the note about rows left out.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    names: str = "site"
    alike: Sequence[str] = ("calls", "nan", "inf")
    spare: Sequence[str] = ("dtype", "parameters")
    weights: Sequence[float] | None = None
    pictures: Callable[[int], Picture | None] | None = None
    empty: str = ""
    every: str = 'f"{x:all}"'

    def text(self, limit: int | None = None, whole: bool = False) -> str:
        """Return the table as plain text, at most `limit` wide; with `whole`, nothing is merged or cut."""
        return "\n".join(map(str, self.lines(limit, whole)))

    def html(self) -> str:
        """Return the table for a notebook, collapsible by module."""
        if not self.rows and self.empty:
            return render((), [], self.empty, None, None)
        return render(self.header, self._cells(), self.title, self._name, self.pictures)

    def lines(self, limit: int | None = None, whole: bool = False) -> Iterator[Line]:
        """Yield the lines of the table, each at most `limit` wide."""
        if not self.rows and self.empty:
            yield from _around("title", self.empty, limit)
            return
        cells, more, notes = self._shortened(self._cells()) if not whole else _whole(self._cells())
        columns = [
            Column(name, [row[index] for row in cells], index == (self._name or 0))
            for index, name in enumerate(self.header)
        ]
        grid = arrange(columns, limit, self.spare)
        yield from _around("title", self.title, limit)
        yield from _lines(grid, more, limit)
        for note in (*grid.notes, *notes):
            yield from _around("note", note, limit)

    def __str__(self) -> str:
        return self.text(terminal_width())

    def __rich__(self) -> Drawn:
        return Drawn(self)

    @property
    def _name(self) -> int | None:
        return list(self.header).index(self.names) if self.names in self.header else None

    def _cells(self) -> list[list[str]]:
        return [[clean(str(cell)) for cell in row] for row in self.rows]

    def _shortened(self, cells: list[list[str]]) -> Shown:
        """Return fewer rows, texts to show between them, and notes."""
        if self.weights is not None:
            return self._heaviest(cells, self.weights)
        notes = []
        if len(cells) > ENOUGH_ROWS and self._name is not None:
            alike = [index for index, name in enumerate(self.header) if name in self.alike]
            fewer = collapse(cells, self._name, alike, ENOUGH_ROWS)
            if len(fewer) < len(cells):
                notes = [f"{len(cells):,} rows as {len(fewer):,}; {self.every} has each"]
            cells = fewer
        if len(cells) <= MOST_ROWS:
            return cells, {}, notes
        half, left_out = MOST_ROWS // 2, len(cells) - MOST_ROWS
        return cells[:half] + cells[-half:], {half: f"{ELLIPSIS} {left_out} more {ELLIPSIS}"}, notes

    def _heaviest(self, cells: list[list[str]], weights: Sequence[float]) -> Shown:
        if len(cells) <= MOST_ROWS:
            return _whole(cells)
        chosen = sorted(sorted(range(len(cells)), key=lambda index: -weights[index])[: MOST_ROWS // 2])
        note = f"the {len(chosen)} of {len(cells):,} rows that matter most; {self.every} has each"
        return [cells[index] for index in chosen], {}, [note]


def table_of(shown: Tabular) -> Table:
    """Return the table of an object that prints as one."""
    return shown._table()


class Tabular:
    """A base class for objects that print as a table: in a terminal (with rich, in colours) and in a notebook."""

    __slots__ = ()

    def _table(self) -> Table:
        """Return the table to show."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self._table())

    def __repr__(self) -> str:
        return in_colours(self._table()) if _is_interactive() else str(self._table())

    def __format__(self, spec: str) -> str:
        if spec not in ("", "all"):
            raise ValueError(f"a table is formatted as it is, or with 'all' for every row, not with {spec!r}")
        return self._table().text(whole=True) if spec else str(self)

    def _repr_html_(self) -> str:
        return self._table().html()

    def __rich__(self) -> Drawn:
        return Drawn(self._table())


class Drawn:
    """A table for rich: the same layout, in colours."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, _console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self.table.lines(options.max_width):
            cells = zip(line.cells, line.columns, strict=True)
            pieces = [(cell, _style(line.kind, column, cell)) for cell, column in cells]
            spaced = [piece for one in pieces for piece in ((" " * GAP, ""), one)][1:]
            text = Text.assemble(*spaced, no_wrap=True, overflow="ignore")
            text.rstrip()
            yield text


def in_colours(table: Table) -> str:
    """Return the table as rich draws it on this terminal."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(Drawn(table))
    return captured.get().rstrip("\n")


def count(number: int, noun: str) -> str:
    """Return "1 call", "2 calls"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(nbytes: float) -> str:
    """Return a number of bytes as text.

    >>> size(48), size(3_100_000)
    ('48 B', '3.1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}"


def _is_interactive() -> bool:
    """Return True in an interactive session, in a terminal with colours, if rich is installed."""
    if not hasattr(sys, "ps1") or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(sys.stdout) and importlib.util.find_spec("rich") is not None


def _whole(cells: list[list[str]]) -> Shown:
    return cells, {}, []


def _around(kind: str, text: str, limit: int | None) -> Iterator[Line]:
    """Yield the wrapped lines of a text that is not a row."""
    for line in wrap(clean(text), limit) if limit is not None else [clean(text)]:
        if line:
            yield Line(kind, [line])


def _lines(grid: Grid, more: dict[int, str], limit: int | None) -> Iterator[Line]:
    columns = [column.header for column in grid.columns]
    heads = [cut_name(column.header, room) for column, room in zip(grid.columns, grid.widths, strict=True)]
    yield Line("header", grid.line(heads), columns)
    yield Line("rule", ["─" * room for room in grid.widths], columns)
    for index, row in enumerate(grid.rows):
        if index in more:
            yield from _around("note", more[index], limit)
        for number in range(max(map(len, row))):
            yield Line("row", grid.line([cell[number] if number < len(cell) else "" for cell in row]), columns)


def _style(kind: str, column: str, cell: str) -> str:
    """Return the colour of a cell."""
    if kind != "row":
        return {"title": "bold", "header": "bold", "rule": "dim", "note": "dim italic"}[kind]
    text = cell.strip()
    if (column in ("nan", "inf") and text not in ("0", "")) or text in ("nan", "failed"):
        return "bold red"
    if column == "active" and text == "no":
        return "dim"
    return {"site": "cyan", "point": "cyan", "module": "green", "hazards": "yellow", "": "blue"}.get(column, "")
