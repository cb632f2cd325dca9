"""Carry the indices of max-pooling layers to the unpooling layers of a decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

import hookline as hl
from hookline._torch import frames_of, variables
from hookline.compat.registrar import warn
from hookline.compat.torch_hook_utils.input_output_hooks import (
    entered,
    layers_of,
    named_modules_of_type,
)

# The function that each layer calls. It also returns the indices if called with return_indices=True.
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
CALL = nn.Module.__call__.__code__
UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)


@contextmanager
def save_maxpool_indices(module_or_modules: nn.Module | Mapping[str, nn.Module]) -> Iterator[dict[Any, Any]]:
    """Collect the indices of max-pooling layers by name. The outputs of the layers do not change.

    The indices are from the latest forward of the given module, or of a part of it that is called directly. A layer
    that runs several times in that forward has a list of tensors, oldest first. For a mapping of layers, each call of
    a layer counts as a forward.
    """
    pools = _layers(module_or_modules, tuple(FUNCTIONS))
    whole = module_or_modules if isinstance(module_or_modules, nn.Module) else nn.ModuleList(pool for _, pool in pools)
    latest = LatestIndices(whole, pools)
    blocks = []
    for name, pool in pools:
        function = _function(name, pool)
        hooks = hl.capture(pool, function, transform=partial(latest.add, name), with_call=True)
        if not pool.return_indices:
            hooks.patch({f'{function}:inputs["return_indices"]': True})
            hooks.edit(function, _without_indices, with_call=True, check=False, clone=False)
        blocks.append(([name], hooks))
    with entered(blocks, each=False):
        yield latest.indices


@contextmanager
def use_indices_in_maxunpool(
    module_or_modules: nn.Module | Mapping[str, nn.Module],
    maxpool_indices: MutableMapping[str, Any],
    consume_indices: bool = False,
) -> Iterator[None]:
    """Pass each max-unpooling layer the indices under its name, so that the model calls it with its input alone.

    If there is a list of indices, a call gets those with the shape of its input. If several fit, the last pooled is
    unpooled first. After the first pooled, and when the given module is called again, this starts over at the last.

    Args:
        consume_indices: Remove the used indices from the mapping when the block is entered.
    """
    unpools = _layers(module_or_modules, UNPOOLS)
    missing = [repr(name) for name, _ in unpools if name not in maxpool_indices]
    if missing:
        given = f"; there are indices for {', '.join(map(repr, maxpool_indices))}" if maxpool_indices else ""
        warn(f"no indices were given for {', '.join(missing)}{given}")
    take = maxpool_indices.pop if consume_indices else maxpool_indices.__getitem__
    blocks = []
    for name, unpool in unpools:
        if name in maxpool_indices:
            give = GivenIndices(module_or_modules, name, take(name))
            hooks = hl.edit(unpool, ":inputs", give, with_call=True, check=False, clone=False)
            blocks.append(([name], hooks))
    with entered(blocks):
        yield


class LatestIndices:
    """The indices of each pool from the latest forward in which it ran."""

    def __init__(self, whole: nn.Module, pools: list[tuple[Any, nn.Module]]) -> None:
        self.indices: dict[Any, Any] = {}
        self._modules = {id(module) for module in whole.modules()}
        self._pools = pools
        self._found: dict[Any, list[Tensor]] = {}
        self._forward: object = None

    def add(self, name: Any, value: Any, call: Any) -> None:
        """Add the indices of a call, and drop those that the same pools have from an earlier forward."""
        # If the value has no indices, a block inside this one has removed them and stored them in the notes.
        indices = value[1] if isinstance(value, tuple) else call.notes["indices"]
        running = outermost_call(self._modules)
        if running is None or running.mark is not self._forward:
            self._forward = running and running.mark
            parts = set(running.module.modules()) if running else set()
            for one in [name, *(one for one, pool in self._pools if pool in parts)]:
                self._found.pop(one, None)
                self.indices.pop(one, None)
        found = self._found.setdefault(name, [])
        found.append(indices)
        self.indices[name] = indices if len(found) == 1 else found


class GivenIndices:
    """The indices for one unpooling layer, or a list of them, and a count of those used in the current forward."""

    def __init__(self, whole: object, name: Any, indices: Tensor | list[Tensor]) -> None:
        self._whole = {id(whole)}
        self._name = name
        self._indices = indices
        self._chosen: dict[int, Tensor] = {}
        self._used: Counter[tuple[int, ...]] = Counter()
        self._forward: object = None

    def __call__(self, inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        """Return the inputs of the layer with the indices added."""
        given = inputs.get("indices")
        if isinstance(given, Tensor) and given is not call.notes.get(
            "indices"
        ):  # Otherwise a block around this one added them.
            raise AssertionError(f"{self._name!r} was called with indices, but gets its indices from the block")
        if not isinstance(given, Tensor):  # The model passes no indices, so the second argument is the output size.
            inputs = {"output_size": given, **inputs}
        call.notes["indices"] = indices = self._choose(inputs["input"], call.number)
        return {**inputs, "indices": indices}

    def _choose(self, value: Tensor, number: int) -> Tensor:
        """Return the indices of the pooling that this call undoes."""
        if isinstance(self._indices, Tensor):
            return self._indices
        if number in self._chosen:  # A checkpoint repeats the call with the same number.
            return self._chosen[number]
        running = outermost_call(self._whole)
        if running and running.mark is not self._forward:
            self._forward = running.mark
            self._used.clear()
        fitting = [one for one in self._indices if one.shape == value.shape]
        if not fitting:
            shapes = ", ".join(str(tuple(one.shape)) for one in self._indices)
            raise hl.EditError(
                f"no indices for {self._name!r} have the shape {tuple(value.shape)} of its input: {shapes}"
            )
        self._chosen[number] = fitting[-1 - self._used[value.shape] % len(fitting)]
        self._used[value.shape] += 1
        return self._chosen[number]


class Running(NamedTuple):
    """A running call of a module, and an object that is unique to this call."""

    module: nn.Module
    mark: object


def outermost_call(modules: set[int]) -> Running | None:
    """Return the outermost running call of any of these modules, given by their ids."""
    found = None
    for held in map(variables, frames_of(CALL)):
        if id(held["self"]) in modules:
            found = Running(held["self"], held["kwargs"])  # Python creates a new dict for each call.
    return found


def _layers(given: nn.Module | Mapping[str, nn.Module], kinds: tuple[type[nn.Module], ...]) -> list[tuple[Any, Any]]:
    if not isinstance(given, nn.Module):
        return layers_of(given)[0]
    found = list(named_modules_of_type(given, kinds))
    if not found:
        warn(f"{type(given).__name__} has none of {', '.join(kind.__name__ for kind in kinds)}")
    return found


def _function(name: str, pool: nn.Module) -> str:
    """Return the site of the function that a layer calls. torch calls a different function to return indices."""
    function = next((function for kind, function in FUNCTIONS.items() if isinstance(pool, kind)), "")
    if not function:
        raise hl.HooklineError(f"{name!r} is a {type(pool).__name__}, not a max-pooling layer")
    return f"/{function}_with_indices" if pool.return_indices else f"/{function}"


def _without_indices(value: Any, call: Any) -> Any:
    """Return the result that the layer would have got without `return_indices`."""
    if not isinstance(value, tuple):
        return None
    output, call.notes["indices"] = value
    return output
