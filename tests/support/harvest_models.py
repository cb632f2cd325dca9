"""Models and data to harvest, and the rows to expect."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import (
    IterableDataset,
)

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


class Tagger(nn.Module):
    """A tiny model of token sequences, with the argument names of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, input_ids, attention_mask=None):
        return {"logits": self.mix(self.embed(input_ids))}


class Texts:
    """Samples of several lengths, padded on one side."""

    def __init__(self, number: int = 23, left: bool = False) -> None:
        self.number, self.left = number, left

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.number:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 20, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator)

    def collate(self, samples):
        ids = torch.zeros(len(samples), max(map(len, samples)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            place = slice(-len(sample), None) if self.left else slice(len(sample))
            ids[row, place], mask[row, place] = sample, 1
        return {"input_ids": ids, "attention_mask": mask}


def expected(model: nn.Sequential, layers: int, x: torch.Tensor = X, batch: int = 8) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model[:layers](part) for part in x.split(batch)])


BATCHES = [X[:8], X[8:20], X[20:21], X[21:]]


class Broken:
    """A dataset of which one sample can't be loaded, and another makes the model fail."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise ValueError("no such picture")
        return torch.full((4,), float("inf") if index == 13 else float(index))


class Fussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 2)

    def forward(self, x):
        if x.isinf().any():
            raise RuntimeError("too large")
        return self.one(x)


def changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[1, 5] += 1e-3  # The harvests stop before this layer.
    return model


class Endless(IterableDataset):
    """Samples of unknown number: the stated length is a wrong guess."""

    def __iter__(self):
        return iter(X[:40])

    def __len__(self) -> int:
        return 1000
