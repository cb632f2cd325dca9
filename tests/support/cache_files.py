"""Files of caches: write one byte by byte, compare values bit for bit, list the files that a writer left behind.

The format of a file is written down here a second time, so that a change of it is noticed.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.support.states import bits

FORMAT = ["hookline cache", 1]
TEMPORARY = ".hookline-temporary"  # How the names of files end that are still being written.
# How the dtypes are called in a safetensors file. Complex numbers are stored as pairs, and any other float of one byte
# as a byte. Some are missing in older versions of torch.
_NAMES = """
    float64 F64, float32 F32, float16 F16, bfloat16 BF16, float8_e4m3fn F8_E4M3, float8_e5m2 F8_E5M2, int64 I64,
    int32 I32, int16 I16, int8 I8, uint64 U64, uint32 U32, uint16 U16, uint8 U8, bool BOOL, complex128 F64,
    complex64 F32, complex32 F16, float8_e5m2fnuz U8, float8_e4m3fnuz U8, float8_e8m0fnu U8, float4_e2m1fn_x2 U8
"""
_PAIRS = [pair.split() for pair in _NAMES.split(",")]
NAMES = {getattr(torch, name): stored for name, stored in _PAIRS if hasattr(torch, name)}
DTYPES = list(NAMES)  # The dtypes that a file can hold.


def forge(path: Path, tensors: list[Any], sites: list[Any], data: bytes = b"", **more: Any) -> None:
    """Write a file with any manifest and correct checksums."""
    manifest = {"format": FORMAT, "tensors": tensors, "sites": sites, **more}
    forge_text(path, json.dumps(manifest, separators=(",", ":")), data)


def forge_text(path: Path, manifest: str, data: bytes = b"") -> None:
    """Write a file with any text as its manifest; without the tensors' places if they can't be laid out."""
    checksum = f"{zlib.crc32(manifest.encode()):08x}"
    header: dict[str, Any] = {"__metadata__": {"hookline": manifest, "checksum": checksum}}
    if len(manifest) < 20_000_000:  # Parsing a longer one takes seconds.
        with suppress(AttributeError, LookupError, TypeError, ValueError, RecursionError, OverflowError):
            header |= _places(json.loads(manifest)["tensors"])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _places(tensors: list[Any]) -> dict[str, Any]:
    """Return where each tensor is in the data: those with the largest elements come first."""
    found, end = {}, 0
    dtypes = [getattr(torch, str(note[1]).removeprefix("torch.")) for note in tensors]
    for index in sorted(range(len(tensors)), key=lambda index: -dtypes[index].to_real().itemsize):
        dtype, shape = dtypes[index], tensors[index][2]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        pairs = [2] if dtype.is_complex else []
        found[str(index)] = {"dtype": NAMES[dtype], "shape": shape + pairs, "data_offsets": [begin, end]}
    return found


def same(left: Any, right: Any) -> bool:
    """Return True if two values have the same types and the same bits."""
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def leftovers(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if name.endswith(TEMPORARY)]
