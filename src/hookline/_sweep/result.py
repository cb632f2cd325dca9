"""`hl.Sweep`: what a sweep measured at each place, as a mapping, a table, a grid, a picture and a file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookline import Site
from hookline._kernel import describe, parse, refuse_flags, refuse_numbers, refuse_texts, short_text
from hookline._plot.plot import plot, plot_grid
from hookline._sweep.axes import Located, SweepGrid, find_grid
from hookline._sweep.sweep_file import SweepParts, read_sweep, write_sweep
from hookline._tables import Table, Tabular, count
from hookline._tables.terminal import bar
from hookline.errors import HooklineError, NotCaptured, SiteError, StoreError, did_you_mean, first_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_BAR = 20
_HEIGHTS = "▁▂▃▄▅▆▇█"
_MANY = 40  # From so many places on, a sweep prints a line for several places.
_ACROSS = 8, 40  # The fewest places that such a line stands for, and the most characters it takes.


class Sweep(Tabular, Mapping[str, Any]):
    """What was measured with each place changed, in the order in which places fire; prints as a table with bars.

    `base` is what was measured without a change. Single numbers are floats. Several, as for several pairs of prompts,
    are a tensor, of which tables and pictures show the mean.

    Args:
        dimensions: For each site, the names of the dimensions that its last subscript counts in.
        notes: How the places were measured.
    """

    def __init__(
        self,
        base: Any,
        measured: Mapping[str, Any],
        change: str = "changed",
        *,
        dimensions: Mapping[str, tuple[str, ...]] | None = None,
        notes: tuple[str, ...] | list[str] = (),
    ) -> None:
        if not isinstance(measured, Mapping):
            raise HooklineError(f"measured= takes a mapping from site to a number, not {describe(measured)}")
        refuse_texts(change=change)
        self.base = _checked("base", base)
        self._measured = {_name_of(site): _checked(repr(site), value) for site, value in measured.items()}
        self._change = change
        self._dimensions = _checked_dimensions(dimensions)
        self._notes = _checked_texts("notes", notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the places were measured: which shared runs, and how exact that is."""
        return self._notes

    def __getitem__(self, site: str | Site) -> Any:
        name = _name_of(site)
        if name not in self._measured:
            raise NotCaptured(f"'{name}' was not measured in this sweep{did_you_mean(name, self._measured)}")
        return self._measured[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def select(self, *where: str | Site) -> Sweep:
        """Return a sweep of the places that match: `found.select("h.0.attn/softmax[:, *]")`.

        A subscript is that of a place, or `*` for any.
        """
        chosen: dict[str, Any] = {}
        for text in map(_text_of, where):
            pattern = parse(text)
            matching = [site for site in self if pattern.beyond(Site.parse(site)) == ()]
            if not matching:
                near = did_you_mean(text, self)
                example = f"; places are written as in {next(iter(self))!r}" if self and not near else ""
                raise NotCaptured(f"{text!r} matches nothing in this sweep{near}{example}")
            chosen |= {site: self[site] for site in matching}
        return with_values(self, self.base, chosen if where else self)

    def top(self, n: int = 10) -> Sweep:
        """Return a sweep of the `n` places where the measurement changed most, the largest change first."""
        refuse_numbers(1, n=n)
        sizes = {site: effect.size for site, effect in self._effects.items()}
        largest = sorted(sizes, key=lambda site: -sizes[site])[:n]
        return with_values(self, self.base, {site: self[site] for site in largest})

    def normalised(self, *, clean: float | Tensor, corrupted: float | Tensor) -> Sweep:
        """Return a sweep on a scale on which `corrupted` is 0 and `clean` is 1.

        `clean` and `corrupted` are what the metric gives for the two runs without a change: numbers, or for several
        pairs of prompts a tensor with one for each pair.
        """
        ends = [self._end("clean", clean), self._end("corrupted", corrupted)]
        equal = (ends[0] == ends[1]).flatten()
        if equal.any():
            where = f" for {equal.sum().item()} of {len(equal)} pairs; leave those out" if len(equal) > 1 else ""
            raise HooklineError(f"clean= and corrupted= are equal, which leaves nothing to measure between them{where}")

        def scaled(value: Any) -> Any:
            found = (torch.as_tensor(value).cpu().double() - ends[1]) / (ends[0] - ends[1]) + 0.0  # No -0.0.
            return found if found.numel() > 1 else found.item()

        words = f"{self._change} (0 is corrupted, 1 is clean)"
        return with_values(self, scaled(self.base), {site: scaled(value) for site, value in self.items()}, words)

    def _end(self, name: str, given: Any) -> Tensor:
        """Return one end of a scale, for each pair of prompts or for all."""
        end = torch.as_tensor(_checked(f"{name}=", given)).cpu().double()
        if end.dim() and not (isinstance(self.base, Tensor) and self.base.shape == end.shape):
            raise HooklineError(
                f"{name}= is {describe(given)}, and the metric gave {describe(self.base)}; give one number, or one for "
                "each that the metric gave"
            )
        if not end.isfinite().all():
            raise HooklineError(f"{name}= has to be finite, and {describe(given)} is not")
        return end

    def grid(self) -> SweepGrid:
        """Return the measurements as a tensor with named axes, such as layer, head and position.

        Places that were not measured are NaN. Raises if the places form no grid, and says which one does not fit.

        >>> found = Sweep(0.5, {"h.0.attn": 0.1, "h.0.mlp": 0.2, "h.1.attn": 0.3, "h.1.mlp": 0.4})
        >>> found.grid().axes, found.grid().values[1].tolist()
        ({'layer': [0, 1], 'module': ['attn', 'mlp']}, [0.3, 0.4])
        """
        found = find_grid(list(self), self._dimensions)
        return SweepGrid(_laid_out(found, {site: _number(value) for site, value in self.items()}), found.axes)

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame with a row for each place: its axes if the places form a grid, and the numbers."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise HooklineError("to_frame() needs pandas: pip install 'hookline[pandas]'") from None
        columns: dict[str, list[Any]] = {"site": list(self)}
        if self._located is not None:
            cells = [self._located.cells[site] for site in self]
            for number, (name, labels) in enumerate(self._located.axes.items()):
                columns[name] = [labels[cell[number]] for cell in cells]
        columns["measured"] = [effect.measured for effect in self._effects.values()]
        columns["change"] = [effect.mean for effect in self._effects.values()]
        if self._has_several:
            columns["spread"] = [effect.spread for effect in self._effects.values()]
        return DataFrame(columns)

    def plot(self, *, ax: Axes | None = None, tokens: Any = None, title: str | None = None) -> Figure | Axes:
        """Draw the measurements along their axes.

        One axis is a curve, two are a map of the changes, and more are a map for each layer. Places that form no grid
        are drawn in their order.

        Args:
            ax: The axes to draw into; by default, those of a new figure, which shows itself in a notebook.
            tokens: Labels of the positions.
            title: A title instead of the default.
        """
        if title is not None:
            refuse_texts(title=title)
        numbers = {site: _number(value) for site, value in self.items()}
        base, found = _number(self.base), self._located
        if found is None:
            if tokens is not None:
                self.grid()  # It raises, and says why there are no positions to label.
            return plot(numbers, "depth", ax=ax, title=title, base=base, label="measured")
        return plot_grid(
            _laid_out(found, numbers), found.axes, base=base, pattern=found.pattern, ax=ax, tokens=tokens, title=title
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the sweep to one safetensors file. It is written completely or not at all."""
        refuse_flags(overwrite=overwrite)
        parts = SweepParts(self.base, self._measured, self._change, self._dimensions, self._notes)
        write_sweep(path, parts, overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sweep:
        """Read a sweep that `save` wrote. Nothing is unpickled; a damaged or foreign file raises StoreError."""
        parts = read_sweep(path)
        try:
            return cls(*parts[:3], dimensions=parts.dimensions, notes=parts.notes)
        except HooklineError as error:
            raise StoreError(f"{os.fspath(path)!r} is damaged ({first_line(error)}); save it again") from None

    def __format__(self, spec: str) -> str:
        return self._table_of_places().text(whole=True) if spec == "all" else super().__format__(spec)

    def _table(self) -> Table:
        found = self._located if len(self) >= _MANY else None
        if found is not None and len(found.axes) > 1 and len([*found.axes.values()][-1]) >= _ACROSS[0]:
            return self._table_of_lines(found)
        return self._table_of_places()

    def _table_of_places(self) -> Table:
        """Return a table with a row for each place."""
        sizes = [effect.size for effect in self._effects.values()]
        most = _largest(sizes)
        rows = []
        for (site, effect), size in zip(self._effects.items(), sizes, strict=True):
            spread = [f"±{effect.spread:.4g}"] if self._has_several else []
            numbers = f"{effect.measured:.4g}", f"{effect.mean:+.4g}", *spread
            rows.append((site or '""', *numbers, bar(size / most, _BAR)))
        header = ("site", "measured", "change", *(["spread"] if self._has_several else []), "")
        return Table(header, rows, self._title(), weights=sizes)

    def _table_of_lines(self, found: Located) -> Table:
        """Return a table with a row for the places that differ only in the last axis, such as the position."""
        sizes = _laid_out(found, {site: effect.size for site, effect in self._effects.items()})
        sizes = sizes.nan_to_num(-1.0, posinf=math.inf)  # NaN is where nothing was measured.
        changes = _laid_out(found, {site: effect.mean for site, effect in self._effects.items()})
        *names, last = found.axes
        labels, most = found.axes[last], _largest(sizes.flatten().tolist())
        cells = {cell[:-1]: None for cell in found.cells.values()}
        weights = [sizes[cell].max().item() for cell in cells]
        rows = []
        for cell in cells:
            place = int(sizes[cell].argmax())
            where = [str(found.axes[name][number]) for name, number in zip(names, cell, strict=True)]
            rows.append((*where, _heights(sizes[cell] / most), f"{changes[cell][place]:+.4g}", str(labels[place])))
        header = (*names, f"size of the change by {last}", "largest", f"at {last}")
        return Table(header, rows, self._title(found.pattern), names=names[0], weights=weights)

    def _title(self, pattern: str = "") -> str:
        what = "mean of what was measured" if self._has_several else "measured"
        places = f"{count(len(self), 'place')} {pattern}".rstrip()
        return f"{places}, one at a time {self._change}; {what} without: {_number(self.base):.4g}"

    @cached_property
    def _located(self) -> Located | None:
        """The grid of the places; None if they form none."""
        try:
            return find_grid(list(self), self._dimensions)
        except HooklineError:
            return None

    @cached_property
    def _effects(self) -> dict[str, _Effect]:
        return {site: _Effect.of(value, self.base) for site, value in self.items()}

    @property
    def _has_several(self) -> bool:
        return isinstance(self.base, Tensor)


class _Effect(NamedTuple):
    """What was measured at a place, how far that is from the base, and how much this varies; means of several."""

    measured: float
    mean: float
    spread: float

    @property
    def size(self) -> float:
        """The size of the change; infinite if it is no number."""
        return abs(self.mean) if math.isfinite(self.mean) else math.inf

    @staticmethod
    def of(value: Any, base: Any) -> _Effect:
        """Compare a measurement with the base."""
        mean = _number(value) - _number(base)
        if not isinstance(value, Tensor):
            return _Effect(value, mean, 0.0)
        is_paired = isinstance(base, Tensor) and base.shape == value.shape
        each = value.double() - base.double() if is_paired else value.double()
        return _Effect(_number(value), mean, each.std(correction=0).item())


def with_values(
    sweep: Sweep,
    base: Any,
    measured: Mapping[str, Any],
    change: str | None = None,
    notes: tuple[str, ...] | None = None,
) -> Sweep:
    """Return a sweep with other measurements, at all or some of its places."""
    change = sweep._change if change is None else change
    notes = sweep._notes if notes is None else notes
    return Sweep(base, measured, change, dimensions=sweep._dimensions, notes=notes)


def _checked(name: str, value: Any) -> Any:
    """Return a measurement as a float or as a tensor of several elements."""
    if isinstance(value, Tensor) and value.numel() > 1 and not value.is_complex():
        return value.detach()
    is_other = isinstance(value, (bool, str, complex)) or (
        isinstance(value, Tensor) and (value.is_complex() or not value.numel())
    )
    if is_other or not hasattr(value, "__float__"):
        raise HooklineError(f"{name} has to be a number or a tensor of numbers, not {describe(value)}")
    return float(value)


def _checked_dimensions(given: Any) -> dict[str, tuple[str, ...]]:
    if given is not None and not isinstance(given, Mapping):
        raise HooklineError(f"dimensions= takes names of dimensions by site, not {describe(given)}")
    return {_name_of(site): _checked_texts(f"dimensions[{site!r}]", names) for site, names in (given or {}).items()}


def _checked_texts(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise HooklineError(f"{name} is a list of texts, not {describe(given)}")
    return tuple(given)


def _number(value: Any) -> float:
    return value.double().mean().item() if isinstance(value, Tensor) else float(value)


def _name_of(site: Any) -> str:
    if not isinstance(site, (str, Site)):
        raise NotCaptured(f"a sweep is read by site, not by {type(site).__name__}")
    return str(Site.parse(site) if isinstance(site, str) else site)


def _text_of(where: Any) -> str:
    if not isinstance(where, (str, Site)):
        raise SiteError(f"{short_text(where)}: a sweep knows its places by name only; give text ('h.*') or a Site")
    return str(where)


def _laid_out(found: Located, numbers: Mapping[str, float]) -> Tensor:
    """Return numbers by site as a tensor with the axes of a grid."""
    values = torch.full([len(labels) for labels in found.axes.values()], math.nan, dtype=torch.float64)
    cells = torch.tensor([found.cells[site] for site in numbers])
    values[tuple(cells.T)] = torch.tensor(list(numbers.values()), dtype=torch.float64)
    return values


def _largest(sizes: list[float]) -> float:
    return max((size for size in sizes if 0 < size < math.inf), default=1.0)


def _heights(shares: Tensor) -> str:
    """Draw shares between 0 and 1 as blocks of different heights; several neighbours as one if there are many.

    >>> _heights(torch.tensor([0.0, 0.5, 1.0, -1.0]))
    '▁▅█ '
    """
    pooled = [piece.max().item() for piece in shares.tensor_split(min(len(shares), _ACROSS[1]))]
    return "".join(" " if share < 0 else _HEIGHTS[min(round(7 * min(share, 1.0)), 7)] for share in pooled)
