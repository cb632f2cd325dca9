"""Carry the indices of max-pooling layers to the unpooling layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

import hookline as hl
from hookline.compat.torch_hook_utils.input_output_hooks import (
    INPUTS,
    entered,
    named_modules_of_type,
    pairs,
)
from hookline.compat.torch_hook_utils.layer_values import LayerValues
from hookline.compat.warning import warn

# The function that each of them calls, which gives the indices too if it is asked to.
FUNCTIONS: dict[type[nn.Module], str] = {
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.MaxPool3d: "max_pool3d",
    nn.AdaptiveMaxPool1d: "adaptive_max_pool1d",
    nn.AdaptiveMaxPool2d: "adaptive_max_pool2d",
    nn.AdaptiveMaxPool3d: "adaptive_max_pool3d",
    nn.FractionalMaxPool2d: "fractional_max_pool2d",
    nn.FractionalMaxPool3d: "fractional_max_pool3d",
}
UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)


@contextmanager
def save_maxpool_indices(module_or_modules: nn.Module | Mapping[str, nn.Module]) -> Iterator[LayerValues]:
    """Collect the indices of max-pooling layers, as a mapping from name to tensor; the layers return what they did.

    A layer that ran several times has a list of tensors there, oldest first.
    """
    indices = LayerValues()
    blocks = []
    for name, pool in _layers(module_or_modules, tuple(FUNCTIONS)):
        site = hl.Site("", member=f"/{_function(name, pool)}")
        hooks = hl.capture(pool, site, keep="all", transform=_indices, with_call=True)
        if not pool.return_indices:
            hooks.patch({hl.Site("", "inputs", '["return_indices"]', member=site.member): True})
            hooks.edit(site, _without_indices, with_call=True, check=False, clone=False)
        indices.watch(name, hooks, site, _one_or_all)
        blocks.append((name, hooks))
    with entered(blocks):
        yield indices


@contextmanager
def use_indices_in_maxunpool(
    module_or_modules: nn.Module | Mapping[str, nn.Module],
    maxpool_indices: MutableMapping[str, Any],
    consume_indices: bool = False,
) -> Iterator[None]:
    """Give each max-unpooling layer the indices of its name, so that it is called with its input alone.

    Of a list, a call gets the next one that has the shape of its input; after the last the first again.

    Args:
        consume_indices: Take those that are used out of the mapping, on entering the block.
    """
    unpools = _layers(module_or_modules, UNPOOLS)
    missing = [repr(name) for name, _ in unpools if name not in maxpool_indices]
    if missing:
        given = f"; those given are for {', '.join(map(repr, maxpool_indices))}" if maxpool_indices else ""
        warn(f"no indices were given for {', '.join(missing)}{given}")
    take = maxpool_indices.pop if consume_indices else maxpool_indices.__getitem__
    blocks = []
    for name, unpool in unpools:
        if name in maxpool_indices:
            give = partial(_give_indices, name, take(name), {})
            blocks.append((name, hl.edit(unpool, INPUTS, give, with_call=True, check=False, clone=False)))
    with entered(blocks):
        yield


def _layers(given: nn.Module | Mapping[str, nn.Module], kinds: tuple[type[nn.Module], ...]) -> list[tuple[str, Any]]:
    if not isinstance(given, nn.Module):
        return pairs(given)
    found = list(named_modules_of_type(given, kinds))
    if not found:
        warn(f"{type(given).__name__} has none of {', '.join(kind.__name__ for kind in kinds)}")
    return found


def _function(name: str, pool: nn.Module) -> str:
    """Return the name of the function that a layer calls: torch has another one for when the indices are wanted."""
    function = next((function for kind, function in FUNCTIONS.items() if isinstance(pool, kind)), "")
    if not function:
        raise hl.HooklineError(f"{name!r} is a {type(pool).__name__}, not a max-pooling layer")
    return f"{function}_with_indices" if pool.return_indices else function


def _indices(value: Any, call: Any) -> Any:
    """Return the indices that a pooling function gave, which a block around this one may have taken away."""
    return value[1] if isinstance(value, tuple) else call.notes["indices"]


def _without_indices(value: Any, call: Any) -> Any:
    """Return what the layer would have got by itself."""
    if not isinstance(value, tuple):
        return None
    output, call.notes["indices"] = value
    return output


def _one_or_all(cache: hl.Cache, site: hl.Site) -> Tensor | list[Tensor]:
    found = cache.calls(site)
    return found[0] if len(found) == 1 else found


def _give_indices(
    name: str, indices: Tensor | list[Tensor], chosen: dict[int, Tensor], inputs: dict[str, Any], call: Any
) -> dict[str, Any]:
    """Return the inputs of an unpooling layer with the indices among them."""
    given = inputs.get("indices")
    if isinstance(given, Tensor) and given is not call.notes.get("indices"):  # Else they are of a block around this.
        raise AssertionError(f"{name!r} was called with indices, but gets those of the block")
    if given is not None and not isinstance(given, Tensor):  # What comes after the input is the size here.
        inputs = {"output_size": given, **inputs}
    if not isinstance(indices, Tensor) and call.number not in chosen:  # A checkpoint calls with the same number again.
        chosen[call.number] = _next(name, indices, list(chosen.values()), inputs["input"])
    call.notes["indices"] = chosen.get(call.number, indices)
    return {**inputs, "indices": call.notes["indices"]}


def _next(name: str, indices: list[Tensor], used: list[Tensor], value: Tensor) -> Tensor:
    """Return the indices of the pooling that this unpooling undoes."""
    fitting = [one for one in indices if one.shape == value.shape]
    if not fitting:
        shapes = ", ".join(str(tuple(one.shape)) for one in indices)
        raise hl.EditError(f"no indices for {name!r} have the shape {tuple(value.shape)} of its input: {shapes}")
    return fitting[sum(one.shape == value.shape for one in used) % len(fitting)]
