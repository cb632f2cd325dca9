"""Numbers drawn from a value for a picture: one for all of it, one for each token, and the share of dead units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hookline.display.kinds import UNIT, shaped
from hookline.errors import HooklineError, did_you_mean

# Each takes floats of 64 bits and the dimensions to sum up.
MEASURES: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "norm": lambda value, dims: torch.linalg.vector_norm(value, dim=dims),
    "rms": lambda value, dims: value.square().mean(dims).sqrt(),
    "mean": lambda value, dims: value.mean(dims),
    "std": lambda value, dims: value.std(dims, unbiased=False),
    "min": lambda value, dims: value.amin(dims),
    "max": lambda value, dims: value.amax(dims),
    "abs": lambda value, dims: value.abs().mean(dims),
    "zeros": lambda value, dims: (value == 0).double().mean(dims),
    "nan": lambda value, dims: value.isnan().double().mean(dims),
    "inf": lambda value, dims: value.isinf().double().mean(dims),
}


def measure(tensor: Tensor, name: str) -> float:
    """Return one number for a whole value.

    >>> measure(torch.tensor([3.0, 4.0]), "norm")
    5.0
    """
    return float(_measured(tensor.reshape(-1), name, (0,)))


def by_token(tensor: Tensor, name: str) -> Tensor:
    """Return one number for each token of a value (sample, token, unit), as (sample, token).

    >>> by_token(torch.ones(2, 3, 4), "norm").shape
    torch.Size([2, 3])
    """
    return _measured(tensor, name, (tensor.dim() - 1,))


def dead_share(tensor: Tensor, kind: str) -> float | None:
    """Return the share of units that are zero wherever they are seen; None where a value has no units.

    >>> dead_share(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "units")
    0.5
    """
    if kind not in UNIT or not tensor.numel():
        return None
    units = shaped(tensor, kind).movedim(UNIT[kind], 0)
    return float((units == 0).reshape(len(units), -1).all(1).double().mean())


def _measured(tensor: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
    if name not in MEASURES:
        raise HooklineError(f"{name!r} is no statistic{did_you_mean(name, MEASURES)}; there are {', '.join(MEASURES)}")
    value = tensor.detach()
    value = (value.abs() if value.is_complex() else value).to("cpu", torch.float64)
    return MEASURES[name](value, dims) if value.numel() else value.new_full((), float("nan"))
