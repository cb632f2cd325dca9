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
from hookline.watching.targets import Target

SAMPLED = 1 << 16  # Elements of a parameter that are compared before and after a step.

Parameters = dict[str, list[nn.Parameter]]  # Those that each module holds itself.


class Row:
    """What has passed in one step: numbers that are on their devices still."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._before: dict[nn.Parameter, Tensor] = {}  # Samples of the parameters, before optimizers step.
        self._values: list[tuple[str, int]] = []  # The site and the elements of each value, and three numbers of it:
        self._of_values: list[Tensor] = []  # norm, elements that are not zero, largest.
        self._gradients: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Tensor]] = {}
        self._updates: dict[str, list[Tensor]] = {}  # How far each parameter has moved, then how large it was.

    @torch.no_grad()
    def add(self, site: str, plain: Tensor) -> None:
        """Note the plain numbers of one call."""
        self._values.append((site, plain.numel()))
        self._of_values += (*_norms([plain]), plain.count_nonzero(), extreme(plain))

    @torch.no_grad()
    def add_gradients(self, parameters: Parameters, scale: float, keep: bool) -> None:
        """Note the norms of the gradients that are there, in the place of earlier ones unless these are kept."""
        found = {site: [one.grad for one in held if one.grad is not None] for site, held in parameters.items()}
        kept = self._gradients if keep else {}
        self._gradients = {**_by_site(found, 1 / scale), **kept}

    @torch.no_grad()
    def add_weights(self, parameters: Parameters) -> None:
        """Note the norms of the parameters."""
        self._weights = _by_site({site: list[Tensor](held) for site, held in parameters.items()})

    def sample(self, held: Iterable[nn.Parameter]) -> None:
        """Note what parameters are before the first optimizer that steps."""
        self._before = {one: sample(one) for one in held if one not in self._before} | self._before

    @torch.no_grad()
    def add_updates(self, parameters: Parameters) -> None:
        """Note how far the parameters of which samples were taken have moved, and how large they were."""
        before = self._before
        pairs = {
            site: [(sample(one), before[one]) for one in held if one in before] for site, held in parameters.items()
        }
        moved = _by_site({site: [new - old for new, old in found] for site, found in pairs.items()})
        large = _by_site({site: [old for _, old in found] for site, found in pairs.items()})
        self._updates = {site: [*norms, *large[site]] for site, norms in moved.items()}

    def read(self) -> dict[str, dict[str, float]]:
        """Wait for the devices, once for each; return {quantity: {site: number}}."""
        held = (self._gradients, self._weights, self._updates)
        numbers = iter(_read([*self._of_values, *(one for found in held for norms in found.values() for one in norms)]))
        sums: dict[str, list[float]] = {}
        for site, count in self._values:
            norm, others, largest = next(numbers), next(numbers), next(numbers)
            before = sums.get(site, [0.0, 0.0, 0.0, 0.0])
            sums[site] = [before[0] + norm**2, before[1] + others, max(before[2], largest), before[3] + count]
        gradients, weights, updates = (
            {site: [next(numbers) for _ in norms] for site, norms in found.items()} for found in held
        )
        read = {
            "rms": {site: math.sqrt(squares / count) for site, (squares, _, _, count) in sums.items()},
            "zeros": {site: 1 - others / count for site, (_, others, _, count) in sums.items()},
            "largest": {site: largest for site, (_, _, largest, _) in sums.items()},
            "gradient": {site: math.hypot(*norms) for site, norms in gradients.items()},
            "weight": {site: math.hypot(*norms) for site, norms in weights.items()},
            "update": {site: share for site, norms in updates.items() if (share := _share(norms)) is not None},
        }
        return {quantity: found for quantity, found in read.items() if found}


def _share(norms: list[float]) -> float | None:
    """Return how far a layer has moved as a share of its size; one that is all zeros has none."""
    half = len(norms) // 2
    size = math.hypot(*norms[half:])
    return math.hypot(*norms[:half]) / size if size else None


def _by_site(found: Mapping[str, list[Tensor]], factor: float = 1.0) -> dict[str, list[Tensor]]:
    """Return the norms of tensors in the same order, without those that have no numbers."""
    plain = {site: [one for tensor in held if (one := numbers_in(tensor)) is not None] for site, held in found.items()}
    norms = iter(_norms([one for held in plain.values() for one in held], factor))
    return {site: [next(norms) for _ in held] for site, held in plain.items() if held}


def _norms(tensors: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Return the norm of each tensor, in at least single precision: half would overflow."""
    norms: list[Tensor] = [torch.linalg.vector_norm(one, 2, dtype=_wide(one)) for one in tensors]
    return norms if factor == 1 else [norm * factor for norm in norms]


def _read(tensors: list[Tensor]) -> list[float]:
    """Return the numbers of tensors of one element, with one wait for each device."""
    found = [0.0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        read: list[float] = torch.stack([tensors[number].to(torch.float64) for number in numbers]).tolist()
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
                self._numbers.setdefault(key, array("d", [math.nan] * (len(self.steps) - 1))).append(number)
                named[f"{quantity}/{site or 'model'}"] = number
        for numbers in self._numbers.values():
            if len(numbers) < len(self.steps):
                numbers.append(math.nan)  # So that the number at any place is of the step at that place.
        return named

    def cache(self) -> Cache:
        """Return all numbers as a cache: `h.0["rms"]`, one call for each row."""
        cache = Cache()
        for site, numbers in self._numbers.items():
            cache._keep(site, list(torch.tensor(numbers, dtype=torch.float64).unbind()))
        return cache


class Statistics:
    """The row of the step that runs, that of the step before while optimizers may still belong to it, and the log."""

    def __init__(self, every: int | None, parameters: Parameters) -> None:
        self.every, self._parameters = every, parameters
        self.log = Log()
        self.row: Row | None = None
        self._closing: Row | None = None
        self.targets: list[Target] = []

    def begin(self, step: int) -> None:
        """Begin a row, if this is a step of which one is kept."""
        self.row = Row(step) if self.every is not None and step % self.every == 0 else None

    def sample(self, held: Iterable[nn.Parameter], is_further: bool) -> None:
        """Note what parameters are before an optimizer steps: the first of a step, or a further one."""
        row = self._closing if is_further else self.row
        if row is not None:
            row.sample(held)

    def close(self, step: int) -> None:
        """Let the row of the step that is over wait for further optimizers, and begin the next."""
        self.settle()
        self._closing = self.row
        self.begin(step)

    def settle(self) -> None:
        """Write the row that waits."""
        row, self._closing = self._closing, None
        if row is None:
            return
        row.add_weights(self._parameters)
        row.add_updates(self._parameters)
        numbers = self.log.add(row.step, row.read())
        for target in self.targets:
            target.write(row.step, numbers)

    def end(self) -> None:
        """Keep no more."""
        self.row = self._closing = None
        for target in self.targets:
            target.close()


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


def _wide(plain: Tensor) -> Any:
    return torch.float64 if plain.dtype is torch.float64 else torch.float32
