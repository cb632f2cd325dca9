"""Watch a model while a trainer trains it: `LightningWatch` for Lightning, `TrainerWatch` for transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.callbacks.lightning import LightningWatch
    from hookline.callbacks.transformers_trainer import TrainerWatch

__all__ = ["LightningWatch", "TrainerWatch"]

# Each is imported on first use, because it needs its trainer's library.
_HOMES = {"LightningWatch": "lightning", "TrainerWatch": "transformers_trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hookline.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hookline.callbacks.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
