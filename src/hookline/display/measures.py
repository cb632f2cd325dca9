"""Numbers drawn from a value for a picture: one for all of it, one for each token, and the share of dead units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.arguments import told
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

POSITIVE = ("norm", "rms", "std", "abs")  # Those that a logarithmic scale suits.
_NAMES = {
    "abs": "mean of |value|",
    "std": "standard deviation",
    "zeros": "share of zeros",
    "nan": "share of NaN",
    "inf": "share of Inf",
}
FAR = 1000.0  # How many times larger or smaller than where the signal came from is called exploding or vanishing.


def refuse_statistic(name: Any) -> None:
    """Raise for what is not the name of a statistic."""
    if not isinstance(name, str) or name not in MEASURES:
        raise HooklineError(
            f"{told(name)} is not a statistic{did_you_mean(str(name), MEASURES)}; there are {', '.join(MEASURES)}"
        )


def statistic_name(name: str) -> str:
    """Return what a statistic is called on an axis."""
    return _NAMES.get(name, name)


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


def extremes(numbers: Sequence[float], source: Literal["first", "last"]) -> list[str]:
    """Say which numbers along depth have "vanished" or "exploded" against the one where the signal comes from.

    Values come from the first layer, gradients from the last.

    >>> extremes([1e-5, 0.1, 0.5, float("nan")], source="last")
    ['vanishing', '', '', 'not finite']
    """
    along = numbers if source == "first" else numbers[::-1]
    reference = next((number for number in along if math.isfinite(number) and number > 0), 0.0)
    return [_extreme(number, reference) for number in numbers]


def _extreme(number: float, reference: float) -> str:
    if not math.isfinite(number):
        return "not finite"
    if number * FAR < reference or number == 0:
        return "vanishing"
    return "exploding" if number > FAR * reference else ""


def _measured(tensor: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
    refuse_statistic(name)
    value = tensor.detach()
    value = (value.abs() if value.is_complex() else value).to("cpu", torch.float64)
    return MEASURES[name](value, dims) if value.numel() else value.new_full((), float("nan"))
