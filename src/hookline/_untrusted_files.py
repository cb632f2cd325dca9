"""Read untrusted files safely; and the names of dtypes in files."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from typing import Any, NoReturn

import torch

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# The dtypes that every safetensors reader knows. Complex numbers are stored as pairs, other 1-byte floats as bytes.
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

LONGEST = 100_000_000  # Bytes of JSON: also safetensors' limit for a header.
_MOST_PARTS = 4_000_000  # Values in JSON: each takes a few hundred bytes of memory, however short its text.
# Without O_NONBLOCK, opening a pipe would wait. Not every system has all of these flags.
_FLAGS = [getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")]


def open_regular(path: str) -> BufferedReader:
    """Open a file to read it. Raises an OSError for a folder, a pipe, a device, or a link to one."""
    _refuse_irregular(os.stat(path))  # Opening some devices has side effects.
    descriptor = os.open(path, sum(_FLAGS))
    try:
        _refuse_irregular(os.fstat(descriptor))  # The file may have been replaced since `os.stat`.
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def parse_json(data: bytes | str) -> Any:
    """Parse JSON. Raises a ValueError if it is malformed, or would take far more memory than its text."""
    text = data.decode() if isinstance(data, bytes) else data
    check_parts(text)
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_parts(text: str) -> None:
    """Raise a ValueError if JSON has too many values to be parsed."""
    parts = sum(map(text.count, "[{,")) if len(text) > _MOST_PARTS else 0
    if parts > _MOST_PARTS:
        raise ValueError(f"it has up to {parts:,} values, but at most {_MOST_PARTS:,} are read")


def check_memory(nbytes: int) -> None:
    """Raise a MemoryError if this process can't allocate this many bytes. They are freed at once."""
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError:
        raise MemoryError(f"{nbytes:,} bytes of memory, which this process can't allocate") from None


def _refuse_irregular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as people write it.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of the dtype in which this one is stored."""
    byte = "U8" if dtype.is_floating_point and dtype.itemsize == 1 else None
    return NAMES.get(dtype.to_real(), byte)
