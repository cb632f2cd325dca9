"""How far a run has come: a bar in a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

from hookline.harvesting.units import Told
from hookline.tables import size

_log = logging.getLogger("hookline")
_EVERY = 30.0  # Seconds between lines in the log.


class Progress(Told):
    """Counts rows, bytes and samples; `shows` is whether anybody looks: None asks whether there is a terminal."""

    def __init__(self, total: int | None, done: int, shows: bool | None) -> None:
        self.total = total
        self.start = done
        self.samples = done
        self.rows = self.nbytes = 0
        self.lost = 0
        self.began = self.spoke = time.monotonic()
        self._lock = threading.Lock()
        self._bar = _bar(total, done) if shows or (shows is None and sys.stderr.isatty()) else None
        self._logs = shows is not False and self._bar is None

    def wrote(self, rows: int, nbytes: int) -> None:
        """Count what is on disk."""
        with self._lock:
            self.rows += rows
            self.nbytes += nbytes

    def passed(self, samples: int) -> None:
        """Count what has been through the model, and show it."""
        self.samples += samples
        if self._bar is not None:
            self._bar.update(0, completed=self.samples, text=self.line())
        elif self._logs and time.monotonic() - self.spoke > _EVERY:
            self.spoke = time.monotonic()
            _log.info("harvest: %s", self.line())

    def finished(self, unit: int, committed: bool) -> None:
        """Count the units with which another process was faster."""
        self.lost += not committed

    def line(self) -> str:
        """Return rows, bytes, rate and time left."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        parts = [f"{self.rows:,} rows", size(self.nbytes), f"{size(int(self.nbytes / seconds))}/s"]
        if self.total is not None:
            parts.insert(0, f"{self.samples:,} of {self.total:,} samples")
            rate = (self.samples - self.start) / seconds
            parts += [f"{clock((self.total - self.samples) / rate)} left"] if rate else []
        else:
            parts.insert(0, f"{self.samples:,} samples")
        return ", ".join(parts)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.update(0, completed=self.samples, text=self.line())
            self._bar.stop()
        if self._logs:
            _log.info("harvest: %s, %s in all", self.line(), clock(time.monotonic() - self.began))


def clock(seconds: float) -> str:
    """Return a time as people write it.

    >>> clock(75), clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(total: int | None, done: int) -> Any:
    """Return a bar on stderr, if rich is there to draw it."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    columns = (TextColumn("harvest"), BarColumn(), TextColumn("{task.fields[text]}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=False)
    bar.add_task("harvest", total=total, completed=done, text="")
    return bar
