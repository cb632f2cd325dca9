"""Caches with a limit: models to fill them, and functions that show what they hold and where."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import children
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


def bytes_in(value: Any) -> int:
    """Return the bytes that a value needs under a limit: so many are enough, and one less is not."""
    try:
        capture_one(value, limit=0)
        return 0
    except hl.CacheFull as full:
        (size,) = re.findall(r"^'at.0': ([\d,]+) bytes more than the 0 already kept", str(full))
    size = int(size.replace(",", ""))
    capture_one(value, limit=size)
    return size


def capture_one(value: Any, **options: Any) -> hl.Cache:
    """Capture a value as it is, without a copy."""
    with hl.capture(model := Echo(), "at.0", clone=False, **options) as acts:
        model(value)
    return acts


def bytes_at(acts: hl.Cache) -> tuple[int, int]:
    """Return how many bytes of a cache are in memory and on disk, as its table says."""
    title = repr(acts).splitlines()[0].replace(",", "")
    memory, disk = re.search(r" (\d+) bytes?(?: (\d+) bytes? on disk)?$", title).groups()  # type: ignore[union-attr]
    return int(memory), int(disk or 0)


def files() -> list[Path]:
    """Return the files of all caches in the folder for temporary files, oldest first."""
    found = Path(tempfile.gettempdir()).glob("hookline-*/*.safetensors")
    return sorted(found, key=lambda path: int(path.stem))


def on_disk(acts: hl.Cache) -> list[str]:
    """Return the sites with a value on disk: they can't be read while the files are elsewhere."""
    moved, found = {path: path.rename(path.with_suffix(".elsewhere")) for path in files()}, []
    for site in acts:
        try:
            acts.calls(site)
        except hl.StoreError:
            found.append(site)
    for path, place in moved.items():
        place.rename(path)
    return found


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
