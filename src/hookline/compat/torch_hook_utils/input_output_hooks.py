"""Collect and replace what goes into layers and comes out of them, for a block."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.torch_hook_utils.layer_values import LayerValues
from hookline.compat.warning import warn

Layers = Iterable[tuple[str, nn.Module]] | Mapping[str, nn.Module]
Kind = type[nn.Module] | tuple[type[nn.Module], ...]
INPUT, INPUTS, OUTPUT = hl.Site("", "input"), hl.Site("", "inputs"), hl.Site("")  # Of a layer hooked by itself.


def get_layer_inputs(named_layers: Layers, *, keep: str | int = "last") -> AbstractContextManager[LayerValues]:
    """Collect the first input of each layer, however it is passed, as a mapping from name to value.

    >>> layer = nn.Identity()
    >>> with get_layer_inputs([("first", layer)]) as inputs:
    ...     output = layer(input="anything")
    >>> inputs
    {'first': 'anything'}

    Args:
        keep: What `inputs.calls(name)` has of a layer that runs several times: "last", "all", or how many.
    """
    return _collected(named_layers, INPUT, keep)


def get_layer_outputs(named_layers: Layers, *, keep: str | int = "last") -> AbstractContextManager[LayerValues]:
    """Collect what each layer returns, as a mapping from name to value; `keep` is that of `get_layer_inputs`."""
    return _collected(named_layers, OUTPUT, keep)


def replace_layer_inputs(network_layers: Layers, inputs_to_use: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Give each layer its value of `inputs_to_use` in the place of its first input; other inputs stay."""
    return _replaced(network_layers, INPUT, inputs_to_use)


def replace_layer_outputs(network_layers: Layers, layer_outputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let each layer run, and put its value of `layer_outputs` in the place of what it returns."""
    return _replaced(network_layers, OUTPUT, layer_outputs)


@contextmanager
def replace_layer_input_arguments(
    network_layers: Layers, *input_args_to_use: Any, **input_kwargs_to_use: Any
) -> Iterator[None]:
    """Bind these arguments to the parameters of each layer's forward, in the place of those it is called with.

    >>> layer = nn.Bilinear(1, 1, 1)
    >>> with replace_layer_input_arguments([("layer", layer)], input2=layer.weight.new_ones(1)):
    ...     layer(layer.weight.new_ones(1)).shape
    torch.Size([1])
    """
    blocks = []
    for name, layer in pairs(network_layers):
        bound = inspect.signature(layer.forward).bind_partial(*input_args_to_use, **input_kwargs_to_use)
        blocks.append((name, hl.edit(layer, INPUTS, partial(_bind, bound), check=False, clone=False)))
    with entered(blocks):
        yield


class ModulesOfType:
    """The modules of some types and their names: looked for anew each time it is iterated."""

    def __init__(self, module: nn.Module, module_type: Kind) -> None:
        self.module = module
        self.module_type = module_type
        self._rest = iter(self)

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        kind = self.module_type
        return ((name, module) for name, module in self.module.named_modules() if isinstance(module, kind))

    def __next__(self) -> tuple[str, nn.Module]:
        return next(self._rest)

    def __repr__(self) -> str:
        return repr(list(self))


def named_modules_of_type(module: nn.Module, module_type: Kind) -> ModulesOfType:
    """Return the pairs of name and module that are of these types, the module itself included.

    >>> named_modules_of_type(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Tanh)
    [('1', Tanh())]
    """
    return ModulesOfType(module, module_type)


def pairs(named_layers: Layers) -> list[tuple[str, nn.Module]]:
    """Return the layers that can be called: a ModuleList never is."""
    by_name = isinstance(named_layers, (Mapping, nn.ModuleDict))
    given = list(named_layers.items() if by_name else named_layers)  # type: ignore[union-attr]
    for name, layer in given:
        if not isinstance(layer, nn.Module):
            raise AssertionError(f"{name!r} is a {type(layer).__name__}, not an nn.Module")
    found = [(name, layer) for name, layer in given if type(layer).forward is not nn.Module.forward]
    if not found:
        warn("no layer was given that can be called; a generator that was iterated before is empty: make a list of it")
    return found


@contextmanager
def entered(blocks: list[tuple[str, hl.Hooks]]) -> Iterator[None]:
    """Open these blocks, and warn at the end of layers that did not run."""
    with ExitStack() as stack:
        for _, hooks in blocks:
            stack.enter_context(hooks.when_missing("ignore"))
        yield
    missing = [repr(name) for name, hooks in blocks if not any(hook.fired for hook in hooks)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn(
            f"nothing passed {', '.join(missing[:3])}{more} in this block: "
            "not called, or without an input, or on another thread than the block's"
        )


@contextmanager
def _collected(named_layers: Layers, site: hl.Site, keep: str | int) -> Iterator[LayerValues]:
    values = LayerValues()
    blocks = []
    for name, layer in pairs(named_layers):
        hooks = hl.capture(layer, site, keep=keep, detach=False)
        values.watch(name, hooks, site, hl.Cache.__getitem__)
        blocks.append((name, hooks))
    with entered(blocks):
        yield values


@contextmanager
def _replaced(network_layers: Layers, site: hl.Site, values: Mapping[str, Any]) -> Iterator[None]:
    layers = pairs(network_layers)
    with entered([(name, hl.patch(layer, {site: values[name]}, check=False)) for name, layer in layers]):
        yield


def _bind(bound: inspect.BoundArguments, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's inputs with others bound over them, by the names that hookline gives: `*args` is a tuple."""
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
