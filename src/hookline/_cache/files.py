"""A cache as one safetensors file: nested values of every call, whole or not at all, and never a pickle.

`write` turns the values into a manifest in JSON and a list of tensors (`Encoder`) and streams both to a temporary name
that becomes the final one; `read` checks every byte and builds the values again (`Decoder`), tensors on the CPU.
Any safetensors reader opens the file: tensors "0", "1", ..., each memory once, and in the metadata the manifest and its
checksum. The header follows from the manifest (`_header`), so a header that does not is a damaged one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from typing import Any

import torch
from torch import Tensor

from hookline._values.serialize import (
    DTYPES,
    LONGEST,
    Decoder,
    Encoder,
    Later,
    Problem,
    check_memory,
    check_parts,
    first_line,
    open_regular,
    parse_json,
    stored_dtype,
)
from hookline.errors import StoreError

_FORMAT = ["hookline cache", 1]  # The name and the version.
_START = b'{"__metadata__":{"hookline":"'  # Of every header, up to the text of the manifest.
_PIECE = 4 << 20  # Bytes copied at a time.
_TEMPORARY, _STALE = ".hookline-temporary", 3600  # Seconds without a write after which its writer must be dead.
_EXISTS = "it exists; only files are replaced, and only with overwrite=True"
_TOO_MANY = "it holds too many values for one file; save fewer sites with cache.select(...)"
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error)


def write(
    path: str | os.PathLike[str],
    entries: Mapping[str, Sequence[Any]],
    *,
    overwrite: bool = False,
    scratch: bool = False,
) -> None:
    """Write each site's calls (a list of nested values, oldest first) to one safetensors file, whole or not at all.

    A scratch file is in a folder of this process alone, and need not outlive it: nothing waits for the disk.
    """
    name, target, size = os.fspath(path), os.path.realpath(path), ""
    try:
        if os.path.exists(target) and not (overwrite and os.path.isfile(target)):
            raise Problem(_EXISTS)
        encoder = Encoder()
        sites = [[site, encoder.calls(site, calls)] for site, calls in entries.items()]
        notes = [["0" * 8, str(tensor.dtype), list(tensor.shape)] for tensor in encoder.tensors]
        manifest = {"format": _FORMAT, "tensors": notes, "sites": sites}
        needed = len(_header(manifest)) + sum(tensor.nbytes for tensor in encoder.tensors)
        size = f" ({needed:,} bytes)"
        _make_room(os.path.dirname(target), needed, clean=not scratch)
        _save(target, manifest, encoder.tensors, overwrite, wait=not scratch)
    except Problem as problem:
        raise StoreError(f"{name!r} was not written: {problem}") from problem.__cause__
    except OSError as error:
        remedy = "see that its folder exists, may be written to and has room, or save less with cache.select(...)"
        raise StoreError(f"{name!r} was not written{size}: {error.strerror or error}; {remedy}") from error


def read(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Read what `write` wrote; anything else is a StoreError and nothing is half-read."""
    name = os.fspath(path)
    try:
        with open_regular(name) as file, torch.inference_mode(False), torch.no_grad():
            return _load(file, os.fstat(file.fileno()).st_size)
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
    """Return index, dtype, shape, begin and end of each tensor in the data: large elements first, so aligned."""
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
    """Remove what killed processes left in a folder; raise where there is still no room."""
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found if clean else ():
            if entry.name.endswith(_TEMPORARY) and time.time() - entry.stat().st_mtime > _STALE:
                os.unlink(entry)
    if needed > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save(target: str, manifest: dict[str, Any], tensors: list[Tensor | Later], overwrite: bool, wait: bool) -> None:
    """Write a file under a temporary name, then give it its own."""
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
    with suppress(OSError):  # Not every system can wait for a folder.
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
            # From a GPU, copy_ gets strided conjugate and negative views wrong. It leaves copy-on-write tensors shared.
            plain = piece.resolve_conj().resolve_neg()
            torch.frombuffer(data, dtype=piece.dtype).view(piece.shape).copy_(plain)
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        manifest["tensors"][index][0] = f"{checksum:08x}"
    file.seek(0)
    file.write(_header(manifest))
    file.flush()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into parts of at most _PIECE bytes, in the order of its elements."""
    if tensor.nbytes <= _PIECE:
        yield from [tensor] if tensor.numel() else []
        return
    rows = _PIECE * len(tensor) // tensor.nbytes
    for start in range(0, len(tensor), max(rows, 1)):
        yield from _pieces(tensor[start : start + rows] if rows else tensor[start])


def _publish(temporary: str, target: str, overwrite: bool) -> None:
    """Give a finished file its final name: by a link, which replaces nothing, unless asked to."""
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except OSError:
        if os.path.lexists(target):
            raise Problem(_EXISTS) from None
        os.rename(temporary, target)  # Some file systems have no links.


def _load(file: BufferedReader, size: int) -> dict[str, list[Any]]:
    """Return the values in an open file of a size."""
    manifest, start = _manifest(file, size)
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
        raise ValueError("a site stands twice, or a tensor belongs to none")
    return entries


def _manifest(file: BufferedReader, size: int) -> tuple[dict[str, Any], int]:
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
    # Only the text of the manifest is read: the rest of the header follows from it.
    text, _ = json.JSONDecoder().raw_decode(head[8:].decode(), len(_START) - 1)
    manifest = parse_json(text)
    is_whole = f'"checksum":"{zlib.crc32(text.encode()):08x}"'.encode() in head
    if manifest["format"] != _FORMAT and is_whole:
        raise Problem(
            f"is of format {first_line(manifest['format'])}, but this hookline reads {_FORMAT}; update hookline"
        )
    if not is_whole or _header(manifest) != head:
        raise Problem("is damaged: its header does not fit its checksum; save it again")
    return manifest, len(head)


def _memory(file: BufferedReader, nbytes: int, checksum: str) -> Tensor:
    """Read the next bytes of a file, checked, into memory of torch's own."""
    memory, found = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
    for start in range(0, nbytes, _PIECE):
        data = bytearray(min(_PIECE, nbytes - start))
        file.readinto(data)
        found = zlib.crc32(data, found)
        memory[start : start + _PIECE] = torch.frombuffer(data, dtype=torch.uint8)
    if f"{found:08x}" != checksum:
        raise Problem("is damaged: a tensor does not fit its checksum; save it again")
    return memory
