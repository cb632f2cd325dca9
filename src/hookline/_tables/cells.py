"""Text in the cells of a terminal: how wide it is, made safe, cut and wrapped. Knows no torch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

ELLIPSIS = "…"
_BLOCKS = " ▏▎▍▌▋▊▉█"
_JOINER = "\u200d"  # It makes one picture of several.


def clean(text: str) -> str:
    r"""Return text that stays on one line and does nothing to a terminal: what can't be seen is written out.

    >>> clean("two\nlines, \x1b[31mred")
    'two lines, \\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, " ".join(text.splitlines())))


def width(text: str) -> int:
    """Return how many columns of a terminal a text takes.

    >>> width("h.0"), width("層.0")
    (3, 4)
    """
    return len(text) if text.isascii() else sum(map(_columns, text))


def pad(text: str, columns: int, right: bool = False) -> str:
    """Fill a text up with blanks, as far as it goes in a terminal."""
    blanks = " " * (columns - width(text))
    return blanks + text if right else text + blanks


def cut(text: str, columns: int) -> str:
    """Cut a text at its end.

    >>> cut("MultiheadAttention", 12)
    'MultiheadAt…'
    """
    return text if width(text) <= columns else _first(text, columns - 1) + ELLIPSIS


def cut_name(text: str, columns: int) -> str:
    """Cut a name in its first half: what tells it from others is at its end.

    >>> cut_name("transformer.h.0.attn.c_proj", 20)
    'tran…h.0.attn.c_proj'
    """
    if width(text) <= columns:
        return text
    head = _first(text, (columns - 1) // 4)
    tail = _last(text, columns - 1 - width(head))
    dot = tail.find(".")
    if 0 < dot <= len(tail) // 4 and not text.endswith(f".{tail}"):  # Rather all of a name than the end of one.
        tail = tail[dot:]
    return head + ELLIPSIS + tail


def wrap(text: str, columns: int) -> list[str]:
    """Break a text into lines: at blanks, but not inside a shape, and behind dots.

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
    """Draw a share of 1 as text, to an eighth of a column.

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
    """Return characters with the marks that belong to them."""
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
