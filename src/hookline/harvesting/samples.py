"""Samples that can be had by number: a map-style dataset, of which any unit can be had by itself."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.harvesting.batches import Batch
from hookline.harvesting.digests import digest
from hookline.harvesting.models import function_text

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SPREAD = 32  # Samples of a dataset by which it is known again.


class Columns:
    """Tensors (or lists) of the same length as a dataset: a sample is a dict with one of each."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = dict(columns)
        if len({len(column) for column in self.columns.values()}) != 1:
            sizes = ", ".join(f"{name!r} {len(column)}" for name, column in self.columns.items())
            raise HooklineError(f"all of a mapping must hold as many samples, but these hold: {sizes or 'nothing'}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


class Loaded:
    """A dataset that gives a batch of samples with those that failed, instead of failing."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: list[int]) -> Batch:
        try:
            many = getattr(self.dataset, "__getitems__", None)
            found = many(numbers) if many is not None else [self.dataset[number] for number in numbers]
            return Batch(numbers, self.collate(found))
        except Exception as error:
            return self._one_by_one(numbers, error)

    def _one_by_one(self, numbers: list[int], error: Exception) -> Batch:
        found, failures = {}, {}
        for number in numbers:
            try:
                found[number] = self.dataset[number]
                self.collate([found[number]])
            except Exception as failure:
                found.pop(number, None)
                failures[number] = _that_travels(failure)
        if not failures:
            raise HooklineError(
                f"samples {numbers[0]} to {numbers[-1]} don't go into one batch: {error}; give collate=, a function "
                "from a list of samples to a batch"
            ) from error
        return Batch(list(found), self.collate(list(found.values())) if found else None, failures)


def _that_travels(failure: Exception) -> Exception:
    """Return an exception, of a process that loads as one of the same name that surely arrives where the model is.

    What can't be pickled would be dropped on the way, and waited for there for ever.
    """
    from torch.utils.data import get_worker_info

    if get_worker_info() is None:
        return failure
    try:
        if type(pickle.loads(pickle.dumps(failure))) is type(failure):
            return failure
    except Exception:  # Whatever its class makes of it.
        pass
    return RuntimeError(f"{type(failure).__name__}: {failure}")


class Samples:
    """A map-style dataset. Batches are made inside a unit, the same each time, in every process that asks."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None,
        sort_by_length: bool = False,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        from torch.utils.data import default_collate

        if type(batch_size) is not int or batch_size < 1:
            raise HooklineError(f"batch_size is a number of samples from 1 on, not {batch_size!r}")
        self.batch_size: int | None = batch_size
        self._dataset = dataset
        self._loaded = Loaded(dataset, collate or default_collate)
        self._sorted = sort_by_length
        self._workers = _settings(loader)
        self.samples: int | None = len(dataset)
        if loader is not None and loader.drop_last:
            self.samples = len(dataset) // batch_size * batch_size
        if not self.samples:
            raise HooklineError("there are no samples to harvest: the dataset is empty")

    def known(self) -> dict[str, Any]:
        """Return the dataset's own fingerprint, or some of its samples'."""
        told = {"samples": self.samples, "collate": function_text(_alone(self._loaded.collate))}
        own = getattr(self._dataset, "fingerprint", None) or getattr(self._dataset, "_fingerprint", None)
        if own is not None:
            return {**told, "fingerprint": str(own() if callable(own) else own)}
        return {**told, "digest": digest([self._safe(number) for number in self._spread()])}

    def _spread(self) -> list[int]:
        """Return the numbers of some samples from all over the data."""
        assert self.samples is not None
        return sorted({index * (self.samples - 1) // (SPREAD - 1) for index in range(SPREAD)})

    def _safe(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except Exception:  # It will be met again, and told of then.
            return None

    def first(self) -> Batch:
        """Return the first batch of which something could be loaded."""
        assert self.samples is not None
        for start in range(0, self.samples, self.batch_size or 1):
            batch = self._loaded.__getitems__(list(range(start, min(start + (self.batch_size or 1), self.samples))))
            if batch.samples:
                return batch
        number, failure = next(iter(batch.failures.items()))
        raise HooklineError(f"no sample could be loaded; sample {number}: {failure!r}") from failure

    def units(self, size: int) -> int:
        """Return how many units of so many samples there are."""
        assert self.samples is not None
        return -(-self.samples // size)

    def count(self, unit: int, size: int) -> int:
        """Return how many batches a unit has."""
        assert self.samples is not None
        return -(-min(size, self.samples - unit * size) // (self.batch_size or 1))

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Return the batches of some units, loaded as the user's own loader would."""
        from torch.utils.data import DataLoader

        coming: deque[int] = deque()
        order = _Order(units, lambda unit: self._numbers(unit, size), coming)
        loader: DataLoader[Any] = DataLoader(self._loaded, batch_sampler=order, collate_fn=_itself, **self._workers)  # type: ignore[arg-type]
        try:
            for batch in loader:
                yield coming.popleft(), batch
        except (ConnectionError, EOFError) as error:  # torch was just reading from that process.
            if str(error).startswith("Caught "):  # An error in the worker, such as of worker_init_fn.
                raise
            raise RuntimeError(
                f"a DataLoader worker died while a batch was read from it ({error!r}); "
                "once its cause is mended, the same call goes on where it stopped"
            ) from error

    def _numbers(self, unit: int, size: int) -> Iterator[list[int]]:
        """Return the numbers of a unit's samples, a list for each batch."""
        assert self.samples is not None
        numbers = list(range(unit * size, min((unit + 1) * size, self.samples)))
        if self._sorted:
            numbers.sort(key=lambda number: -self._length(number))  # A batch too large for memory comes first.
        step = self.batch_size or 1
        return iter([numbers[start : start + step] for start in range(0, len(numbers), step)])

    def _length(self, number: int) -> int:
        sample = self._safe(number)
        if isinstance(sample, Mapping) and isinstance(sample.get("attention_mask"), Tensor):
            return int(sample["attention_mask"].sum())
        length = getattr(self._dataset, "length", None)
        if callable(length) and sample is not None:
            return int(length(sample))
        if isinstance(sample, Mapping):
            sample = sample.get("input_ids", next(iter(sample.values()), None))
        elif isinstance(sample, (tuple, list)) and sample and hasattr(sample[0], "__len__"):
            sample = sample[0]
        return len(sample) if sample is not None and hasattr(sample, "__len__") else 0

    def compare(self, size: int, passed: Callable[[int, str], None]) -> None:
        """Do nothing: samples from all over the data are known already."""

    def longer(self, first: int) -> float:
        """Return how much longer samples are than the first ones, by those from all over the data."""
        own = [self._length(number) for number in range(min(first, SPREAD))]
        spread = [self._length(number) for number in self._spread()]
        return sum(spread) / len(spread) * len(own) / sum(own) if sum(own) else 1.0

    def singles(self, batch: Batch) -> list[Batch]:
        """Return each sample of a batch as one of its own."""
        return [self._loaded.__getitems__([number]) for number in batch.samples]


class _Order:
    """The batches of the units that come: which, is asked only when the loader wants to load them."""

    def __init__(self, units: Iterable[int], numbers: Callable[[int], Iterator[list[int]]], coming: deque[int]) -> None:
        self.units = units
        self.numbers = numbers
        self.coming = coming

    def __iter__(self) -> Iterator[list[int]]:
        for unit in self.units:
            for numbers in self.numbers(unit):
                self.coming.append(unit)
                yield numbers


def _alone(function: Any) -> Any:
    """Return a method without its object: a dataset is known by its samples."""
    return getattr(function, "__func__", function)


def _itself(batch: Batch) -> Batch:
    return batch


def _settings(loader: DataLoader[Any] | None) -> dict[str, Any]:
    """Return how the user's loader loads."""
    own = {"generator": torch.Generator()}  # Else the loader would draw a seed from everybody's.
    if loader is None:
        return own
    names = ["num_workers", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["prefetch_factor"] if loader.num_workers else []
    return {**own, **{name: getattr(loader, name) for name in names}}
