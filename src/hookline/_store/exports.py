"""Export rows to Parquet and to Hugging Face `datasets`, as a stream. A dtype is widened only on request.

A table has a line for each row: the number of its sample, its position in the sample, and one column for each array.
Arrow has no bfloat16, float8 or complex numbers: the caller chooses what they become.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline._kernel import dtype_of
from hookline._store.rows import Rows
from hookline._untrusted_files import dtype_name
from hookline.errors import HooklineError, StoreError

_GROUP = 16 << 20  # Bytes in memory at a time: a row group, or a batch.
_FILE = 512 << 20
_TYPES = {
    torch.bool: "bool_", torch.uint8: "uint8", torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.float16: "float16", torch.float32: "float32", torch.float64: "float64",
}  # fmt: skip
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class ExportColumn:
    """The rows of one array as a column: converted to a dtype, then stored as numbers or as their bits.

    In Arrow files, bits are stored as integers. Parquet stores small integers in four bytes, so there the bits are
    stored as the bytes of the row.
    """

    rows: Rows
    dtype: torch.dtype
    as_bits: bool
    as_bytes: bool

    @property
    def description(self) -> dict[str, Any]:
        """The dtype and shape that a reader needs to restore the tensors."""
        return {"dtype": str(self.dtype), "shape": list(self.rows.shape[1:]), "bits": self.as_bits}

    @property
    def width(self) -> int:
        """The number of numbers that one row has in the table."""
        return math.prod(self.rows.shape[1:]) * (2 if self.dtype.is_complex else 1)

    def type(self, arrow: Any) -> Any:
        """Return the Arrow type of a row: a number, a list of fixed size, or bytes."""
        if self.as_bytes:
            return arrow.binary(self.width * self.stored.itemsize)
        item = _arrow_type(arrow, self.stored)
        return item if len(self.rows.shape) == 1 else arrow.list_(item, self.width)

    def array(self, arrow: Any, begin: int, end: int) -> Any:
        """Return some rows as an Arrow array that shares their memory."""
        rows = self.rows[begin:end].to(self.dtype)
        plain = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
        numbers = plain.contiguous().view(self.stored)
        if self.as_bytes and numbers.numel():
            buffer = arrow.foreign_buffer(numbers.data_ptr(), numbers.nbytes, base=numbers)
            return arrow.Array.from_buffers(self.type(arrow), end - begin, [None, buffer])
        values = _values(arrow, numbers)
        return values if len(self.rows.shape) == 1 else arrow.FixedSizeListArray.from_arrays(values, self.width)

    @property
    def path(self) -> str:
        """The path of the column's numbers in Parquet."""
        return self.rows.name if len(self.rows.shape) == 1 else f"{self.rows.name}.list.element"

    @property
    def is_small(self) -> bool:
        """True if the numbers are integers of one or two bytes."""
        return self.stored.itemsize <= 2 and self.stored not in (torch.bool, torch.float16)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the numbers in the table."""
        plain = self.dtype.to_real() if self.dtype.is_complex else self.dtype
        return _WORDS[plain.itemsize] if plain not in _TYPES else plain


class ExportTables:
    """Arrays as Arrow tables, read piece by piece."""

    def __init__(
        self, rows: Sequence[Rows], dtype: torch.dtype | str | None, bits: bool, as_bytes: bool = False
    ) -> None:
        for other in rows[1:]:
            if not other.is_aligned_with(rows[0]):
                problem = (
                    f"the rows of {rows[0].name!r} and of {other.name!r} are not of the same samples and positions"
                )
                raise StoreError(f"{problem}; export them one by one")
        cast_to = None if dtype is None else dtype_of(dtype)
        self.columns = [_column(one, cast_to, bits, as_bytes) for one in rows]
        self._labels = rows[0].samples, rows[0].positions
        self._rows = len(rows[0])
        width = sum(column.width * column.stored.itemsize for column in self.columns) + 16
        self._step = max(1, _GROUP // width)
        self._steps_in_file = max(1, _FILE // _GROUP)

    @property
    def description(self) -> dict[str, Any]:
        """The original dtype and shape of each column."""
        return {column.rows.name: column.description for column in self.columns}

    def schema(self, arrow: Any) -> Any:
        """Return the schema. Its metadata describes the original columns."""
        fields = [("sample", arrow.int64()), ("position", arrow.int64())]
        fields += [(column.rows.name, column.type(arrow)) for column in self.columns]
        return arrow.schema(fields, metadata={"hookline": json.dumps(self.description)})

    def files(self, arrow: Any) -> Iterator[Iterator[Any]]:
        """Yield the batches of each file. There is at least one file."""
        size = self._step * self._steps_in_file
        for begin in range(0, max(1, self._rows), size):
            yield self._batches(arrow, begin, min(begin + size, self._rows))

    def _batches(self, arrow: Any, begin: int, end: int) -> Iterator[Any]:
        schema = self.schema(arrow)
        for start in range(begin, end, self._step):
            stop = min(start + self._step, end)
            labels = [_values(arrow, one[start:stop]) for one in self._labels]
            arrays = [column.array(arrow, start, stop) for column in self.columns]
            yield arrow.RecordBatch.from_arrays([*labels, *arrays], schema=schema)


def to_parquet(
    path: str | os.PathLike[str],
    rows: Sequence[Rows],
    *,
    dtype: torch.dtype | str | None = None,
    bits: bool = False,
    compression: str | None = None,
) -> None:
    """Write rows to a new folder of Parquet files: see `Store.to_parquet`."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise HooklineError("to_parquet() writes with pyarrow: pip install 'hookline[parquet]'") from error
    tables = ExportTables(rows, dtype, bits, as_bytes=True)
    # Without a dictionary, Parquet stores small integers in four bytes each.
    small = [column.path for column in tables.columns if not column.as_bits and column.is_small]
    options = {"compression": compression or "none", "use_dictionary": small, "write_statistics": ["sample"]}
    with _new_folder(path) as folder:
        for number, batches in enumerate(tables.files(arrow)):
            name = os.path.join(folder, f"{number:06d}.parquet")
            with parquet.ParquetWriter(name, tables.schema(arrow), **options) as writer:
                for batch in batches:
                    writer.write_batch(batch, row_group_size=len(batch))


def to_datasets(
    path: str | os.PathLike[str], rows: Sequence[Rows], *, dtype: torch.dtype | str | None = None, bits: bool = False
) -> Any:
    """Write rows to a new folder that `datasets.load_from_disk` opens: see `Store.to_datasets`."""
    try:
        import datasets
        import pyarrow as arrow
    except ImportError as error:
        raise HooklineError("to_datasets() needs datasets: pip install 'hookline[datasets]'") from error
    tables = ExportTables(rows, dtype, bits)
    features = datasets.Features.from_arrow_schema(tables.schema(arrow))
    schema = features.arrow_schema
    about = datasets.DatasetInfo(features=features, description=json.dumps({"hookline": tables.description}))
    names = []
    with _new_folder(path) as folder:
        for number, batches in enumerate(tables.files(arrow)):
            names.append(f"data-{number:05d}.arrow")
            with arrow.OSFile(os.path.join(folder, names[-1]), "wb") as file, arrow.ipc.new_stream(file, schema) as to:
                for batch in batches:
                    to.write_batch(batch.replace_schema_metadata(schema.metadata))
        about.write_to_directory(folder)  # Keeps the description: datasets drops the metadata of the tables.
        with open(os.path.join(folder, "state.json"), "x", encoding="utf-8") as file:
            json.dump(_state(names), file, indent=2)
    return datasets.load_from_disk(os.fspath(path))


def _state(names: list[str]) -> dict[str, Any]:
    """Return the contents of the state file that `datasets` expects beside the data files."""
    return {
        "_data_files": [{"filename": name} for name in names], "_fingerprint": os.urandom(8).hex(),
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
        "_split": None,
    }  # fmt: skip


def _column(rows: Rows, dtype: torch.dtype | None, bits: bool, as_bytes: bool) -> ExportColumn:
    """Return the column of an array; raise if Arrow lacks the dtype and the caller has not chosen another form."""
    if rows.name in ("sample", "position"):
        raise StoreError(f"an array named {rows.name!r} can't be exported: the table has a column of that name")
    wanted = dtype if dtype is not None and rows.dtype.is_floating_point else rows.dtype
    if wanted in _TYPES:
        return ExportColumn(rows, wanted, as_bits=False, as_bytes=False)
    if not bits:
        name = dtype_name(wanted)
        others = "" if wanted.is_complex else ", or dtype=torch.float32 to widen them"
        raise StoreError(f"{rows.name!r} is {name}, which Arrow does not have; give bits=True to keep its bits{others}")
    return ExportColumn(rows, wanted, as_bits=True, as_bytes=as_bytes and not wanted.is_complex)


def _values(arrow: Any, tensor: Tensor) -> Any:
    """Return the numbers of a contiguous tensor as an Arrow array that shares its memory."""
    if not tensor.numel():
        return arrow.array([], _arrow_type(arrow, tensor.dtype))
    buffer = arrow.foreign_buffer(tensor.data_ptr(), tensor.nbytes, base=tensor)
    if tensor.dtype is torch.bool:  # Arrow stores each bool as one bit.
        return arrow.Array.from_buffers(arrow.uint8(), tensor.numel(), [None, buffer]).cast(arrow.bool_())
    return arrow.Array.from_buffers(_arrow_type(arrow, tensor.dtype), tensor.numel(), [None, buffer])


def _arrow_type(arrow: Any, dtype: torch.dtype) -> Any:
    found: Callable[[], Any] = getattr(arrow, _TYPES[dtype])
    return found()


@contextmanager
def _new_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary folder, and rename it to `path` when everything is written."""
    target = os.path.abspath(os.fsdecode(path))
    if os.path.exists(target):
        raise StoreError(f"{target!r} exists; give a new path")
    temporary = f"{target}.{os.urandom(4).hex()}.hookline-temporary"
    try:
        os.makedirs(temporary)
        yield temporary
        os.rename(temporary, target)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{target!r} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
