"""Which epoch an iteration is: agreed on by every worker of a DataLoader, whenever and however it was started.

Workers can't ask each other, and nothing is called in the process that starts them. So each appends its iteration to
one small file, which is atomic, and reads it from the start: all see the same iterations in the same order.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import get_worker_info

_ENTRY = struct.Struct("<qq")
_SET = -1  # An entry (_SET, epoch) says what the next epoch is; any other is the name of an iteration.
_ALONE = -2


class Epochs:
    """A count of epochs that copies of it in other processes share."""

    def __init__(self) -> None:
        self._passes = 0  # Of this worker: one that persists has one seed for all its epochs.
        self._make()

    def set(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._append(_SET, epoch)

    def begin(self) -> int:
        """Return the epoch of the iteration that begins now, the same one in all workers of a DataLoader."""
        worker = get_worker_info()
        if worker is None:
            name = (_ALONE, int.from_bytes(os.urandom(7), "little"))
        else:
            name = (self._passes, worker.seed - worker.id)  # This seed is drawn anew for each set of workers.
            self._passes += 1
        return self._number(self._append(*name), name)

    def _append(self, *entry: int) -> bytes:
        """Append an entry, and return the file as it is then."""
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
        raise AssertionError("an iteration is in the file before it is looked for")

    def _make(self) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="hookline-epochs-")
        os.close(descriptor)
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_passes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not os.path.exists(self._path):  # Another machine, or another day.
            self._make()


def generator(*numbers: int) -> torch.Generator:
    """Return a generator whose seed depends on every one of some numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # Not in a forked worker.
        with suppress(OSError):
            os.unlink(path)
