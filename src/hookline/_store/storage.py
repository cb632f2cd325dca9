"""Storage: the files of a store, in a folder on this machine or a remote one through fsspec.

`Storage` and `Sink` are the interfaces that a store needs. `LocalStorage` is a folder on this machine; remote folders
are in remote_storage.py.

A data file is created under a temporary name, locked, and only then renamed to its final name. A file with its final
name that is not locked therefore has no running writer: the system releases the locks of a killed process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
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
from hookline.errors import HooklineError, StoreError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: dead writers are recognized by the age of their files.
    fcntl = None

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None

_TEMPORARY = ".hookline-temporary"
_LOCK = f".lock{_TEMPORARY}"  # A lock file for file systems without hard links. It is never removed.
_EARLY = 8 << 20  # The system is asked to write to disk after this many bytes. Otherwise it would wait for the end.
_STALE = 3600  # Without locks, a writer that wrote nothing for this many seconds is taken for dead.
_OR_MOVE = "or give another path; starting again goes on after the last finished unit"
_REMEDIES = {
    errno.ENOSPC: f"make room on this disk, {_OR_MOVE}",
    errno.EDQUOT: f"make room in your quota, {_OR_MOVE}",
    errno.EFBIG: "take smaller units, or raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or take fewer sites at once",
}


class Sink(Protocol):
    """A data file that is being written. No other writer touches it until `close`."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def finish(self, header: bytes) -> None:
        """Write the header into the reserved bytes. The file is durable when this returns."""

    def close(self) -> None:
        """Close the file: its record was written."""

    def discard(self) -> None:
        """Remove the file; do nothing if it was closed or discarded before."""


class Storage(Protocol):
    """A folder, local or remote. Names are relative, with "/". Errors other than a missing file are StoreErrors."""

    @property
    def maps(self) -> bool:
        """True if `rows` maps a file, which costs nothing until it is read; False if `rows` reads at once."""

    def child(self, name: str) -> Storage:
        """Return the storage of a folder inside this one."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file atomically and durably; return False, and change nothing, if it exists."""

    def read(self, name: str, start: int = 0, nbytes: int = -1) -> bytes:
        """Return a small file, or `nbytes` of one from `start` on; raise FileNotFoundError if it does not exist.

        A file that is not regular, or far too large, is refused before it is read.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of each regular file in a folder, by name; none if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def sink(self, name: str, reserved: int) -> Sink:
        """Return a new file to be written from offset `reserved` on."""

    def rows(self, name: str, start: int, nbytes: int) -> Tensor:
        """Return bytes of a file as a flat uint8 tensor. Writing to it never changes the file."""

    def free(self) -> int | None:
        """Return the number of free bytes, or None if it is unknown."""

    def remove_dead(self, name: str, is_wanted: Callable[[], bool]) -> bool:
        """Remove a data file if no running writer holds it, and `is_wanted`, called after that, returns False.

        Return True if it was removed.
        """

    def remove_temporary(self, folder: str) -> list[str]:
        """Remove the temporary files that killed writers left in a folder; return their names."""


def full_path(to: str | os.PathLike[str]) -> str:
    """Return what `to=` names, as a URL or a full path: another process may have another working folder."""
    text = os.fsdecode(to)
    if not text:
        raise HooklineError("to='' is not a folder; '.' is the one you are in")
    return text if "://" in text else os.path.abspath(text)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Open the storage that a path names: a folder of this machine, or "scheme://..."."""
    text = os.fsdecode(path)
    scheme, mark, path = text.partition("://")
    if mark and scheme in ("file", "local"):
        return LocalStorage(path)
    return RemoteStorage(text) if mark else LocalStorage(text)


class LocalStorage:
    """A folder, which need not exist yet."""

    maps = True  # `rows` maps a file, which costs nothing until it is read.

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fsdecode(path))  # Another process may have another working folder.

    def __str__(self) -> str:
        return self.path

    def child(self, name: str) -> LocalStorage:
        """Return the storage of a folder inside this one."""
        return LocalStorage(os.path.join(self.path, name))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file atomically and durably; return False, and change nothing, if it exists."""
        target = os.path.join(self.path, name)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, f".{os.urandom(8).hex()}{_TEMPORARY}")
        with _writing(target):
            _make_folder(folder)
            try:
                with open(temporary, "xb", buffering=0) as file:
                    _write(file, memoryview(data))
                    os.fsync(file.fileno())
                created = _publish(temporary, target)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            _sync_folder(folder)
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
        """Return the names in a folder, sorted; none if it does not exist."""
        path = os.path.join(self.path, folder)
        try:
            with _reading(path):
                found = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if not name.endswith(_TEMPORARY))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of each regular file in a folder, by name; none if it does not exist."""
        path, sizes = os.path.join(self.path, folder), {}
        try:
            with _reading(path), os.scandir(path) as found:
                for entry in found:
                    with suppress(OSError):  # A broken symbolic link.
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode) and not entry.name.endswith(_TEMPORARY):
                            sizes[entry.name] = status.st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        path = os.path.join(self.path, name)
        with _writing(path), suppress(FileNotFoundError):
            os.unlink(path)

    def sink(self, name: str, reserved: int) -> LocalSink:
        """Return a new file to be written from offset `reserved` on. The header before it is written at the end."""
        return LocalSink(os.path.join(self.path, name), reserved)

    def rows(self, name: str, start: int, nbytes: int) -> Tensor:
        """Return bytes of a file, mapped into memory. Writing to them never changes the file."""
        path = os.path.join(self.path, name)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if os.stat(path).st_size < start + nbytes:  # torch would lengthen the file, or read past its end.
            raise EOFError(f"{path!r} is cut short")
        storage: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=start + nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)[start:]

    def free(self) -> int | None:
        """Return the free bytes on the disk, for this user."""
        folder = self.path
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def remove_dead(self, name: str, is_wanted: Callable[[], bool]) -> bool:
        """Remove a data file if no running writer holds it, and `is_wanted`, called after that, returns False."""
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
            pass  # Its writer or another process has removed it.
        return False

    def remove_temporary(self, folder: str) -> list[str]:
        """Remove the temporary files that killed writers left in a folder; return their names."""
        removed = []
        with suppress(OSError), os.scandir(os.path.join(self.path, folder)) as found:
            for entry in found:
                if entry.name.endswith(_TEMPORARY) and entry.name != _LOCK and _age(entry.path) > _STALE:
                    os.unlink(entry.path)
                    removed.append(f"{folder}/{entry.name}")
        return removed


class LocalSink:
    """A data file that is being written. It is locked until `close`, or until its process dies."""

    def __init__(self, path: str, reserved: int) -> None:
        self.path = path
        self._reserved = reserved
        self._started = 0  # The system was asked to write to disk up to this offset.
        self._turn = threading.Lock()  # Prevents closing during a write: another file could get the descriptor.
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f".{os.urandom(8).hex()}{_TEMPORARY}") if fcntl else path
        with _writing(path):
            _make_folder(folder)
            self._file = FileIO(temporary, "xb")
            try:
                if temporary != path:  # They are equal on Windows, which does not rename open files.
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
        """Append bytes. Other threads can run during the write."""
        with self._turn, _writing(self.path):
            self._check()
            _write(self._file, data)
            self._start()

    def finish(self, header: bytes) -> None:
        """Write the header, and wait until the whole file is on disk."""
        if len(header) != self._reserved:
            raise ValueError(f"{len(header)} bytes of header, but {self._reserved} are reserved")
        with self._turn, _writing(self.path):
            self._check()
            self._file.seek(0)
            _write(self._file, memoryview(header))
            os.fsync(self._file.fileno())
            _sync_folder(os.path.dirname(self.path))
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise StoreError(f"{self.path!r} was removed while it was written; run this unit again")

    def close(self) -> None:
        """Close the file: its record was written."""
        with self._turn:
            self._file.close()

    def discard(self) -> None:
        """Remove the file, unless it was closed."""
        with self._turn:
            if self._file.closed:
                return
            self._file.close()
            with suppress(OSError):
                os.unlink(self.path)

    def _start(self) -> None:
        """Let the disk work while more rows come, so that `finish` waits for less. `finish` reports errors of this."""
        end = self._file.tell() // _EARLY * _EARLY
        if end > self._started and _sync_file_range is not None:
            span = ctypes.c_int64(self._started), ctypes.c_int64(end - self._started)
            _sync_file_range(self._file.fileno(), *span, 2)  # 2 is SYNC_FILE_RANGE_WRITE: it does not wait.
            self._started = end

    def _check(self) -> None:
        if self._file.closed:
            raise StoreError(f"{self.path!r} takes no more rows: it was finished or discarded")


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise a StoreError that says why a file can't be read. The caller handles a missing file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise StoreError(f"{path!r} can't be read: {error.strerror or error}") from error


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Raise a StoreError that says why a file can't be written."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, f"check that its folder is writable, {_OR_MOVE}")
        raise StoreError(f"{path!r} was not written: {error.strerror or error}; {remedy}") from error


def _write(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _lock(file: FileIO | BufferedReader) -> bool | None:
    """Lock an open file; return False if another process has locked it, None if files can't be locked here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Not every file system has locks.
        return None
    return True


def _age(path: str) -> float:
    return time.time() - os.stat(path).st_mtime


def _make_folder(folder: str) -> None:
    """Create a folder and its parents, durably."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    """Wait until the names in a folder are on disk."""
    with suppress(OSError):  # Not every system can sync a folder.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(temporary: str, target: str) -> bool:
    """Give a finished file its name by a hard link, which is atomic; return False if the name is taken."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return os.stat(temporary).st_nlink > 1  # On a network disk, the link may be ours, and only the answer was lost.
    except OSError as error:
        return _publish_without_links(temporary, target, error)
    return True


def _publish_without_links(temporary: str, target: str, error: OSError) -> bool:
    """Give a finished file its name under a lock, on a file system without hard links."""
    if fcntl is None:  # On Windows, a rename never replaces a file.
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
