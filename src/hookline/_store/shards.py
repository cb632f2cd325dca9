"""One data file: a standard safetensors file with one tensor, "rows", whose header is reserved first and written last.

The header follows from the array and the number of rows, so that any other one is a damaged one. It is padded, and
the rows begin at a multiple of the page size.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from functools import lru_cache

import torch
from torch import Tensor

from hookline._store.manifest import Array, File
from hookline._store.storage import Sink, Storage
from hookline._torch import first_element
from hookline._untrusted_files import stored_dtype

POSITIONS = Array("positions", torch.int64, ())  # Where in its sample each row was.
_PAGE = 4096
_MOST_ROWS = 1 << 62


class Shard:
    """A data file that is being written."""

    def __init__(self, storage: Storage, name: str, array: Array) -> None:
        self._array = array
        self._sink: Sink = storage.sink(name, reserved(array))
        self._rows = self._checksum = 0

    def append(self, rows: Tensor) -> None:
        """Write rows straight from their memory."""
        plain = rows.detach().resolve_conj().resolve_neg().contiguous()
        memory = memory_view(plain)
        self._checksum = zlib.crc32(memory, self._checksum)
        self._sink.write(memory)  # In one call: the kernel keeps what comes together in larger pages, which map faster.
        self._rows += len(rows)

    def finish(self) -> File:
        """Write the header and wait for the disk."""
        self._sink.finish(header(self._array, self._rows))
        return File(self._rows, file_bytes(self._array, self._rows), self._checksum)

    def close(self) -> None:
        """Let go of a file whose record is there."""
        self._sink.close()

    def discard(self) -> None:
        """Remove the file."""
        self._sink.discard()


def header(array: Array, rows: int) -> bytes:
    """Return the file up to its first row."""
    data = _json(array, rows)
    length = reserved(array) - 8
    return length.to_bytes(8, "little") + data + b" " * (length - len(data))


@lru_cache(maxsize=4096)
def reserved(array: Array) -> int:
    """Return where the rows begin, however many there will be."""
    return -(-(len(_json(array, _MOST_ROWS)) + 8) // _PAGE) * _PAGE


def file_bytes(array: Array, rows: int) -> int:
    """Return the size of a file."""
    return reserved(array) + rows * array.row_bytes


def _json(array: Array, rows: int) -> bytes:
    pairs = [2] if array.dtype.is_complex else []
    tensor = {
        "dtype": stored_dtype(array.dtype),
        "shape": [rows, *array.shape, *pairs],
        "data_offsets": [0, rows * array.row_bytes],
    }
    content = {"__metadata__": {"name": array.name, "dtype": str(array.dtype)}, "rows": tensor}
    return json.dumps(content, separators=(",", ":")).encode()


def memory_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor where they lie; the tensor must be held as long as they are."""
    if not tensor.nbytes:
        return memoryview(b"")
    start = first_element(tensor)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(start)).cast("B")
