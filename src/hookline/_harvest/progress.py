"""How far a run has come: a bar in a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import threading
import time

from hookline._harvest.units import Told
from hookline._progress import Bar, clock
from hookline._tables import size

_log = logging.getLogger("hookline")
_EVERY = 30.0  # Seconds between lines in the log.


class Progress(Told):
    """Counts rows, bytes and samples; `shows` is whether anybody looks: None asks whether there is a terminal."""

    def __init__(self, total: int | None, done: int, shows: bool | None) -> None:
        self.rows = self.nbytes = 0
        self.lost = 0
        self.spoke = time.monotonic()
        self._lock = threading.Lock()
        self._bar = Bar("harvest", total, done, shows, stays=True, unit="samples")
        self._logs = shows is not False and not self._bar.shows

    def wrote(self, rows: int, nbytes: int) -> None:
        """Count what is on disk."""
        with self._lock:
            self.rows += rows
            self.nbytes += nbytes

    def passed(self, samples: int) -> None:
        """Count what has been through the model, and show it."""
        self._bar.advance(samples, self._written())
        if self._logs and time.monotonic() - self.spoke > _EVERY:
            self.spoke = time.monotonic()
            _log.info("harvest: %s", self.line())

    def finished(self, unit: int, committed: bool) -> None:
        """Count the units with which another process was faster."""
        self.lost += not committed

    def line(self) -> str:
        """Return samples, rate, time left, rows and bytes."""
        return f"{self._bar.figures()}, {self._written()}"

    def _written(self) -> str:
        seconds = max(time.monotonic() - self._bar.began, 1e-9)
        return f"{self.rows:,} rows, {size(self.nbytes)}, {size(int(self.nbytes / seconds))}/s"

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.advance(0, self._written())
        self._bar.__exit__()
        if self._logs:
            _log.info("harvest: %s, %s in all", self.line(), clock(time.monotonic() - self._bar.began))
