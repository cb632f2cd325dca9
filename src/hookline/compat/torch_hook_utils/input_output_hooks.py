"""Collect and replace the inputs and outputs of layers in a `with` block."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial, wraps
from typing import Any

from torch import nn

import hookline as hl
from hookline.compat.registrar import is_called, warn
from hookline.compat.shared import cache_of, may_call_itself

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


class NamedLayers(nn.Module):
    """A container for the given layers, so that hookline's messages use the user's names for them.

    `layers.at(":input")` is the place to hook. The container itself is never called.
    """

    def __init__(self, layers: Iterable[Pair]) -> None:
        super().__init__()
        self.names: dict[
            str, dict[Any, None]
        ] = {}  # The user's names for each layer that was found, by the path of its hook.
        self._found: dict[int, dict[Any, None]] = {}
        self._titles: dict[str, Any] = {}
        for name, layer in layers:
            path = str(name)
            while path in self._titles:
                path += "'"
            self._titles[path] = name
            self._modules[path] = layer  # add_module() refuses names with dots.

    def at(self, rest: str, only: Collection[int] | None = None) -> Any:
        """Return a place for hookline: `rest` (or the output) of the layers with the ids `only`, or of all layers."""
        return (partial(self._has, only), rest) if rest else partial(self._has, only)

    def _has(self, only: Collection[int] | None, path: str, module: nn.Module) -> bool:
        """Return True if `module` is the layer at `path`, or the model inside it if the layer is a wrapper."""
        layer = self._modules.get(path)
        if layer is None or (only is not None and id(layer) not in only):
            return False
        if layer is not module and all(one is not module for one in layer.modules()):
            return False
        if id(module) not in self._found:
            self._found[id(module)] = self.names[path] = {}
        self._found[id(module)][self._titles[path]] = None
        return True


NONE = object()  # Stands for None: if a transform returns None, hookline stores nothing.


def _reading(method: Any, of_one: bool = False) -> Any:
    """Wrap a method of dict so that it first stores the captured values: for the one name it reads, or for all."""

    @wraps(method)
    def read(self: LayerValues, *args: Any) -> Any:
        self.refresh(*args[:1] if of_one else ())
        if args and isinstance(args[0], LayerValues):
            args[0].refresh()
        return method(self, *args)

    return read


def _changing(method: Any) -> Any:
    """Wrap a method of dict so that it first stores and fixes the captured values: only later calls replace them."""

    @wraps(method)
    def change(self: LayerValues, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        self.forget()
        return method(self, *args, **kwargs)

    return change


class Collected(dict[Any, Any]):
    """A dict that says why an expected name has no value. It is saved and loaded as a dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._why_not: dict[Any, str] = {}

    def expect(self, name: Any, why_not: str) -> None:
        """Expect a value with this name; `why_not` is the reason to give until it arrives."""
        self._why_not[name] = why_not

    def __missing__(self, name: Any) -> Any:
        if name not in self._why_not:
            raise KeyError(name)
        raise hl.NotCaptured(f"{name!r} has no value: {self._why_not[name]}")

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load() allows an OrderedDict by default.


class LayerValues(Collected):
    """The values of each layer, in the order in which the layers first ran. Reading the dict updates it.

    A value is the layer's own tensor, or a copy from before it was overwritten in place. Once the user changes the
    dict, the values in it are fixed, and only later calls replace them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache = hl.Cache()
        self._sites: dict[str, hl.Site] = {}
        self._names: Mapping[str, Iterable[Any]] = {}
        self._latest: dict[hl.Site, int] = {}  # The highest number among the calls that have ended.
        self._outer: dict[hl.Site, hl.Cache] = {}  # Outputs of calls that ended after another call inside them.
        self._site_of: dict[Any, hl.Site] = {}  # If several layers have one name, the site of the one that ran last.

    def follow(self, hooks: hl.Hooks, names: Mapping[str, Iterable[Any]]) -> None:
        """Show the values that these hooks capture, under the user's names for each path."""
        self._cache, self._names = hooks.cache, names
        self._sites = {str(hook.site): hook.site for hook in hooks if hook.site.path in names}

    def note(self, value: Any, call: Any) -> Any:
        """Record which call has ended. This is the transform of a capture, whose latest call is the last to begin."""
        site, number = call.site, int(call.number)
        if number < self._latest.get(site, 0):
            self._outer[site] = cache_of(value)
        else:
            self._latest[site] = number
            self._outer.pop(site, None)
        for name in self._names.get(site.path, ()):
            self._site_of[name] = site
        return NONE if value is None else value

    def calls(self, name: Any) -> list[Any]:
        """Return all stored values of a layer, oldest call first."""
        sites = [site for site in self._sites.values() if name in self._names[site.path]]
        return [None if value is NONE else value for site in sites for value in self._cache.calls(site)]

    def refresh(self, *names: Any) -> None:
        """Store the captured values: of these names if the dict has all of them, otherwise of all names in order."""
        if names and all(map(super().__contains__, names)):
            sites = [self._site_of[name] for name in names if name in self._site_of]
        else:
            sites = [self._sites[text] for text in self._cache if text in self._sites]
        for site in sites:
            found = self._outer[site].calls("") if site in self._outer else self._cache.calls(site)
            for name in self._names[site.path] if found else ():
                if self._site_of.setdefault(name, site) == site:
                    self._why_not.pop(name, None)
                    super().__setitem__(name, None if found[-1] is NONE else found[-1])

    def forget(self) -> None:
        """Drop the captured values that are not stored in the dict."""
        self._cache.clear()
        self._outer.clear()

    __getitem__, get = _reading(dict.__getitem__, of_one=True), _reading(dict.get, of_one=True)
    __contains__ = _reading(dict.__contains__, of_one=True)
    __len__, __iter__, __reversed__ = map(_reading, (dict.__len__, dict.__iter__, dict.__reversed__))
    __eq__, __ne__, __or__, __ror__ = map(_reading, (dict.__eq__, dict.__ne__, dict.__or__, dict.__ror__))
    keys, values, items, copy = map(_reading, (dict.keys, dict.values, dict.items, dict.copy))
    __repr__ = _reading(dict.__repr__)
    __setitem__, __delitem__, __ior__ = map(_changing, (dict.__setitem__, dict.__delitem__, dict.__ior__))
    pop, popitem, setdefault = map(_changing, (dict.pop, dict.popitem, dict.setdefault))
    update, clear = map(_changing, (dict.update, dict.clear))
    __hash__ = None  # type: ignore[assignment]


Kind = type[nn.Module] | tuple[type[nn.Module], ...]
NOT_RUN = "not called in this block, or without an input, or on another thread or task than the block's"


def get_layer_inputs(named_layers: Layers, *, keep: str | int = "last") -> AbstractContextManager[LayerValues]:
    """Collect the first input of each layer, as a mapping from name to value.

    The first input is the first parameter that the forward declares. If a call omits it, it is the first one passed.

    >>> layer = nn.Identity()
    >>> with get_layer_inputs([("first", layer)]) as inputs:
    ...     output = layer(input="anything")
    >>> inputs
    {'first': 'anything'}

    Args:
        keep: Which calls `inputs.calls(name)` returns for a layer that runs several times: "last", "all" or a number.
    """
    return _collected(named_layers, ":input", keep)


def get_layer_outputs(named_layers: Layers, *, keep: str | int = "last") -> AbstractContextManager[LayerValues]:
    """Collect the output of each layer, as a mapping from name to value. For `keep`, see `get_layer_inputs`."""
    return _collected(named_layers, "", keep)


def replace_layer_inputs(network_layers: Layers, inputs_to_use: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Replace the first input of each layer with its value in `inputs_to_use`, even if the call omits that input."""
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


class ModulesOfType:
    """The modules of some types with their names. Each iteration searches again, until next() is called."""

    def __init__(self, module: nn.Module, module_type: Kind) -> None:
        self.module = module
        self.module_type = module_type
        self._rest: Iterator[tuple[str, nn.Module]] | None = None

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self._found()) if self._rest is None else self._rest

    def __next__(self) -> tuple[str, nn.Module]:
        self._rest = iter(self)
        return next(self._rest)

    def __repr__(self) -> str:
        return repr(self._found())

    def _found(self) -> list[tuple[str, nn.Module]]:
        named = self.module.named_modules()
        return [(name, module) for name, module in named if isinstance(module, self.module_type)]


def named_modules_of_type(module: nn.Module, module_type: Kind) -> ModulesOfType:
    """Return the modules of these types as (name, module) pairs, including the given module itself.

    >>> named_modules_of_type(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Tanh)
    [('1', Tanh())]
    """
    return ModulesOfType(module, module_type)


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


@contextmanager
def _collected(named_layers: Layers, port: str, keep: str | int) -> Iterator[LayerValues]:
    values = LayerValues()
    called, others = layers_of(named_layers)
    for name, layer in others:
        values.expect(name, f"a {type(layer).__name__} is never called where hookline could see it")
    for name, _ in called:
        values.expect(name, NOT_RUN)
    blocks = [([name for name, _ in called], _captured(called, port, values, keep))] if called else []
    try:
        with entered(blocks):
            yield values
    finally:
        values.refresh()


def _captured(layers: list[Pair], port: str, values: LayerValues, keep: str | int) -> hl.Hooks:
    """Capture at layers. Add a transform only where a plain capture might show the value of the wrong call."""
    count = Counter(name for name, _ in layers)
    note, needs_it = (partial(_note_first, values), _may_skip) if port else (values.note, may_call_itself)
    noted = {id(layer) for name, layer in layers if count[name] > 1 or needs_it(layer)}
    plain = {id(layer) for _, layer in layers} - noted
    named = NamedLayers(layers)
    noting: dict[str, Any] = {"transform": note, "with_call": True}
    hooks = hl.capture(named, named.at(port, plain or noted), keep=keep, detach=False, **({} if plain else noting))
    if plain and noted:
        hooks.capture(named.at(port, noted), keep=keep, detach=False, **noting)
    values.follow(hooks, named.names)
    return hooks


def _note_first(values: LayerValues, value: Any, call: Any) -> Any:
    """Record the first input. Inputs passed by keyword are taken in the order of the forward's parameters."""
    names = [] if call.args else [one.name for one in _parameters(call.module)]
    return values.note(next((call.kwargs[name] for name in names if name in call.kwargs), value), call)


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
    with entered(([name], _patched(name, layer, port, values[name])) for name, layer in called):
        yield


def _patched(name: Any, layer: nn.Module, port: str, value: Any) -> hl.Hooks:
    if port == "" or not _may_skip(layer):
        return hl.patch(layer, {port: value}, check=False)
    hooks = hl.edit(layer, ":inputs", partial(_with_first, name), with_call=True, check=False, clone=False)
    hooks.patch({port: value}, check=False)
    return hooks


def _with_first(name: Any, inputs: dict[str, Any], call: Any) -> dict[str, Any] | None:
    """Return a layer's inputs starting with the first one that its forward declares, even if the call omits it."""
    if call.args:
        return None
    first = next(iter(_parameters(call.module)), None)
    if first is None or (first.kind is first.VAR_KEYWORD and not inputs):
        raise hl.EditError(f"{name!r} takes no input that could be replaced")
    if inputs and first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD):
        return None
    return {first.name: (None,) if first.kind is first.VAR_POSITIONAL else None, **inputs}


def _may_skip(layer: nn.Module) -> bool:
    """Return True if a call may omit the first parameter of a layer's forward."""
    first = next(iter(_parameters(layer)), None)
    return first is None or first.kind > first.POSITIONAL_OR_KEYWORD or first.default is not first.empty


def _parameters(layer: nn.Module) -> Sequence[inspect.Parameter]:
    return _declared(layer.forward) if "forward" in vars(layer) else _declared_by(type(layer).forward)


@lru_cache(maxsize=1024)
def _declared_by(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    return _declared(function)[1:]  # Without self.


def _declared(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # A builtin was set as the forward of the instance.
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


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
