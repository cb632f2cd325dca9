"""Values as one byte an element: an index into a few levels, and how far the levels are from the truth at most."""

from __future__ import annotations

import base64
import struct
from typing import NamedTuple

import torch
from torch import Tensor

MOST_LEVELS = 252
FEWEST_LEVELS = 16
MINUS_INF, PLUS_INF, NAN = 253, 254, 255  # The codes of what is not a finite number.
_LARGEST = torch.finfo(torch.float32).max


class Quantised(NamedTuple):
    """Ascending levels (float32), a code for each element (uint8), and the largest difference to the true value."""

    levels: Tensor
    codes: Tensor
    error: float

    def as_json(self) -> dict[str, object]:
        """Return it for a page: little-endian bytes as base64."""
        packed = struct.pack(f"<{len(self.levels)}f", *self.levels.tolist())
        return {"levels": _text(packed), "codes": _text(_bytes(self.codes)), "error": self.error}


def quantise(value: Tensor, most: int = MOST_LEVELS) -> Quantised:
    """Return real numbers as codes. A value of few different numbers, as float32 holds them, is exact.

    >>> quantise(torch.tensor([0.0, 2.0, 2.0, float("nan")]))
    Quantised(levels=tensor([0., 2.]), codes=tensor([  0,   1,   1, 255], dtype=torch.uint8), error=0.0)
    """
    value = value.detach().to("cpu", torch.float64)
    is_finite = value.isfinite()
    finite = value if is_finite.all() else value[is_finite]
    levels = levels_of(finite.reshape(-1), most)
    wide = levels.double()
    codes = torch.bucketize(value.contiguous(), (wide[1:] + wide[:-1]) / 2).to(torch.uint8)
    error = (finite - wide[codes.long() if finite is value else codes[is_finite].long()]).abs() if len(levels) else None
    if finite is not value:
        codes[value == float("-inf")] = MINUS_INF
        codes[value == float("inf")] = PLUS_INF
        codes[value.isnan()] = NAN
    return Quantised(levels, codes, 0.0 if error is None or not error.numel() else float(error.max()))


def levels_of(finite: Tensor, most: int = MOST_LEVELS) -> Tensor:
    """Return the levels for some numbers: each of them if they are few, else even steps and quantiles by halves.

    The even steps bound the error by a part of the range; the quantiles show what lies close together, so that a few
    outliers do not drown the rest.
    """
    if not finite.numel():
        return torch.zeros(0)
    ordered = finite.sort().values
    each = ordered.unique_consecutive()
    if len(each) > most:
        places = torch.linspace(0, len(ordered) - 1, most // 2).long()
        steps = torch.linspace(float(ordered[0]), float(ordered[-1]), most - most // 2, dtype=torch.float64)
        each = torch.cat((ordered[places], steps)).sort().values
    levels: Tensor = each.clamp(-_LARGEST, _LARGEST).float().unique_consecutive()
    return levels


def read(quantised: Quantised) -> Tensor:
    """Return what a page shows of quantised values."""
    others = torch.tensor([float("-inf"), float("inf"), float("nan")], dtype=torch.float64)
    table = torch.cat((torch.zeros(MINUS_INF, dtype=torch.float64), others))
    table[: len(quantised.levels)] = quantised.levels.double()
    return table[quantised.codes.long()]


def _bytes(codes: Tensor) -> bytearray:
    data = bytearray(codes.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(codes.reshape(-1))
    return data


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
