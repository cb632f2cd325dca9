"""The registrar under four of the libraries: `register(module, kind, function)` puts a function on a module.

| kind | the function is called as | its result |
|---|---|---|
| "forward_pre" | `function(inputs, call)` with the positional inputs | replaces the positional inputs |
| "forward" | `function(output, call)` | replaces the output |
| "capture" | `function(output, call)` | is kept in `handle.cache` |
| "backward" | `function(BackwardCall)`, once for each backward through a call | is ignored |
| "backward_values" | the same, with the inputs and outputs of the call | is ignored |

A result of None changes nothing. The handle is a `hl.Hooks`: it switches the function on and off, and removes it.
Auto_HookPoint has points instead, from `hookline.points`.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._torch import frame_at, outside, when_backward_ends

WHOLE = hl.Site("")
Function = Callable[..., Any]


def register(
    module: nn.Module | hl.Hooks,
    kind: str,
    function: Function,
    active: bool = True,
    site: hl.Site = WHOLE,
    missing: str = "ignore",
    **options: Any,
) -> hl.Hooks:
    """Put a function on a module, and return the handle. A module that is never called gives a warning.

    Args:
        module: The module, or existing hooks on a model to add to.
        site: The module or method in the model.
        missing: What to do if the site does not run: see `Hooks.when_missing`.
        options: Options of `Hooks.capture`.
    """
    hooks = module if isinstance(module, hl.Hooks) else hl.Hooks(module, active)
    if site == WHOLE and not is_called(hooks.model):
        kind_of = type(hooks.model).__name__
        warn(f"this function will never be called: hookline can't see calls of a {kind_of}; use the modules inside")
        return hooks
    name = f"compat {len(hooks)}"  # A unique name, so that one function can be added several times.
    if kind == "forward":
        added = hooks.edit(site, function, name, True, check=False, clone=False)
    elif kind == "forward_pre":
        before = _before(function, site.method or "forward")
        added = hooks.edit(site._replace(port="inputs"), before, name, True, check=False, clone=False)
    elif kind == "capture":
        hooks.capture(site, transform=function, with_call=True, name=name, **options)
        added = hooks[name]
    else:
        added = _Backward(function, keeps_values=kind == "backward_values").add_to(hooks, site, name)
    return added.when_missing(missing)


def is_called(module: nn.Module) -> bool:
    """Return True if a module has a forward that can be hooked.

    Containers have no forward, and torch.jit runs outside Python.

    >>> is_called(nn.ReLU()), is_called(nn.ModuleList())
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)  # torch.compile sets it.


def warn(message: str) -> None:
    """Warn at the nearest line outside hookline, torch and contextlib."""
    _, steps = outside(("hookline", "torch", "contextlib"), frame_at(1))
    warnings.warn(message, hl.HooklineWarning, stacklevel=2 + steps)


def weakly(method: Function) -> Function:
    """Return a function that calls a method without keeping its object alive. It returns None once the object is gone.

    The module holds the hook's function, which may be a method of the object that owns the hooks.
    """
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        here = found()
        return None if here is None else here(*args)

    return call


def _before(function: Function, method: str) -> Function:
    def before(_inputs: Any, call: Any) -> dict[str, Any] | None:
        new = function(call.args, call)
        if new is None or new is call.args:
            return None
        signature = inspect.signature(getattr(call.module, method))
        try:
            signature.bind_partial(*new, **call.kwargs)
        except TypeError as error:
            raise TypeError(f"{type(call.module).__name__}.{method}() got {error}") from None
        return {**signature.bind_partial(*new).arguments, **call.kwargs}

    return before


class BackwardCall(NamedTuple):
    """One backward pass through one call: gradients in the structure of the values, with None where none arrived."""

    module: nn.Module
    grad_inputs: tuple[Any, ...]
    grad_outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


Place = tuple[str, tuple[Any, ...]]  # The port of a gradient, and the subscripts of its tensor there.


class _Notes:
    """The state of one call: its values with places in place of tensors, and the gradients that arrived so far."""

    def __init__(self) -> None:
        self.inputs: tuple[Any, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.values: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
        self.awaited: set[Place] = set()
        self.arrived: dict[Place, Tensor] = {}


class _Backward:
    """Collects the gradients of one call, which hookline delivers one by one, and calls the function with all."""

    def __init__(self, function: Function, keeps_values: bool) -> None:
        self.function = function
        self.keeps_values = keeps_values

    def add_to(self, hooks: hl.Hooks, site: hl.Site, name: str) -> hl.Hooks:
        """Add the hooks that follow a call and its gradients."""
        options: dict[str, Any] = {"name": name, "with_call": True}
        clone = None if self.keeps_values else False  # None: the values are copied before they are overwritten.
        hooks.edit(site._replace(port="inputs"), self.take_inputs, clone=clone, check=False, **options)
        hooks.edit(site._replace(port="output"), self.take_outputs, clone=clone, **options)
        for port in ("grad_inputs", "grad_output"):
            hooks.edit(site._replace(port=port), self.take_gradient, **options)
        return hooks[name]

    def take_inputs(self, bound: dict[str, Any], call: Any) -> dict[str, Any]:
        """Record the inputs. A tensor that is passed twice becomes two, so that each has its own gradient."""
        seen: set[int] = set()
        bound = {name: _apart(value, seen) for name, value in bound.items()}
        names = _names(call, bound)
        notes = call.notes[self] = _Notes()
        notes.inputs = tuple(_places("grad_inputs", path, _at(bound, path), {}) for path in names)
        if self.keeps_values:
            notes.values = tuple(_detached(_at(bound, path)) for path in names), ()
        for name, value in bound.items():
            notes.awaited |= _awaited("grad_inputs", (name,), value)
        return bound

    def take_outputs(self, output: Any, call: Any) -> None:
        """Record the outputs."""
        notes: _Notes = call.notes[self]
        parts = [((i,), part) for i, part in enumerate(output)] if isinstance(output, tuple) else [((), output)]
        first: dict[int, Place] = {}  # hookline reports the gradient of a tensor at the first of its places.
        notes.outputs = tuple(_places("grad_output", path, part, first) for path, part in parts)
        if self.keeps_values:
            notes.values = notes.values[0], tuple(_detached(part) for _, part in parts)
        if not notes.awaited:
            notes.awaited = {place for path, part in parts for place in _awaited("grad_output", path, part)}

    def take_gradient(self, gradient: Tensor, call: Any) -> None:
        """Store one gradient. The last one calls the function, or the end of the backward, if some never arrive."""
        notes: _Notes = call.notes[self]
        place = call.site.port, call.site.subscripts
        if place in notes.arrived:  # The stored gradients are from an earlier backward that failed halfway.
            notes.arrived = {}
        if not notes.arrived:
            module = call.module
            when_backward_ends(lambda: self._call(notes, module))
        notes.arrived[place] = gradient
        if notes.awaited <= set(notes.arrived):
            self._call(notes, call.module)

    def _call(self, notes: _Notes, module: nn.Module) -> None:
        arrived, notes.arrived = notes.arrived, {}
        if arrived:
            grad_inputs, grad_outputs = (
                tuple(_fill(part, arrived) for part in side) for side in (notes.inputs, notes.outputs)
            )
            self.function(BackwardCall(module, grad_inputs, grad_outputs, *notes.values))


class _Gradient(NamedTuple):
    """Stands for a tensor in the structure of a value."""

    place: Place


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (tuple, list)) else []


def _places(port: str, path: tuple[Any, ...], value: Any, first: dict[int, Place]) -> Any:
    if isinstance(value, Tensor):
        return _Gradient(first.setdefault(id(value), (port, path)))
    parts = {key: _places(port, (*path, key), part, first) for key, part in _children(value)}
    return parts, isinstance(value, Mapping)


def _awaited(port: str, path: tuple[Any, ...], value: Any) -> set[Place]:
    if isinstance(value, Tensor):
        return {(port, path)} if value.requires_grad and torch.is_grad_enabled() else set()
    return {place for key, part in _children(value) for place in _awaited(port, (*path, key), part)}


def _fill(template: Any, arrived: Mapping[Place, Tensor]) -> Any:
    """Return copies of the gradients in the structure of the value, and None for a part without any."""
    if isinstance(template, _Gradient):
        gradient = arrived.get(template.place)
        return None if gradient is None else gradient.clone()
    parts, is_mapping = template
    filled = {key: _fill(part, arrived) for key, part in parts.items()}
    if all(part is None for part in filled.values()):
        return None
    return filled if is_mapping else tuple(filled.values())


def _apart(value: Any, seen: set[int]) -> Any:
    """Return a value in which no tensor is one of those seen before."""
    if isinstance(value, Tensor):
        if id(value) in seen and value.requires_grad:
            return torch.ops.aten.alias(value)
        seen.add(id(value))
    elif type(value) in (tuple, list):
        return type(value)(_apart(part, seen) for part in value)
    return value


def _names(call: Any, bound: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the path in `bound` of each positional input. Those of `*args` are in one tuple."""
    paths: list[tuple[Any, ...]] = []
    parameters = inspect.signature(getattr(call.module, call.site.method or "forward")).parameters
    for name, value in bound.items():
        is_rest = name in parameters and parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        is_rest = is_rest and isinstance(value, tuple)
        paths += [(name, i) for i in range(len(value))] if is_rest else [(name,)]
    return paths[: len(call.args)]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _detached(value: Any) -> Any:
    """Return a value without its autograd graph: the graph holds the notes of the call, so they must not hold it."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(part) for key, part in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value
