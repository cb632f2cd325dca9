"""`Store`: a harvest on disk, as a mapping from site to rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from hookline import Site
from hookline._kernel import parse, refuse_flags, refuse_numbers, same_values
from hookline._plot.plot import Plottable, PlotValues
from hookline._stats import Stats, numbers_of_pieces
from hookline._store.disk_format import has_manifest, parts, read_manifest, unit_count
from hookline._store.exports import to_datasets, to_parquet
from hookline._store.row_index import RowIndex, SampleTable, StorePart, read_index
from hookline._store.rows import MappedFiles, NoSample, Rows
from hookline._store.storage import Storage, open_storage
from hookline._store.torch_datasets import RowsDataset, SamplesDataset, ShuffledRows, dataset
from hookline._store.verify import Verified, check_sizes, check_units, verify
from hookline._tables import Table, Tabular, count
from hookline._untrusted_files import dtype_name
from hookline.errors import HooklineError, NotCaptured, SiteError, StoreError, did_you_mean

_PIECE = 1 << 20  # Bytes that `stats` reads at a time.
_DRAWN = 256 << 20, 4096  # The most bytes of all arrays, and the most rows of each, that a plot shows.
_HEADER = ("site", "dtype", "shape", "rows", "bytes")


class Store(Tabular, Plottable, Mapping[str, Rows]):
    """The arrays of a harvest in a folder, in the order in which their sites first fired. Rows are read on demand."""

    as_cache = "hl.Cache({site: rows[:] for site, rows in store.items()})"  # Code that loads all rows into memory.

    def __init__(self, path: str | os.PathLike[str], *, partial: bool = False) -> None:
        refuse_flags(partial=partial)
        self._parts = _open(open_storage(path), partial)
        self._share()

    @property
    def samples(self) -> int:
        """The number of harvested samples, including skipped ones. A partial store counts those of its units."""
        return sum(part.index.samples() for part in self._parts)

    @property
    def skipped(self) -> dict[int, str]:
        """The numbers of the samples that were skipped, with the error of each."""
        return {part.first + number: why for part in self._parts for number, why in sorted(part.index.skipped.items())}

    @property
    def spec(self) -> Mapping[str, Any]:
        """The specification of the (first) harvest: the model, the data, the options."""
        return self._parts[0].manifest.spec

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(rows.nbytes for rows in self.values())

    @overload
    def rows(self, site: str | Site) -> Rows: ...

    @overload
    def rows(self, site: str | Site, sample: int) -> Tensor: ...

    def rows(self, site: str | Site, sample: int | None = None) -> Rows | Tensor:
        """Return the rows of a site; with `sample`, the rows of that sample as a tensor."""
        if sample is None:
            return self[site]
        refuse_numbers(sample=sample)
        try:
            return self[site].sample(sample)
        except NoSample:
            why = self.skipped.get(sample)
            if why is None:
                raise
            raise NoSample(f"sample {sample} was skipped: {why}") from None

    def dataset(
        self,
        *sites: str | Site,
        shuffle: bool = False,
        samples: bool = False,
        seed: int = 0,
        window: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        even: bool = False,
    ) -> RowsDataset | SamplesDataset | ShuffledRows:
        """Return the rows of some sites (or all) as a torch dataset: tensors for one site, tuples for several.

        Args:
            shuffle: Return an `IterableDataset` of all rows in a new order each epoch, without random disk access.
            samples: Items are whole samples, with as many rows as each has.
            seed: The seed of the order.
            window: How many bytes are shuffled together, over all workers of a DataLoader. The default is 256 MiB.
            rank: Which of `world` parts this is. By default torch.distributed says so if it is initialized, or else the
                launcher (torchrun, srun, Open MPI); without either, the dataset has all rows.
            world: See `rank`.
            even: Give every rank the same number of rows. This leaves out fewer rows than there are ranks, different
                ones in each epoch.
        """
        rows = [self[site] for site in sites or self]
        return dataset(
            rows, shuffle=shuffle, samples=samples, seed=seed, window=window, rank=rank, world=world, even=even
        )

    def to_parquet(
        self,
        path: str | os.PathLike[str],
        *sites: str | Site,
        dtype: torch.dtype | str | None = None,
        bits: bool = False,
        compression: str | None = None,
    ) -> None:
        """Write the rows of some sites (or all) to a new folder of Parquet files.

        The columns are `sample`, `position` and one for each site.

        Args:
            dtype: Convert floating-point numbers to this dtype, such as torch.float32.
            bits: Write dtypes that Arrow lacks (bfloat16, float8) as the bytes of the row, and complex numbers as
                pairs. The metadata of the files says so.
            compression: "zstd", for example. The default is none, which is several times as fast to read.
        """
        rows = [self[site] for site in sites or self]
        to_parquet(path, rows, dtype=dtype, bits=bits, compression=compression)

    def to_datasets(
        self,
        path: str | os.PathLike[str],
        *sites: str | Site,
        dtype: torch.dtype | str | None = None,
        bits: bool = False,
    ) -> Any:
        """Write rows as a `datasets.Dataset` to a new folder, and open it. See `to_parquet`; bits become integers."""
        return to_datasets(path, [self[site] for site in sites or self], dtype=dtype, bits=bits)

    def verify(self) -> Verified:
        """Read every byte and compare checksums; raise a StoreError that names every damaged file."""
        return verify(self._parts)

    def stats(self) -> Stats:
        """Return mean, std, min, max, norm and the shares of zeros, NaN and Inf of each site, in bounded memory."""
        return Stats.of({name: numbers_of_pieces(rows.scan(_PIECE)) for name, rows in self.items()})

    def _to_draw(self, where: Sequence[str | Site], call: int | None, sample: int | None) -> PlotValues:
        """Return the rows of one sample, or rows evenly spaced over all samples, few enough to fit in memory."""
        if call is not None:
            raise HooklineError("a store holds one value for each row, so call= has no meaning here")
        names = list(dict.fromkeys(name for one in where for name in self._matching(one))) if where else list(self)
        if sample is not None:
            found = {name: self.rows(name, sample) for name in names}
            values = {name: rows if len(rows) == 1 else rows[None] for name, rows in found.items()}
            return PlotValues(values, None, f"sample {sample}")
        values = {name: _evenly(self[name], _DRAWN[0] // len(names), _DRAWN[1]) for name in names}
        total, drawn = max(len(self[name]) for name in names), max(map(len, values.values()))
        return PlotValues(values, None, f"{drawn:,} of {total:,} rows, evenly spaced" if drawn < total else "")

    def _matching(self, where: str | Site) -> list[str]:
        """Return the names of the arrays that a site or pattern matches."""
        pattern = parse(str(where))
        if where in self or pattern.path is not None:
            return [self._find(where)]
        found = [name for name in self if pattern.means(Site.parse(name))]
        if not found:
            raise NotCaptured(f"{str(where)!r} matches nothing in this store{did_you_mean(str(where), self)}")
        return found

    def __eq__(self, other: object) -> bool:
        """Return True if both hold the same rows of the same samples and positions. NaN equals NaN."""
        if not isinstance(other, Store):
            return NotImplemented
        pairs = [(self[name], other[name]) for name in self if name in other]
        if len(pairs) != len(self) or len(self) != len(other) or self.samples != other.samples:
            return False
        if any((mine.dtype, mine.shape) != (theirs.dtype, theirs.shape) for mine, theirs in pairs):
            return False
        return all(_same_rows(mine, theirs) for mine, theirs in pairs)

    def __getitem__(self, site: str | Site) -> Rows:
        name = self._find(site)
        if name not in self._rows:
            index = RowIndex(self._parts, name, self._tables)
            self._rows[name] = Rows(self._parts[0].arrays[name], index, self._maps)
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0].arrays)

    def __len__(self) -> int:
        return len(self._parts[0].arrays)

    def __contains__(self, site: object) -> bool:
        try:
            self._find(site)
        except (NotCaptured, SiteError):
            return False
        return True

    def __add__(self, other: Store) -> Store:
        if not isinstance(other, Store):
            return NotImplemented
        both = Store.__new__(Store)
        both._parts = _joined([*self._parts, *other._parts])
        both._share()
        return both

    def _share(self) -> None:
        """Create the objects that all arrays share: mapped files and tables of samples."""
        self._maps = MappedFiles()
        self._tables: dict[tuple[int, ...], SampleTable] = {}
        self._rows: dict[str, Rows] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._parts = state["_parts"]
        self._share()

    def _find(self, site: object) -> str:
        """Return the name of the array that a site means, in any spelling."""
        names = self._parts[0].arrays
        if isinstance(site, str) and site in names:
            return site
        if isinstance(site, str):
            wanted = [str(Site(site))]  # Text that equals a module's name means that module.
            if wanted[0] not in names and (pattern := parse(site)).path is not None:
                wanted.append(str(pattern.at(pattern.path)))
        elif isinstance(site, Site):
            wanted = [str(site)]
        else:
            raise NotCaptured(f"a store is read by site, not by {type(site).__name__}")
        for name in wanted:
            if name in names:
                return name
        near = did_you_mean(str(site), names) or f"; it has {', '.join(map(repr, list(names)[:8]))}"
        raise NotCaptured(f"{str(site)!r} is not in this store{near}{', ...' if len(names) > 8 else ''}")

    def _table(self) -> Table:
        found = [(name or '""', dtype_name(rows.dtype), rows) for name, rows in self.items()]
        lines = [
            (name, dtype, tuple(rows.shape[1:]), f"{len(rows):,}", f"{rows.nbytes:,}") for name, dtype, rows in found
        ]
        return Table(_HEADER, lines, self._title())

    def _title(self) -> str:
        left_out = f", {len(self.skipped):,} of them skipped" if self.skipped else ""
        return f"{count(len(self), 'array')} of {count(self.samples, 'sample')}{left_out}, {count(self.nbytes, 'byte')}"


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return True if a folder, local or remote, holds a store."""
    return has_manifest(open_storage(path))


def _same_rows(mine: Rows, theirs: Rows) -> bool:
    """Return True if rows, samples and positions are the same. The two stores may be divided into other units."""
    step = max(1, (64 << 20) * len(mine) // max(1, mine.nbytes))
    spans = [slice(start, start + step) for start in range(0, len(mine), step)]
    pairs: list[tuple[Any, Any]] = [(mine, theirs), (mine.samples, theirs.samples), (mine.positions, theirs.positions)]
    return all(same_values(one[span], other[span]) for span in spans for one, other in pairs)


def _evenly(rows: Rows, nbytes: int, most: int) -> Tensor:
    """Return at most `most` rows and about `nbytes` bytes, evenly spaced."""
    fit = nbytes // max(1, rows.nbytes // max(1, len(rows)))
    few = max(1, min(most, fit))
    return rows[:: max(1, -(-len(rows) // few))]


def _open(root: Storage, partial: bool) -> list[StorePart]:
    found = [_open_part(one, partial) for one in (root, *parts(root))]
    return _joined(found)


def _open_part(root: Storage, partial: bool) -> StorePart:
    manifest = read_manifest(root)
    index = read_index(root, manifest)
    check_sizes(root, manifest, index)
    units = unit_count(root, manifest)
    check_units(root, index, units)
    if not partial and (units is None or len(index) < units):
        found = f"{len(index)} units, and its data had not ended" if units is None else f"{len(index)} of {units} units"
        raise StoreError(f"'{root}' has {found}; run its harvest again to finish it, or open it with partial=True")
    return StorePart(root, manifest, index)


def _joined(found: Sequence[StorePart]) -> list[StorePart]:
    """Return parts with the same arrays, with their samples numbered from part to part."""
    joined, first = [], 0
    for part in found:
        _check_same(found[0], part)
        joined.append(StorePart(part.storage, part.manifest, part.index, first))
        first += part.index.end()
    return joined


def _check_same(one: StorePart, other: StorePart) -> None:
    """Raise unless two parts have the same arrays, in any order."""
    if one.arrays == other.arrays:
        return
    names = [name for name in {**one.arrays, **other.arrays} if one.arrays.get(name) != other.arrays.get(name)]
    first = names[0]
    each = [f"'{part.storage}' has {part.arrays.get(first) or f'no {first!r}'}" for part in (one, other)]
    raise StoreError(f"only stores with the same arrays can be joined: {each[0]}, but {each[1]}")
