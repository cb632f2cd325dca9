"""Batches that are given as they are: any iterable of them. To reach a unit, all before it are passed over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.copies import share_tensor
from hookline.errors import HooklineError
from hookline.harvesting.digests import digest
from hookline.values import leaves, map_tensors


@dataclass
class Batch:
    """Some samples, as the model takes them; `failures` are those that could not be loaded."""

    samples: Sequence[int]  # Their numbers, in the order in which they stand.
    value: Any
    failures: dict[int, Exception] = field(default_factory=dict)


class Again:
    """An iterable of batches made anew by a function each time; one has been made already."""

    def __init__(self, function: Callable[[], Iterable[Any]], made: Iterable[Any]) -> None:
        self.function = function
        self.made = [made]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made.pop() if self.made else self.function())


class Batches:
    """Any iterable of batches; a unit is so many of them. An iterator can be passed over once only."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batch_size: int | None = None
        self.samples: int | None = None
        self._given = batches
        self._is_iterator = isinstance(batches, Iterator)
        self._peeked: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._count = self._length = length_of(batches)
        self._digest = ""  # Of the first batch.

    def known(self) -> dict[str, Any]:
        """Return the first batch, and how many there are: the others are compared when they are passed over."""
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
            self._rest = self._rest if self._is_iterator else None  # Its processes need not stay.
        if not self._peeked:
            raise HooklineError("there are no batches to harvest; if it is an iterator, it may have been used up")
        return Batch(range(samples_in(self._peeked[0])), self._peeked[0])

    def units(self, size: int) -> int | None:
        """Return how many units there are, if they can be counted."""
        return None if self._count is None else -(-self._count // size)

    def count(self, unit: int, size: int) -> int:
        """Return how many batches a unit has."""
        return size if self._count is None else min(size, self._count - unit * size)

    def _pass(self) -> Iterator[tuple[int, Batch]]:
        """Pass over all batches once."""
        if self._is_iterator and self._rest is None:
            raise HooklineError("the iterator of batches has been used up; give something that can be iterated again "
                                "(a list, a DataLoader, a dataset), or make it again")  # fmt: skip
        again = itertools.chain(self._peeked, self._rest or ()) if self._is_iterator else iter(self._given)
        if self._is_iterator:
            self._peeked, self._rest = [], None
        first, number = 0, -1
        for number, value in enumerate(again):
            if number == 0 and self._digest and digest(value) != self._digest:
                raise HooklineError("the data give other batches each time that they are passed over; give them in "
                                    "one order, or as an iterator (iter(data)), to be passed over once")  # fmt: skip
            count = samples_in(value)
            yield number, Batch(range(first, first + count), value)
            first += count
        self._check_length(number + 1)
        self._count = number + 1

    def _check_length(self, found: int, more: bool = False) -> None:
        """Refuse data that are longer or shorter than they say: units would be missing, or never done."""
        if self._length is not None and (more or found < self._length):
            came = f"more than {found}" if more else found
            raise HooklineError(f"len() of the data is {self._length}, but {came} batches came; give them without a "
                                "length, as an iterator (iter(data)), or mend it")  # fmt: skip

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Return the batches of some units; those that lie before the last one asked for cost another pass."""
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
        """Return 1: nobody knows before they come."""
        return 1.0

    def compare(self, size: int, passed: Callable[[int, str], None]) -> None:
        """Pass over all that there is, and tell of every unit."""
        text, unit = "", -1
        for number, batch in self._pass():
            unit, text = number // size, digest(batch.value, text)
            if (number + 1) % size == 0:
                passed(unit, text)
                text = ""
        if text:
            passed(unit, text)

    def singles(self, batch: Batch) -> list[Batch]:
        """Return each sample as a batch of one, if all tensors have the batch in front; else the batch as it is."""
        count = len(batch.samples)
        if isinstance(batch.value, (list, tuple)) and not leaves(batch.value):
            return [Batch([number], batch.value[index : index + 1]) for index, number in enumerate(batch.samples)]
        tensors = leaves(batch.value)
        others = {size for tensor in tensors for size in tensor.shape[1:]}
        # A vector as long as the batch may be something else (positions, say) that only happens to be as long.
        is_doubtful = count in others and any(tensor.dim() == 1 for tensor in tensors)
        if is_doubtful or any(tensor.dim() == 0 or len(tensor) != count for tensor in tensors):
            return [batch]
        return [
            Batch([number], map_tensors(lambda tensor, at=index: tensor[at : at + 1], batch.value))  # type: ignore[misc]
            for index, number in enumerate(batch.samples)
        ]


def size_of(value: Any) -> int:
    """Return how many bytes the tensors of a batch hold."""
    return sum(tensor.nbytes if tensor.layout is torch.strided else 0 for tensor in leaves(value))


def length_of(batches: Any) -> int | None:
    """Return how many there are, where that's known for sure: an IterableDataset only guesses."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(batches, "dataset", batches), IterableDataset):
        return None
    try:
        return len(batches)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def samples_in(value: Any) -> int:
    """Return how many samples a batch holds: the first dimension of its first tensor."""
    tensors = leaves(value)
    if tensors and tensors[0].dim():
        return len(tensors[0])
    if isinstance(value, (list, tuple)) and value and not tensors:
        return len(value)
    raise HooklineError(f"a batch holds tensors with the samples in front, or a list of samples; this is {value!r:.80}")


def on(value: Any, device: torch.device | None) -> Any:
    """Return a batch for a model, on its device: a copy, so that the model may write into it. Nobody waits for it."""
    return map_tensors(lambda tensor: _on(tensor, device), value)


def _on(tensor: Tensor, device: torch.device | None) -> Tensor:
    here = tensor.device
    if device is None or str(device) in (str(here), here.type):
        own = share_tensor(tensor.detach())
    else:
        own = (_pinned(tensor.detach()) if device.type == "cuda" else tensor.detach()).to(device, non_blocking=True)
    return own.requires_grad_(tensor.requires_grad)


def _pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory: to copy from other memory would wait for all that the device has to do."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor
