"""Units of work: the batches of each through the model, and their rows onto disk."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline._harvest.data import Batch, Source, size_of
from hookline._harvest.fingerprints import digest
from hookline._harvest.passes import Part, Pass
from hookline._harvest.tokens import Choice
from hookline._harvest.writing import Countdown, Lanes, Staged, Staging
from hookline._kernel import map_tensors, share_tensor
from hookline._store.manifest import Manifest
from hookline._store.places import Place
from hookline._store.writer import Unit
from hookline.errors import BadSample, HooklineError

ON_ERROR = ("raise", "skip")
_LONGEST = 500  # Letters of why a sample was skipped.
MOST_OPEN = 4  # Units on their way at once: no more are lost when the process dies, however slow the disk.
_FATAL = (HooklineError, torch.cuda.OutOfMemoryError, MemoryError)


def _is_fatal(error: Exception) -> bool:
    """Return whether the samples can't have caused an error: torch's handler of signals raises at any line."""
    return isinstance(error, _FATAL) or str(error).startswith("DataLoader worker")


class Told:
    """What is told of the work as it goes on; code that wants to know replaces it."""

    def wrote(self, rows: int, nbytes: int) -> None:
        """So many rows are on disk."""

    def passed(self, samples: int) -> None:
        """So many samples have been through the model."""

    def finished(self, unit: int, committed: bool) -> None:
        """A unit is done; `committed` is False if another was faster."""


class Open:
    """The unit that is being filled: what its record will say."""

    def __init__(self, place: Place, manifest: Manifest, number: int, first: int) -> None:
        self.number = number
        self.first = first  # Where it begins, if nothing is in it.
        self.unit = Unit(place, manifest, number)
        self.samples: list[int] = []  # In the order in which they are stored.
        self.choices: list[list[Choice]] = [[] for _ in manifest.arrays]
        self.skipped: dict[int, str] = {}
        self.inputs = ""

    def add(self, samples: Iterable[int], parts: list[Part]) -> None:
        """Note to which samples the rows of a batch belong."""
        self.samples.extend(samples)
        for choices, part in zip(self.choices, parts, strict=True):
            choices.append(part.choice)

    def skip(self, sample: int, error: BaseException) -> None:
        """Note a sample that has no rows."""
        self.skipped[sample] = f"{type(error).__name__}: {error}"[:_LONGEST]

    def digest(self, batch: Any) -> None:
        """Note what went in."""
        self.inputs = digest(batch, self.inputs)

    def commit(self) -> bool:
        """Finish the files, and the record last."""
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
        """Return the first array whose rows were chosen as those of this one."""
        return next(index for index, others in enumerate(self.choices) if all(map(operator.is_, others, choices)))

    def _write_positions(self, group: int) -> None:
        """Write the positions of rows, unless they count up from 0 in every sample."""
        if any(choice.positions is not None for choice in self.choices[group]):
            self.unit.positions(group, torch.cat([choice.all_positions() for choice in self.choices[group]]))


class Runner:
    """Runs units of a source through a pass, into a place."""

    def __init__(
        self,
        passing: Pass,
        source: Source,
        place: Place,
        manifest: Manifest,
        *,
        on_error: str = "raise",
        told: Told | None = None,
        limit: int = 1 << 29,
        threads: int = 1,
    ) -> None:
        self.passing = passing
        self.source = source
        self.place = place
        self.manifest = manifest
        self.on_error = on_error
        self.told = told or Told()
        self.threads = threads
        self.lanes = Lanes(threads, limit)
        self.turn = 0
        self.staging = Staging()
        self.open: Open | None = None
        self.unfinished: list[Open] = []

    def run(self, units: Iterable[int], size: int, passed: Callable[[int, str], None]) -> None:
        """Run some units, one after the other. What is not finished when something goes wrong leaves nothing behind."""
        try:
            most = _most_open(len(self.manifest.arrays))
            coming = self.source.batches(units, size, passed)
            first = list(itertools.islice(coming, 1))  # Processes that load are started before threads that write.
            with contextlib.closing(coming), self.lanes:
                for number, batch in itertools.chain(first, coming):
                    if self.open is None or self.open.number != number:
                        self._close()
                        self.lanes.until(lambda: len(self.unfinished) < most)
                        self.open = Open(self.place, self.manifest, number, first=_begin(batch))
                        self.unfinished.append(self.open)
                    self._feed(self.open, batch)
                self._close()
                self.lanes.finish()
        finally:
            self.lanes.stop()  # Again, for a Ctrl-C while they were started or ended.
            for unit in self.unfinished:
                unit.unit.discard()

    def _feed(self, unit: Open, batch: Batch) -> None:
        """Run a batch, and give its rows to the threads that write."""
        for sample, failure in batch.failures.items():
            self._refuse(unit, sample, failure)
        if self.source.batch_size is None:  # What was passed over is known by it, when the run goes on.
            self._digest(unit, batch.value)
        if not batch.samples:
            return
        for good, parts in self._through(unit, batch):
            unit.add(good.samples, parts)
            for index, part in enumerate(parts):
                self._send(unit, index, part)
            self.told.passed(len(good.samples))
            del parts

    def _digest(self, unit: Open, given: Any) -> None:
        """Let a thread note what went in; the loader may fill the same memory again by then."""
        staged: dict[int, Staged] = {}

        def copied(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
                return share_tensor(tensor)
            copy = self.staging.copy(tensor.detach())
            staged[id(copy)] = copy
            return copy.tensor

        own = map_tensors(copied, given)

        def note() -> None:
            unit.digest(own)
            for copy in staged.values():
                copy.give_back()

        self.lanes.put(self._lane(0), note, size_of(given))

    def _send(self, unit: Open, index: int, part: Part) -> None:
        """Let a thread write rows."""
        staged = self.staging.copy(part.rows) if isinstance(part.rows, Tensor) else None

        def write() -> None:
            rows = part.arrived() if staged is None else staged.tensor
            unit.unit.append(index, rows)
            self.told.wrote(len(rows), rows.nbytes)
            if staged is not None:
                staged.give_back()

        if staged is not None:
            part = replace(part, rows=staged.tensor)  # What the model made is let go now.
        self.lanes.put(self._lane(index), write, part.nbytes)

    def _lane(self, index: int) -> int:
        """Return who writes an array: another for each unit, so that one may wait for the disk."""
        return (self.turn + index) % self.threads

    def _close(self) -> None:
        """Let the unit be committed when the last of its rows is written."""
        unit = self.open
        if unit is None:
            return

        def commit() -> None:
            self.told.finished(unit.number, unit.commit())
            self.unfinished.remove(unit)

        lanes = {self._lane(index) for index in range(len(self.manifest.arrays))}
        done = Countdown(len(lanes), commit)
        for lane in lanes:
            self.lanes.put(lane, done)
        self.open = None
        self.turn += len(lanes)

    def _through(self, unit: Open, batch: Batch) -> list[tuple[Batch, list[Part]]]:
        """Return the rows of a batch; if the model fails, of its samples one by one."""
        try:
            return [(batch, self._parts(self.passing.run(batch)))]
        except Exception as error:
            if _is_fatal(error):
                raise
            return self._one_by_one(unit, batch, error)

    def _one_by_one(self, unit: Open, batch: Batch, error: Exception) -> list[tuple[Batch, list[Part]]]:
        found, bad = [], 0
        for single in self.source.singles(batch):
            try:
                found.append((single, self._parts(self.passing.run(single))))
            except Exception as failure:
                if _is_fatal(failure):
                    raise
                bad += 1
                for sample in single.samples:
                    self._refuse(unit, sample, failure)
        if not bad:
            raise HooklineError(
                f"the model failed on samples {batch.samples[0]} to {batch.samples[-1]} together, though on none "
                f"of them alone: {type(error).__name__}: {error}"
            ) from error
        return found

    def _refuse(self, unit: Open, sample: int, failure: Exception) -> None:
        """Skip a sample, or raise with its number."""
        if self.on_error == "skip":
            unit.skip(sample, failure)
            self.told.passed(1)
            return
        raise bad_sample(sample, failure) from failure

    def _parts(self, found: dict[str, Part]) -> list[Part]:
        """Return what passed in the order of the arrays; it must be what was there at the first batch."""
        arrays = self.manifest.arrays
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


def _most_open(arrays: int) -> int:
    """Return how many units may be on their way: each has a file for every array, and a process has so many only."""
    try:
        import resource
    except ImportError:  # Windows.
        return MOST_OPEN
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(MOST_OPEN, files // 2 // max(arrays, 1))) if files > 0 else MOST_OPEN


def bad_sample(sample: int, failure: Exception) -> BadSample:
    """Return what is raised because of a sample."""
    error = BadSample(
        f'sample {sample} failed: {type(failure).__name__}: {failure}; on_error="skip" goes on without such samples, '
        "and lists them in store.skipped"
    )
    error.sample = sample
    return error


def _begin(batch: Batch) -> int:
    """Return at which sample a batch begins, also if it has none."""
    return batch.samples.start if isinstance(batch.samples, range) else min([*batch.samples, *batch.failures])
