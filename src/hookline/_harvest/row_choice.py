"""Which rows of a value a harvest keeps (`rows=`), and to which sample and position each row belongs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline import Site
from hookline._harvest.fingerprints import bytes_of
from hookline._harvest.padding import named_positions, token_positions
from hookline._kernel import children, describe, write_subscripts
from hookline.errors import HooklineError

Rule = str | Callable[..., Any]
Mask = Callable[[Site, Any, Any, tuple[int, int]], Tensor | None]  # Of a site, a batch, the model's output and a shape.
RULES = ("batch", "tokens")


@dataclass(frozen=True)
class Choice:
    """Which rows of values [samples, positions, ...] are kept."""

    counts: list[int]  # How many of each sample.
    index: Tensor | None  # Into samples × positions; None is all of them.
    positions: Tensor | None  # Of each row in its sequence; None if they count up from 0.

    def all_positions(self) -> Tensor:
        """Return the position of each row."""
        return counted_up(torch.tensor(self.counts)) if self.positions is None else self.positions


def check_rule(rule: Any) -> None:
    """Refuse what is not a rule."""
    for one in rule.values() if isinstance(rule, Mapping) else [rule]:
        if not callable(one) and one not in RULES:
            raise HooklineError(
                f'rows= is "batch", "tokens", a function of the batch, or a mapping of site to these, not {one!r}'
            )


class RowChooser:
    """The rows of one batch's values: those that share a mask are chosen once."""

    def __init__(self, batch: Any, samples: int, output: Any, mask: Mask) -> None:
        self._batch = batch
        self._samples = samples
        self._output = output
        self._mask = mask
        self._choices: dict[Any, Choice] = {}

    def choose(self, name: str, site: Site | None, side: Site, value: Any, rule: Rule) -> tuple[Tensor, Choice]:
        """Return the rows of a value, and which they are."""
        if not isinstance(value, Tensor):
            part = write_subscripts(tuple(children(value) or (0,))[:1])
            raise HooklineError(f"{name!r} is {describe(value)}, no tensor; name the part to keep, '{name}{part}', "
                                "or make one of it with transform=")  # fmt: skip
        if value.layout is not torch.strided:
            raise HooklineError(f"{name!r} is a tensor of layout {value.layout}; make it dense with transform=")
        if rule == "tokens" and site is not None and isinstance(named_positions(site), int):
            rule = "batch"  # One position of each sample is left.
        if value.dim() == 0 or ((rule == "batch" or value.dim() == 1) and len(value) != self._samples):
            raise HooklineError(f"{name!r} has shape {tuple(value.shape)} for {self._samples} samples: the first "
                                "dimension must be the batch; bring it there with transform=, or, if the data are "
                                "single samples, give batch_size=")  # fmt: skip
        if rule == "batch" or value.dim() == 1:
            return value, self._choice("batch", lambda: Choice([1] * self._samples, None, None))
        choice = self._of_positions(name, side, value, rule)
        flat = value.flatten(0, 1)
        return (flat if choice.index is None else flat.index_select(0, on_device(choice.index, flat.device))), choice

    def _choice(self, key: Any, make: Callable[[], Choice]) -> Choice:
        if key not in self._choices:
            self._choices[key] = make()
        return self._choices[key]

    def _of_positions(self, name: str, side: Site, value: Tensor, rule: Rule) -> Choice:
        """Return which positions are kept: those that the rule's mask has, or the batch's own."""
        shape = (value.shape[0], value.shape[1])
        if shape[0] != self._samples:
            raise HooklineError(f"{name!r} has shape {tuple(value.shape)} for {self._samples} samples: rows by "
                                "position need [samples, positions, ...]; bring it there with transform=")  # fmt: skip
        try:
            real = self._mask(side, self._batch, self._output, shape)
        except HooklineError:
            if not callable(rule):
                raise
            real = None  # A rule of its own needs none.
        key = (rule, shape, None if real is None else bytes_of(real))
        if not callable(rule):
            return self._choice(key, lambda: _chosen(real, real, shape))
        return self._choice(key, lambda: _chosen(self._chosen_by(name, rule, shape), real, shape))

    def _chosen_by(self, name: str, rule: Callable[..., Any], shape: tuple[int, int]) -> Tensor:
        """Return the mask that a function gives."""
        mask = rule(self._batch, self._output) if takes_output(rule) else rule(self._batch)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
            found = describe(mask)
            raise HooklineError(f"{name!r}: the rows= function gives a mask {list(shape)} for this value, not {found}")
        return mask.bool()


def takes_output(function: Callable[..., Any]) -> bool:
    """Return whether a function of the batch wants to see what the model returned, too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # A function in C has no signature.
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([one for one in parameters if one.kind in positional and one.default is one.empty]) > 1


def _chosen(mask: Tensor | None, real: Tensor | None, shape: tuple[int, int]) -> Choice:
    """Return the rows under a mask; positions count what is real."""
    if mask is None:
        return Choice([shape[1]] * shape[0], None, None)
    mask = mask.to("cpu", torch.bool)
    counts = mask.sum(1)
    index = None if bool(mask.all()) else mask.reshape(-1).nonzero().reshape(-1)
    at = token_positions(mask, None if real is None else real.to("cpu"))
    return Choice(counts.tolist(), index, None if torch.equal(at, counted_up(counts)) else at)


def counted_up(counts: Tensor) -> Tensor:
    """Return the numbers from 0 for each of some counts."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """Return an index where it is needed, without waiting for the device."""
    if device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def cast(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return rows as another kind of float; what is not a float stays as it is."""
    return rows.to(dtype) if dtype is not None and rows.is_floating_point() else rows
