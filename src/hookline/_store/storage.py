"""Storage: the files of a store, in a folder of this machine or elsewhere through fsspec.

`Storage` and `Sink` say what a store needs; `open_storage` chooses between local_storage.py and remote_storage.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hookline._store.local_storage import LocalStorage
from hookline._store.remote_storage import RemoteStorage


class Sink(Protocol):
    """A data file while it is written. No other writer touches it until `close`."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def finish(self, header: bytes) -> None:
        """Put the header, as long as was reserved, in front; it is durable when this returns."""

    def close(self) -> None:
        """Let go of the file: its record is there."""

    def discard(self) -> None:
        """Remove the file; do nothing if it was closed or removed before."""


class Storage(Protocol):
    """A folder, here or elsewhere. Names are relative, with "/"; an error that is not an absence is a StoreError."""

    @property
    def maps(self) -> bool:
        """Whether `rows` costs nothing until they are read; else ask for no more than is needed."""

    def child(self, name: str) -> Storage:
        """Return the storage of a folder inside this one."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, whole and durable; return False, and change nothing, if it was there already."""

    def read(self, name: str, start: int = 0, nbytes: int = -1) -> bytes:
        """Return a small file, or `nbytes` of one from `start` on; FileNotFoundError if it is absent.

        A file that is not a regular one, or is far too large to be small, is refused before it is read.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it is not there."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each regular file in a folder, by name; none if it is not there."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""

    def sink(self, name: str, reserved: int) -> Sink:
        """Return a new file to be written from byte `reserved` on."""

    def rows(self, name: str, start: int, nbytes: int) -> Tensor:
        """Return bytes of a file as a flat uint8 tensor that may be written to without changing the file."""

    def free(self) -> int | None:
        """Return the bytes that are left, if known."""

    def remove_dead(self, name: str, is_wanted: Callable[[], bool]) -> bool:
        """Remove a data file if no living writer holds it, and, asked only then, it is not wanted."""

    def remove_temporary(self, folder: str) -> list[str]:
        """Remove what killed writers left in a folder under names of its own; return them."""


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Open the storage that a path names: a folder of this machine, or "scheme://..."."""
    text = os.fsdecode(path)
    scheme, mark, path = text.partition("://")
    if mark and scheme in ("file", "local"):
        return LocalStorage(path)
    return RemoteStorage(text) if mark else LocalStorage(text)
