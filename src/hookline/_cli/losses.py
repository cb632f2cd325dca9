"""--loss: what a backward starts from (lm, sum or module:function), and the labels that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline._cli.inputs import ModelInput
from hookline._cli.models import is_function, named
from hookline._harvest.padding import NO_LABEL
from hookline._kernel import leaves, parse
from hookline.errors import HooklineError

LossFunction = Callable[[Any], Tensor]


def labelled(entry: ModelInput, loss: str | None) -> ModelInput:
    """Return an input with the labels of a language model, if that is its loss: its own tokens, without padding."""
    if loss != "lm" or "labels" in (entry.kwargs or {}):
        return entry
    if entry.kwargs is None or "input_ids" not in entry.kwargs:
        raise HooklineError("--loss lm is for texts: the labels are the tokens that go in")
    labels = entry.kwargs["input_ids"]
    if "attention_mask" in entry.kwargs:
        labels = labels.masked_fill(entry.kwargs["attention_mask"] == 0, NO_LABEL)
    return replace(entry, kwargs={**entry.kwargs, "labels": labels})


def asks_for_gradients(at: Sequence[str]) -> list[str]:
    """Return the places that are gradients."""
    return [where for where in at if parse(where).at("").is_gradient]


def loss_of(name: str | None, at: Sequence[str]) -> LossFunction | None:
    """Return what makes one number of an output, or None where nothing asks for gradients."""
    if name is None:
        wanted = asks_for_gradients(at)
        return _needed(wanted[0]) if wanted else None
    if name == "lm":
        return _needed("--loss lm")
    if name == "sum":
        return _sum
    if is_function(name):
        found: LossFunction = named(name)
        return found
    raise HooklineError(f"--loss {name}: it is lm, sum, or module:function")


def _needed(why: str) -> LossFunction:
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
