"""The backward pass through one call of a module as one event, as module backward hooks have it.

hookline gives each gradient when it comes. A module backward hook wants those of all inputs and outputs at once: what
has come of one call is kept in its notes, and the function is called with the last. tacklebox and nice_hooks use this.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.compat.gradients import (
    Parts,
    Path,
    Place,
    awaited,
    changed_of,
    detached,
    fill,
    is_followed,
    outputs_of,
    templates_of,
)


@dataclass
class Pass:
    """One backward pass through one call of a module; by position, keyword inputs after the others."""

    module: nn.Module
    grad_inputs: tuple[Any, ...]
    grad_outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    positional: int


Function = Callable[[Pass], Sequence[Any] | None]
PreFunction = Callable[[nn.Module, tuple[Any, ...]], Sequence[Any] | None]


def add_backward(
    hooks: hl.Hooks,
    site: hl.Site | str,
    function: Function,
    name: str,
    keep_values: bool = False,
    changes: bool = False,
) -> hl.Hooks:
    """Call `function` with each backward pass through a module or method.

    Return the hooks that do it, which all have that name and are to be switched together.

    Args:
        keep_values: Whether a pass has the inputs and outputs themselves, detached, as they were in the forward.
        changes: Whether what the function returns replaces `grad_inputs`. A module that writes into one of several
            inputs then raises, as it does under torch's own hooks.
    """
    joined = _Joined(function, keep_values, changes)
    site = hl.Site(site) if isinstance(site, str) else site
    clone = None if keep_values else False
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(site._replace(port="inputs"), joined.take_inputs, clone=clone, check=False, **options)
    hooks.edit(site, joined.take_outputs, clone=clone, **options)
    hooks.edit(site._replace(port="grad_inputs"), joined.take_gradient, **options)
    hooks.edit(site._replace(port="grad_output"), joined.take_gradient, **options)
    return hooks[name].when_missing("ignore")


def add_backward_pre(hooks: hl.Hooks, site: hl.Site | str, function: PreFunction, name: str) -> hl.Hooks:
    """Call `function(module, grad_outputs)` when the gradients of a call come; what it returns replaces them."""
    before = _Before(function)
    site = hl.Site(site) if isinstance(site, str) else site
    hooks.edit(site, before.take_outputs, name=name, with_call=True, clone=False, check=False)
    hooks.edit(site._replace(port="grad_output"), before.take_gradient, name=name, with_call=True)
    return hooks[name].when_missing("ignore")


@dataclass
class _Notes:
    """What is known of one call: its values with a place for each tensor, and the gradients that have come so far."""

    positional: int
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    waited_for: set[Place] = field(default_factory=set)  # Of inputs; where none is, of outputs.
    came: dict[Place, Tensor] = field(default_factory=dict)
    is_gated: bool = False


class _Gate(torch.autograd.Function):
    """An identity for several tensors, whose gradients pass it together. They must not be written in place then."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.receive(gradients)


def _gate(receive: Callable[..., Any], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return _Gate.apply(receive, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Joined:
    """The functions that hookline calls, for one backward hook."""

    def __init__(self, function: Function, keep_values: bool, changes: bool) -> None:
        self.function = function
        self.keep_values = keep_values
        self.changes = changes

    def take_inputs(self, bound: Mapping[str, Any], call: Any) -> dict[str, Any] | None:
        """Note what a call is given; several tensors of which gradients will come pass a gate."""
        rest = _rest_of(getattr(call.module, call.site.method or "forward"))
        parts: Parts = []
        for name, value in bound.items():
            is_rest = name == rest and name not in call.kwargs
            parts += [((name, i), part) for i, part in enumerate(value)] if is_rest else [((name,), value)]
        notes = call.notes[self] = _Notes(len(call.args), templates_of("grad_inputs", parts))
        notes.waited_for = awaited("grad_inputs", parts)
        if self.keep_values:
            notes.values = tuple(detached(value) for _, value in parts), ()
        gated = [path for path, value in parts if isinstance(value, Tensor) and is_followed(value)]
        are_distinct = len({id(dict(parts)[path]) for path in gated}) == len(gated)
        if len(gated) < 2 or (are_distinct and not self.changes):
            return None
        notes.is_gated = True
        receive = partial(self._receive, notes, weakref.ref(call.module), gated)  # The graph is to hold no module.
        passed = dict(zip(gated, _gate(receive, [dict(parts)[path] for path in gated]), strict=True))
        new = dict(bound)
        for path, tensor in passed.items():
            name, *index = path
            new[name] = tuple(passed.get((name, i), one) for i, one in enumerate(bound[name])) if index else tensor
        return new

    def take_outputs(self, output: Any, call: Any) -> None:
        """Note what a call gives."""
        notes: _Notes = call.notes[self]
        parts = outputs_of(output)
        notes.outputs = templates_of("grad_output", parts)
        notes.waited_for = notes.waited_for or awaited("grad_output", parts)
        if self.keep_values:
            notes.values = notes.values[0], tuple(detached(value) for _, value in parts)

    def take_gradient(self, gradient: Tensor, call: Any) -> Tensor | None:
        """Take one gradient in; with the last, call the function. What it puts in this one's place is returned."""
        notes: _Notes = call.notes[self]
        place = Place(call.site.port, call.site.subscripts)
        if place in notes.came:  # Of an earlier backward, which did not get through.
            notes.came = {}
        if not notes.came:
            module = call.module
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end(notes, module))  # Some may have no gradient to wait for.
        notes.came[place] = gradient
        if notes.is_gated or not notes.waited_for <= set(notes.came):
            return None
        return self._call(notes, call.module).get(place)

    def _receive(
        self, notes: _Notes, module: Callable[[], Any], gated: list[Path], gradients: tuple[Tensor | None, ...]
    ) -> list[Any]:
        places = [Place("grad_inputs", path) for path in gated]
        notes.came.update({place: one for place, one in zip(places, gradients, strict=True) if one is not None})
        changed = self._call(notes, module())
        return [changed.get(place, one) for place, one in zip(places, gradients, strict=True)]

    def _end(self, notes: _Notes, module: nn.Module) -> None:
        if notes.came:
            self._call(notes, module)

    def _call(self, notes: _Notes, module: nn.Module) -> dict[Place, Any]:
        """Call the function, and return what it put in the place of gradients of inputs."""
        came, notes.came = notes.came, {}
        old, grad_outputs = (tuple(fill(part, came) for part in side) for side in (notes.inputs, notes.outputs))
        new = self.function(Pass(module, old, grad_outputs, *notes.values, notes.positional))
        return {} if new is None or not self.changes else changed_of(notes.inputs, old, new)


class _Before:
    """The functions that hookline calls, for one backward pre-hook."""

    def __init__(self, function: PreFunction) -> None:
        self.function = function

    def take_outputs(self, output: Any, call: Any) -> Any:
        """Note what a call gives; several tensors of which gradients will come pass a gate."""
        parts = outputs_of(output)
        templates = call.notes[self] = templates_of("grad_output", parts)
        gated = [path for path, value in parts if isinstance(value, Tensor) and is_followed(value)]
        if len(gated) < 2:
            return None
        call.notes[self] = None
        receive = partial(self._receive, weakref.ref(call.module), templates, gated)
        passed = dict(zip(gated, _gate(receive, [output[i] for (i,) in gated]), strict=True))
        items = [passed.get(path, value) for path, value in parts]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)

    def take_gradient(self, gradient: Tensor, call: Any) -> Any:
        """Call the function with the only gradient that comes."""
        place = Place("grad_output", call.site.subscripts)
        if call.notes[self] is not None:
            return self._call(call.module, call.notes[self], {place: gradient}).get(place)
        return None

    def _receive(
        self, module: Callable[[], Any], templates: list[Any], gated: list[Path], gradients: tuple[Tensor | None, ...]
    ) -> list[Any]:
        places = [Place("grad_output", path) for path in gated]
        came = {place: one for place, one in zip(places, gradients, strict=True) if one is not None}
        changed = self._call(module(), templates, came)
        return [changed.get(place, one) for place, one in zip(places, gradients, strict=True)]

    def _call(self, module: nn.Module, templates: list[Any], came: dict[Place, Tensor]) -> dict[Place, Any]:
        old = tuple(fill(template, came) for template in templates)
        new = self.function(module, old)
        return {} if new is None else changed_of(templates, old, new)


def _rest_of(forward: Callable[..., Any]) -> str:
    """Return the name under which hookline gives what a forward takes as `*args`, if it does."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return "args"
    return next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")
