"""What goes into the model: whatever was given, as numbered samples, in batches, in units."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hookline.errors import HooklineError, warn
from hookline.harvesting.batches import Again, Batch, Batches
from hookline.harvesting.samples import Columns, Samples

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Source(Protocol):
    """Numbered samples in units of a size: of samples, or for an iterable of batches."""

    batch_size: int | None  # Of samples, where units are counted in them.
    samples: int | None  # How many there are, where that's known.

    def known(self) -> dict[str, Any]:
        """Return by what the data is known again."""

    def first(self) -> Batch:
        """Return the first batch. An iterator gives it again when its time has come."""

    def units(self, size: int) -> int | None:
        """Return how many units there are, if that's known."""

    def count(self, unit: int, size: int) -> int:
        """Return how many batches a unit has, where that's known."""

    def batches(
        self, units: Iterable[int], size: int, passed: Callable[[int, str], None]
    ) -> Generator[tuple[int, Batch], None, None]:
        """Return the batches of some units, each with its unit; tell of those that were passed over."""

    def singles(self, batch: Batch) -> list[Batch]:
        """Return the samples of a batch one by one, as far as that can be done."""

    def compare(self, size: int, passed: Callable[[int, str], None]) -> None:
        """Pass over data that can't be known again otherwise, and tell of every unit."""

    def longer(self, first: int) -> float:
        """Return how many times as long samples are as the first few, as far as a look at some of them tells."""


def source(
    data: Any, batch_size: int | None, collate: Callable[[list[Any]], Any] | None, sort_by_length: bool
) -> Source:
    """Return whatever was given as numbered samples."""
    from torch.utils.data import DataLoader

    if isinstance(data, (str, bytes, os.PathLike)):
        raise HooklineError(f"data= is {data!r:.60}; for the texts of a file give hl.Texts(path, tokenizer)")
    if callable(data) and not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        made = data()
        data = Again(data, made) if isinstance(made, Iterator) else made
    if isinstance(data, DataLoader):
        return _of_loader(data, batch_size, collate, sort_by_length)
    if batch_size is None and hasattr(data, "collate") and hasattr(data, "fingerprint"):
        batch_size = getattr(data, "batch_size", None)
    if batch_size is not None:
        if isinstance(data, Mapping):
            data = Columns(data)
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise HooklineError(
                f"batch_size= needs numbered samples (a dataset, a list, a tensor), but {type(data).__name__} has no "
                "length and index; give an iterable of batches, without batch_size"
            )
        return Samples(data, batch_size, collate or getattr(data, "collate", None), sort_by_length)
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


def _of_loader(
    loader: DataLoader[Any], batch_size: int | None, collate: Callable[[list[Any]], Any] | None, sort_by_length: bool
) -> Source:
    """Return a DataLoader's dataset if it passes over that in order; else its batches, as they come."""
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
                            "and shuffle what was harvested: store.dataset(..., shuffle=True)")  # fmt: skip
    if isinstance(sampler, DistributedSampler):
        raise HooklineError("DistributedSampler repeats samples to give every rank as many; leave it out: the ranks of "
                            "a harvest share its units by themselves")  # fmt: skip
    is_plain = type(loader.batch_sampler) is BatchSampler and type(sampler) is SequentialSampler
    if is_plain and loader.batch_size is not None and getattr(sampler, "data_source", None) is loader.dataset:
        if batch_size not in (None, loader.batch_size):
            raise HooklineError(
                f"batch_size={batch_size!r}, but the loader makes batches of {loader.batch_size}; leave batch_size= "
                "out, or make the loader with it"
            )
        return Samples(loader.dataset, loader.batch_size, collate or loader.collate_fn, sort_by_length, loader)
    if sort_by_length or collate is not None or batch_size is not None:
        raise HooklineError("a loader with batches of its own takes no batch_size, collate or sort_by_length; give its "
                            "dataset instead")  # fmt: skip
    if not _counts_up(loader, sampler):
        warn(
            "the loader has an order of its own, so samples are numbered 0, 1, ... as they come, not by their place in "
            "its dataset; harvest the dataset with batch_size= to number them by that, or give `lambda: iter(loader)` "
            "if this is what you mean"
        )
    return Batches(loader)


def _counts_up(loader: DataLoader[Any], sampler: Any) -> bool:
    """Return whether a loader is known to give samples 0, 1, 2, ... of its dataset, or has none with numbers."""
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
        order = []  # To ask a sampler would use up random numbers, and it may answer otherwise the next time.
    return bool(order) and order == list(range(len(order)))
