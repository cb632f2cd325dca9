"""Progress bars on stderr, if that is a terminal: steps done, their rate and the time left.

Bar      counts steps, and shows them while it is entered
track    iterates over something and shows a bar
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

from hookline._tables import is_terminal, terminal_width
from hookline._tables.terminal import bar, clean, cut, pad, width

Step = TypeVar("Step")

_EVERY = 0.1  # Seconds between two updates.
_WIDTH = 30  # The width of a bar in columns.
_NARROWEST = 12  # Its least width, if the text after it is long.
_showing: list[Bar] = []  # The bar on screen, if any: a second one would draw over it.


class _Drawing(Protocol):
    def draw(self, share: float | None, text: str) -> None:
        """Show a bar with a text."""

    def end(self) -> None:
        """Stop showing the bar."""


class Bar:
    """Counts steps, and shows their number, their rate and the time left.

    >>> with Bar("reading", total=8, progress=False) as progress:
    ...     progress.advance(3)
    >>> progress.done
    3

    Args:
        total: How many steps there will be, if known.
        done: How many steps were done before.
        progress: Whether to show the bar. None shows it if stderr is a terminal.
        stays: Whether the bar stays on screen at the end.
        unit: What is counted, as in "samples".
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        done: int = 0,
        progress: bool | None = None,
        stays: bool = False,
        unit: str = "",
    ) -> None:
        self.label = clean(label)
        self.total = total
        self.start = self.done = done
        self.shows = is_terminal(sys.stderr) if progress is None else progress
        self.began = time.monotonic()
        self._stays = stays
        self._unit = unit and f" {unit}"
        self._drawn = 0.0  # The time of the last update.
        self._text = ""
        self._drawing: _Drawing | None = None

    def advance(self, steps: int = 1, text: str = "") -> None:
        """Count steps; `text` is shown after the figures."""
        self.done += steps
        self._text = text
        if self._drawing is not None and time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def figures(self) -> str:
        """Return the number of steps, their rate and the time left, as text."""
        taken = self.done - self.start
        seconds = max(time.monotonic() - self.began, 1e-9)
        found = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        parts = [found + self._unit]
        parts += [pace(taken / seconds)] if taken else []
        if taken and self.total is not None:
            parts.append(f"{clock(max(self.total - self.done, 0) * seconds / taken)} left")
        return ", ".join(parts)

    def __enter__(self) -> Bar:
        self.began = time.monotonic()
        if self.shows and not _showing:
            _showing.append(self)
            self._drawing = _rich(self) or _Line(self)
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is None:
            return
        _showing.remove(self)
        try:
            drawing.draw(self._share, self._line())
        finally:
            drawing.end()

    @property
    def _share(self) -> float | None:
        return None if self.total is None else self.done / max(self.total, 1)

    def _line(self) -> str:
        figures, text = self.figures(), clean(self._text)
        columns = (terminal_width(sys.stderr) or 80) if is_terminal(sys.stderr) else None
        while text and columns and width(f"{self.label}    {figures}  {text} ") + _NARROWEST > columns:
            text = text.rpartition(", ")[0]  # The last item matters least.
        return "  ".join(filter(None, (figures, text)))

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._drawing is not None:
            self._drawing.draw(self._share, self._line())


def track(steps: Iterable[Step], label: str, total: int | None = None, progress: bool | None = None) -> Iterable[Step]:
    """Iterate over `steps`, with a bar if stderr is a terminal.

    >>> list(track(range(3), "counting"))
    [0, 1, 2]
    """
    under = Bar(label, len(steps) if total is None and isinstance(steps, Sized) else total, progress=progress)
    return _tracked(steps, under) if under.shows else steps


def clock(seconds: float) -> str:
    """Return a duration as text.

    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pace(rate: float) -> str:
    """Return the rate in steps per second, or the seconds per step if it is slow.

    >>> pace(1234.5), pace(2.5), pace(0.2)
    ('1,234/s', '2.5/s', '5.0 s each')
    """
    if rate < 1:
        return f"{1 / rate:,.1f} s each"
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


def _tracked(steps: Iterable[Step], under: Bar) -> Iterator[Step]:
    with under:
        for step in steps:
            yield step
            under.advance()


class _Line:
    """A bar as one line of plain text, rewritten in place; without a terminal, only the last state is written."""

    def __init__(self, of: Bar) -> None:
        self.of = of
        self.stream = sys.stderr
        self.shown = 0

    def draw(self, share: float | None, text: str) -> None:
        room = (terminal_width(self.stream) or 80) - 1
        left = room - width(f"{self.of.label}    {text}")
        columns = max(min(left, _WIDTH), _NARROWEST) if is_terminal(self.stream) else _WIDTH
        drawn = "" if share is None else f"{pad(bar(share, columns), columns)}  "
        self.text = f"{self.of.label}  {drawn}{text}"
        if is_terminal(self.stream):
            self.text = cut(self.text, room)
            self._write(f"\r{pad(self.text, max(self.shown, width(self.text)))}")
            self.shown = width(self.text)

    def end(self) -> None:
        if not is_terminal(self.stream):
            self._write(f"{self.text}\n")
        else:
            self._write("\n" if self.of._stays else f"\r{' ' * self.shown}\r")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class _Rich:
    """A bar that rich draws."""

    def __init__(self, drawn: Any) -> None:
        self.drawn = drawn

    def draw(self, share: float | None, text: str) -> None:
        self.drawn.update(0, completed=share, total=None if share is None else 1.0, text=text)

    def end(self) -> None:
        self.drawn.stop()


def _rich(of: Bar) -> _Rich | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    label, text = (TextColumn(one, markup=False) for one in ("{task.description}", "{task.fields[text]}"))
    console = Console(stderr=True)
    goes = console.is_terminal and not of._stays
    drawn = Progress(label, BarColumn(_WIDTH), text, console=console, transient=goes)
    drawn.add_task(of.label, total=None, text="")
    drawn.start()
    return _Rich(drawn)
