"""The data of a harvest as numbered samples, in batches, in units.

`source_of` turns the `data` argument into a `Source`: `Batches` for an iterable of batches, `NumberedSamples` for a
dataset, a list, tensors, or a DataLoader that goes through its dataset in order.
"""

from __future__ import annotations

import itertools
import operator
import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hookline._jobs.fingerprints import digest, function_text
from hookline._kernel import leaves, map_tensors, share_tensor
from hookline.errors import HooklineError, warn

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SAMPLES_COMPARED = 32  # How many samples of a dataset a resumed run compares.


@dataclass
class Batch:
    """Some samples, collated for the model, and the errors of samples that could not be loaded (`failures`)."""

    samples: Sequence[int]  # The sample numbers, in the order of the batch.
    value: Any
    failures: dict[int, Exception] = field(default_factory=dict)  # By sample number.


class Source(Protocol):
    """Numbered samples, divided into units of a given size: a number of samples, or of batches for an iterable."""

    batch_size: int | None  # None if the size of a unit is a number of batches.
    samples: int | None  # The number of samples, or None if it is unknown.

    def known(self) -> dict[str, Any]:
        """Return the facts that identify the data. A resumed run compares them."""

    def first(self) -> Batch:
        """Return the first batch. `batches` yields it again, even if the data is an iterator."""

    def units(self, size: int) -> int | None:
        """Return the number of units of this size, or None if it is unknown."""

    def count(self, unit: int, size: int) -> int:
        """Return the number of batches in a unit. If the length of the data is unknown, this is `size`."""

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Yield (unit, batch) for every batch of some units.

        `passed` is called with the number and digest of each unit that had to be read to skip it.
        """

    def singles(self, batch: Batch) -> list[Batch]:
        """Return each sample of a batch as a batch of one; if the batch can't be split, the batch itself."""

    def compare(self, size: int, passed: Callable[[int, str], None]) -> None:
        """Read data that can't be compared otherwise, and call `passed` with the number and digest of every unit."""

    def longer(self, first: int) -> float:
        """Return how many times longer samples are on average than the first few, estimated from a selection."""


def source_of(
    data: Any, batch_size: int | None, collate: Callable[[list[Any]], Any] | None, sort_by_length: bool
) -> Source:
    """Return the `data` of a harvest as numbered samples."""
    from torch.utils.data import DataLoader

    if isinstance(data, (str, bytes, os.PathLike)):
        raise HooklineError(f"data= is {data!r:.60}; for the texts of a file give hl.Texts(path, tokenizer)")
    if callable(data) and not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        made = data()
        data = RepeatedIterable(data, made) if isinstance(made, Iterator) else made
    if isinstance(data, DataLoader):
        return _source_of_loader(data, batch_size, collate, sort_by_length)
    if batch_size is None and hasattr(data, "collate") and hasattr(data, "fingerprint"):
        batch_size = getattr(data, "batch_size", None)
    if batch_size is not None:
        if isinstance(data, Mapping):
            data = ColumnsDataset(data)
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise HooklineError(
                f"batch_size= needs numbered samples (a dataset, a list, a tensor), but {type(data).__name__} has no "
                "length and index; give an iterable of batches, without batch_size"
            )
        return NumberedSamples(data, batch_size, collate or getattr(data, "collate", None), sort_by_length)
    if isinstance(data, (Tensor, Mapping)) or not hasattr(data, "__iter__"):
        raise HooklineError(
            f"{type(data).__name__} is not an iterable of batches; to batch its samples, give batch_size="
        )
    if sort_by_length or collate is not None:
        raise HooklineError(
            "sort_by_length and collate make batches of samples; give a dataset and batch_size= for that"
        )
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    if isinstance(first, Tensor) and first.dim() == 1 and first.is_floating_point():
        warn(
            f"each batch is a tensor of shape {tuple(first.shape)}, taken for {len(first)} samples of one number each; "
            "if it is one sample, give batch_size= to make batches of them"
        )
    return Batches(data)


def _source_of_loader(
    loader: DataLoader[Any], batch_size: int | None, collate: Callable[[list[Any]], Any] | None, sort_by_length: bool
) -> Source:
    """Return the dataset if the DataLoader goes through it in order; otherwise the loader's batches as they come."""
    from torch.utils.data import (
        BatchSampler,
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        raise HooklineError("the loader shuffles, so its samples could not be found again; harvest with shuffle=False "
                            "and shuffle the store: store.dataset(..., shuffle=True)")  # fmt: skip
    if isinstance(sampler, DistributedSampler):
        raise HooklineError("DistributedSampler repeats samples so that all ranks get equally many; leave it out: the "
                            "ranks of a harvest share the units by themselves")  # fmt: skip
    is_plain = type(loader.batch_sampler) is BatchSampler and type(sampler) is SequentialSampler
    if is_plain and loader.batch_size is not None and getattr(sampler, "data_source", None) is loader.dataset:
        if batch_size not in (None, loader.batch_size):
            raise HooklineError(
                f"batch_size={batch_size!r}, but the loader makes batches of {loader.batch_size}; leave batch_size= "
                "out, or make the loader with it"
            )
        return NumberedSamples(loader.dataset, loader.batch_size, collate or loader.collate_fn, sort_by_length, loader)
    if sort_by_length or collate is not None or batch_size is not None:
        raise HooklineError("a loader with batches of its own takes no batch_size, collate or sort_by_length; give its "
                            "dataset instead")  # fmt: skip
    if not _counts_up(loader, sampler):
        warn(
            "the loader has an order of its own, so samples are numbered 0, 1, ... as they come, not by their place in "
            "its dataset; to number them by that place, harvest the dataset with batch_size=; to number them as they "
            "come without this warning, give `lambda: iter(loader)`"
        )
    return Batches(loader)


def _counts_up(loader: DataLoader[Any], sampler: Any) -> bool:
    """Return True if a loader yields samples 0, 1, 2, ... of its dataset, or if its samples have no numbers."""
    from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

    if isinstance(loader.dataset, IterableDataset):
        return True
    batches = loader.batch_sampler
    if isinstance(batches, Sequence):
        order = [number for numbers in batches for number in numbers]
    elif batches is None or type(batches) is BatchSampler:
        if type(sampler) is SequentialSampler:
            return True
        order = list(sampler) if isinstance(sampler, Sequence) else []
    else:
        order = []  # Not iterated: a sampler may draw random numbers, and may give another order next time.
    return bool(order) and order == list(range(len(order)))


class Batches:
    """Any iterable of batches. Units are counted in batches. An iterator can be read only once."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batch_size: int | None = None
        self.samples: int | None = None
        self._given = batches
        self._is_iterator = isinstance(batches, Iterator)
        self._peeked: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._count = self._length = length_of(batches)
        self._digest = ""  # The digest of the first batch.

    def known(self) -> dict[str, Any]:
        """Return the digest of the first batch and the number of batches.

        A resumed run compares the other batches as it skips them.
        """
        return {"first": self._first(), "batches": self._length}

    def _first(self) -> str:
        if not self._digest:
            self._digest = digest(self.first().value)
        return self._digest

    def first(self) -> Batch:
        """Return the first batch."""
        if not self._peeked:
            self._rest = iter(self._given)
            self._peeked = list(itertools.islice(self._rest, 1))
            self._rest = self._rest if self._is_iterator else None  # Dropping a loader's iterator ends its workers.
        if not self._peeked:
            raise HooklineError("there are no batches to harvest; if the data is an iterator, it may be used up")
        return Batch(range(samples_in(self._peeked[0])), self._peeked[0])

    def units(self, size: int) -> int | None:
        """Return the number of units, or None if it is unknown."""
        return None if self._count is None else -(-self._count // size)

    def count(self, unit: int, size: int) -> int:
        """Return the number of batches in a unit."""
        return size if self._count is None else min(size, self._count - unit * size)

    def _pass(self) -> Iterator[tuple[int, Batch]]:
        """Yield all batches once, each with its number."""
        if self._is_iterator and self._rest is None:
            raise HooklineError("the iterator of batches has been used up; give something that can be iterated again "
                                "(a list, a DataLoader, a dataset), or make it again")  # fmt: skip
        again = itertools.chain(self._peeked, self._rest or ()) if self._is_iterator else iter(self._given)
        if self._is_iterator:
            self._peeked, self._rest = [], None
        first, number = 0, -1
        for number, value in enumerate(again):
            if number == 0 and self._digest and digest(value) != self._digest:
                raise HooklineError("the data give other batches each time they are iterated; give them in a fixed "
                                    "order, or as an iterator (iter(data)), which is read once")  # fmt: skip
            count = samples_in(value)
            yield number, Batch(range(first, first + count), value)
            first += count
        self._check_length(number + 1)
        self._count = number + 1

    def _check_length(self, found: int, more: bool = False) -> None:
        """Refuse data with more or fewer batches than len() says: units would be missing, or would never be done."""
        if self._length is not None and (more or found < self._length):
            came = f"more than {found}" if more else found
            raise HooklineError(f"len() of the data is {self._length}, but {came} batches came; fix len(), or give an "
                                "iterator (iter(data)), which has no length")  # fmt: skip

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Yield the batches of some units. Going back to an earlier unit reads the data from the start again."""
        coming = self._pass()
        ahead = next(coming, None)
        for unit in units:
            if ahead is None or ahead[0] > unit * size:
                if unit >= (self.units(size) or unit + 1):
                    return  # The data has ended.
                coming = self._pass()
                ahead = next(coming, None)
            text = ""
            while ahead is not None and ahead[0] < unit * size:
                text = digest(ahead[1].value, text)
                if (ahead[0] + 1) % size == 0:
                    passed(ahead[0] // size, text)
                    text = ""
                ahead = next(coming, None)
            if ahead is None:
                return
            while ahead is not None and ahead[0] < (unit + 1) * size:
                yield unit, ahead[1]
                ahead = next(coming, None)
            if ahead is not None and ahead[0] >= (self._length or ahead[0] + 1):
                self._check_length(self._length or 0, more=True)

    def longer(self, first: int) -> float:
        """Return 1: the length of samples is not known in advance."""
        return 1.0

    def compare(self, size: int, passed: Callable[[int, str], None]) -> None:
        """Read all batches, and call `passed` with the number and digest of every unit."""
        text, unit = "", -1
        for number, batch in self._pass():
            unit, text = number // size, digest(batch.value, text)
            if (number + 1) % size == 0:
                passed(unit, text)
                text = ""
        if text:
            passed(unit, text)

    def singles(self, batch: Batch) -> list[Batch]:
        """Return each sample as a batch of one if the batch is the first dimension of every tensor; else the batch."""
        count = len(batch.samples)
        if isinstance(batch.value, (list, tuple)) and not leaves(batch.value):
            return [Batch([number], batch.value[index : index + 1]) for index, number in enumerate(batch.samples)]
        tensors = leaves(batch.value)
        others = {size for tensor in tensors for size in tensor.shape[1:]}
        # If another dimension is as long as the batch, a vector of that length may be something else: positions, say.
        is_doubtful = count in others and any(tensor.dim() == 1 for tensor in tensors)
        if is_doubtful or any(tensor.dim() == 0 or len(tensor) != count for tensor in tensors):
            return [batch]
        return [
            Batch([number], map_tensors(operator.itemgetter(slice(index, index + 1)), batch.value))
            for index, number in enumerate(batch.samples)
        ]


class RepeatedIterable:
    """An iterable of batches that calls a function for each pass. `made` is the result of the first call."""

    def __init__(self, function: Callable[[], Iterable[Any]], made: Iterable[Any]) -> None:
        self.function = function
        self.made = [made]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made.pop() if self.made else self.function())


def length_of(batches: Any) -> int | None:
    """Return the number of batches, or None if it is not certain: len() of an IterableDataset is only a guess."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(batches, "dataset", batches), IterableDataset):
        return None
    try:
        return len(batches)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def samples_in(value: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, or the length of a list."""
    tensors = leaves(value)
    if tensors and tensors[0].dim():
        return len(tensors[0])
    if isinstance(value, (list, tuple)) and value and not tensors:
        return len(value)
    raise HooklineError(
        f"a batch holds tensors with samples in the first dimension, or is a list of samples; this is {value!r:.80}"
    )


class NumberedSamples:
    """A map-style dataset. A unit has the same batches in every pass and in every process."""

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
        self._loaded = FailureTolerantDataset(dataset, collate or default_collate)
        self._sorted = sort_by_length
        self._workers = _loader_settings(loader)
        self.samples: int | None = len(dataset)
        if loader is not None and loader.drop_last:
            self.samples = len(dataset) // batch_size * batch_size
        if not self.samples:
            raise HooklineError("there are no samples to harvest: the dataset is empty")

    def known(self) -> dict[str, Any]:
        """Return the number of samples, `collate`, and the dataset's fingerprint or a digest of some samples."""
        known = {"samples": self.samples, "collate": function_text(_without_object(self._loaded.collate))}
        own = getattr(self._dataset, "fingerprint", None) or getattr(self._dataset, "_fingerprint", None)
        if own is not None:
            return {**known, "fingerprint": str(own() if callable(own) else own)}
        return {**known, "digest": digest([self._safe(number) for number in self._spread()])}

    def _spread(self) -> list[int]:
        """Return the numbers of up to `SAMPLES_COMPARED` samples, evenly spread over the data."""
        assert self.samples is not None
        return sorted({index * (self.samples - 1) // (SAMPLES_COMPARED - 1) for index in range(SAMPLES_COMPARED)})

    def _safe(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except Exception:  # The error is reported when the sample is loaded for the model.
            return None

    def first(self) -> Batch:
        """Return the first batch of which at least one sample can be loaded."""
        assert self.samples is not None
        for start in range(0, self.samples, self.batch_size or 1):
            batch = self._loaded.__getitems__(list(range(start, min(start + (self.batch_size or 1), self.samples))))
            if batch.samples:
                return batch
        number, failure = next(iter(batch.failures.items()))
        raise HooklineError(f"no sample could be loaded; sample {number}: {failure!r}") from failure

    def units(self, size: int) -> int:
        """Return the number of units of this many samples."""
        assert self.samples is not None
        return -(-self.samples // size)

    def count(self, unit: int, size: int) -> int:
        """Return the number of batches in a unit."""
        assert self.samples is not None
        return -(-min(size, self.samples - unit * size) // (self.batch_size or 1))

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Yield the batches of some units, loaded with the settings of the user's DataLoader if there is one."""
        from torch.utils.data import DataLoader

        coming: deque[int] = deque()
        order = _Order(units, lambda unit: self._numbers(unit, size), coming)
        loader: DataLoader[Any] = DataLoader(self._loaded, batch_sampler=order, collate_fn=_keep_batch, **self._workers)  # type: ignore[arg-type]
        try:
            for batch in loader:
                yield coming.popleft(), batch
        except (ConnectionError, EOFError) as error:  # The worker died while torch was reading from it.
            if str(error).startswith("Caught "):  # An error inside the worker, such as in worker_init_fn.
                raise
            raise RuntimeError(
                f"a DataLoader worker died while a batch was read from it ({error!r}); "
                "once the cause is fixed, the same call goes on where it stopped"
            ) from error

    def _numbers(self, unit: int, size: int) -> Iterator[list[int]]:
        """Return the numbers of a unit's samples, a list for each batch."""
        assert self.samples is not None
        numbers = list(range(unit * size, min((unit + 1) * size, self.samples)))
        if self._sorted:
            numbers.sort(key=lambda number: -self._length(number))  # Longest first: running out of memory shows early.
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
        """Do nothing: `known` has a fingerprint or a digest of some samples, which was compared."""

    def longer(self, first: int) -> float:
        """Return how many times longer samples are on average than the first ones, estimated from some of them."""
        own = [self._length(number) for number in range(min(first, SAMPLES_COMPARED))]
        spread = [self._length(number) for number in self._spread()]
        return sum(spread) / len(spread) * len(own) / sum(own) if sum(own) else 1.0

    def singles(self, batch: Batch) -> list[Batch]:
        """Return each sample of a batch as a batch of one."""
        return [self._loaded.__getitems__([number]) for number in batch.samples]


class _Order:
    """A batch sampler for the units. It takes the next unit only when the loader asks for its first batch."""

    def __init__(self, units: Iterable[int], numbers: Callable[[int], Iterator[list[int]]], coming: deque[int]) -> None:
        self.units = units
        self.numbers = numbers
        self.coming = coming

    def __iter__(self) -> Iterator[list[int]]:
        for unit in self.units:
            for numbers in self.numbers(unit):
                self.coming.append(unit)
                yield numbers


class FailureTolerantDataset:
    """A dataset whose batches list the samples that could not be loaded, instead of failing."""

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
                failures[number] = _picklable(failure)
        if not failures:
            raise HooklineError(
                f"samples {numbers[0]} to {numbers[-1]} don't go into one batch: {error}; give collate=, a function "
                "from a list of samples to a batch"
            ) from error
        return Batch(list(found), self.collate(list(found.values())) if found else None, failures)


class ColumnsDataset:
    """A mapping of equally long tensors or lists as a dataset: a sample is a dict with one element of each."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = dict(columns)
        if len({len(column) for column in self.columns.values()}) != 1:
            sizes = ", ".join(f"{name!r} {len(column)}" for name, column in self.columns.items())
            raise HooklineError(f"the entries of a mapping must have one length, but these have: {sizes or 'nothing'}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def _picklable(failure: Exception) -> Exception:
    """Return an exception that a loader process can send to the main process.

    An exception that can't be pickled would be lost, and the main process would wait forever.
    """
    from torch.utils.data import get_worker_info

    if get_worker_info() is None:
        return failure
    try:
        if type(pickle.loads(pickle.dumps(failure))) is type(failure):
            return failure
    except Exception:  # Pickling may run any code of the exception's class.
        pass
    return RuntimeError(f"{type(failure).__name__}: {failure}")


def _without_object(function: Any) -> Any:
    """Return the plain function of a method. Its object is usually the dataset, which is compared by its samples."""
    return getattr(function, "__func__", function)


def _keep_batch(batch: Batch) -> Batch:
    return batch


def _loader_settings(loader: DataLoader[Any] | None) -> dict[str, Any]:
    """Return the DataLoader arguments to copy from the user's loader."""
    own = {"generator": torch.Generator()}  # Otherwise DataLoader draws a seed from the global generator.
    if loader is None:
        return own
    names = ["num_workers", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["prefetch_factor"] if loader.num_workers else []
    return {**own, **{name: getattr(loader, name) for name in names}}


def bytes_in(value: Any) -> int:
    """Return the number of bytes in the tensors of a batch."""
    return sum(tensor.nbytes if tensor.layout is torch.strided else 0 for tensor in leaves(value))


def to_device(value: Any, device: torch.device | None) -> Any:
    """Return a copy of a batch on the model's device, without waiting for a GPU. The model may write into the copy."""
    return map_tensors(lambda tensor: _tensor_to_device(tensor, device), value)


def _tensor_to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    here = tensor.device
    if device is None or str(device) in (str(here), here.type):
        own = share_tensor(tensor.detach())
    else:
        own = (_pinned(tensor.detach()) if device.type == "cuda" else tensor.detach()).to(device, non_blocking=True)
    return own.requires_grad_(tensor.requires_grad)


def _pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory: a copy from pageable memory to the GPU would wait until the GPU is idle."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor
