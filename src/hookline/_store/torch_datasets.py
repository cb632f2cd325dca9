"""Rows as torch datasets: by number, as whole samples, or shuffled in windows that fit in memory."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline._kernel import rank_and_world, refuse_flags, refuse_numbers
from hookline._store.rows import Rows
from hookline.errors import HooklineError, StoreError

_ENTRY = struct.Struct("<qq")
_SET = -1  # An entry (_SET, epoch) sets the next epoch. Any other entry names an iteration.
_ALONE = -2  # An entry (_ALONE, random number) names an iteration outside of DataLoader workers.
_WINDOW = 256 << 20
_BLOCKS = 64  # Blocks in a window, each from another place in the store.
_LARGEST = 4 << 20  # The most bytes of a block. Reading so many takes far longer than seeking to them.
_PIECE = 2 << 20  # Bytes read at a time, few enough to be in the CPU's cache when they are copied.
_READERS = 8  # Pieces read at once over a network.
_AT_ONCE = 1024  # Rows taken out of a window together.
# Each worker makes its own batches, so its share should be a multiple of common batch sizes.
_MULTIPLES = (1_024_000, 8192, 1024, 128, 16)


def dataset(
    rows: Sequence[Rows],
    *,
    shuffle: bool,
    samples: bool,
    seed: int,
    window: int | None,
    rank: int | None,
    world: int | None,
    even: bool,
) -> RowsDataset | SamplesDataset | ShuffledRows:
    """Return rows as a torch dataset: see `Store.dataset`."""
    refuse_flags(shuffle=shuffle, samples=samples, even=even)
    refuse_numbers(seed=seed)
    if not rows:
        raise HooklineError("a dataset needs at least one site")
    if not shuffle:
        given = {"seed": seed != 0, "window": window is not None, "rank": rank is not None, "world": world is not None}
        for name in (name for name, is_given in {**given, "even": even}.items() if is_given):
            raise HooklineError(f"{name}= is for shuffle=True; without it, DataLoader's sampler shuffles and shares")
        return SamplesDataset(rows) if samples else RowsDataset(rows)
    if samples:
        raise HooklineError("whole samples are shuffled by DataLoader(store.dataset(..., samples=True), shuffle=True)")
    if window is not None and (not hasattr(window, "__index__") or window < 1):
        raise HooklineError(f"window={window!r} is not a number of bytes")
    if (rank is None) != (world is None):
        raise HooklineError("rank= and world= go together")
    if rank is None or world is None:
        rank, world = rank_and_world()
    if not 0 <= rank < world:
        raise HooklineError(f"there is no rank {rank} of {world}; ranks count from 0")
    return ShuffledRows(rows, seed=seed, window=window or _WINDOW, rank=rank, world=world, even=even)


class RowsDataset(Dataset[Any]):
    """Rows by number; tuples of rows if there are several arrays. A batch is one gather per array."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        _check_aligned(rows)
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows[0])

    def __getitem__(self, index: Any) -> Any:
        return _one_or_all([rows[index] for rows in self._rows])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the rows of a batch, as DataLoader asks for them."""
        numbers = torch.tensor(indices, dtype=torch.int64)
        gathered = [rows[numbers] for rows in self._rows]
        if len(gathered) == 1:
            return GatheredRows(gathered[0])
        return list(zip(*(some.unbind() for some in gathered), strict=True))

    def __repr__(self) -> str:
        return _representation(self, self._rows, f"{len(self):,} rows")


class GatheredRows(Sequence[Tensor]):
    """The rows of a batch in one tensor. When DataLoader calls `torch.stack` on them, it gets that tensor."""

    def __init__(self, gathered: Tensor) -> None:
        self._gathered = gathered

    def __len__(self) -> int:
        return len(self._gathered)

    def __getitem__(self, index: Any) -> Any:
        return list(self._gathered[index].unbind()) if isinstance(index, slice) else self._gathered[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._gathered.unbind())

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor for `torch.stack`, and call other functions with a list of rows."""
        options = dict(kwargs or {})
        if function is torch.stack and len(args) == 2 and args[1] == 0 and not options.keys() - {"out"}:
            out, gathered = options.get("out"), args[0]._gathered
            return gathered if out is None else out.copy_(gathered)
        return function(*[list(one) if isinstance(one, cls) else one for one in args], **options)


class SamplesDataset(Dataset[Any]):
    """Whole samples, each as the tensor of its rows; tuples if there are several arrays."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = list(rows)
        self.numbers = rows[0].sample_numbers  # Without skipped samples.

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        number = int(self.numbers[index])
        return _one_or_all([rows.sample(number) for rows in self._rows])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, as DataLoader asks for them, with one gather per array."""
        numbers = self.numbers[torch.tensor(indices, dtype=torch.int64)].tolist()
        arrays = []
        for rows in self._rows:
            spans = [rows.span(number) for number in numbers]
            wanted = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            arrays.append(rows[wanted].split([len(span) for span in spans]))
        return list(arrays[0]) if len(arrays) == 1 else list(zip(*arrays, strict=True))

    def __repr__(self) -> str:
        return _representation(self, self._rows, f"{len(self):,} samples")


class ShuffledRows(IterableDataset[Any]):
    """Every row once per epoch, in a new order each time. Rows are read in blocks and shuffled in a window of many.

    Workers and ranks divide the rows without overlap. `set_epoch` sets the epoch of the next iteration; without it,
    each iteration is the next epoch.
    """

    def __init__(
        self, rows: Sequence[Rows], *, seed: int = 0, window: int = _WINDOW, rank: int, world: int, even: bool = False
    ) -> None:
        _check_aligned(rows)
        self._rows = list(rows)
        self._seed = seed
        self._window = window
        self._rank, self._world, self._even = rank, world, even
        self._epochs = Epochs()
        self._row_bytes = max(1, sum(one.nbytes for one in rows) // max(1, len(rows[0])))
        most = max(1, min(_LARGEST, window // _BLOCKS) // self._row_bytes)
        self._starts, self._counts = _blocks(rows[0].bounds, most)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in persistent workers as well."""
        self._epochs.set(epoch)

    def __len__(self) -> int:
        return len(self._share())

    def __iter__(self) -> Iterator[Any]:
        epoch, worker = self._epochs.begin(), get_worker_info()
        workers = worker.num_workers if worker else 1
        share = _part_of(self._share(), worker.id if worker else 0, workers)
        order = torch.randperm(len(self._starts), generator=seeded_generator(self._seed, epoch))
        starts, counts = self._starts[order], self._counts[order]
        chance = seeded_generator(self._seed, epoch, share.start)
        step = min(max(1, self._window // workers // self._row_bytes), max(1, len(share)))
        # Reuse the window's memory: allocating it again costs more than filling it.
        memory = [torch.empty(step, *rows.shape[1:], dtype=rows.dtype, device="cpu") for rows in self._rows]
        for begin in range(share.start, share.stop, step):
            numbers = _rows_between(starts, counts, begin, min(begin + step, share.stop)).sort().values
            window = [into[: len(numbers)] for into in memory]
            for rows, into in zip(self._rows, window, strict=True):
                self._read(rows, numbers, into)
            yield from _shuffled(window, chance)

    def _read(self, rows: Rows, numbers: Tensor, into: Tensor) -> None:
        """Read rows in the order on disk, piece by piece; over a network, several pieces at once."""
        size = max(1, _PIECE // self._row_bytes)
        pieces = [(numbers[start : start + size], into[start : start + size]) for start in range(0, len(numbers), size)]
        if rows.is_mapped:
            for wanted, place in pieces:
                place.copy_(rows[wanted])
            return
        with ThreadPoolExecutor(_READERS) as pool:
            for (_, place), found in zip(pieces, pool.map(lambda piece: rows[piece[0]], pieces), strict=True):
                place.copy_(found)

    def _share(self) -> range:
        """Return this rank's range of places in the epoch's order."""
        rows = len(self._rows[0])
        if self._even:
            each = rows // self._world
            return range(self._rank * each, (self._rank + 1) * each)
        return range(self._rank * rows // self._world, (self._rank + 1) * rows // self._world)

    def __repr__(self) -> str:
        shared = f", rank {self._rank} of {self._world}" if self._world > 1 else ""
        return _representation(self, self._rows, f"{len(self):,} rows{shared}")


def _check_aligned(rows: Sequence[Rows]) -> None:
    for other in rows[1:]:
        if not other.is_aligned_with(rows[0]):
            both = f"the rows of {rows[0].name!r} ({len(rows[0]):,}) and of {other.name!r} ({len(other):,})"
            raise StoreError(f"{both} are not of the same samples and positions; take whole samples with samples=True")


def _one_or_all(found: list[Tensor]) -> Any:
    return found[0] if len(found) == 1 else tuple(found)


def _representation(dataset: object, rows: Sequence[Rows], what: str) -> str:
    return f"{type(dataset).__name__}({', '.join(repr(one.name) for one in rows)}, {what})"


def _blocks(bounds: Sequence[int], most: int) -> tuple[Tensor, Tensor]:
    """Return the starts and lengths of blocks of at most `most` rows. No block spans two units."""
    starts = [torch.arange(begin, end, most) for begin, end in itertools.pairwise(bounds)]
    joined = torch.cat([torch.empty(0, dtype=torch.int64), *starts])
    ends = torch.cat([joined[1:], torch.tensor(bounds[-1:], dtype=torch.int64)]) if len(joined) else joined
    return joined, ends - joined


def _part_of(share: range, worker: int, workers: int) -> range:
    """Return a worker's part of a rank's share: a multiple of common batch sizes, if the parts stay about equal."""
    multiple = next((one for one in _MULTIPLES if one * workers * 8 <= len(share)), 1)
    cuts = [len(share) // multiple * number // workers * multiple for number in range(workers)] + [len(share)]
    return share[cuts[worker] : cuts[worker + 1]]


def _rows_between(starts: Tensor, counts: Tensor, begin: int, end: int) -> Tensor:
    """Return the row numbers at the places from `begin` to `end` in a sequence of blocks."""
    ends = counts.cumsum(0)
    first, last = torch.searchsorted(ends, torch.tensor([begin, end - 1]), right=True).tolist()
    starts, counts, before = starts[first : last + 1], counts[first : last + 1], ends[first : last + 1]
    before = before - counts
    skipped = (begin - before).clamp(min=0)
    left = torch.minimum(counts, end - before) - skipped
    offsets = torch.arange(int(left.sum())) - (left.cumsum(0) - left).repeat_interleave(left)
    return (starts + skipped).repeat_interleave(left) + offsets


def _shuffled(window: list[Tensor], chance: torch.Generator) -> Iterator[Any]:
    """Yield the rows of a window in random order, from small copies: a row that the user keeps holds only its copy."""
    for some in torch.randperm(len(window[0]), generator=chance).split(_AT_ONCE):
        taken = [_select(array, some).unbind() for array in window]
        yield from taken[0] if len(taken) == 1 else zip(*taken, strict=True)


def _select(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return a copy of some rows, of any dtype."""
    if not rows.numel():
        return rows[: len(numbers)].clone()
    plain = rows.reshape(len(rows), -1).view(torch.uint8)
    return plain.index_select(0, numbers).view(rows.dtype).view(len(numbers), *rows.shape[1:])


class Epochs:
    """A counter of epochs. A file shares it with its copies in other processes."""

    def __init__(self) -> None:
        self._passes = 0  # Iterations in this worker. A persistent worker has one seed for all epochs.
        self._make()

    def set(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._append(_SET, epoch)

    def begin(self) -> int:
        """Return the epoch of the iteration that begins now. All workers of a DataLoader get the same one."""
        worker = get_worker_info()
        if worker is None:
            name = (_ALONE, int.from_bytes(os.urandom(7), "little"))
        else:
            name = (self._passes, worker.seed - worker.id)  # DataLoader draws a new seed for each set of workers.
            self._passes += 1
        return self._number(self._append(*name), name)

    def _append(self, *entry: int) -> bytes:
        """Append an entry, and return the contents of the file."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            file.write(_ENTRY.pack(*entry))
            file.seek(0)
            return file.read()

    def _number(self, log: bytes, name: tuple[int, int]) -> int:
        epoch, known = 0, set()
        for entry in _ENTRY.iter_unpack(log[: len(log) // _ENTRY.size * _ENTRY.size]):
            if entry[0] == _SET:
                epoch = entry[1]
            elif entry == name and entry not in known:
                return int(epoch)
            elif entry not in known:
                known.add(entry)
                epoch += 1
        raise AssertionError("_append writes the iteration before this searches for it")

    def _make(self) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="hookline-epochs-")
        os.close(descriptor)
        weakref.finalize(self, _remove_file, self._path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_passes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not os.path.exists(self._path):  # Unpickled on another machine, or after the original was deleted.
            self._make()


def seeded_generator(*numbers: int) -> torch.Generator:
    """Return a generator whose seed depends on all these numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _remove_file(path: str, process: int) -> None:
    if os.getpid() == process:  # Not in a forked worker.
        with suppress(OSError):
            os.unlink(path)
