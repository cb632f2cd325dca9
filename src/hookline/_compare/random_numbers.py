"""Run with known random numbers, so that two runs drop out the same elements, and leave those of the process alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The states of the random numbers of a process."""

    of_torch: Tensor
    of_gpus: list[Tensor]
    of_python: Any
    of_numpy: Any


@contextmanager
def random_numbers(state: RandomState | None = None) -> Iterator[None]:
    """Draw random numbers from a state, by default that of seed 0, and restore those of the process in the end."""
    before = random_state()
    try:
        if state is None:
            _seed()
        else:
            _draw_from(state)
        yield
    finally:
        _draw_from(before)


def random_state() -> RandomState:
    """Return the state of all random numbers: of torch, of the GPUs in use, of Python and of numpy if it is in use."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _seed() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` would change the seed of a GPU that is used later.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _draw_from(state: RandomState) -> None:
    torch.set_rng_state(state.of_torch)
    if state.of_gpus:
        torch.cuda.set_rng_state_all(state.of_gpus)
    random.setstate(state.of_python)
    if state.of_numpy is not None:
        sys.modules["numpy"].random.set_state(state.of_numpy)
