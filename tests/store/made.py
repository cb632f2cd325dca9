"""Stores for tests, written without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hookline._store.begin import begin
from hookline._store.manifest import Array, Manifest
from hookline._store.storage import open_storage
from hookline._store.store import Store
from hookline._store.writer import Unit


def made(
    path: str | os.PathLike[str], samples: Mapping[str, Sequence[Tensor]], unit: int = 4, **options: object
) -> Store:
    """Write a store of arrays, each the rows of sample 0, 1, ..., so many samples a unit; return it."""
    root, count = open_storage(path), len(next(iter(samples.values())))
    arrays = [Array(name, some[0].dtype, tuple(some[0].shape[1:])) for name, some in samples.items()]
    manifest = begin(root, Manifest({"made": "by hand"}, tuple(arrays), -(-count // unit)))
    for number in range(manifest.units or 0):
        mine = range(number * unit, min(count, (number + 1) * unit))
        with Unit(root, manifest, number) as attempt:
            for array, some in enumerate(samples.values()):
                attempt.append(array, torch.cat([some[sample] for sample in mine]))
            lengths = [[len(some[sample]) for sample in mine] for some in samples.values()]
            assert attempt.commit(first=mine.start, samples=len(mine), lengths=lengths)
    return Store(path)


def tokens(lengths: Sequence[int], width: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the rows of samples of some lengths: random, but the first number of each row is the row's own."""
    rows = torch.randn(sum(lengths), width)
    rows[:, 0] = torch.arange(len(rows)) % 256
    return list(rows.to(dtype).split(list(lengths)))
