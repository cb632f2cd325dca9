"""A model over a dataset, into a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.harvest.plan import Harvest
from hookline.where import Where


def harvest(model: nn.Module | Callable[[], nn.Module], data: Any, *where: Where, to: Any, **options: Any) -> Any:
    """Run a dataset through a model, keep what passes at the places, and return the store; `Harvest` has the options.

    Called again after anything went wrong, it goes on where it was.
    """
    return Harvest(model, data, *where, to=to, **options).run()


__all__ = ["Harvest", "harvest"]
