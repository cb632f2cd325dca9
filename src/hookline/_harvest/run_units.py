"""Run units of work: run their batches through the model, write the rows in threads, show the progress."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline._harvest.data import Batch, Source, bytes_in
from hookline._harvest.rows_and_padding import Choice
from hookline._harvest.run_batch import BatchRows, BatchRunner, bad_sample, is_fatal, run_singly
from hookline._harvest.writer_threads import BufferPool, Countdown, PooledCopy, WriterThreads
from hookline._jobs.fingerprints import digest
from hookline._kernel import map_tensors, offload, share_tensor
from hookline._progress import Bar, clock
from hookline._store.disk_format import Manifest
from hookline._store.storage import Storage
from hookline._store.writer import Unit
from hookline._tables import size
from hookline.errors import HooklineError

_log = logging.getLogger("hookline")
_EVERY = 30.0  # Seconds between lines in the log.
_LONGEST = 500  # Characters of a sample's error that are kept in the record.
_AHEAD = 64 << 20  # Bytes of rows that may be on their way from a GPU, unless they are of two batches.
MOST_OPEN = 4  # Unfinished units at once. A crash loses no more than these, however slow the disk is.


class UnitRunner:
    """Runs the batches of units through the model, and writes their rows to a storage."""

    def __init__(
        self,
        batch_runner: BatchRunner,
        source: Source,
        storage: Storage,
        manifest: Manifest,
        *,
        on_error: str = "raise",
        listener: Listener | None = None,
        limit: int = 1 << 29,
        threads: int = 1,
    ) -> None:
        self.batch_runner = batch_runner
        self.source = source
        self.storage = storage
        self.manifest = manifest
        self.on_error = on_error
        self.listener = listener or Listener()
        self.threads = threads
        self.writers = WriterThreads(threads, limit)
        self.turn = 0
        self.buffers = BufferPool()
        self.leaving: deque[tuple[int, list[weakref.ref[offload.Copy]]]] = deque()  # Rows on their way, by batch.
        self.leaving_bytes = 0
        self.open: OpenUnit | None = None
        self.unfinished: list[OpenUnit] = []

    def run(
        self,
        units: Iterable[int],
        size: int,
        passed: Callable[[int, str], None],
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Run units one after the other. After an error, unfinished units leave no files behind.

        `at_end` is called after the last batch, while its rows are on their way to the disk.
        """
        try:
            most = _most_open(len(self.manifest.arrays))
            coming = self.source.batches(units, size, passed)
            first = list(itertools.islice(coming, 1))  # Starts the loader's processes before the writer threads.
            with contextlib.closing(coming), self.writers:
                for number, batch in itertools.chain(first, coming):
                    if self.open is None or self.open.number != number:
                        self._close()
                        self.writers.until(lambda: len(self.unfinished) < most)
                        self.open = OpenUnit(self.storage, self.manifest, number, first=_begin(batch))
                        self.unfinished.append(self.open)
                    self._feed(self.open, batch)
                self._close()
                at_end()
                self.writers.finish()
        finally:
            self.writers.stop()  # Runs again if Ctrl-C interrupted the start or the first stop.
            for unit in self.unfinished:
                unit.unit.discard()

    def _feed(self, unit: OpenUnit, batch: Batch) -> None:
        """Run a batch, and give its rows to the writer threads."""
        for sample, failure in batch.failures.items():
            self._refuse(unit, sample, failure)
        if self.source.batch_size is None:  # A resumed run compares the batches that it skips.
            self._digest(unit, batch.value)
        if not batch.samples:
            return
        for good, parts in self._through(unit, batch):
            unit.add(good.samples, parts)
            for index, part in enumerate(parts):
                self._send(unit, index, part)
            self.listener.passed(len(good.samples))
            self._limit_leaving(parts)
            del parts

    def _digest(self, unit: OpenUnit, given: Any) -> None:
        """Compute the digest of a batch in a thread. The thread gets a copy, since the loader may reuse the memory."""
        staged: dict[int, PooledCopy] = {}

        def copied(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
                return share_tensor(tensor)
            copy = self.buffers.copy(tensor.detach())
            staged[id(copy)] = copy
            return copy.tensor

        own = map_tensors(copied, given)

        def note() -> None:
            unit.digest(own)
            for copy in staged.values():
                copy.give_back()

        self.writers.put(self._writer_of(0), note, bytes_in(given))

    def _send(self, unit: OpenUnit, index: int, part: BatchRows) -> None:
        """Write rows in a thread. Rows on the CPU are copied, so that the model's tensor is freed now."""
        staged = self.buffers.copy(part.rows) if isinstance(part.rows, Tensor) else None

        def write() -> None:
            rows = part.arrived() if staged is None else staged.tensor
            unit.unit.append(index, rows)
            self.listener.wrote(len(rows), rows.nbytes)
            if staged is not None:
                staged.give_back()

        if staged is not None:
            part = replace(part, rows=staged.tensor)
        self.writers.put(self._writer_of(index), write, part.nbytes)

    def _limit_leaving(self, parts: list[BatchRows]) -> None:
        """Wait until a GPU is at most some batches behind: each takes pinned memory, which is slow to allocate."""
        copies = [weakref.ref(part.rows) for part in parts if isinstance(part.rows, offload.Copy)]
        nbytes = sum(part.nbytes for part in parts)
        self.leaving.append((nbytes, copies))
        self.leaving_bytes += nbytes
        while self.leaving_bytes > _AHEAD and len(self.leaving) > 2:
            nbytes, copies = self.leaving.popleft()
            self.leaving_bytes -= nbytes
            for copy in filter(None, (copy() for copy in copies)):  # A copy that is gone was written.
                copy.arrive()

    def _writer_of(self, index: int) -> int:
        """Return the thread that writes an array. It changes with the unit: the last one's may wait for the disk."""
        return (self.turn + index) % self.threads

    def _close(self) -> None:
        """Commit the open unit once the last of its rows is written."""
        unit = self.open
        if unit is None:
            return

        def commit() -> None:
            self.listener.finished(unit.number, unit.commit())
            self.unfinished.remove(unit)

        writers = {self._writer_of(index) for index in range(len(self.manifest.arrays))}
        done = Countdown(len(writers), commit)
        for writer in writers:
            self.writers.put(writer, done)
        self.open = None
        self.turn += len(writers)

    def _through(self, unit: OpenUnit, batch: Batch) -> list[tuple[Batch, list[BatchRows]]]:
        """Return the batches that ran, each with its rows: this one, or its samples alone if the model fails on it."""
        try:
            return [(batch, self._run(batch))]
        except Exception as error:
            if is_fatal(error):
                raise
            refuse = functools.partial(self._refuse, unit)
            return run_singly(batch, self.source.singles(batch), self._run, refuse, error)

    def _refuse(self, unit: OpenUnit, sample: int, failure: Exception) -> None:
        """Skip a sample, or raise an error that names it."""
        if self.on_error == "skip":
            unit.skip(sample, failure)
            self.listener.passed(1)
            return
        raise bad_sample(sample, failure) from failure

    def _run(self, batch: Batch) -> list[BatchRows]:
        """Return the rows of a batch in the order of the arrays. Raise if the arrays differ from the first batch's."""
        found, arrays = self.batch_runner.run(batch), self.manifest.arrays
        if found.keys() != {array.name for array in arrays}:
            missing = [array.name for array in arrays if array.name not in found]
            more = [name for name in found if name not in {array.name for array in arrays}]
            what = f"{missing[0]!r} did not fire" if missing else f"{more[0]!r} fired, though not at the first"
            raise HooklineError(f"the batches differ: in this one {what}; harvest sites that every batch passes")
        parts = [found[array.name] for array in arrays]
        for array, part in zip(arrays, parts, strict=True):
            if part.array(array.name) != array:
                raise HooklineError(
                    f"the batches differ: this one has {part.array(array.name)}, the first {array}; sequences of "
                    'several lengths need rows="tokens", others transform='
                )
        return parts


class OpenUnit:
    """A unit that is being written, and the contents of its record."""

    def __init__(self, storage: Storage, manifest: Manifest, number: int, first: int) -> None:
        self.number = number
        self.first = first  # The first sample number, for a unit that stays empty.
        self.unit = Unit(storage, manifest, number)
        self.samples: list[int] = []  # The sample numbers, in the order in which they are stored.
        self.choices: list[list[Choice]] = [[] for _ in manifest.arrays]
        self.skipped: dict[int, str] = {}
        self.inputs = ""

    def add(self, samples: Iterable[int], parts: list[BatchRows]) -> None:
        """Note the samples of a batch, and which of their rows are kept."""
        self.samples.extend(samples)
        for choices, part in zip(self.choices, parts, strict=True):
            choices.append(part.choice)

    def skip(self, sample: int, error: BaseException) -> None:
        """Note a sample that failed and has no rows."""
        self.skipped[sample] = f"{type(error).__name__}: {error}"[:_LONGEST]

    def digest(self, batch: Any) -> None:
        """Add a batch to the digest of the inputs."""
        self.inputs = digest(batch, self.inputs)

    def commit(self) -> bool:
        """Finish the files, then write the record; return False if another process was faster."""
        groups = [self._group(choices) for choices in self.choices]
        lengths = {group: [count for one in self.choices[group] for count in one.counts] for group in set(groups)}
        for group in lengths:
            self._write_positions(group)
        numbers = sorted([*self.samples, *self.skipped]) or [self.first]
        return self.unit.commit(
            first=numbers[0],
            samples=len(self.samples) + len(self.skipped),
            lengths=[lengths[group] for group in groups],
            order=None if self.samples == sorted(self.samples) else [one - numbers[0] for one in self.samples],
            skipped=self.skipped,
            inputs=self.inputs,
            groups=groups,
        )

    def _group(self, choices: list[Choice]) -> int:
        """Return the number of the first array with the same choices of rows."""
        return next(index for index, others in enumerate(self.choices) if all(map(operator.is_, others, choices)))

    def _write_positions(self, group: int) -> None:
        """Write the positions of rows, unless they are 0, 1, ... in every sample."""
        if any(choice.positions is not None for choice in self.choices[group]):
            self.unit.positions(group, torch.cat([choice.all_positions() for choice in self.choices[group]]))


def _most_open(arrays: int) -> int:
    """Return how many units may be open at once. Each has a file for every array, and open files are limited."""
    try:
        import resource
    except ImportError:  # Windows.
        return MOST_OPEN
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(MOST_OPEN, files // 2 // max(arrays, 1))) if files > 0 else MOST_OPEN


def _begin(batch: Batch) -> int:
    """Return the first sample number of a batch, which may be empty."""
    return batch.samples.start if isinstance(batch.samples, range) else min([*batch.samples, *batch.failures])


class Listener:
    """A listener that is notified as the work proceeds. This one does nothing; subclasses count or show progress."""

    def wrote(self, rows: int, nbytes: int) -> None:
        """Called when rows are on disk."""

    def passed(self, samples: int) -> None:
        """Called when samples have been through the model."""

    def finished(self, unit: int, committed: bool) -> None:
        """Called when a unit is done. `committed` is False if another process was faster."""


class Counts(Listener):
    """Counts the units, samples, rows and bytes that are done."""

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
        """Count the units that were committed, and those that another process finished first."""
        self.committed += committed
        self.lost += not committed


class Progress(Counts):
    """Counts, and shows a progress bar or writes log lines. `shows=None` means a bar in a terminal, else log lines."""

    def __init__(self, total: int | None, done: int, shows: bool | None) -> None:
        super().__init__()
        self._logged = time.monotonic()
        self._bar = Bar("harvest", total, done, shows, stays=True, unit="samples")
        self._logs = shows is not False and not self._bar.shows

    def passed(self, samples: int) -> None:
        """Count the samples that have been through the model, and show the progress."""
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
