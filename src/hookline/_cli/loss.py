"""The loss function of `--loss`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookline._cli.models import import_name, is_function
from hookline._kernel import leaves, parse
from hookline.errors import HooklineError

LossFunction = Callable[[Any], Tensor]


def asks_for_gradients(at: Sequence[str]) -> list[str]:
    """Return the places that are gradients."""
    return [where for where in at if parse(where).at("").is_gradient]


def loss_of(name: str | None, at: Sequence[str]) -> LossFunction | None:
    """Return a function from the output to the loss, or None if nothing asks for gradients."""
    if name is None:
        wanted = asks_for_gradients(at)
        return _needed(wanted[0]) if wanted else None
    if name == "lm":
        return _needed("--loss lm")
    if name == "sum":
        return _sum
    if is_function(name):
        found: LossFunction = import_name(name)
        return found
    raise HooklineError(f"--loss {name}: give lm, sum, or module:function")


def _needed(why: str) -> LossFunction:
    def loss(output: Any) -> Tensor:
        """Return the loss that a transformers model computes from labels."""
        found = getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise HooklineError(
                f"{why!r} needs a loss, and the output has none; give --loss lm, --loss sum or --loss module:function"
            )
        return found

    return loss


def _sum(output: Any) -> Tensor:
    """Return the sum of the first tensor of floats in the output."""
    found = next((one for one in leaves(output) if one.is_floating_point()), None)
    if found is None:
        raise HooklineError("--loss sum: the output holds no floats")
    return found.sum()
