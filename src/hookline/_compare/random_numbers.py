"""Run with known random numbers, so that two runs drop out the same elements, and leave those of the process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = tuple[Tensor, list[Tensor]]  # Of the processor, and of each GPU.


@contextmanager
def random_numbers(state: RandomState | None = None) -> Iterator[None]:
    """Draw random numbers from a state, by default that of seed 0, and restore those of the process in the end."""
    before = random_state()
    try:
        if state is None:
            torch.manual_seed(0)
        else:
            _draw_from(state)
        yield
    finally:
        _draw_from(before)


def random_state() -> RandomState:
    """Return the state of the random numbers of the processor and of each GPU in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _draw_from(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
