"""Storage: the files of a store, in a folder of this machine or elsewhere through fsspec.

`Storage` and `Sink` say what a store needs, and `LocalStorage` is a folder; remote_storage.py has the rest.

A data file is made under a temporary name, locked, and only then given its own: so a file that has its name and is not
locked belongs to no living writer. The system drops the locks of a killed process.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from hookline._store.remote_storage import RemoteStorage
from hookline._untrusted_files import LONGEST, open_regular
from hookline.errors import StoreError


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


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: a dead writer is known by the age of its files.
    fcntl = None

_TEMPORARY = ".hookline-temporary"
_LOCK = f".lock{_TEMPORARY}"  # Where there are no links; it stays.
_STALE = 3600  # Seconds without a write after which a writer must be dead, where locks can't tell.
_FOREVER = "or give another path; starting again goes on after the last finished unit"
_REMEDIES = {
    errno.ENOSPC: f"make room on this disk, {_FOREVER}",
    errno.EDQUOT: f"make room in your quota, {_FOREVER}",
    errno.EFBIG: "take smaller units, or raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or take fewer sites at once",
}


class LocalStorage:
    """A folder, which need not exist yet."""

    maps = True  # `rows` costs nothing until they are read.

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fsdecode(path))  # Another process may have another working folder.

    def __str__(self) -> str:
        return self.path

    def child(self, name: str) -> LocalStorage:
        """Return the storage of a folder inside this one."""
        return LocalStorage(os.path.join(self.path, name))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, whole and for good; return False, and change nothing, if it was there already."""
        target = os.path.join(self.path, name)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, f".{os.urandom(8).hex()}{_TEMPORARY}")
        with _writing(target):
            _make(folder)
            try:
                with open(temporary, "xb", buffering=0) as file:
                    _write(file, memoryview(data))
                    os.fsync(file.fileno())
                created = _publish(temporary, target)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            _wait_for(folder)
        return created

    def read(self, name: str, start: int = 0, nbytes: int = -1) -> bytes:
        """Return a small file, or a part of one."""
        path = os.path.join(self.path, name)
        with _reading(path), open_regular(path) as file:
            if nbytes < 0 and os.fstat(file.fileno()).st_size > LONGEST:
                raise OSError(errno.EFBIG, f"it has over {LONGEST:,} bytes")
            file.seek(start)
            return file.read(nbytes)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it is not there."""
        path = os.path.join(self.path, folder)
        try:
            with _reading(path):
                found = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if not name.endswith(_TEMPORARY))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name."""
        path, sizes = os.path.join(self.path, folder), {}
        try:
            with _reading(path), os.scandir(path) as found:
                for entry in found:
                    with suppress(OSError):  # A link that leads nowhere.
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode) and not entry.name.endswith(_TEMPORARY):
                            sizes[entry.name] = status.st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""
        path = os.path.join(self.path, name)
        with _writing(path), suppress(FileNotFoundError):
            os.unlink(path)

    def sink(self, name: str, reserved: int) -> LocalSink:
        """Return a new file to be written from byte `reserved` on; what comes before is given when it is finished."""
        return LocalSink(os.path.join(self.path, name), reserved)

    def rows(self, name: str, start: int, nbytes: int) -> Tensor:
        """Return bytes of a file, mapped: reading them reads the disk, writing to them never changes the file."""
        path = os.path.join(self.path, name)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if os.stat(path).st_size < start + nbytes:  # torch would lengthen the file, or read past its end.
            raise EOFError(f"{path!r} is cut short")
        storage: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=start + nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)[start:]

    def free(self) -> int | None:
        """Return the bytes that are left on the disk, for this user."""
        folder = self.path
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def remove_dead(self, name: str, is_wanted: Callable[[], bool]) -> bool:
        """Remove a data file if no living writer holds it, and, asked only then, it is not wanted."""
        path = os.path.join(self.path, name)
        try:
            with open_regular(path) as file:
                locked = _lock(file)
                if locked and not is_wanted():
                    os.unlink(path)
                    return True
            if locked is None and _age(path) > _STALE and not is_wanted():
                os.unlink(path)
                return True
        except FileNotFoundError:
            pass  # Its writer, or another sweep, was first.
        return False

    def remove_temporary(self, folder: str) -> list[str]:
        """Remove what killed processes left of files that never got their name."""
        removed = []
        with suppress(OSError), os.scandir(os.path.join(self.path, folder)) as found:
            for entry in found:
                if entry.name.endswith(_TEMPORARY) and entry.name != _LOCK and _age(entry.path) > _STALE:
                    os.unlink(entry.path)
                    removed.append(f"{folder}/{entry.name}")
        return removed


class LocalSink:
    """A data file while it is written. It is locked until `close`, or until its process dies."""

    def __init__(self, path: str, reserved: int) -> None:
        self.path = path
        self._reserved = reserved
        self._turn = threading.Lock()  # A file must not be closed under a write: its number may be another's by then.
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f".{os.urandom(8).hex()}{_TEMPORARY}") if fcntl else path
        with _writing(path):
            _make(folder)
            self._file = FileIO(temporary, "xb")
            try:
                if temporary != path:  # Windows does not rename open files.
                    _lock(self._file)
                    os.rename(temporary, path)
                self._file.seek(reserved)
            except BaseException:
                self._file.close()
                for name in (temporary, path):
                    with suppress(OSError):
                        os.unlink(name)
                raise

    def write(self, data: memoryview) -> None:
        """Append bytes; other threads go on meanwhile."""
        with self._turn, _writing(self.path):
            self._check()
            _write(self._file, data)

    def finish(self, header: bytes) -> None:
        """Put the header in front, and wait until all of it is on disk."""
        if len(header) != self._reserved:
            raise ValueError(f"{len(header)} bytes of header, but {self._reserved} are reserved")
        with self._turn, _writing(self.path):
            self._check()
            self._file.seek(0)
            _write(self._file, memoryview(header))
            os.fsync(self._file.fileno())
            _wait_for(os.path.dirname(self.path))
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise StoreError(f"{self.path!r} was removed while it was written; run this unit again")

    def close(self) -> None:
        """Let go of the file: its record is there."""
        with self._turn:
            self._file.close()

    def discard(self) -> None:
        """Remove the file; do nothing if it was closed before."""
        with self._turn:
            if self._file.closed:
                return
            self._file.close()
            with suppress(OSError):
                os.unlink(self.path)

    def _check(self) -> None:
        if self._file.closed:
            raise StoreError(f"{self.path!r} takes no more rows: it was finished or given up")


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Say in words why something can't be read; that it is not there is for the caller."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise StoreError(f"{path!r} can't be read: {error.strerror or error}") from error


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Say in words what the disk has against a file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, f"see that its folder may be written to, {_FOREVER}")
        raise StoreError(f"{path!r} was not written: {error.strerror or error}; {remedy}") from error


def _write(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _lock(file: FileIO | BufferedReader) -> bool | None:
    """Lock an open file; False if somebody else has, None where files can't be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Not every file system can.
        return None
    return True


def _age(path: str) -> float:
    return time.time() - os.stat(path).st_mtime


def _make(folder: str) -> None:
    """Make a folder and those above it, for good."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    _wait_for(parent)


def _wait_for(folder: str) -> None:
    """Wait until the names in a folder are on disk."""
    with suppress(OSError):  # Not every system can wait for a folder.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(temporary: str, target: str) -> bool:
    """Give a finished file its name unless another has it: by a link, which is there wholly or not at all."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return os.stat(temporary).st_nlink > 1  # Over a network the answer to a link that was made may be lost.
    except OSError as error:
        return _publish_without_links(temporary, target, error)
    return True


def _publish_without_links(temporary: str, target: str, error: OSError) -> bool:
    """Give a finished file its name under a lock: some file systems have no links."""
    if fcntl is None:  # On Windows a rename replaces nothing.
        try:
            os.rename(temporary, target)
        except FileExistsError:
            return False
        return True
    with open(os.path.join(os.path.dirname(target), _LOCK), "ab", buffering=0) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        except OSError:
            raise error from None  # Neither links nor locks: two writers could not be told apart.
        if os.path.exists(target):
            return False
        os.rename(temporary, target)
    return True
