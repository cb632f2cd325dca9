"""Collapse repeated blocks of a model: rows that differ in one number of their name become one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import isfinite

from hookline._tables.cells import ELLIPSIS

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
_HERE = "\0"  # Stands for the number in which rows differ, where another of their cells names it too.

Limits = tuple[str, str]


class _Row:
    """One row or several: its name as text, number, text, …; its numbers as the least and the most of them."""

    def __init__(self, parts: list[str], cells: list[str], limits: dict[int, Limits]) -> None:
        self.parts = parts
        self.cells = cells
        self.limits = limits

    def key(self, position: int, alike: Collection[int]) -> tuple[object, ...]:
        """Return what has to be the same in rows that are one: all but a number of the name, and what may vary."""
        number = self.parts[position]
        others = [_HERE if index == position else part for index, part in enumerate(self.parts)]
        cells = [
            "" if column in self.limits and column not in alike else _mention(cell, number)
            for column, cell in enumerate(self.cells)
        ]
        return tuple(others), tuple(cells)

    def texts(self, name: int) -> list[str]:
        """Return what stands in the cells."""
        cells = list(self.cells)
        for column, (low, high) in self.limits.items():
            cells[column] = low if low == high else f"{low}{ELLIPSIS}{high}"
        cells[name] = "".join(self.parts)
        return cells


def collapse(rows: Sequence[Sequence[str]], name: int, alike: Collection[int], enough: int) -> list[list[str]]:
    """Make one row of those that are alike in all but a number of their name, until so few are left that it is enough.

    >>> collapse([["h.0", "32"], ["h.1", "48"], ["head", "9"]], name=0, alike=(), enough=2)
    [['h.{0,1}', '32…48'], ['head', '9']]

    Args:
        name: The column with the names.
        alike: The columns whose numbers have to be the same too; others become ranges.
    """
    found = [_row(row, name) for row in rows]
    for position in range(1, max((len(row.parts) for row in found), default=0), 2):
        if len(found) <= enough:
            break
        found = _merged(found, position, alike)
    return [row.texts(name) for row in found]


def is_number(cell: str) -> bool:
    """Whether a cell holds a number, a range of them, or nothing."""
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
    """Return rows, each with its place in the table, as one; or as they are, if they are not a block."""
    numbers = sorted(int(row.parts[position]) for _, row in group) if len(group) > 1 else []
    if not numbers or (len(numbers) == 2 and numbers[1] > numbers[0] + 1):  # Two that are far apart are not a block.
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
    """Write numbers as the site language writes alternatives, with ranges: "{0…3,5}", "{0,2…10}"."""
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
    """Mark where a text names a module by this number: "Capture 'h.0.attn' instead"."""
    if number not in cell:
        return cell
    return re.sub(rf"(?:(?<=[A-Za-z_]\.)|(?<=')){number}(?!\w)", _HERE, cell)
