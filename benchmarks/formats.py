"""The same rows in several formats, each written and read as the format's documentation recommends.

A format is a class with `write(folder, batches)`. Once a folder is written, an instance has `gather(rows)`,
`sequence(...)` and `scan()`, which return bfloat16 tensors. A format without bfloat16 stores its bits as integers. A
file has about 50 MB. The store waits for the disk at the end of each file; for the others, `write` waits for every file
and folder at the end.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import hookline as hl
from hookline._store.disk_format import Array, Manifest
from hookline._store.storage import open_storage
from hookline._store.writer import Unit, begin

WIDTH = 768
SHARD = 32768  # The least number of rows in a file.
PIECE = 8192  # The number of rows that a scan returns at a time.


class Format(Protocol):
    """One way to store rows."""

    needs: tuple[str, ...]
    checks: bool  # True if `write` stores checksums of the rows.

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write batches of sequences. Everything is on disk when this returns."""

    def __init__(self, folder: Path) -> None: ...

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows with these numbers."""

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Return the rows of one sequence."""

    def scan(self) -> Iterator[Tensor]:
        """Return all rows in order, in pieces."""


def shards(batches: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Group batches into files."""
    group: list[list[Tensor]] = []
    for batch in batches:
        group.append(batch)
        if sum(len(one) for some in group for one in some) >= SHARD:
            yield group
            group = []
    if group:
        yield group


def joined(group: list[list[Tensor]]) -> Tensor:
    """Return the rows of a file."""
    return torch.cat([one for batch in group for one in batch])


def wait_for(folder: Path) -> None:
    """Wait until every file and its name are on disk."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def installed(format: type[Format]) -> bool:
    """Return True if the packages that a format needs are installed."""
    return all(importlib.util.find_spec(name) is not None for name in format.needs)


class Store:
    """hookline's store, streamed batch by batch. Its records hold a CRC-32 of each file."""

    needs = ()
    checks = True

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write as a harvest does: batch by batch, one unit after the other."""
        groups = list(shards(batches))
        root = open_storage(folder)
        manifest = begin(root, Manifest({}, (Array("h", torch.bfloat16, (WIDTH,)),), len(groups)))
        first = 0
        for number, group in enumerate(groups):
            unit, lengths = Unit(root, manifest, number), [len(one) for batch in group for one in batch]
            for batch in group:
                unit.append(0, torch.cat(batch))
            unit.commit(first=first, samples=len(lengths), lengths=[lengths])
            first += len(lengths)

    def __init__(self, folder: Path) -> None:
        self.store = hl.Store(folder)
        self.rows = self.store["h"]

    def gather(self, rows: Tensor) -> Tensor:
        """Take rows by number."""
        return self.rows[rows]

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Take the rows of a sample."""
        return self.store.rows("h", sample=number)

    def scan(self) -> Iterator[Tensor]:
        """Return a few megabytes at a time."""
        return self.rows.scan(PIECE * WIDTH * 2)


class Sharded:
    """Memory-mapped files with one array each: the common part of npy and torch.save."""

    arrays: list[Tensor]

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())
        self.arrays = [self.load(path) for path in self.paths]
        self.bounds = torch.tensor([0, *(len(one) for one in self.arrays)]).cumsum(0)

    @staticmethod
    def load(path: Path) -> Tensor:
        """Map one file."""
        raise NotImplementedError

    def gather(self, rows: Tensor) -> Tensor:
        """Select once from each file."""
        result = torch.empty(len(rows), WIDTH, dtype=torch.bfloat16)
        files = torch.searchsorted(self.bounds, rows, right=True) - 1
        for file in files.unique().tolist():
            here = (files == file).nonzero().view(-1)
            result[here] = self.arrays[file].index_select(0, rows[here] - self.bounds[file])
        return result

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Return a slice: a sequence is never split over two files."""
        file = int(torch.searchsorted(self.bounds, begin, right=True)) - 1
        offset = int(self.bounds[file])
        return self.arrays[file][begin - offset : end - offset].clone()

    def scan(self) -> Iterator[Tensor]:
        """Return the rows file by file, and map each file only when it is reached."""
        for path in self.paths:
            yield from self.load(path).split(PIECE)


class Npy(Sharded):
    """np.save, and np.load with mmap_mode."""

    needs = ("numpy",)
    checks = False

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write one file for each group."""
        import numpy

        for number, group in enumerate(shards(batches)):
            numpy.save(folder / f"{number:06d}.npy", joined(group).view(torch.uint16).numpy())
        wait_for(folder)

    @staticmethod
    def load(path: Path) -> Tensor:
        """Map one file. Mode "c" avoids torch's warning about arrays that can't be written to."""
        import numpy

        return torch.from_numpy(numpy.load(path, mmap_mode="c")).view(torch.bfloat16)


class CheckedNpy(Npy):
    """npy files with a checksum of each file, as in the store."""

    checks = True

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write the files and their checksums."""
        import numpy

        sums = []
        for number, group in enumerate(shards(batches)):
            array = joined(group).view(torch.uint16).numpy()
            sums.append(zlib.crc32(memoryview(array).cast("B")))
            numpy.save(folder / f"{number:06d}.npy", array)
        (folder / "sums.txt").write_text(repr(sums))
        wait_for(folder)


class Pt(Sharded):
    """torch.save, which stores a CRC-32 of each tensor, and torch.load with mmap, which does not check it."""

    needs = ()
    checks = True

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write one file for each group."""
        for number, group in enumerate(shards(batches)):
            torch.save(joined(group), folder / f"{number:06d}.pt")
        wait_for(folder)

    @staticmethod
    def load(path: Path) -> Tensor:
        """Map one file."""
        found: Tensor = torch.load(path, mmap=True, weights_only=True)
        return found


def table_of(group: list[list[Tensor]], as_bytes: bool = False) -> Any:
    """Return rows as an Arrow table that shares their memory."""
    import pyarrow

    rows = joined(group)
    memory = pyarrow.py_buffer(rows.view(torch.uint16).numpy())
    if as_bytes:
        column = pyarrow.Array.from_buffers(pyarrow.binary(2 * WIDTH), len(rows), [None, memory])
    else:
        values = pyarrow.Array.from_buffers(pyarrow.uint16(), rows.numel(), [None, memory])
        column = pyarrow.FixedSizeListArray.from_arrays(values, WIDTH)
    return pyarrow.table({"h": column})


def tensor_of(column: Any) -> Tensor:
    """Return a column as rows. It is copied only if it has several chunks."""
    import numpy
    import pyarrow

    whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    numbers = whole.flatten() if hasattr(whole, "flatten") else whole
    begin = numbers.offset * numbers.type.bit_width // 8
    memory = numbers.buffers()[-1][begin : begin + 2 * WIDTH * len(whole)]
    return torch.from_numpy(numpy.frombuffer(memory, dtype="uint16")).view(torch.bfloat16).view(-1, WIDTH)


class Parquet:
    """pyarrow's Parquet writer, and its datasets for reading.

    A row is stored as bytes, because Parquet's integers take at least four bytes. There is no compression: with zstd
    the files would have 0.8 of the size and be slower. By default there are no checksums.
    """

    needs = ("pyarrow",)
    checks = False

    @classmethod
    def write(cls, folder: Path, batches: list[list[Tensor]]) -> None:
        """Write one file for each group, in row groups of a few megabytes."""
        from pyarrow import parquet

        options = {"compression": "none", "use_dictionary": False, "write_page_checksum": cls.checks}
        for number, group in enumerate(shards(batches)):
            table = table_of(group, as_bytes=True)
            parquet.write_table(table, folder / f"{number:06d}.parquet", row_group_size=4096, **options)
        wait_for(folder)

    def __init__(self, folder: Path) -> None:
        import pyarrow.dataset

        self.dataset = pyarrow.dataset.dataset(folder)

    def gather(self, rows: Tensor) -> Tensor:
        """Take rows by number. `take` accepts them in any order."""
        import pyarrow

        return tensor_of(self.dataset.take(pyarrow.array(rows.numpy()))["h"])

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Take the rows of a sequence by number."""
        return self.gather(torch.arange(begin, end))

    def scan(self) -> Iterator[Tensor]:
        """Return the rows batch by batch."""
        return (tensor_of(batch["h"]) for batch in self.dataset.to_batches(batch_size=PIECE))


class CheckedParquet(Parquet):
    """Parquet with a CRC-32 of each page."""

    checks = True


class Datasets:
    """Hugging Face's ArrowWriter, and the format "arrow" for reading. Arrow's files have no checksums."""

    needs = ("datasets", "pyarrow")
    checks = False

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write one file for each group."""
        from datasets.arrow_writer import ArrowWriter

        for number, group in enumerate(shards(batches)):
            with ArrowWriter(path=str(folder / f"{number:06d}.arrow")) as writer:
                writer.write_table(table_of(group))
                writer.finalize()
        wait_for(folder)

    def __init__(self, folder: Path) -> None:
        import datasets

        found = [datasets.Dataset.from_file(str(path)) for path in sorted(folder.iterdir())]
        self.dataset = datasets.concatenate_datasets(found).with_format("arrow")

    def gather(self, rows: Tensor) -> Tensor:
        """Take rows by a list of numbers."""
        return tensor_of(self.dataset[rows.tolist()]["h"])

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Return a slice."""
        return tensor_of(self.dataset[begin:end]["h"]).clone()

    def scan(self) -> Iterator[Tensor]:
        """Return the rows batch by batch."""
        return (tensor_of(batch["h"]) for batch in self.dataset.iter(batch_size=PIECE))


class Lance:
    """A Lance dataset, written from a record batch reader."""

    needs = ("lance", "pyarrow")
    checks = False

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write everything in one call that reads batch by batch."""
        import lance
        import pyarrow

        tables = (table_of([batch]).to_batches()[0] for batch in batches)
        schema = table_of(batches[:1]).schema
        lance.write_dataset(
            pyarrow.RecordBatchReader.from_batches(schema, tables), folder / "rows.lance", max_rows_per_file=SHARD
        )
        wait_for(folder)

    def __init__(self, folder: Path) -> None:
        import lance

        self.dataset = lance.dataset(folder / "rows.lance")

    def gather(self, rows: Tensor) -> Tensor:
        """Take rows by a list of numbers."""
        return tensor_of(self.dataset.take(rows.tolist())["h"])

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Take the rows of a sequence by number."""
        return tensor_of(self.dataset.take(list(range(begin, end)))["h"])

    def scan(self) -> Iterator[Tensor]:
        """Return the rows batch by batch."""
        return (tensor_of(batch["h"]) for batch in self.dataset.to_batches(batch_size=PIECE))


class Zarr:
    """One zarr 3 array in chunks of 1.5 MB without compression, the fastest of the tried settings for gathering."""

    needs = ("zarr",)
    checks = False

    @staticmethod
    def write(folder: Path, batches: list[list[Tensor]]) -> None:
        """Write many chunks at a time, and each chunk once."""
        import zarr

        rows = sum(len(one) for batch in batches for one in batch)
        array = zarr.create_array(
            folder / "rows.zarr", shape=(rows, WIDTH), chunks=(1024, WIDTH), dtype="uint16", compressors=None
        )
        flat, done = [one for batch in batches for one in batch], 0
        for whole in torch.cat(flat).split(SHARD):
            array[done : done + len(whole)] = whole.view(torch.uint16).numpy()
            done += len(whole)
        wait_for(folder)

    def __init__(self, folder: Path) -> None:
        import zarr

        self.array = zarr.open_array(folder / "rows.zarr", mode="r")

    def gather(self, rows: Tensor) -> Tensor:
        """Take rows by orthogonal indexing."""
        return torch.from_numpy(self.array.oindex[rows.numpy()]).view(torch.bfloat16)

    def sequence(self, number: int, begin: int, end: int) -> Tensor:
        """Return a slice."""
        return torch.from_numpy(self.array[begin:end]).view(torch.bfloat16)

    def scan(self) -> Iterator[Tensor]:
        """Return the rows slice by slice."""
        for start in range(0, self.array.shape[0], PIECE):
            yield torch.from_numpy(self.array[start : start + PIECE]).view(torch.bfloat16)


FORMATS: dict[str, type[Format]] = {
    "store": Store,
    "npy, mapped": Npy,
    "torch.save, mapped": Pt,
    "Parquet": Parquet,
    "datasets (Arrow)": Datasets,
    "Lance": Lance,
    "zarr": Zarr,
}
