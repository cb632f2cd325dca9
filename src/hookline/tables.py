"""Tables as text and as HTML. Knows no torch."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

MOST_ROWS = 60


def table(header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """Lay out `rows` under `header`; columns of numbers are set to the right."""
    cells = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    cells, left_out = _shorten(cells)
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(_is_number(cell) for cell in column) for column in zip(*cells, strict=True)] or [False] * len(header)
    right[0] = False  # The first column holds names, which may be numbers.
    lines = [title] if title else []
    lines.append(_line(header, widths, right))
    lines.append("  ".join("─" * width for width in widths))
    lines.extend(_line(row, widths, right) for row in cells)
    if left_out:
        lines.insert(-(MOST_ROWS // 2), f"… {left_out} more …")
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """Return the same table for a notebook, every text escaped."""
    head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def count(number: int, noun: str) -> str:
    """Return "1 call", "2 calls"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(nbytes: float) -> str:
    """Return a number of bytes as people write it.

    >>> size(48), size(3_100_000)
    ('48 B', '3.1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}"


def _shorten(cells: list[list[str]]) -> tuple[list[list[str]], int]:
    if len(cells) <= MOST_ROWS:
        return cells, 0
    half = MOST_ROWS // 2
    return cells[:half] + cells[-half:], len(cells) - 2 * half


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(padded).rstrip()


def _is_number(cell: str) -> bool:
    if cell in ("", "-"):
        return True
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return False
    return True
