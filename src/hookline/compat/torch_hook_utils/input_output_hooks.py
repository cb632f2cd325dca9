"""Collect and replace the inputs and outputs of layers in a `with` block."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.registrar import is_called, warn

Pair = tuple[Any, nn.Module]
Layers = Iterable[Pair] | Mapping[Any, nn.Module]

AS_PAIRS = "layers are (name, layer) pairs, as from model.named_modules() or named_modules_of_type(model, kind)"


def layers_of(given: Layers) -> tuple[list[Pair], list[Pair]]:
    """Return the given layers in two lists: those that can be hooked, and those never called (a ModuleList)."""
    if isinstance(given, (Mapping, nn.ModuleDict)):
        given = given.items()
    if isinstance(given, nn.Module):
        raise TypeError(f"{AS_PAIRS}, not a {type(given).__name__}")
    called: list[Pair] = []
    others: list[Pair] = []
    for name, layer in map(_pair, given):
        (called if is_called(layer) else others).append((name, layer))
    if not called:
        warn("no layer that can be called was given; a generator that was already iterated is empty: make a list of it")
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


Kind = type[nn.Module] | tuple[type[nn.Module], ...]
NOT_RUN = "not called in this block, or without an input, or on another thread or task than the block's"


def get_layer_inputs(named_layers: Layers) -> AbstractContextManager[dict[Any, Any]]:
    """Collect the first input of each layer, as a mapping from name to value.

    The first input is the first parameter that the forward declares.

    >>> layer = nn.Identity()
    >>> with get_layer_inputs([("first", layer)]) as inputs:
    ...     output = layer(input="anything")
    >>> inputs
    {'first': 'anything'}
    """
    return _collected(named_layers, ":input")


def get_layer_outputs(named_layers: Layers) -> AbstractContextManager[dict[Any, Any]]:
    """Collect the output of each layer, as a mapping from name to value."""
    return _collected(named_layers, "")


def replace_layer_inputs(network_layers: Layers, inputs_to_use: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Replace the first input of each layer with its value in `inputs_to_use`."""
    return _replaced(network_layers, ":input", inputs_to_use)


def replace_layer_outputs(network_layers: Layers, layer_outputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let each layer run, and replace its output with its value in `layer_outputs`."""
    return _replaced(network_layers, "", layer_outputs)


@contextmanager
def replace_layer_input_arguments(
    network_layers: Layers, *input_args_to_use: Any, **input_kwargs_to_use: Any
) -> Iterator[None]:
    """Bind these arguments to the parameters of each layer's forward, over the arguments of the call.

    >>> layer = nn.Bilinear(1, 1, 1)
    >>> with replace_layer_input_arguments([("layer", layer)], input2=layer.weight.new_ones(1)):
    ...     layer(layer.weight.new_ones(1)).shape
    torch.Size([1])
    """

    def bound(layer: nn.Module) -> hl.Hooks:
        given = inspect.signature(layer.forward).bind_partial(*input_args_to_use, **input_kwargs_to_use)
        return hl.edit(layer, ":inputs", partial(_bind, given), check=False, clone=False)

    with entered(([name], bound(layer)) for name, layer in layers_of(network_layers)[0]):
        yield


def named_modules_of_type(module: nn.Module, module_type: Kind) -> list[tuple[str, nn.Module]]:
    """Return the modules of these types as (name, module) pairs, including the given module itself.

    >>> named_modules_of_type(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Tanh)
    [('1', Tanh())]
    """
    return [(name, found) for name, found in module.named_modules() if isinstance(found, module_type)]


@contextmanager
def entered(blocks: Iterable[tuple[list[Any], hl.Hooks]], each: bool = True) -> Iterator[None]:
    """Enter the hooks of all blocks. At the end, warn about layers that never ran; if not `each`, only if none ran."""
    opened = []
    with ExitStack() as stack:
        for names, hooks in blocks:
            opened.append((names, hooks))
            stack.enter_context(hooks.when_missing("ignore"))
        yield
    missing = [names for names, hooks in opened if not any(hook.fired for hook in hooks)]
    unseen = [repr(name) for one in missing for name in one]
    if unseen and (each or len(missing) == len(opened)):
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        warn(f"nothing passed {', '.join(unseen[:3])}{more}: {NOT_RUN}")


class LayerValues(dict[Any, Any]):
    """The values of layers by name. Each is read as it passed, even if the model has overwritten it since."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[Any, Callable[[], list[Any]]] = {}  # Returns what was kept of a value, if it was.

    def keep(self, name: Any, value: Any, kept: Callable[[], list[Any]]) -> None:
        """Set the value of a layer, and where to read it as it is now."""
        super().__setitem__(name, value)
        self.kept[name] = kept

    def settled(self) -> dict[Any, Any]:
        """Return a plain dict of all values as they passed."""
        return {name: self[name] for name in self}

    def __getitem__(self, name: Any) -> Any:
        kept = self.kept[name]() if name in self.kept else []
        return kept[-1] if kept else super().__getitem__(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        self.kept.pop(name, None)
        super().__setitem__(name, value)

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load reads this type without code.

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> Any:
        return self.settled().items()

    def values(self) -> Any:
        return self.settled().values()


@contextmanager
def _collected(named_layers: Layers, port: str) -> Iterator[dict[Any, Any]]:
    """Collect the value of the call that ended last of each layer."""
    values = LayerValues()
    names: dict[nn.Module, list[Any]] = {}
    for name, layer in layers_of(named_layers)[0]:
        names.setdefault(layer, []).append(name)
    blocks = [_collecting(values, names, port)] if names else []
    if blocks and len(blocks[0][1]) < len(names):  # A wrapper and the layer in it are one place of one model.
        blocks[0][1].remove()
        blocks = [_collecting(values, {layer: some}, port) for layer, some in names.items()]
    try:
        with entered(blocks, each=False):
            yield values
    finally:
        for name, value in values.items():
            values[name] = value


def _collecting(values: LayerValues, names: dict[nn.Module, list[Any]], port: str) -> tuple[list[Any], hl.Hooks]:
    """Return all names of some layers, and the hooks that collect their values."""
    names_of, latest = [*names.values()], Counter[str]()

    def collect(value: Any, call: Any) -> Any:
        path, number = call.site.path, int(call.number)
        if number >= latest[path]:  # A cache has the call that began last.
            kept = partial(cache.calls, call.site)
        else:
            kept = partial(_copied_on_write(value).calls, "")
        latest[path] = max(number, latest[path])
        for name in names_of[int(path)]:
            values.keep(name, value, kept)
        return value

    hooks = hl.Hooks(nn.ModuleList(names), active=False)
    sites = [f"{number}{port}" for number in range(len(names))]
    cache = hooks.capture(sites, transform=collect, with_call=True, detach=False)
    return [name for some in names_of for name in some], hooks


def _copied_on_write(value: Any) -> hl.Cache:
    """Return a cache that holds a value as it is now. It is copied only if somebody writes into it."""
    identity = nn.Identity()
    with hl.capture(identity, "", detach=False) as cache:
        identity(value)
    return cache


@contextmanager
def _replaced(network_layers: Layers, port: str, values: Mapping[str, Any]) -> Iterator[None]:
    called, others = layers_of(network_layers)
    for name, layer in others:
        if name in values:
            kind = type(layer).__name__
            warn(f"the value for {name!r} is not used: a {kind} is never called where hookline could see it")
    for name, _ in called:
        if name not in values:
            raise KeyError(f"no value was given for the layer {name!r}; there are values for {list(values)}")
    with entered(([name], hl.patch(layer, {port: values[name]}, check=False)) for name, layer in called):
        yield


def _bind(bound: inspect.BoundArguments, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's inputs with other arguments bound over them, by hookline's names: `*args` is a tuple."""
    result = dict(inputs)
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            result.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            result[name] = (*value, *inputs.get(name, ())[len(value) :])
        else:
            result[name] = value
    return result
