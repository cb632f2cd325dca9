"""Odd but plausible arguments that users pass by mistake. Each test gets new ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "no text": lambda: "",
    "other text": lambda: "nonsense",
    "number as text": lambda: "3",
    "no list": list,
    "no dict": dict,
    "tuple of names": lambda: ("0", "2"),
    "names twice": lambda: ["0", "0"],
    "dict": lambda: {"0": 1.0},
    "text for a bool": lambda: "no",
    "True": lambda: True,
    "0": lambda: 0,
    "negative": lambda: -1,
    "huge": lambda: 10**12,
    "float": lambda: 2.5,
    "NaN": lambda: float("nan"),
    "tensor": lambda: torch.ones(2, 2),
    "empty tensor": lambda: torch.ones(0),
    "class": lambda: nn.Linear,
    "other module": nn.ReLU,
    "function of nothing": lambda: lambda: None,
    "generator": lambda: (name for name in ("0", "2")),
    "exhausted": lambda: iter(()),
    "path": lambda: Path("nowhere"),
    "object": lambda: object(),
}
