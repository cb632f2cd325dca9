"""A cache as one safetensors file: nested values of every call, without pickle, written completely or not at all.

Other results are saved in the same way under another name of the format: see `READERS`.

`write_file` turns the values into a JSON manifest and a list of tensors (`Encoder`) and streams both to a temporary
file, which it then renames. `read_file` checks every byte and rebuilds the values (`Decoder`), with their tensors on
the CPU. Any safetensors reader can open the file: it has tensors "0", "1", ..., and the same view of the same
memory is written once. The metadata has the manifest and its checksum. The header is computed from the manifest
(`_header`). A file with any other header is damaged.

In the manifest a value is a node: None, a bool, an int, a str or [kind, *nodes]. `_KINDS` defines how each kind of
value is taken apart and rebuilt. A value that can't be written exactly is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import json
import math
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from typing import Any

import torch
from torch import Tensor

from hookline._torch import lazy_clone, storage_address, storage_id
from hookline._untrusted_files import DTYPES, LONGEST, check_memory, check_parts, open_regular, parse_json, stored_dtype
from hookline.errors import StoreError, first_line

READERS = {"cache": "hl.Cache.load", "sweep": "hl.Sweep.load"}  # What a file may hold, and what reads it.
_VERSION = 1
_START = b'{"__metadata__":{"hookline":"'  # The start of every header, up to the text of the manifest.
_PIECE = 4 << 20  # Bytes copied at a time.
_TEMPORARY, _STALE = ".hookline-temporary", 3600  # After so many seconds without a write, the writer must be dead.
_EXISTS = "it exists; only files are replaced, and only with overwrite=True"
_TOO_MANY = "it holds too many values for one file; save fewer sites with cache.select(...)"
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error)


def write_file(
    path: str | os.PathLike[str],
    entries: Mapping[str, Sequence[Any]],
    gaps: Sequence[str] = (),
    *,
    kind: str = "cache",
    overwrite: bool = False,
    scratch: bool = False,
) -> None:
    """Write each site's calls (lists of nested values, oldest first) to one safetensors file, completely or not at all.

    Args:
        gaps: The sites of which other calls were not kept.
        kind: What the file holds, one of `READERS`.
        scratch: Whether the file is in a folder that only this process uses, and need not outlive it. It is not synced
            to disk.
    """
    name, target, size = os.fspath(path), os.path.realpath(path), ""
    try:
        if os.path.exists(target) and not (overwrite and os.path.isfile(target)):
            raise Problem(_EXISTS)
        encoder = Encoder()
        sites = [[site, encoder.calls(site, calls)] for site, calls in entries.items()]
        notes = [["0" * 8, str(tensor.dtype), list(tensor.shape)] for tensor in encoder.tensors]
        manifest: dict[str, Any] = {"format": _format(kind), "tensors": notes, "sites": sites}
        manifest |= {"gaps": gaps} if gaps else {}
        needed = len(_header(manifest)) + sum(tensor.nbytes for tensor in encoder.tensors)
        size = f" ({needed:,} bytes)"
        _make_room(os.path.dirname(target), needed, clean=not scratch)
        _save(target, manifest, encoder.tensors, overwrite, wait=not scratch)
    except Problem as problem:
        raise StoreError(f"{name!r} was not written: {problem}") from problem.__cause__
    except OSError as error:
        remedy = f"see that its folder exists, may be written to and has room, or save less with {kind}.select(...)"
        raise StoreError(f"{name!r} was not written{size}: {error.strerror or error}; {remedy}") from error


def read_file(path: str | os.PathLike[str], kind: str = "cache") -> dict[str, list[Any]]:
    """Return the values in a file that `write_file` wrote. Any other or damaged file raises StoreError."""
    return read_cache(path, kind)[0]


def read_cache(path: str | os.PathLike[str], kind: str = "cache") -> tuple[dict[str, list[Any]], list[str]]:
    """Return the values in a file, and the sites of which other calls were not kept."""
    name = os.fspath(path)
    try:
        with open_regular(name) as file, torch.inference_mode(False), torch.no_grad():
            return _load(file, os.fstat(file.fileno()).st_size, kind)
    except Problem as problem:
        raise StoreError(f"{name!r} {problem}") from problem.__cause__
    except OSError as error:
        remedy = (
            "a folder of hl.harvest is opened by hl.Store" if os.path.isdir(path) else "give a path that was saved to"
        )
        raise StoreError(f"{name!r} can't be read: {error.strerror or error}; {remedy}") from error
    except MemoryError as error:
        raise StoreError(f"{name!r} needs {error}; load it on a larger machine") from error
    except _MALFORMED as error:
        raise StoreError(
            f"{name!r} is damaged, its manifest makes no sense ({first_line(error)}); save it again"
        ) from error


def _format(kind: str) -> list[Any]:
    """Return the name and version of the format of a file."""
    return [f"hookline {kind}", _VERSION]


def _header(manifest: Mapping[str, Any]) -> bytes:
    """Return the start of the file, up to the data."""
    text = json.dumps(manifest, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {"hookline": text, "checksum": f"{zlib.crc32(text.encode()):08x}"}}
    for index, dtype, shape, begin, end in _places(manifest["tensors"]):
        pairs = [2] if dtype.is_complex else []
        header[str(index)] = {"dtype": stored_dtype(dtype), "shape": shape + pairs, "data_offsets": [begin, end]}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    try:
        check_parts(text)
    except ValueError as error:
        raise Problem(_TOO_MANY) from error
    if len(data) > LONGEST:
        raise Problem(_TOO_MANY)
    return len(data).to_bytes(8, "little") + data


def _places(notes: Sequence[Any]) -> list[tuple[int, torch.dtype, list[int], int, int]]:
    """Return index, dtype, shape, begin and end of each tensor in the data.

    Tensors with the largest elements come first, which keeps all of them aligned.
    """
    places, end = [], 0
    for index in sorted(range(len(notes)), key=lambda index: -DTYPES[notes[index][1]].to_real().itemsize):
        dtype, shape = DTYPES[notes[index][1]], notes[index][2]
        fits = len(shape) <= 64 and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
        if not fits or not stored_dtype(dtype):
            raise ValueError(f"tensor {index} can't have this dtype or shape")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        places.append((index, dtype, shape, begin, end))
    return places


def _make_room(folder: str, needed: int, clean: bool) -> None:
    """Remove the temporary files of killed processes from a folder; raise if there is still no room."""
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found if clean else ():
            if entry.name.endswith(_TEMPORARY) and time.time() - entry.stat().st_mtime > _STALE:
                os.unlink(entry)
    if needed > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save(target: str, manifest: dict[str, Any], tensors: list[Tensor | Later], overwrite: bool, wait: bool) -> None:
    """Write a file under a temporary name, then rename it."""
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file, torch.no_grad():
            _stream(file, manifest, tensors)
            if wait:
                os.fsync(file.fileno())
        _publish(temporary, target, overwrite)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    if not wait:
        return
    with suppress(OSError):  # Not every system can sync a folder.
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _stream(file: BufferedWriter, manifest: dict[str, Any], tensors: list[Tensor | Later]) -> None:
    """Write the tensors a piece at a time, then the header with their checksums."""
    file.seek(len(_header(manifest)))
    for index, *_ in _places(manifest["tensors"]):
        checksum, tensor = 0, tensors[index]
        for piece in _pieces(tensor.read() if isinstance(tensor, Later) else tensor):
            data = bytearray(piece.nbytes)
            # From a GPU, copy_ gets strided conjugate and negative views wrong, so they are resolved first. Reading a
            # copy-on-write tensor by copy_ leaves it shared.
            plain = piece.resolve_conj().resolve_neg()
            torch.frombuffer(data, dtype=piece.dtype).view(piece.shape).copy_(plain)
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        manifest["tensors"][index][0] = f"{checksum:08x}"
    file.seek(0)
    file.write(_header(manifest))
    file.flush()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tensor of at most _PIECE bytes, in the order of its elements."""
    if tensor.nbytes <= _PIECE:
        yield from [tensor] if tensor.numel() else []
        return
    rows = _PIECE * len(tensor) // tensor.nbytes
    for start in range(0, len(tensor), max(rows, 1)):
        yield from _pieces(tensor[start : start + rows] if rows else tensor[start])


def _publish(temporary: str, target: str, overwrite: bool) -> None:
    """Give a finished file its final name. Without `overwrite`, link it: a link never replaces a file."""
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except OSError:
        if os.path.lexists(target):
            raise Problem(_EXISTS) from None
        os.rename(temporary, target)  # Some file systems have no links.


def _load(file: BufferedReader, size: int, kind: str) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the values in an open file of `size` bytes, and its sites with gaps."""
    manifest, start = _manifest(file, size, kind)
    places = _places(manifest["tensors"])
    if size != start + max((end for *_, end in places), default=0):
        raise Problem("is cut short or too long; save it again")
    check_memory(size - start)
    tensors = {}
    for index, dtype, shape, begin, end in places:
        memory = _memory(file, end - begin, manifest["tensors"][index][0])
        tensors[index] = memory.view(dtype).view(shape)
    decoder = Decoder(tensors)
    if not all(type(site) is str and type(calls) is list for site, calls in manifest["sites"]):
        raise ValueError("a site that is not text, or has no list of calls")
    entries = {site: [decoder.value(call) for call in calls] for site, calls in manifest["sites"]}
    if decoder.unused or len(entries) != len(manifest["sites"]):
        raise ValueError("a site appears twice, or a tensor belongs to no site")
    gaps = manifest.get("gaps", [])
    if type(gaps) is not list or not all(type(site) is str and site in entries for site in gaps):
        raise ValueError("gaps that are no list of its sites")
    return entries, gaps


def _manifest(file: BufferedReader, size: int, kind: str) -> tuple[dict[str, Any], int]:
    """Return the checked manifest of an open file, and where the data starts."""
    foreign = "or not a safetensors file (no pickle is ever opened: for a .pt use torch.load(path, weights_only=True))"
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if not 0 < length <= min(size - 8, LONGEST):
        raise Problem(f"is cut short, {foreign}")
    head += file.read(length)
    if not head.startswith(b"{", 8):
        raise Problem(f"is damaged, {foreign}")
    if not head.startswith(_START, 8):
        raise Problem("is not from hookline, or damaged; read another's with safetensors.torch.load_file(path)")
    # Only the text of the manifest is parsed. The rest of the header is computed from it and compared.
    text, _ = json.JSONDecoder().raw_decode(head[8:].decode(), len(_START) - 1)
    manifest = parse_json(text)
    is_whole = f'"checksum":"{zlib.crc32(text.encode()):08x}"'.encode() in head
    if manifest["format"] != _format(kind) and is_whole:
        other = next((one for one in READERS if manifest["format"] == _format(one)), None)
        if other is not None:
            raise Problem(f"holds a {other}, not a {kind}; read it with {READERS[other]}(path)")
        raise Problem(
            f"is of format {first_line(manifest['format'])}, but this hookline reads {_format(kind)}; update hookline"
        )
    if not is_whole or _header(manifest) != head:
        raise Problem("is damaged: its header does not fit its checksum; save it again")
    return manifest, len(head)


def _memory(file: BufferedReader, nbytes: int, checksum: str) -> Tensor:
    """Read the next bytes of a file into memory that torch owns, and check them."""
    memory, found = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
    for start in range(0, nbytes, _PIECE):
        data = bytearray(min(_PIECE, nbytes - start))
        file.readinto(data)
        found = zlib.crc32(data, found)
        memory[start : start + _PIECE] = torch.frombuffer(data, dtype=torch.uint8)
    if f"{found:08x}" != checksum:
        raise Problem("is damaged: a tensor does not fit its checksum; save it again")
    return memory


_DEPTH = 100  # Levels of nesting.
_MOST_KINDS = 1000  # The most kinds of records in one file. Each kind needs a new type, which is slow to create.


class Problem(Exception):
    """A problem with a value or a file. `write_file` and `read_file` add the path."""

    what = ""  # For a tensor that no file can hold: what kind it is.


class Later:
    """A tensor that is stored elsewhere, and is read when it is written to the file."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = shape
        self.nbytes = shape.numel() * dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError


class Encoder:
    """Turns values into nodes and collects their tensors. A node is None, a bool, an int, a str or [kind, *nodes]."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | Later] = []
        self._indices: dict[Any, int] = {}
        self._kinds: set[Any] = set()
        self._storages: list[list[int]] = []

    def calls(self, site: str, calls: Sequence[Any]) -> list[Any]:
        """Return the node of each call."""
        try:
            return [self._node(call, 0) for call in calls]
        except Problem as problem:
            raise Problem(f"the value of {site!r} is or holds {problem}") from problem.__cause__

    def _node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if depth > _DEPTH:
            raise _refusal(f"a {kind.__name__} over {_DEPTH} levels deep (does it hold itself?)")
        if value is None or kind in (bool, str) or (kind is int and abs(value) < 1 << 63):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Later):
            return self._note(value, value, 0)
        tag, parts = (kind.__name__, _KINDS[kind][0](value)) if kind in _KINDS else ("record", _record(value))
        if tag == "record" and not _is_counted(self._kinds, parts):
            raise _refusal(f"over {_MOST_KINDS} kinds of records")
        return [tag, *(self._node(part, depth + 1) for part in parts)]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        """Note each memory once. Storages that share it copy-on-write get different numbers."""
        check(tensor)
        signs = (tensor.is_conj(), tensor.is_neg())
        start = storage_address(tensor), tensor.storage_offset()  # The address is that of the storage.
        key = (*start, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), signs)
        return self._note(key, tensor.detach(), storage_id(tensor.untyped_storage()))

    def _note(self, key: Any, tensor: Tensor | Later, storage: int) -> list[Any]:
        index = self._indices.setdefault(key, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self._storages.append([])
        storages = self._storages[index]
        if storage not in storages:
            storages.append(storage)
        return ["tensor", index, storages.index(storage)]


class Decoder:
    """Turns nodes back into values."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = {(index, 0): tensor for index, tensor in tensors.items()}
        self.unused = set(tensors)
        self._kinds: set[Any] = set()

    def value(self, node: Any) -> Any:
        """Return the value that a node stands for."""
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is not list:
            raise ValueError(f"{str(node)[:40]!r} is not a value")
        kind, *parts = [self.value(part) for part in node]
        if kind == "record" and not _is_counted(self._kinds, parts):
            raise ValueError(f"over {_MOST_KINDS} kinds of records")
        return self._tensor(*parts) if kind == "tensor" else _BUILDERS[kind](*parts)

    def _tensor(self, index: int, copy: int) -> Tensor:
        if type(copy) is not int:
            raise ValueError(f"{str(copy)[:40]!r} is not the number of a copy")
        self.unused.discard(index)
        if (index, copy) not in self._tensors:
            self._tensors[index, copy] = lazy_clone(self._tensors[index, 0])
        return self._tensors[index, copy]


def _flat(parts: Mapping[Any, Any]) -> list[Any]:
    for key in parts:
        if key is not None and type(key) not in (str, int, bool):
            raise _refusal(f"a dict with a key of type {type(key).__name__}")
    return [part for pair in parts.items() for part in pair]


def _dict(*parts: Any) -> dict[Any, Any]:
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(found) != len(parts):
        raise ValueError("a key appears twice")
    if not all(key is None or type(key) in (str, int, bool) for key in found):
        raise ValueError("a key of another type")
    return found


def _is_counted(kinds: set[Any], record: Sequence[Any]) -> bool:
    """Count a kind of record: its name and its field names. Return False if there are too many kinds."""
    kinds.add((record[0], record[1], *record[2::2]))
    return len(kinds) <= _MOST_KINDS


def _record(value: Any) -> list[Any]:
    """Return the name of a record's type, the names of its fields that are None and left out, and its other fields."""
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        if isinstance(value, Mapping):  # In a ModelOutput, [0] is the first field that is not None.
            return [kind.__name__, tuple(name for name in names if name not in value), *_flat(value)]
        return [kind.__name__, (), *_flat({name: getattr(value, name) for name in names if hasattr(value, name)})]
    fields = getattr(kind, "__match_args__", None)  # Namedtuples and torch.return_types have it.
    if isinstance(value, tuple) and fields is not None and len(fields) == len(value):
        return [kind.__name__, getattr(kind, "_absent", ()), *_flat(dict(zip(fields, value, strict=True)))]
    raise _refusal(f"a {kind.__module__}.{kind.__qualname__}")


def _build_record(name: str, absent: tuple[str, ...], *parts: Any) -> Any:
    fields = _dict(*parts)
    if not all(type(text) is str for text in (name, *absent, *fields)):
        raise ValueError("a name in a record that is not text")
    kind = _record_type(name, absent, tuple(fields))
    return fields if kind is None else kind(*fields.values())


@functools.lru_cache(maxsize=1024)
def _record_type(name: str, absent: tuple[str, ...], fields: tuple[str, ...]) -> Any:
    """Return a namedtuple type, the same for the same names; None if the names can't be its fields."""
    make: Any = collections.namedtuple
    try:
        make(name, (fields + absent)[:256])
        kind = make(name, fields[:256])
    except (ValueError, SyntaxError):
        return None
    for field in absent:
        setattr(kind, field, None)
    kind._absent = absent
    return kind if len(fields + absent) <= 256 else None


# How each kind of value is taken apart and rebuilt. To support another kind, add a line.
_KINDS: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[..., Any]]] = {
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    float: (lambda value: [struct.pack("<d", value).hex()], lambda text: struct.unpack("<d", bytes.fromhex(text))[0]),
    complex: (lambda value: [value.real, value.imag], complex),
    torch.dtype: (lambda value: [str(value)], DTYPES.__getitem__),
    torch.device: (lambda value: [str(value)], torch.device),
    torch.Size: (list, lambda *parts: torch.Size(parts)),
    list: (list, lambda *parts: list(parts)),
    tuple: (list, lambda *parts: parts),
    dict: (_flat, _dict),
    collections.OrderedDict: (_flat, lambda *parts: collections.OrderedDict(_dict(*parts))),
}
_BUILDERS = {kind.__name__: build for kind, (_, build) in _KINDS.items()} | {"record": _build_record}


def _refusal(what: str) -> Problem:
    allowed = "plain tensors, numbers, text, None, and tuples, lists, dicts and records of these"
    advice = "change it with cache.map(...), or cache.select(...) the rest"
    problem = Problem(f"{what}, but a file takes {allowed}; {advice}")
    problem.what = what
    return problem


def check(tensor: Tensor) -> None:
    """Raise if a tensor can't be written exactly."""
    kind = type(tensor)
    if kind not in (Tensor, torch.nn.Parameter):
        raise _refusal(f"a {kind.__module__}.{kind.__qualname__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise _refusal(f"a {'nested' if tensor.is_nested else tensor.layout} tensor")
    if tensor.is_meta or not stored_dtype(tensor.dtype):
        raise _refusal(f"a tensor of {tensor.dtype} on {tensor.device}")
    try:
        storage_address(tensor)
    except RuntimeError as error:
        raise _refusal("a tensor of torch.func, which has no memory of its own") from error
