"""Statistics of captured values, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._tables import Table, Tabular
from hookline._torch import FakeTensor
from hookline.errors import NotCaptured, did_you_mean

MOST_ELEMENTS = 4096  # Of a tensor, for a small histogram.
MOST_PARTS = 8


class Numbers(NamedTuple):
    """The statistics of one value; zeros, nan and inf are shares between 0 and 1."""

    mean: float
    std: float
    min: float
    max: float
    norm: float
    zeros: float
    nan: float
    inf: float


class Histogram(NamedTuple):
    """The number of elements in each of several bins of equal width between `low` and `high`, without NaN and Inf."""

    low: float
    high: float
    counts: tuple[int, ...]


class Stats(Tabular, Mapping[str, Numbers]):
    """Statistics by site.

    >>> Stats({"h.0": [torch.tensor([0.0, 3.0, 4.0])]})["h.0"].norm
    5.0
    """

    def __init__(self, tensors: Mapping[str, Iterable[Tensor]] | Iterable[tuple[str, Iterable[Tensor]]]) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._numbers: dict[str, Numbers] = {}
        self._spread: dict[str, Histogram | None] = {}  # Shown in a notebook.
        for site, found in pairs:
            seen: list[Tensor] = []
            self._numbers[site] = numbers(found) if isinstance(found, list) else numbers_of_pieces(_noted(found, seen))
            self._spread[site] = glimpse(found if isinstance(found, list) else seen)

    @classmethod
    def of(cls, numbers: Mapping[str, Numbers]) -> Stats:
        """Return a table of statistics that were computed elsewhere."""
        stats = cls({})
        stats._numbers = dict(numbers)
        return stats

    def __getitem__(self, site: str) -> Numbers:
        if site not in self._numbers:
            raise NotCaptured(f"{site!r} has no statistics here{did_you_mean(site, self._numbers)}")
        return self._numbers[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def _table(self) -> Table:
        rows = [(site or '""', *(f"{number:.4g}" for number in row)) for site, row in self._numbers.items()]
        pictures = [self._spread.get(site) for site in self._numbers]
        spare = ("min", "max", "mean")
        return Table(
            ("site", *Numbers._fields), rows, spare=spare, pictures=pictures.__getitem__ if any(pictures) else None
        )


@torch.no_grad()
def numbers(tensors: list[Tensor]) -> Numbers:
    """Return the statistics of all elements together; NaN and Inf count only for their shares."""
    parts = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not parts:
        return Numbers(*(float("nan"),) * 5, 0.0, 0.0, 0.0)
    flat = torch.cat([_real(part) for part in parts])
    finite = flat[flat.isfinite()]
    nothing = finite.numel() == 0
    return Numbers(
        mean=float("nan") if nothing else finite.mean().item(),
        std=float("nan") if nothing else finite.std(unbiased=False).item(),
        min=float("nan") if nothing else finite.min().item(),
        max=float("nan") if nothing else finite.max().item(),
        norm=float("nan") if nothing else finite.norm().item(),
        zeros=(flat == 0).double().mean().item(),
        nan=flat.isnan().double().mean().item(),
        inf=flat.isinf().double().mean().item(),
    )


@torch.no_grad()
def numbers_of_pieces(pieces: Iterable[Tensor]) -> Numbers:
    """Return the statistics of all elements together, with only one piece in memory at a time."""
    count = seen = zeros = nan = inf = 0
    mean = squares = total = 0.0  # `squares` are of distances to the mean: plain sums of squares lose digits.
    least, most = float("inf"), float("-inf")
    for piece in pieces:
        flat = _real(piece.detach())
        count, zeros = count + flat.numel(), zeros + flat.numel() - int(flat.count_nonzero())
        limits = flat.aminmax() if len(flat) else ()
        if not all(limit.isfinite() for limit in limits):
            nan, inf = nan + int(flat.isnan().sum()), inf + int(flat.isinf().sum())
            flat = flat[flat.isfinite()]
            limits = flat.aminmax() if len(flat) else ()
        if limits:
            new, all_seen = flat.numel(), seen + flat.numel()
            middle = flat.mean().item()
            centred, distance = flat - middle, middle - mean
            squares += torch.dot(centred, centred).item() + distance**2 * seen * new / all_seen
            mean, seen, total = mean + distance * new / all_seen, all_seen, total + torch.dot(flat, flat).item()
            least, most = min(least, limits[0].item()), max(most, limits[1].item())
    if not seen:
        mean = least = most = squares = float("nan")
    share = max(count, 1)
    std, norm = math.sqrt(squares / max(seen, 1)), math.sqrt(total) if seen else float("nan")
    return Numbers(mean, std, least, most, norm, zeros / share, nan / share, inf / share)


@torch.no_grad()
def glimpse(tensors: list[Tensor], bins: int = 24) -> Histogram | None:
    """Return a histogram of a few thousand elements of a value; None if there is nothing to count."""
    parts = [_some(tensor.detach()) for tensor in tensors[:MOST_PARTS] if _is_there(tensor)]
    found = histogram(parts, bins) if parts else None
    return found if found is not None and any(found.counts) else None


def _noted(tensors: Iterable[Tensor], seen: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, and put a few elements of the first ones into `seen`."""
    for tensor in tensors:
        if len(seen) < MOST_PARTS and _is_there(tensor):
            seen.append(_some(tensor.detach()).clone())
        yield tensor


def _is_there(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and not (tensor.is_meta or tensor.is_nested or isinstance(tensor, FakeTensor))


def _some(tensor: Tensor) -> Tensor:
    """Return elements from all over a tensor, as a view of it, so that a GPU tensor is not copied as a whole."""
    if tensor.layout is not torch.strided or tensor.is_quantized or _is_masked(tensor):
        return tensor
    left = MOST_ELEMENTS
    for dimension in sorted(range(tensor.dim()), key=lambda one: tensor.shape[one]):
        # With an even step, the same few units would be sampled again and again.
        step = -(-tensor.shape[dimension] // max(left, 1)) | 1 if tensor.shape[dimension] > left else 1
        tensor = tensor[(slice(None),) * dimension + (slice(None, None, step),)]
        left //= tensor.shape[dimension]
    return tensor


@torch.no_grad()
def histogram(tensors: list[Tensor], bins: int = 64) -> Histogram:
    """Return a histogram of all elements together.

    >>> histogram([torch.tensor([0.0, 1.0, 1.0, 2.0, float("nan")])], bins=2)
    Histogram(low=0.0, high=2.0, counts=(1, 3))
    """
    parts = [_real(tensor.detach()) for tensor in tensors if tensor.numel()]
    finite = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    finite = finite[finite.isfinite()]
    if not len(finite):
        return Histogram(float("nan"), float("nan"), (0,) * bins)
    low, high = (limit.item() for limit in finite.aminmax())
    counted = torch.histc(finite, bins, low, high) if low < high else torch.histc(finite, bins, low - 0.5, low + 0.5)
    return Histogram(low, high, tuple(int(number) for number in counted))


def _real(tensor: Any) -> Tensor:
    """Return the elements as real numbers: absolute values of complex ones, only the valid ones of a MaskedTensor."""
    if _is_masked(tensor):
        tensor = tensor.get_data()[tensor.get_mask()]
    dense: Tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    dense = dense.dequantize() if dense.is_quantized else dense
    return (dense.abs() if dense.is_complex() else dense).reshape(-1).to("cpu", torch.float64)


def _is_masked(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "MaskedTensor"
