"""The layers that are given to a block, each with its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from hookline.compat.called import is_called
from hookline.compat.warning import warn

Pair = tuple[Any, nn.Module]
Layers = Iterable[Pair] | Mapping[Any, nn.Module]

AS_PAIRS = "layers are (name, layer) pairs, as of model.named_modules() or named_modules_of_type(model, kind)"


def layers_of(given: Layers) -> tuple[list[Pair], list[Pair]]:
    """Return the layers that were given: those that can be hooked, and those that are never called, as a ModuleList."""
    if isinstance(given, (Mapping, nn.ModuleDict)):
        given = given.items()
    if isinstance(given, nn.Module):
        raise TypeError(f"{AS_PAIRS}, not a {type(given).__name__}")
    called: list[Pair] = []
    others: list[Pair] = []
    for name, layer in map(_pair, given):
        (called if is_called(layer) else others).append((name, layer))
    if not called:
        warn("no layer was given that can be called; a generator that was iterated before is empty: make a list of it")
    return called, others


def _pair(one: Any) -> Pair:
    if isinstance(one, nn.Module):
        raise TypeError(f"{AS_PAIRS}, not {type(one).__name__} alone")
    if not isinstance(one, (tuple, list)) or len(one) != 2:
        raise ValueError(f"{AS_PAIRS}, not {one!r}")
    name, layer = one
    if not isinstance(layer, nn.Module):
        raise AssertionError(f"{name!r} is a {type(layer).__name__}, not an nn.Module")
    return name, layer


class NamedLayers(nn.Module):
    """Holds layers under the names they were given: what hookline says of a hook on it is in these names.

    `layers.at(":input")` is where to hook. It is never called itself.
    """

    def __init__(self, layers: Iterable[Pair]) -> None:
        super().__init__()
        self.names: dict[str, dict[Any, None]] = {}  # Of each layer that was found, by the path of its hook.
        self._found: dict[int, dict[Any, None]] = {}
        self._titles: dict[str, Any] = {}
        for name, layer in layers:
            path = str(name)
            while path in self._titles:
                path += "'"
            self._titles[path] = name
            self._modules[path] = layer  # add_module() refuses names with dots.

    def at(self, rest: str, only: Collection[int] | None = None) -> Any:
        """Return a place for hookline: the outputs of these layers, by their ids, or of all, or what `rest` says."""
        return (partial(self._has, only), rest) if rest else partial(self._has, only)

    def _has(self, only: Collection[int] | None, path: str, module: nn.Module) -> bool:
        """Whether this is the layer of that name, or the model inside it where it is a wrapper, as of torch.compile."""
        layer = self._modules.get(path)
        if layer is None or (only is not None and id(layer) not in only):
            return False
        if layer is not module and all(one is not module for one in layer.modules()):
            return False
        if id(module) not in self._found:
            self._found[id(module)] = self.names[path] = {}
        self._found[id(module)][self._titles[path]] = None
        return True
