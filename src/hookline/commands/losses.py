"""What backward starts from: a loss by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline.commands.inputs import Given
from hookline.commands.names import is_function, named
from hookline.errors import HooklineError
from hookline.harvesting.masks import NO_LABEL
from hookline.sites import parse
from hookline.values import leaves

Loss = Callable[[Any], Tensor]


def labelled(given: Given, loss: str | None) -> Given:
    """Return an input with the labels of a language model, if that is its loss: its own tokens, without padding."""
    if loss != "lm" or "labels" in (given.kwargs or {}):
        return given
    if given.kwargs is None or "input_ids" not in given.kwargs:
        raise HooklineError("--loss lm is for texts: the labels are the tokens that go in")
    labels = given.kwargs["input_ids"]
    if "attention_mask" in given.kwargs:
        labels = labels.masked_fill(given.kwargs["attention_mask"] == 0, NO_LABEL)
    return replace(given, kwargs={**given.kwargs, "labels": labels})


def asks_for_gradients(at: Sequence[str]) -> list[str]:
    """Return those of some places that are gradients."""
    return [where for where in at if parse(where).at("").is_gradient]


def loss_of(name: str | None, at: Sequence[str]) -> Loss | None:
    """Return what makes one number of an output, or None where nothing asks for gradients."""
    if name is None:
        wanted = asks_for_gradients(at)
        return _needed(wanted[0]) if wanted else None
    if name == "lm":
        return _needed("--loss lm")
    if name == "sum":
        return _sum
    if is_function(name):
        found: Loss = named(name)
        return found
    raise HooklineError(f"--loss {name}: it is lm, sum, or module:function")


def _needed(why: str) -> Loss:
    def loss(output: Any) -> Tensor:
        """The loss that a model of transformers gives where it has labels."""
        found = getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise HooklineError(
                f"{why!r} needs a loss, and the output has none; give --loss lm, --loss sum or --loss module:function"
            )
        return found

    return loss


def _sum(output: Any) -> Tensor:
    """The sum of the output, of which several tensors are judged by the first."""
    found = next((one for one in leaves(output) if one.is_floating_point()), None)
    if found is None:
        raise HooklineError("--loss sum: the output holds no floats")
    return found.sum()
