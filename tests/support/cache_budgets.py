"""Caches with a limit: models to fill them, and functions that show what they hold and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._cache.budget import Budget, CountedValue, memories_of
from hookline._cache.record import EMPTY
from hookline._values.nested import children
from tests.support.states import bits

VALUE = 4 * 8 * 16  # The bytes of one activation of `model_of()`.


x = torch.randn(8, 16)


class Echo(nn.Module):
    """A module that returns its input through one of several places."""

    def __init__(self, places: int = 3) -> None:
        super().__init__()
        self.at = nn.ModuleList(nn.Identity() for _ in range(places))

    def forward(self, value: Any, place: int = 0) -> Any:
        return self.at[place](value)


@dataclasses.dataclass
class Step:
    hidden: Tensor
    note: str = ""


def model_of(depth: int = 4, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(*[one for _ in range(depth // 2) for one in (nn.Linear(16, 16), nn.ReLU(inplace))])


def budget_of(hooks: hl.Hooks) -> Budget:
    return next(hook.action.budget for hook in hooks if hook.kind == "capture")  # type: ignore[union-attr, return-value]


def kept_in(acts: hl.Cache) -> list[CountedValue]:
    """Return the values of a cache that its budgets count."""
    found = [value for record in acts._all() for value in record._held()]
    parts = [part for value in found for part in getattr(value, "arrived", {0: value}).values()]
    return [part for part in parts if isinstance(part, CountedValue)]


def bytes_in(*values: Any) -> int:
    return sum(size for _, size in frozenset().union(*map(memories_of, values)))


def is_on_disk(kept: CountedValue) -> bool:
    return kept.value is EMPTY


def paths_of(acts: hl.Cache) -> list[Path]:
    return [Path(file.path) for kept in kept_in(acts) for file in kept.files]


def same(one: Any, other: Any) -> bool:
    """Return True if two values have the same structure, dtypes, shapes, devices and bits."""
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape, one.device, type(one)) == (other.dtype, other.shape, other.device, type(other))
        return alike and bits(one) == bits(other)
    parts, others = children(one), children(other)
    if parts is None or others is None:
        return bool(one == other)
    return type(one) is type(other) and list(parts) == list(others) and all(same(parts[k], others[k]) for k in parts)


def agree(acts: hl.Cache, expected: hl.Cache) -> bool:
    """Return True if two caches give the same values, calls and table."""
    return (
        list(acts) == list(expected)
        and all(same(acts[site], expected[site]) for site in expected)
        and all(same(acts.calls(site), expected.calls(site)) for site in expected)
        and repr(acts).splitlines()[1:] == repr(expected).splitlines()[1:]
    )
