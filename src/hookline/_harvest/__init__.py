"""A model over a dataset, into a store: `Harvest` is the plan, `harvest` makes one and runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec

from hookline._harvest.generation import Generation
from hookline._harvest.images import Images
from hookline._harvest.plan import Harvest
from hookline._harvest.texts import Texts
from hookline._store.store import Store

Options = ParamSpec("Options")


def _run_of(plan: Callable[Options, Harvest]) -> Callable[Options, Store]:
    """Return a function that takes what the plan takes."""

    def harvest(*args: Options.args, **kwargs: Options.kwargs) -> Store:
        """Run a dataset through a model, keep what passes at the places on disk, and return the store.

        Called again after anything went wrong, it goes on where it was; `Harvest` has the options.

        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
        >>> store = harvest(model, torch.ones(10, 4), "0", to="acts", batch_size=4)
        >>> store["0"][:2].shape
        torch.Size([2, 8])
        """
        return plan(*args, **kwargs).run()

    harvest.__doc__ = f"{harvest.__doc__}\n{_arguments(plan)}"
    harvest.__signature__ = inspect.signature(plan).replace(return_annotation=Store)  # type: ignore[attr-defined]
    return harvest


def _arguments(plan: Callable[..., Harvest]) -> str:
    """Return what the options are, as the plan has it."""
    return "    Args:" + (plan.__doc__ or "").partition("    Args:")[2]


harvest = _run_of(Harvest)
harvest.__qualname__ = "harvest"

__all__ = ["Generation", "Harvest", "Images", "Texts", "harvest"]
