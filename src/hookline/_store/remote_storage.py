"""A remote folder, through fsspec: "s3://bucket/acts", "memory://acts", and, for reading, any URL that fsspec opens.

A data file is written to a local temporary file and sent as one object when it is finished. A record is an object that
is created only if it does not exist. A killed writer therefore leaves only objects that no record names. Servers and
credentials come from fsspec's configuration and from the environment.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from hookline._untrusted_files import LONGEST
from hookline.errors import HooklineError, StoreError

# Protocols that can create an object only if it does not exist, in one step, and the request header for it.
_EXCLUSIVE = {"s3": "If-None-Match", "s3a": "If-None-Match", "gs": "ifGenerationMatch", "gcs": "ifGenerationMatch"}
_STALE = 24 * 3600  # An object this many seconds old without a record is taken for a dead writer's.
_RANGE = 8 << 20  # Bytes of one request. Larger reads are split.
_TRIES = 5
_CHECK = (
    "check that its bucket or folder exists, and that fsspec's configuration or the environment has the address and "
    "credentials"
)
_in_memory = threading.Lock()  # memory:// first checks, then creates. All its users are in one process.
_exclusive: set[str] = set()  # Servers on which exclusive creation was found to work.


class RemoteStorage:
    """A folder that fsspec can reach, named by its URL."""

    maps = False  # Every call of `rows` is a request over the network.

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._opened: tuple[int, Any, str] | None = None
        self._open()

    def __str__(self) -> str:
        return self.url

    def __getstate__(self) -> str:
        return self.url

    def __setstate__(self, url: str) -> None:
        self.url, self._opened = url, None

    def child(self, name: str) -> RemoteStorage:
        """Return the storage of a folder inside this one."""
        return RemoteStorage(f"{self.url}/{name}")

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; return False if one with other bytes exists.

        An object with the same bytes counts as created here: the answer to a request may be lost and the request
        repeated.
        """
        system, path = self._open(name)
        with self._writing(name):
            self._check_exclusive(system)
            for number in range(_TRIES):
                try:
                    _create(system, path, data)
                    return True
                except Exception as error:
                    with suppress(FileNotFoundError):
                        return self.read(name) == data
                    if number == _TRIES - 1 or isinstance(error, (FileNotFoundError, PermissionError)):
                        raise
                    time.sleep(0.1 * 2**number)  # The server may tell two simultaneous writers both to retry.
        raise AssertionError("the last try returns or raises")

    def read(self, name: str, start: int = 0, nbytes: int = -1) -> bytes:
        """Return a small object, or a part of one."""
        system, path = self._open(name)
        end = LONGEST + 1 if nbytes < 0 else start + nbytes
        with self._reading(name):
            found = bytes(system.cat_file(path, start=start, end=end))
        if nbytes < 0 and len(found) > LONGEST:
            raise StoreError(f"'{self}/{name}' can't be read: it has over {LONGEST:,} bytes")
        return found

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it does not exist."""
        return sorted(_last(found["name"]) for found in self._listing(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of each object in a folder, by name."""
        return {_last(found["name"]): int(found["size"]) for found in self._listing(folder) if found["type"] == "file"}

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        system, path = self._open(name)
        with self._writing(name), suppress(FileNotFoundError):
            system.rm_file(path)

    def sink(self, name: str, reserved: int) -> RemoteSink:
        """Return a new file to be written from offset `reserved` on. It is sent when it is finished."""
        return RemoteSink(self, name, reserved)

    def rows(self, name: str, start: int, nbytes: int) -> Tensor:
        """Return bytes of an object. A large range is read in several pieces at once."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        system, path = self._open(name)
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        starts = range(start, start + nbytes, _RANGE)
        ends = [min(begin + _RANGE, start + nbytes) for begin in starts]
        with self._reading(name):
            if len(starts) == 1:
                pieces = [system.cat_file(path, start=start, end=start + nbytes)]
            else:
                pieces = system.cat_ranges([path] * len(starts), list(starts), ends, on_error="raise")
        for begin, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - begin:
                raise EOFError(f"'{self}/{name}' is cut short")
            memory[begin - start : end - start] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        return memory

    def free(self) -> int | None:
        """Return None: object stores do not report free space."""
        return None

    def remove_dead(self, name: str, is_wanted: Callable[[], bool]) -> bool:
        """Remove an object if it is a day old and not wanted. Only its age shows that its writer is dead."""
        system, path = self._open(name)
        try:
            with self._reading(name):
                age = time.time() - system.modified(path).timestamp()
        except (FileNotFoundError, NotImplementedError):
            return False
        if age < _STALE or is_wanted():
            return False
        self.remove(name)
        return True

    def remove_temporary(self, folder: str) -> list[str]:
        """Return an empty list: objects are created atomically, so there are no temporary ones."""
        return []

    def _open(self, name: str = "") -> tuple[Any, str]:
        """Return the file system, and the path of a name in it. fsspec needs a new file system after a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *_file_system(self.url))
        _, system, root = self._opened
        return system, f"{root}/{name}" if name else root

    def _listing(self, folder: str) -> list[dict[str, Any]]:
        system, path = self._open(folder)
        system.invalidate_cache(path)  # Other processes may have written there.
        try:
            with self._reading(folder):
                found = list(system.ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some file systems list the folder itself.
        return [one for one in found if one["name"].strip("/") != path.strip("/")]

    def _check_exclusive(self, system: Any) -> None:
        """Refuse to write to a server that can't create files exclusively. Each server is tried once."""
        kinds = [system.protocol] if isinstance(system.protocol, str) else list(system.protocol)
        if "memory" in kinds:
            return
        if not any(kind in _EXCLUSIVE for kind in kinds):
            raise StoreError(
                f"'{self}' can be read, but not written to: {kinds[0]} creates no file exclusively, so two writers "
                "could not be told apart; harvest to a folder of this machine and copy it there"
            )
        where = self.url.partition("://")[2].partition("/")[0]
        if where in _exclusive:
            return
        _, path = self._open(f".hookline-{os.urandom(8).hex()}")
        _create(system, path, b"one")
        try:
            with suppress(Exception):
                _create(system, path, b"two")
            if system.cat_file(path) != b"one":
                header = next(_EXCLUSIVE[kind] for kind in kinds if kind in _EXCLUSIVE)
                raise StoreError(
                    f"'{self}' can't be written to: its server ignores {header}, so two writers could not be told "
                    "apart; update it, or harvest to a folder of this machine"
                )
        finally:
            with suppress(Exception):
                system.rm_file(path)
        _exclusive.add(where)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Raise a StoreError that says why an object can't be read. The caller handles a missing one."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, NotImplementedError, StoreError):
            raise
        except Exception as error:  # Each file system has its own exceptions.
            raise StoreError(f"'{self}/{name}' can't be read: {_reason(error)}; {_CHECK}") from error

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Raise a StoreError that says why an object can't be written."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            again = "starting again goes on after the last finished unit"
            raise StoreError(f"'{self}/{name}' was not written: {_reason(error)}; {_CHECK}; {again}") from error


class RemoteSink:
    """A data file that is being written: an unnamed local file until it is sent."""

    def __init__(self, storage: RemoteStorage, name: str, reserved: int) -> None:
        self._storage = storage
        self._name = name
        self._reserved = reserved
        self._turn = threading.Lock()
        self._is_sent = False
        # The file goes away with this process, however that ends.
        self._spool = tempfile.TemporaryFile(prefix="hookline-")  # noqa: SIM115
        self._spool.seek(reserved)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        with self._turn, self._storage._writing(self._name):
            self._check()
            self._spool.write(data)

    def finish(self, header: bytes) -> None:
        """Write the header, and send the file. The object exists when this returns."""
        if len(header) != self._reserved:
            raise ValueError(f"{len(header)} bytes of header, but {self._reserved} are reserved")
        system, path = self._storage._open(self._name)
        with self._turn, self._storage._writing(self._name):
            self._check()
            self._spool.seek(0)
            self._spool.write(header)
            self._spool.flush()
            self._is_sent = True
            with _named(self._spool) as own:
                system.put_file(own, path)
            self._spool.close()

    def close(self) -> None:
        """Close the file: its record was written."""
        with self._turn:
            self._spool.close()
            self._is_sent = False

    def discard(self) -> None:
        """Remove the file, and the object if it was sent; do nothing if it was closed or discarded before."""
        with self._turn:
            self._spool.close()
            if self._is_sent:
                self._is_sent = False
                with suppress(StoreError):
                    self._storage.remove(self._name)

    def _check(self) -> None:
        if self._spool.closed:
            raise StoreError(f"'{self._storage}/{self._name}' takes no more rows: it was finished or discarded")


@contextmanager
def _named(spool: Any) -> Iterator[str]:
    """Yield a path to an unnamed file: the path of its descriptor in /proc, or else of a copy."""
    path = f"/proc/self/fd/{spool.fileno()}"
    if os.path.exists(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
        path = os.path.join(folder, "rows.safetensors")
        spool.seek(0)
        with open(path, "wb") as file:
            while piece := spool.read(_RANGE):
                file.write(piece)
        yield path


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise HooklineError(f"{url!r} is reached through fsspec: pip install 'hookline[remote]'") from error
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        remedy = "pip install 'hookline[s3]'" if scheme in ("s3", "s3a") else _reason(error)
        raise HooklineError(f"{url!r} needs a further package: {remedy}") from error
    except Exception as error:
        raise StoreError(f"{url!r} can't be opened: {_reason(error)}") from error
    return system, str(path).rstrip("/")


def _create(system: Any, path: str, data: bytes) -> None:
    if system.protocol == "memory":
        with _in_memory:
            system.pipe_file(path, data, mode="create")
    else:
        system.pipe_file(path, data, mode="create")


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
