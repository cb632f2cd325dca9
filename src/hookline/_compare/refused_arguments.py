"""Arguments of `hl.compare` that are refused: those of a wrong type, and those that would change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hookline._kernel import describe, is_scripted, refuse_flags, unwrap
from hookline.errors import HooklineError


def refuse_odd(a: Any, b: Any, match: Any, tolerance: Any, functions: Mapping[str, Any], strict: Any) -> None:
    """Raise for arguments of a wrong type."""
    refuse_flags(strict=strict)
    if not isinstance(b, nn.Module):
        raise HooklineError(
            f"hl.compare takes a model as b, not {describe(b)}; to compare checkpoints, load them into models"
        )
    for side, model in (("a", a), ("b", b)):
        if isinstance(model, nn.Module) and is_scripted(unwrap(model)):
            raise HooklineError(
                f"{side} is compiled by torch.jit, and nothing inside can be seen: give the model before"
            )
    is_match = isinstance(match, Mapping) and all(isinstance(one, str) for one in match)
    if match is not None and not (is_match and all(one is None or isinstance(one, str) for one in match.values())):
        raise HooklineError(f'match= takes names of a and of b, as in {{"h.*": "layers.*"}}, not {describe(match)}')
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance < float("inf")):
        raise HooklineError(f"tolerance= takes a number such as 1e-4, not {describe(tolerance)}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise HooklineError(f"{name}= takes a function, not {describe(function)}")


def refuse_without_use(why: str, **options: Any) -> None:
    """Raise for options that would change nothing."""
    for name, given in options.items():
        if given is not None:
            raise HooklineError(f"{name}= changes nothing here: {why}")


def refuse_same(a: nn.Module, b: nn.Module, other: Any) -> None:
    """Raise if a model would be compared with itself."""
    if a is b and other is None:
        raise HooklineError(
            "a and b are the same object: .to(), .eval() and the like change a model in place. "
            "Change a copy, as in hl.compare(model, copy.deepcopy(model).bfloat16(), ...)"
        )
