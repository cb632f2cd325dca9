"""Fit a table into a terminal: measure its width, shorten cells, merge repeated rows, lay out columns."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

ELLIPSIS = "…"
GAP = 2  # Blanks between columns.
_NARROW = 10  # A column up to this width is never squeezed.
_NAME, _TEXT = 24, 14  # The minimum width of a column of names, and of text. If that does not fit, columns are dropped.
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
_HERE = "\0"  # Stands in a cell for the number in which rows differ.
_BLOCKS = " ▏▎▍▌▋▊▉█"
_JOINER = "\u200d"  # Joins several emoji into one.

Limits = tuple[str, str]  # The smallest and the largest number of merged cells, as text.


def terminal_width(stream: Any = None) -> int | None:
    """Return the width of the terminal that a stream writes to; None if it is not a terminal."""
    stream = sys.stdout if stream is None else stream
    if not is_terminal(stream):
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        columns = int(given) if given.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # A stand-in for a terminal, without a file descriptor.
        columns = 0
    return columns or 80


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # The stream is None, or closed.
        return False


def clean(text: str) -> str:
    r"""Return text as one line without control characters, which are written as escapes.

    >>> clean("two\nlines, \x1b[31mred")
    'two lines, \\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, " ".join(text.splitlines())))


def width(text: str) -> int:
    """Return how many columns a text takes in a terminal.

    >>> width("h.0"), width("層.0")
    (3, 4)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def pad(text: str, columns: int, right: bool = False) -> str:
    """Pad a text with blanks to a number of columns."""
    blanks = " " * (columns - width(text))
    return blanks + text if right else text + blanks


def cut(text: str, columns: int) -> str:
    """Cut a text at its end.

    >>> cut("MultiheadAttention", 12)
    'MultiheadAt…'
    """
    return text if width(text) <= columns else _first(text, columns - 1) + ELLIPSIS


def cut_name(text: str, columns: int) -> str:
    """Shorten a name in its first half, since names differ mostly at the end.

    >>> cut_name("transformer.h.0.attn.c_proj", 20)
    'tran…h.0.attn.c_proj'
    """
    if width(text) <= columns:
        return text
    head = _first(text, (columns - 1) // 4)
    tail = _last(text, columns - 1 - width(head))
    dot = tail.find(".")
    if 0 < dot <= len(tail) // 4 and not text.endswith(f".{tail}"):  # Begin at a dot rather than inside a name.
        tail = tail[dot:]
    return head + ELLIPSIS + tail


def wrap(text: str, columns: int) -> list[str]:
    """Break a text into lines at blanks, except inside a shape, and after dots.

    >>> wrap("never called: a container", 16)
    ['never called: a', 'container']
    """
    lines, line = [], ""
    for word in re.findall(r"\s+|\([\d, ]*\)[^\s.]*|[^\s.(]*\.|[^\s.(]+|\(", text):
        if width(line) + width(word.rstrip()) <= columns:
            line += word
            continue
        if line.strip():
            lines.append(line.rstrip())
        line = word.lstrip()
        while width(line) > columns:
            piece = _first(line, columns) or line[:1]
            lines.append(piece)
            line = line[len(piece) :]
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def bar(share: float, columns: int) -> str:
    """Draw a share between 0 and 1 as a bar, exact to an eighth of a column.

    >>> bar(0.5, 8), bar(0.3, 4)
    ('████', '█▎')
    """
    eighths = round(8 * columns * min(max(share, 0.0), 1.0)) if share == share else 0
    return ("█" * (eighths // 8) + _BLOCKS[eighths % 8]).rstrip()


def _visible(character: str) -> str:
    if character.isprintable() or character == _JOINER:
        return character
    return character.encode("unicode_escape").decode()


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _clusters(text: str) -> Iterator[str]:
    """Yield characters, each with its combining marks."""
    cluster = ""
    for character in text:
        if cluster and _columns(character) and not cluster.endswith(_JOINER):
            yield cluster
            cluster = ""
        cluster += character
    if cluster:
        yield cluster


def _first(text: str, columns: int) -> str:
    return "".join(_fitting(list(_clusters(text)), columns))


def _last(text: str, columns: int) -> str:
    return "".join(reversed(_fitting(list(_clusters(text))[::-1], columns)))


def _fitting(clusters: list[str], columns: int) -> list[str]:
    found = []
    for cluster in clusters:
        columns -= width(cluster)
        if columns < 0:
            break
        found.append(cluster)
    return found


class _Row:
    """One row, or several merged ones: the name split into text, number, text, …; the limits of its numeric cells."""

    def __init__(self, parts: list[str], cells: list[str], limits: dict[int, Limits]) -> None:
        self.parts = parts
        self.cells = cells
        self.limits = limits

    def key(self, position: int, alike: Collection[int]) -> tuple[object, ...]:
        """Return what must be equal in merged rows: all except one number of the name and the cells that may vary."""
        number = self.parts[position]
        others = [_HERE if index == position else part for index, part in enumerate(self.parts)]
        cells = [
            "" if column in self.limits and column not in alike else _mention(cell, number)
            for column, cell in enumerate(self.cells)
        ]
        return tuple(others), tuple(cells)

    def texts(self, name: int) -> list[str]:
        """Return the texts of the cells."""
        cells = list(self.cells)
        for column, (low, high) in self.limits.items():
            cells[column] = low if low == high else f"{low}{ELLIPSIS}{high}"
        cells[name] = "".join(self.parts)
        return cells


def collapse(rows: Sequence[Sequence[str]], name: int, alike: Collection[int], enough: int) -> list[list[str]]:
    """Merge rows that differ only in a number of their name, until at most `enough` rows are left.

    >>> collapse([["h.0", "32"], ["h.1", "48"], ["head", "9"]], name=0, alike=(), enough=2)
    [['h.{0,1}', '32…48'], ['head', '9']]

    Args:
        name: The column with the names.
        alike: The columns whose numbers must be equal too. Numbers in other columns become ranges.
    """
    found = [_row(row, name) for row in rows]
    for position in range(1, max((len(row.parts) for row in found), default=0), 2):
        if len(found) <= enough:
            break
        found = _merged(found, position, alike)
    return [row.texts(name) for row in found]


def is_number(cell: str) -> bool:
    """Return True if a cell is a number, a range of numbers, or empty."""
    return cell in ("", "-") or all(_value(part) is not None for part in cell.split(ELLIPSIS))


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _row(cells: Sequence[str], name: int) -> _Row:
    numbers = {column: _value(cell) for column, cell in enumerate(cells) if column != name}
    finite = [column for column, value in numbers.items() if value is not None and isfinite(value)]
    limits = {column: (cells[column], cells[column]) for column in finite}
    without = ["" if column == name else cell for column, cell in enumerate(cells)]
    return _Row(_NUMBER.split(cells[name]), without, limits)


def _merged(rows: list[_Row], position: int, alike: Collection[int]) -> list[_Row]:
    groups: dict[tuple[object, ...], list[tuple[int, _Row]]] = {}
    seen: dict[tuple[object, ...], int] = {}  # Two hooks at one place are two rows.
    for index, row in enumerate(rows):
        if len(row.parts) <= position or not row.parts[position].isdigit():
            groups[index,] = [(index, row)]
            continue
        key = row.key(position, alike)
        nth = seen[key, row.parts[position]] = seen.get((key, row.parts[position]), -1) + 1
        groups.setdefault((key, nth), []).append((index, row))
    found = [one for group in groups.values() for one in _joined(group, position)]
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def _joined(group: list[tuple[int, _Row]], position: int) -> list[tuple[int, _Row]]:
    """Merge rows, each given with its place in the table. Rows that are not a block are returned unchanged."""
    numbers = sorted(int(row.parts[position]) for _, row in group) if len(group) > 1 else []
    # Two rows that are far apart are not a block.
    if not numbers or (len(numbers) == 2 and numbers[1] > numbers[0] + 1):
        return group
    (place, first), several = group[0], _several(numbers)
    parts = [several if index == position else part for index, part in enumerate(first.parts)]
    cells = [_mention(cell, first.parts[position]).replace(_HERE, several) for cell in first.cells]
    limits = {column: _limits([row.limits[column] for _, row in group]) for column in first.limits}
    return [(place, _Row(parts, cells, limits))]


def _limits(several: list[Limits]) -> Limits:
    return min((one[0] for one in several), key=_order), max((one[1] for one in several), key=_order)


def _order(text: str) -> float:
    return _value(text) or 0.0


def _several(numbers: list[int]) -> str:
    """Write numbers as alternatives of the site language, with ranges: "{0…3,5}", "{0,2…10}"."""
    step = numbers[1] - numbers[0]
    if len(numbers) > 3 and step > 1 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{{{numbers[0]},{numbers[1]}{ELLIPSIS}{numbers[-1]}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}{ELLIPSIS}{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(texts) + "}"


def _mention(cell: str, number: str) -> str:
    """Mark this number where it is part of a module's name in a text, as in "Capture 'h.0.attn' instead"."""
    if number not in cell:
        return cell
    return re.sub(rf"(?:(?<=[A-Za-z_]\.)|(?<=')){number}(?!\w)", _HERE, cell)


@dataclass(frozen=True)
class Column:
    """One column: its header, its cells, and whether the cells are names."""

    header: str
    cells: list[str]
    is_name: bool

    @cached_property
    def is_right(self) -> bool:
        """True if the column is aligned right: numbers are, unless they are names."""
        return not self.is_name and bool(self.cells) and all(map(is_number, self.cells))

    @cached_property
    def natural(self) -> int:
        """The width of its longest cell."""
        return max(map(width, (self.header, *self.cells)))

    @cached_property
    def least(self) -> int:
        """The minimum width to which it may be squeezed."""
        if self.is_right or self.header == "":
            return self.natural
        return min(self.natural, max(_NAME if self.is_name else _TEXT, _NARROW))


class Grid(NamedTuple):
    """Columns with their widths, the lines of each cell of each row, and notes."""

    columns: list[Column]
    widths: list[int]
    rows: list[list[list[str]]]
    notes: list[str]

    def line(self, texts: Sequence[str]) -> list[str]:
        """Pad one line of each cell to the width of its column."""
        return [
            pad(text, room, column.is_right)
            for text, room, column in zip(texts, self.widths, self.columns, strict=True)
        ]


def arrange(columns: list[Column], limit: int | None, spare: Sequence[str] = ()) -> Grid:
    """Lay out columns in a terminal of width `limit`; `spare` ones are dropped first."""
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
    """Write ranges of numbers with fewer digits; single numbers stay as they are."""
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
    """Drop columns until the rest fits: first bars, then constant columns, then `spare`, then the rightmost."""
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
    """Return the width of each column: its natural width, or its minimum plus a share of the remaining room."""
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
    if len(set(short)) < len(set(column.cells)):  # Shortened, some names would be equal.
        return [wrap(cell, room) for cell in column.cells]
    return [[cell] for cell in short]
