"""The backward pass through one call of a module as one event, as module backward hooks have it.

hookline gives each gradient when it comes. A module backward hook wants those of all inputs and outputs at once: what
has come of one call is kept in its notes, and the function is called with the last. tacklebox and nice_hooks use this.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._torch import when_backward_ends
from hookline.compat.gradients import (
    Parts,
    Path,
    Place,
    awaited,
    by_place,
    changed_of,
    detached,
    fill,
    is_followed,
    outputs_of,
    passed_together,
    templates_of,
)


@dataclass
class Pass:
    """One backward pass through one call of a module; by position, keyword inputs after the others."""

    site: hl.Site  # Of the module, or of the method.
    module: nn.Module
    grad_inputs: tuple[Any, ...]
    grad_outputs: tuple[Any, ...]
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    positional: int = 0


Function = Callable[[Pass], Sequence[Any] | None]
Where = str | hl.Site | list[hl.Site]


def add_backward(
    hooks: hl.Hooks,
    where: Where,
    function: Function,
    name: str,
    keep_values: bool = False,
    changes: bool = False,
    missing: str = "ignore",
) -> hl.Hooks:
    """Call `function` with each backward pass through a module or method, or through several.

    Return the hooks that do it, which all have that name and are to be switched together.

    Args:
        keep_values: Whether a pass has the inputs and outputs themselves, detached, as they were in the forward.
        changes: Whether what the function returns replaces `grad_inputs`; None in it cuts a gradient. A module that
            writes into one of several inputs then raises, as it does under torch's own hooks.
        missing: What happens when no gradient can come: see `Hooks.when_missing`.
    """
    joined = _Joined(function, keep_values, changes)
    clone = None if keep_values else False
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(_at(where, "inputs"), joined.take_inputs, clone=clone, check=False, **options).when_missing("ignore")
    hooks.edit(_at(where, "output"), joined.take_outputs, clone=clone, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_inputs"), joined.take_gradient, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_output"), joined.take_gradient, **options).when_missing(missing)
    return hooks[name]


def add_backward_pre(hooks: hl.Hooks, where: Where, function: Function, name: str, missing: str = "ignore") -> hl.Hooks:
    """Call `function` when the gradients of the outputs of a call come; what it returns replaces them."""
    before = _Before(function)
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(_at(where, "output"), before.take_outputs, clone=False, check=False, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_output"), before.take_gradient, **options).when_missing(missing)
    return hooks[name]


def _at(where: Where, port: str) -> list[hl.Site]:
    sites = [hl.Site(where)] if isinstance(where, str) else [where] if isinstance(where, hl.Site) else where
    return [site._replace(port=port) for site in sites]


@dataclass
class _Notes:
    """What is known of one call: its values with a place for each tensor, and the gradients that have come so far."""

    site: hl.Site
    positional: int
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    waited_for: set[Place] = field(default_factory=set)  # Of inputs; where none is, of outputs.
    came: dict[Place, Tensor] = field(default_factory=dict)
    gated: list[Path] = field(default_factory=list)


class _Joined:
    """The functions that hookline calls, for one backward hook."""

    def __init__(self, function: Function, keep_values: bool, changes: bool) -> None:
        self.function = function
        self.keep_values = keep_values
        self.changes = changes

    def take_inputs(self, bound: Mapping[str, Any], call: Any) -> dict[str, Any] | None:
        """Note what a call is given; several tensors of which gradients will come pass a gate."""
        rest = _rest_of(getattr(type(call.module), call.site.method or "forward"))
        parts: Parts = []
        for name, value in bound.items():
            is_rest = name == rest and name not in call.kwargs and isinstance(value, tuple)
            parts += [((name, i), part) for i, part in enumerate(value)] if is_rest else [((name,), value)]
        notes = call.notes[self] = _Notes(_home(call.site), len(call.args), templates_of("grad_inputs", parts))
        notes.waited_for = awaited("grad_inputs", parts)
        if self.keep_values:
            notes.values = tuple(detached(value) for _, value in parts), ()
        gated = {path: value for path, value in parts if isinstance(value, Tensor) and is_followed(value)}
        are_distinct = len(set(map(id, gated.values()))) == len(gated)
        if len(gated) < 2 or (are_distinct and not self.changes):
            return None
        notes.gated = list(gated)
        receive = partial(self._receive, notes, weakref.ref(call.module))  # The graph is to hold no module.
        passed = dict(zip(gated, passed_together(receive, gated.values()), strict=True))
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
            when_backward_ends(lambda: self._end(notes, module))  # Some may have no gradient to wait for.
        notes.came[place] = gradient
        if notes.gated or not notes.waited_for <= set(notes.came):
            return None
        return _put(self._call(notes, call.module, {place}), place, gradient)

    def _receive(self, notes: _Notes, module: Callable[[], Any], gradients: tuple[Tensor | None, ...]) -> list[Any]:
        came = by_place("grad_inputs", notes.gated, gradients)
        notes.came.update({place: one for place, one in came.items() if one is not None})
        return list({**came, **self._call(notes, module(), {*came})}.values())

    def _end(self, notes: _Notes, module: nn.Module) -> None:
        if notes.came:
            self._call(notes, module, set())

    def _call(self, notes: _Notes, module: nn.Module, can_take: set[Place]) -> dict[Place, Any]:
        """Call the function, and return what it put in the place of gradients of inputs."""
        came, notes.came = notes.came, {}
        old, grad_outputs = (tuple(fill(part, came) for part in side) for side in (notes.inputs, notes.outputs))
        new = self.function(Pass(notes.site, module, old, grad_outputs, *notes.values, notes.positional))
        return {} if new is None or not self.changes else changed_of(notes.inputs, old, new, can_take)


class _Before:
    """The functions that hookline calls, for one backward pre-hook."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def take_outputs(self, output: Any, call: Any) -> Any:
        """Note what a call gives; several tensors of which gradients will come pass a gate."""
        parts = outputs_of(output)
        templates = templates_of("grad_output", parts)
        gated = {path: value for path, value in parts if isinstance(value, Tensor) and is_followed(value)}
        call.notes[self] = templates if len(gated) < 2 else None
        if len(gated) < 2:
            return None
        receive = partial(self._receive, _home(call.site), weakref.ref(call.module), templates, list(gated))
        passed = dict(zip(gated, passed_together(receive, gated.values()), strict=True))
        items = [passed.get(path, value) for path, value in parts]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)

    def take_gradient(self, gradient: Tensor, call: Any) -> Any:
        """Call the function with the only gradient that comes."""
        if call.notes[self] is None:
            return None
        place = Place("grad_output", call.site.subscripts)
        return _put(self._call(_home(call.site), call.module, call.notes[self], {place: gradient}), place, gradient)

    def _receive(
        self,
        site: hl.Site,
        module: Callable[[], Any],
        templates: list[Any],
        gated: list[Path],
        gradients: tuple[Tensor | None, ...],
    ) -> list[Any]:
        came = by_place("grad_output", gated, gradients)
        return list({**came, **self._call(site, module(), templates, came)}.values())

    def _call(self, site: hl.Site, module: nn.Module, templates: list[Any], came: dict[Place, Any]) -> dict[Place, Any]:
        old = tuple(fill(template, came) for template in templates)
        new = self.function(Pass(site, module, (), old))
        return {} if new is None else changed_of(templates, old, new, {*came})


def _home(site: hl.Site) -> hl.Site:
    """Return the module or method that a place is at."""
    return hl.Site(site.path, member=site.member)


def _put(changed: dict[Place, Any], place: Place, gradient: Tensor) -> Tensor | None:
    """Return what an edit of a gradient is to return; one that is cut is zero, where torch has none at all."""
    new = changed.get(place, gradient)
    return torch.zeros_like(gradient) if new is None else None if new is gradient else new


@lru_cache(maxsize=1024)
def _rest_of(forward: Callable[..., Any]) -> str:
    """Return the name under which hookline gives what a forward takes as `*args`, if it does."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return "args"
    return next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")
