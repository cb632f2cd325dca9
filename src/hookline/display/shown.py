"""What of a value a picture shows: one tensor, as plain numbers, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.display.kinds import shaped
from hookline.errors import HooklineError
from hookline.sites import write_subscripts
from hookline.tables import count
from hookline.values import describe, get, places

_SCALARS = (bool, int, float, complex)


class Options(NamedTuple):
    """What can be told of a picture, beside its kind: see `plot`."""

    statistic: str = "norm"
    tokens: Any = None
    sample: int = 0
    most: int = 64
    log: bool | None = None
    title: str | None = None
    note: str = ""
    base: float | None = None
    label: str | None = None


class Shown(NamedTuple):
    """The tensor of a value that is drawn, and which of several it is."""

    name: str
    tensor: Tensor
    note: str = ""

    @property
    def what(self) -> str:
        """Say what it is, in a few words."""
        return " · ".join(filter(None, (describe(self.tensor), self.note)))


class Numbers(NamedTuple):
    """Elements as floats of 64 bits, in which those that have no place on a scale are NaN; and where these are."""

    values: Tensor
    nan: Tensor
    infinite: Tensor
    told: tuple[str, str]  # How many these are, and what.

    def part(self, index: int) -> Numbers:
        """Return one of the first dimension."""
        return Numbers(self.values[index], self.nan[index], self.infinite[index], self.told)


def is_drawable(value: Any) -> bool:
    """Whether there is a number or a tensor in a value."""
    return isinstance(value, _SCALARS) or bool(places(value))


def shown(name: str, value: Any) -> Shown:
    """Return the tensor of a value to draw: the first, if it has several."""
    if isinstance(value, _SCALARS):
        return Shown(name, torch.tensor(value))
    found = places(value)
    if not found:
        raise HooklineError(f"{name!r} is {describe(value)}: there is no tensor in it to draw")
    tensor = get(value, found[0])
    if tensor.is_meta:
        raise HooklineError(f"{name!r} is on the meta device, where tensors have no values")
    if tensor.is_nested:
        raise HooklineError(
            f"{name!r} is a nested tensor of {tensor.size(0)}: draw one of them, as in {name + '[0]'!r}"
        )
    note = f"the first of {len(found)} tensors, {write_subscripts(found[0])}" if len(found) > 1 else ""
    return Shown(name, tensor, note)


def sample_of(one: Shown, kind: str, sample: int) -> tuple[Tensor, str]:
    """Return one sample of a value with the dimensions of a kind, and which of how many it is."""
    tensor = shaped(dense(one.tensor), kind)
    samples = tensor.shape[0]
    if not -samples <= sample < samples:
        raise HooklineError(f"{one.name!r} has {count(samples, 'sample')}: sample={sample} is not among them")
    return tensor[sample], f"sample {sample % samples} of {samples}" if samples > 1 else ""


def about(many: Mapping[str, Shown]) -> str:
    """Say what values are if they are all the same, else how many."""
    what = {one.what for one in many.values()}
    return what.pop() if len(what) == 1 and any(one.tensor.dim() for one in many.values()) else count(len(many), "site")


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements can be read one by one; complex ones by their size."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor.abs() if tensor.is_complex() else tensor


def numbers_of(tensor: Tensor) -> Numbers:
    """Return the elements as numbers for a scale.

    What is as large as its dtype allows stands for infinity: attention masks are made of that.
    """
    limit = torch.finfo(tensor.dtype).max / 2 if tensor.dtype.is_floating_point else float("inf")
    values = dense(tensor).to("cpu", torch.float64)
    nan, infinite = values.isnan(), values.abs() >= limit
    infinity = "Inf" if bool(values[infinite].isinf().all()) else "Inf or masked"
    told = f"{int(nan.sum()):,} NaN", f"{int(infinite.sum()):,} {infinity}"
    return Numbers(values.masked_fill(infinite, float("nan")), nan, infinite, told)
