"""Likely reasons why a module of b does something else than that of a. Each is tested before it is given.

A reason is a change of b's module, such as another epsilon or a weight of a's in it. It is given if the module, with
that change and the same inputs, returns what a's module returns, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hookline._compare.hints_of_settings import other_config, other_mode, other_precision, other_settings, tensor_cores
from hookline._compare.hints_of_values import (
    other_activation,
    other_attention,
    other_function,
    other_inputs,
    other_inputs_somehow,
    other_output,
    other_pattern,
)
from hookline._compare.hints_of_weights import moved_weights, other_biases, other_weights
from hookline._compare.suspect import Hint, Suspect


def hint_for(suspect: Suspect) -> Hint | None:
    """Return the first reason that holds when it is tested."""
    can_run = False
    with suppress(Exception):
        can_run = suspect.can_run_alone
    for find in _REASONS:
        if not can_run and find not in _WITHOUT_A_RUN:
            continue
        with suppress(Exception):  # A test of a reason is a run that nobody asked for.
            found = find(suspect)
            if found is not None:
                return found if isinstance(found, Hint) else Hint(found)
    return None


_REASONS: tuple[Callable[[Suspect], str | Hint | None], ...] = (
    other_mode,
    moved_weights,
    other_weights,
    other_biases,
    other_settings,
    other_config,
    tensor_cores,
    other_precision,
    other_activation,
    other_output,
    other_inputs,
    other_attention,
    other_function,
    other_pattern,
    other_inputs_somehow,
)
_WITHOUT_A_RUN = (other_biases, other_precision, other_activation, other_output)  # These do not run b's module.
