"""Statistics of each layer, every few steps: gathered on the device, read together, kept small."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.cache import Cache
from hookline.sites import Site, write_subscripts
from hookline.watching.checks import extreme, numbers_in

QUANTITIES = ("rms", "zeros", "largest", "gradient", "weight", "update")
SAMPLED = 1 << 16  # Elements of a parameter that are compared before and after a step.

Parameters = dict[str, list[nn.Parameter]]  # Those that each module holds itself.


class Row:
    """What has passed in one step, on the device still."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}  # By site: sum of squares, elements, elements but zeros, largest.
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.updates: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, site: str, tensors: Iterable[Tensor]) -> None:
        """Note the plain numbers of one call."""
        for plain in tensors:
            norm = torch.linalg.vector_norm(plain, 2, dtype=_wide(plain)).square()
            count = torch.full_like(norm, plain.numel())
            new = torch.stack((norm, count, plain.count_nonzero().to(norm.dtype), extreme(plain)))
            self.values.setdefault(site, []).append(new)

    @torch.no_grad()
    def add_gradients(self, parameters: Parameters, scale: float, keep: bool) -> None:
        """Note the norms of the gradients that are there, in the place of earlier ones unless these are kept."""
        for site, held in parameters.items():
            found = [plain for one in held if one.grad is not None and (plain := numbers_in(one.grad)) is not None]
            if found and not (keep and site in self.gradients):
                self.gradients[site] = _norm(found) / scale

    @torch.no_grad()
    def add_weights(self, parameters: Parameters) -> None:
        """Note the norms of the parameters."""
        for site, held in parameters.items():
            found = [plain for one in held if (plain := numbers_in(one)) is not None]
            if found:
                self.weights[site] = _norm(found)

    @torch.no_grad()
    def add_updates(self, parameters: Parameters, before: Mapping[nn.Parameter, Tensor]) -> None:
        """Note how far the parameters of which samples were taken have moved, as a share of what they were."""
        for site, held in parameters.items():
            pairs = [(before[one], sample(one)) for one in held if one in before]
            if pairs:
                moved = _norm([new - old for old, new in pairs])
                self.updates[site] = moved / _norm([old for old, _ in pairs])

    def read(self) -> dict[str, dict[str, float]]:
        """Wait for the devices; return {quantity: {site: number}}."""
        read: dict[str, dict[str, float]] = {quantity: {} for quantity in QUANTITIES}
        calls = [(site, one) for site, found in self.values.items() for one in found]
        sums: dict[str, list[float]] = {}
        for (site, _), (squares, count, others, largest) in zip(calls, _read([one for _, one in calls]), strict=True):
            before = sums.get(site, [0.0, 0.0, 0.0, 0.0])
            sums[site] = [before[0] + squares, before[1] + count, before[2] + others, max(before[3], largest)]
        for site, (squares, count, others, largest) in sums.items():
            read["rms"][site], read["zeros"][site] = math.sqrt(squares / count), 1 - others / count
            read["largest"][site] = largest
        for quantity in QUANTITIES[3:]:
            held: dict[str, Tensor] = getattr(self, f"{quantity}s")
            read[quantity] = dict(zip(held, _read(list(held.values())), strict=True))
        # A layer that is all zeros has no share by which it moves.
        read["update"] = {site: share for site, share in read["update"].items() if math.isfinite(share)}
        return {quantity: found for quantity, found in read.items() if found}


def _read(tensors: list[Tensor]) -> list[Any]:
    """Return the numbers of tensors of one shape, with one wait for each device."""
    found: list[Any] = [None] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        read = torch.stack([tensors[number].to(torch.float64) for number in numbers]).tolist()
        for number, one in zip(numbers, read, strict=True):
            found[number] = one
    return found


class Log:
    """The numbers of all rows: one list of plain numbers for each quantity of each site."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._numbers: dict[Site, array[float]] = {}

    def add(self, step: int, read: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Take a row in; return its numbers by the names that others know them by: "rms/h.0.mlp"."""
        self.steps.append(step)
        named: dict[str, float] = {}
        for quantity, found in read.items():
            for site, number in found.items():
                key = Site.parse(site)
                key = key._replace(index=key.index + write_subscripts((quantity,)))
                self._numbers.setdefault(key, array("d")).append(number)
                named[f"{quantity}/{site or 'model'}"] = number
        return named

    def cache(self) -> Cache:
        """Return all numbers as a cache: `h.0["rms"]`, one call for each row."""
        cache = Cache()
        for site, numbers in self._numbers.items():
            cache._keep(site, list(torch.tensor(numbers, dtype=torch.float64).unbind()))
        return cache


@torch.no_grad()
def sample(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter, or of some thousand elements all over it."""
    plain = numbers_in(parameter)
    if plain is None:
        return torch.zeros(1)
    flat = plain.reshape(-1)
    stride = max(1, len(flat) // SAMPLED)
    width = plain.shape[-1] if plain.dim() else 1
    while stride > 1 and math.gcd(stride, width) > 1:  # Else it would be the same few columns of a matrix.
        stride += 1
    return flat[::stride].to(_wide(flat), copy=True)


def _norm(tensors: list[Tensor]) -> Tensor:
    norms: list[Tensor] = [torch.linalg.vector_norm(one, 2, dtype=_wide(one)) for one in tensors]
    if len(norms) == 1:
        return norms[0]
    together: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0]) for one in norms]))
    return together


def _wide(plain: Tensor) -> Any:
    return torch.float64 if plain.dtype is torch.float64 else torch.float32
