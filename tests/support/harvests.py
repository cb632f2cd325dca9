"""A harvest small enough to be killed hundreds of times, and the contents of its store in a comparable form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl

SITES = ("embed", "layers.*", "head[:, 0]")


class Reader(nn.Module):
    """A model with an embedding, two layers with in-place activations, and a head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids) * attention_mask[..., None]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def model() -> nn.Module:
    """Return the model. Other processes get this function, not the weights."""
    torch.manual_seed(7)
    return Reader().eval()


class Sentences:
    """Sentences of different lengths. The numbers of those loaded are written to the file `notes`, if given."""

    def __init__(self, number: int = 64, notes: Path | None = None) -> None:
        self.number = number
        self.notes = notes

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.number:
            raise IndexError(index)
        if self.notes is not None:
            with self.notes.open("a") as notes:
                notes.write(f"{index}\n")
        return (torch.arange(3 + index * 7 % 11) * (index + 3) + index) % 50

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Return a batch, padded on the right."""
        pad = nn.utils.rnn.pad_sequence
        masks = [torch.ones(len(sample), dtype=torch.long) for sample in samples]
        return {"ids": pad(samples, batch_first=True), "attention_mask": pad(masks, batch_first=True)}


class Batches:
    """The same sentences as batches of unknown number."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = Sentences()
        for start in range(0, len(data), 2):
            yield data.collate([data[start], data[start + 1]])


def options(to: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of the harvest."""
    rows = {"embed": "tokens", "layers.*": "tokens"}
    return {"to": to, "batch_size": 2, "unit": 4, "rows": rows, "progress": False, **changes}


def harvest(to: Path, data: Any = None, **changes: Any) -> hl.Store:
    """Run the harvest in this process."""
    return hl.harvest(changes.pop("model", model), data or Sentences(), *SITES, **options(to, **changes))


def committed(to: Path) -> set[int]:
    """Return the units that are done."""
    return {int(path.stem) for path in to.glob("units/[0-9]*.json")}


def loaded(notes: Path) -> list[int]:
    """Return the units that were loaded, in order, without the single samples loaded for the fingerprint."""
    numbers = [int(line) for line in notes.read_text().split()]
    return [number // 4 for before, number in pairwise(numbers) if number % 4 == 3 and before == number - 1]


def contents(to: Path) -> dict[str, Any]:
    """Return every file of a store, by name, without the attempt in names and records. A stray file fails.

    Hidden files do not count: a killed process leaves them, empty or small, and they are removed when they are old.
    """
    found: dict[str, Any] = {}
    attempts = {}
    for path in to.glob("units/[0-9]*.json"):
        record = json.loads(path.read_bytes())
        attempts[path.stem] = record.pop("attempt")
        record.pop("checksum", None)  # It depends on the attempt.
        found[f"units/{path.name}"] = record
    for path in sorted(to.rglob("*")):
        name = path.relative_to(to).as_posix()
        if name in found or path.is_dir() or path.name.startswith("."):
            continue
        if name.startswith("data/"):
            unit, attempt = path.stem.split("-")[:2]
            assert attempts.get(unit) == attempt, f"{name} belongs to no record"
            name = name.replace(f"-{attempt}", "")
            assert name not in found, f"{name} exists for two attempts"
        found[name] = path.read_bytes()
    return found
