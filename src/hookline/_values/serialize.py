"""Nested values as nodes of JSON and a list of tensors, and back again. What can't be told exactly is refused.

A node is None, a bool, an int, a str or [kind, *nodes]; `_KINDS` says how each kind is taken apart and built again.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import json
import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from typing import Any, NoReturn

import torch
from torch import Tensor

from hookline._torch import lazy_clone, storage_address, storage_id

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


def first_line(told: object) -> str:
    """Return the first line of an error or of what a file says, cut where it is long."""
    text = str(told).partition("\n")[0] or type(told).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _refuse_irregular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DEPTH = 100  # Levels of nesting.
_MOST_KINDS = 1000  # Of records in one file: each makes a type, which takes long.
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# The dtypes every safetensors reader knows; complex numbers are stored as pairs, rarer floats of one byte as bytes.
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Problem(Exception):
    """What is wrong with a value or a file; `write` and `read` put the path in front of it."""


class Later:
    """A tensor that is elsewhere, and is read when it is to be written."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = shape
        self.nbytes = shape.numel() * dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError


class Encoder:
    """Turns values into nodes, and collects their tensors. A node is None, a bool, an int, a str or [kind, *nodes]."""

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
        """Note each memory once; storages that share it copy-on-write are told apart by a number."""
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
    """Turns nodes into values again."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = {(index, 0): tensor for index, tensor in tensors.items()}
        self.unused = set(tensors)
        self._kinds: set[Any] = set()

    def value(self, node: Any) -> Any:
        """Return the value that a node was made of."""
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
        raise ValueError("a key stands twice")
    if not all(key is None or type(key) in (str, int, bool) for key in found):
        raise ValueError("a key of another type")
    return found


def _is_counted(kinds: set[Any], record: Sequence[Any]) -> bool:
    """Count the kind of a record, that is its name and the names of its fields; False if it is one too many."""
    kinds.add((record[0], record[1], *record[2::2]))
    return len(kinds) <= _MOST_KINDS


def _record(value: Any) -> list[Any]:
    """Return the name of a record's type, the names it answers None to without counting them, and its fields."""
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        if isinstance(value, Mapping):  # In a ModelOutput, [0] is the first field that is not None.
            return [kind.__name__, tuple(name for name in names if name not in value), *_flat(value)]
        return [kind.__name__, (), *_flat({name: getattr(value, name) for name in names if hasattr(value, name)})]
    fields = getattr(kind, "__match_args__", None)  # Of namedtuples and torch.return_types.
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
    """Return a namedtuple type, the same for the same names; None where these can't be its fields."""
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


# How each kind of value is taken apart and built again: to support another one, add a line.
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
    return Problem(f"{what}, but a file takes {allowed}; change it with cache.map(...), or cache.select(...) the rest")


def check(tensor: Tensor) -> None:
    """Raise for a tensor that can't be written exactly."""
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


def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return the name in the file of the dtype that holds this one."""
    byte = "U8" if dtype.is_floating_point and dtype.itemsize == 1 else None
    return NAMES.get(dtype.to_real(), byte)
