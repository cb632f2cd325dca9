"""Small stores for tests, and the rows to expect from them: plain lists of tensors, one for each sample."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from hookline import _untrusted_files
from hookline._store.disk_format import Array, Manifest
from hookline._store.storage import open_storage
from hookline._store.writer import Unit, begin, begin_part, end, remove_leftovers

DTYPES = [dtype for dtype in _untrusted_files.DTYPES.values() if _untrusted_files.stored_dtype(dtype)]


class Writing:
    """A store that is written by hand. No other test names what writes stores: a harvest writes them otherwise.

    Args:
        path: A folder, or the URL of one.
        arrays: What the store keeps.
        units: How many units it has; None if that is not known.
        part: Whether this is appended to the store.
        spec: What was harvested: all that a store is told again by.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        arrays: Sequence[Array],
        units: int | None = 1,
        *,
        part: bool = False,
        **spec: Any,
    ) -> None:
        storage, manifest = open_storage(path), Manifest({"model": "tiny", **spec}, tuple(arrays), units)
        if part:
            self._storage, self._manifest = begin_part(storage, manifest)
        else:
            self._storage, self._manifest = storage, begin(storage, manifest)
        self.arrays = tuple(arrays)
        self.path = str(self._storage)

    def unit(self, number: int = 0) -> Unit:
        """Begin an attempt at a unit: it has `append`, `positions`, `commit`, `discard` and the text `attempt`."""
        return Unit(self._storage, self._manifest, number)

    def end(self, units: int) -> bool:
        """Say how many units there are, if that was not known."""
        return end(self._storage, units)


def leftovers_removed(path: str | os.PathLike[str]) -> list[str]:
    """Remove what killed writers left in a store, as the end of each harvest does; return the names of these files."""
    return remove_leftovers(open_storage(path))


@dataclass
class Plan:
    """One unit to write: the rows of each array and sample, the order of the samples, and positions, if any."""

    samples: int
    rows: list[dict[int, Tensor]]  # For each array, by offset from the unit's first sample.
    order: list[int] | None = None
    skipped: dict[int, str] = field(default_factory=dict)  # Reasons, by offset.
    positions: dict[int, Tensor] | None = None  # For the first array, and arrays with the same lengths.
    pieces: int = 1


def bits(count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return rows of random bits; booleans have only two values."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count, width), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(count, *shape) if width else torch.empty(count, *shape, dtype=dtype)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.nbytes:
        return True
    return bytes(memory(one)) == bytes(memory(other))


def memory(tensor: Tensor) -> Any:
    """Return the bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def take(rows: Tensor, index: Any) -> Tensor:
    """Return rows by number, even of dtypes that torch can't index."""
    if not rows.nbytes:
        return torch.empty(len(torch.arange(len(rows))[index]), *rows.shape[1:], dtype=rows.dtype)
    found = torch.from_numpy(memory(rows)).view(len(rows), -1)[index]
    return found.view(-1).view(rows.dtype).view(len(found), *rows.shape[1:])


def join(parts: list[Tensor], like: Array) -> Tensor:
    """Concatenate rows, even of dtypes that torch can't concatenate."""
    count, full = sum(map(len, parts)), [part for part in parts if part.nbytes]
    if not full:
        return torch.empty(count, *like.shape, dtype=like.dtype)
    whole = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in full])
    return whole.view(like.dtype).view(count, *like.shape)


def write(path: str | os.PathLike[str], arrays: tuple[Array, ...], plans: list[Plan], **spec: Any) -> None:
    """Write a store."""
    writing = Writing(path, arrays, len(plans), **spec)
    first = 0
    for number, plan in enumerate(plans):
        write_unit(writing, number, first, plan)
        first += plan.samples


def write_unit(writing: Writing, number: int, first: int, plan: Plan) -> bool:
    """Write one unit, each array in `plan.pieces` pieces. Return True if it was committed."""
    unit, arrays = writing.unit(number), writing.arrays
    stored = plan.order if plan.order is not None else sorted(plan.rows[0])
    for array, rows in enumerate(plan.rows):
        for piece in join([rows[offset] for offset in stored], arrays[array]).chunk(plan.pieces):
            unit.append(array, piece)
    if plan.positions is not None and stored:
        unit.positions(0, torch.cat([plan.positions[offset] for offset in stored]))
    lengths = [[len(rows[offset]) for offset in stored] for rows in plan.rows]
    skipped = {first + offset: why for offset, why in plan.skipped.items()}
    return unit.commit(first=first, samples=plan.samples, lengths=lengths, order=plan.order, skipped=skipped)


def expected(plans: list[Plan], array: int) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Return the number, the rows and the positions of each stored sample, in the order of their numbers."""
    numbers, rows, positions, first = [], [], [], 0
    for plan in plans:
        for offset in sorted(plan.rows[array]):
            found = plan.rows[array][offset]
            numbers.append(first + offset)
            rows.append(found)
            lengths = [len(plan.rows[0][one]) for one in sorted(plan.rows[0])]
            shares = lengths == [len(plan.rows[array][one]) for one in sorted(plan.rows[array])]
            plain = torch.arange(len(found))
            positions.append(plain if plan.positions is None or not shares else plan.positions[offset])
        first += plan.samples
    return numbers, rows, positions


ARRAYS = (Array("h.0", torch.bfloat16, (3,)), Array("h.1:input[:, -1]", torch.int8, ()))


def plans(units=2, samples=2, seed=0):
    return [
        Plan(samples, [{one: bits(1 + one, (3,), torch.bfloat16, seed + unit) for one in range(samples)},
                       {one: bits(1, (), torch.int8, seed + unit) for one in range(samples)}],
             positions={one: torch.arange(1 + one) + 5 for one in range(samples)})
        for unit in range(units)
    ]  # fmt: skip


def many(path, units=40):
    values = torch.randn(units, 3)
    write(path, (Array("h", torch.float32, (3,)),), [Plan(1, [{0: row.view(1, 3)}], skipped={}) for row in values])
    return values


def seal(value):
    """Return a JSON object with the right checksum, whatever its content."""
    value.pop("checksum", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return json.dumps({**value, "checksum": f"{zlib.crc32(text.encode()):08x}"}).encode()


def manifest_with(data: bytes, spec: Mapping[str, Any]) -> bytes:
    """Return the manifest of a store with other content of its spec, and with the hash and checksum of that."""
    found = json.loads(data)
    found["spec"] = spec
    text = json.dumps({"spec": spec, "arrays": found["arrays"]}, sort_keys=True, separators=(",", ":"))
    return seal({**found, "hash": hashlib.sha256(text.encode()).hexdigest()})


def made(
    path: str | os.PathLike[str], samples: Mapping[str, Sequence[Tensor]], unit: int = 4, **options: object
) -> hl.Store:
    """Write and return a store with `unit` samples per unit. `samples` has, by array, the rows of sample 0, 1, ..."""
    count = len(next(iter(samples.values())))
    arrays = [Array(name, some[0].dtype, tuple(some[0].shape[1:])) for name, some in samples.items()]
    writing = Writing(path, arrays, -(-count // unit), made="by hand")
    for number in range(-(-count // unit)):
        mine = range(number * unit, min(count, (number + 1) * unit))
        with writing.unit(number) as attempt:
            for array, some in enumerate(samples.values()):
                attempt.append(array, torch.cat([some[sample] for sample in mine]))
            lengths = [[len(some[sample]) for sample in mine] for some in samples.values()]
            assert attempt.commit(first=mine.start, samples=len(mine), lengths=lengths)
    return hl.Store(path)


def tokens(lengths: Sequence[int], width: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return random rows of samples of these lengths. The first element of each row is the row's number, modulo 256."""
    rows = torch.randn(sum(lengths), width)
    rows[:, 0] = torch.arange(len(rows)) % 256
    return list(rows.to(dtype).split(list(lengths)))
