"""Files that a stranger may have made: only regular ones are opened, and JSON is bounded before it is parsed.

Whatever such a file says, reading it takes seconds, and memory in proportion to its size.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from typing import Any, NoReturn

import torch

LONGEST = 100_000_000  # Bytes of JSON: also the longest header that safetensors reads.
_MOST_PARTS = 4_000_000  # Of JSON: some hundred bytes of memory each, however short its text.
# A pipe would wait for its other end. Not every system has all of these.
_FLAGS = [getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")]


def open_regular(path: str) -> BufferedReader:
    """Open a file to read it. A folder, a pipe or a device is an OSError; so is a link to one."""
    _refuse_irregular(os.stat(path))  # Merely to open some devices has an effect.
    descriptor = os.open(path, sum(_FLAGS))
    try:
        _refuse_irregular(os.fstat(descriptor))  # It may be another one by now.
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def parse_json(data: bytes | str) -> Any:
    """Return what JSON says; a ValueError if it is malformed, or would take far more memory than its text."""
    text = data.decode() if isinstance(data, bytes) else data
    check_parts(text)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_parts(text: str) -> None:
    """Raise a ValueError if JSON has too many values to be parsed."""
    parts = sum(map(text.count, "[{,"))
    if parts > _MOST_PARTS:
        raise ValueError(f"it has up to {parts:,} values, but at most {_MOST_PARTS:,} are read")


def check_memory(nbytes: int) -> None:
    """Raise a MemoryError if this process can't have so many bytes at once. None is used."""
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError:
        raise MemoryError(f"{nbytes:,} bytes of memory, which this process can't have") from None


def brief(told: object) -> str:
    """Return the first line of an error or of what a file says, cut where it is long."""
    text = str(told).partition("\n")[0] or type(told).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _refuse_irregular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
