"""How far a harvest has come: counts of rows, bytes and samples, a bar in a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import threading
import time

from hookline._progress import Bar, clock
from hookline._tables import size

_log = logging.getLogger("hookline")
_EVERY = 30.0  # Seconds between lines in the log.


class Listener:
    """Hears about the work as it goes on. This one does nothing; subclasses count or show."""

    def wrote(self, rows: int, nbytes: int) -> None:
        """Take note of rows that are on disk now."""

    def passed(self, samples: int) -> None:
        """Take note of samples that have been through the model."""

    def finished(self, unit: int, committed: bool) -> None:
        """Take note that a unit is done; `committed` is False if another process was faster."""


class Counts(Listener):
    """Counts what was done."""

    def __init__(self) -> None:
        self.committed = self.lost = self.samples = self.rows = self.nbytes = 0
        self._lock = threading.Lock()  # Several threads write.

    def wrote(self, rows: int, nbytes: int) -> None:
        """Count the rows and bytes on disk."""
        with self._lock:
            self.rows += rows
            self.nbytes += nbytes

    def passed(self, samples: int) -> None:
        """Count the samples that have been through the model."""
        self.samples += samples

    def finished(self, unit: int, committed: bool) -> None:
        """Count the units that were committed, and those with which another process was faster."""
        self.committed += committed
        self.lost += not committed


class Progress(Counts):
    """Counts, and shows them. `shows` says whether anybody looks; None shows a bar if there is a terminal."""

    def __init__(self, total: int | None, done: int, shows: bool | None) -> None:
        super().__init__()
        self._logged = time.monotonic()
        self._bar = Bar("harvest", total, done, shows, stays=True, unit="samples")
        self._logs = shows is not False and not self._bar.shows

    def passed(self, samples: int) -> None:
        """Count the samples that have been through the model, and show how far it is."""
        super().passed(samples)
        self._bar.advance(samples, self._written())
        if self._logs and time.monotonic() - self._logged > _EVERY:
            self._logged = time.monotonic()
            _log.info("harvest: %s", self.line())

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
