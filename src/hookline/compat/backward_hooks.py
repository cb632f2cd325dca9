"""Module backward hooks: functions that get all gradients of one module call at once.

hookline delivers each gradient as soon as it is computed. This module collects the gradients of one call in
`call.notes` and calls the function when the last one has arrived. tacklebox and nice_hooks use it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hookline as hl
from hookline._torch import when_backward_ends

Path = tuple[Any, ...]
Parts = list[tuple[Path, Any]]  # Each value with the subscripts that lead to it.


class GradientPlace(NamedTuple):
    """The position of a tensor in the inputs or outputs of a call. Its gradient is stored under this key."""

    port: str
    path: Path


def outputs_of(output: Any) -> Parts:
    """Return the outputs of a call by position: the items of a tuple, or the one value."""
    return [((i,), part) for i, part in enumerate(output)] if isinstance(output, tuple) else [((), output)]


def awaited(port: str, parts: Parts) -> set[GradientPlace]:
    """Return the places where a gradient may arrive."""
    found = [pair for path, value in parts for pair in _tensors(port, path, value)]
    first = {
        id(tensor): place for place, tensor in reversed(found)
    }  # If a tensor appears twice, hookline reports its gradient at the first place.
    return {first[id(tensor)] for _, tensor in found if is_followed(tensor)}


def _tensors(port: str, path: Path, value: Any) -> Iterator[tuple[GradientPlace, Tensor]]:
    if isinstance(value, Tensor):
        yield GradientPlace(port, path), value
    inside = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    )
    for key, part in inside:
        yield from _tensors(port, (*path, key), part)


def templates_of(port: str, parts: Parts) -> list[Any]:
    """Return the structure of each value, with tensors replaced by the place of their gradient and the rest by None."""
    first: dict[int, GradientPlace] = {}  # If a tensor is returned twice, both positions show its gradient.
    return [_template(port, path, value, first if port == "grad_output" else {}) for path, value in parts]


def _template(port: str, path: Path, value: Any, first: dict[int, GradientPlace]) -> Any:
    if isinstance(value, Tensor):
        return first.setdefault(id(value), GradientPlace(port, path))
    if isinstance(value, Mapping):
        return {key: _template(port, (*path, key), part, first) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_template(port, (*path, i), part, first) for i, part in enumerate(value)]
    return None


def fill(template: Any, came: Mapping[GradientPlace, Tensor]) -> Any:
    """Return the gradients in the structure of the value, with None for a gradient that has not arrived."""
    if isinstance(template, GradientPlace):
        return came.get(template)
    if isinstance(template, dict):
        filled = {key: fill(part, came) for key, part in template.items()}
        return filled if any(part is not None for part in filled.values()) else None
    parts = tuple(fill(part, came) for part in template) if isinstance(template, list) else ()
    return parts if any(part is not None for part in parts) else None


def is_followed(tensor: Tensor) -> bool:
    """Return True if a tensor may get a gradient."""
    return tensor.requires_grad and torch.is_grad_enabled()


def detached(value: Any) -> Any:
    """Return a value without its autograd graph: the graph holds the notes of the call, so they must not hold it."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(part) for key, part in value.items()}
    return type(value)(map(detached, value)) if type(value) in (tuple, list) else value


def changed_of(
    templates: list[Any], old: tuple[Any, ...], new: Sequence[Any], can_take: set[GradientPlace]
) -> dict[GradientPlace, Any]:
    """Return the replaced gradients by place, with None for a gradient that was cut."""
    if len(new) != len(old):
        raise hl.EditError(f"{len(new)} gradients returned instead of {len(old)}")
    changed = {}
    for number, (template, before, one) in enumerate(zip(templates, old, new, strict=True)):
        if one is before:
            continue
        if isinstance(template, (list, dict)):
            raise hl.EditError("a gradient inside a nested value can't be changed here; use hl.edit on its site")
        if template not in can_take:
            raise hl.EditError(f"a gradient was returned at position {number}, which has none; return None there")
        changed[template] = one
    return changed


def by_place(port: str, paths: list[Path], gradients: tuple[Tensor | None, ...]) -> dict[GradientPlace, Tensor | None]:
    """Return gradients by place, with None for those that did not arrive."""
    return {GradientPlace(port, path): one for path, one in zip(paths, gradients, strict=True)}


def passed_together(receive: Callable[..., Any], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Pass tensors through a gate: `receive` gets their gradients together, and its result flows on in backward."""
    gate: Any = _Gate
    passed: tuple[Tensor, ...] = gate.apply(receive, *tensors)
    return passed


class _Gate(torch.autograd.Function):
    """An identity that receives the gradients of several tensors together. The tensors must not be written in place."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten.alias(tensor) for tensor in tensors)  # `view_as` may change strides.

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.receive(gradients)


@dataclass
class BackwardCall:
    """One backward pass through one module call. Gradients are by position, with those of keyword inputs last."""

    site: hl.Site  # The site of the module or method.
    module: nn.Module
    grad_inputs: tuple[Any, ...]
    grad_outputs: tuple[Any, ...]
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    positional: int = 0


Function = Callable[[BackwardCall], Sequence[Any] | None]
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
    """Call `function` for each backward pass through the modules or methods at `where`.

    Return the hooks that this adds. They all have the same `name` and must be switched together.

    Args:
        keep_values: Also pass the inputs and outputs of the forward to the function, detached.
        changes: Replace `grad_inputs` with the function's result; a None in it cuts that gradient. A module that writes
            into one of several inputs then raises, as it does with torch's full backward hooks.
        missing: What to do if no gradient can arrive: see `Hooks.when_missing`.
    """
    joined = _BackwardHook(function, keep_values, changes)
    clone = None if keep_values else False
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(_at(where, "inputs"), joined.take_inputs, clone=clone, check=False, **options).when_missing("ignore")
    hooks.edit(_at(where, "output"), joined.take_outputs, clone=clone, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_inputs"), joined.take_gradient, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_output"), joined.take_gradient, **options).when_missing(missing)
    return hooks[name]


def add_backward_pre(hooks: hl.Hooks, where: Where, function: Function, name: str, missing: str = "ignore") -> hl.Hooks:
    """Call `function` when the gradients of a call's outputs arrive; its result replaces them."""
    before = _BackwardPreHook(function)
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(_at(where, "output"), before.take_outputs, clone=False, check=False, **options).when_missing("ignore")
    hooks.edit(_at(where, "grad_output"), before.take_gradient, **options).when_missing(missing)
    return hooks[name]


def _at(where: Where, port: str) -> list[hl.Site]:
    sites = [hl.Site(where)] if isinstance(where, str) else [where] if isinstance(where, hl.Site) else where
    return [site._replace(port=port) for site in sites]


@dataclass
class _CallState:
    """The state of one call: templates of its inputs and outputs, and the gradients that have arrived so far."""

    site: hl.Site
    positional: int
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    waited_for: set[GradientPlace] = field(
        default_factory=set
    )  # Places of inputs, or of outputs if no input gets a gradient.
    came: dict[GradientPlace, Tensor] = field(default_factory=dict)
    gated: list[Path] = field(default_factory=list)


class _BackwardHook:
    """One backward hook: the functions that hookline calls for it."""

    def __init__(self, function: Function, keep_values: bool, changes: bool) -> None:
        self.function = function
        self.keep_values = keep_values
        self.changes = changes

    def take_inputs(self, bound: Mapping[str, Any], call: Any) -> dict[str, Any] | None:
        """Record the inputs of a call. Pass them through a gate if their gradients must arrive together."""
        rest = _rest_of(getattr(type(call.module), call.site.method or "forward"))
        parts: Parts = []
        for name, value in bound.items():
            is_rest = name == rest and name not in call.kwargs and isinstance(value, tuple)
            parts += [((name, i), part) for i, part in enumerate(value)] if is_rest else [((name,), value)]
        notes = call.notes[self] = _CallState(_home(call.site), len(call.args), templates_of("grad_inputs", parts))
        notes.waited_for = awaited("grad_inputs", parts)
        if self.keep_values:
            notes.values = tuple(detached(value) for _, value in parts), ()
        gated = {path: value for path, value in parts if isinstance(value, Tensor) and is_followed(value)}
        are_distinct = len(set(map(id, gated.values()))) == len(gated)
        if len(gated) < 2 or (are_distinct and not self.changes):
            return None
        notes.gated = list(gated)
        receive = partial(self._receive, notes, weakref.ref(call.module))  # The graph must not keep the module alive.
        passed = dict(zip(gated, passed_together(receive, gated.values()), strict=True))
        new = dict(bound)
        for path, tensor in passed.items():
            name, *index = path
            new[name] = tuple(passed.get((name, i), one) for i, one in enumerate(bound[name])) if index else tensor
        return new

    def take_outputs(self, output: Any, call: Any) -> None:
        """Record the outputs of a call."""
        notes: _CallState = call.notes[self]
        parts = outputs_of(output)
        notes.outputs = templates_of("grad_output", parts)
        notes.waited_for = notes.waited_for or awaited("grad_output", parts)
        if self.keep_values:
            notes.values = notes.values[0], tuple(detached(value) for _, value in parts)

    def take_gradient(self, gradient: Tensor, call: Any) -> Tensor | None:
        """Store one gradient. If it is the last one, call the function and return the replacement, if there is one."""
        notes: _CallState = call.notes[self]
        place = GradientPlace(call.site.port, call.site.subscripts)
        if place in notes.came:  # The stored gradients are from an earlier backward that failed halfway.
            notes.came = {}
        if not notes.came:
            module = call.module
            when_backward_ends(lambda: self._end(notes, module))  # Some gradients may never arrive.
        notes.came[place] = gradient
        if notes.gated or not notes.waited_for <= set(notes.came):
            return None
        return _put(self._call(notes, call.module, {place}), place, gradient)

    def _receive(self, notes: _CallState, module: Callable[[], Any], gradients: tuple[Tensor | None, ...]) -> list[Any]:
        came = by_place("grad_inputs", notes.gated, gradients)
        notes.came.update({place: one for place, one in came.items() if one is not None})
        return list({**came, **self._call(notes, module(), {*came})}.values())

    def _end(self, notes: _CallState, module: nn.Module) -> None:
        if notes.came:
            self._call(notes, module, set())

    def _call(self, notes: _CallState, module: nn.Module, can_take: set[GradientPlace]) -> dict[GradientPlace, Any]:
        """Call the function and return the gradients of inputs that it replaced."""
        came, notes.came = notes.came, {}
        old, grad_outputs = (tuple(fill(part, came) for part in side) for side in (notes.inputs, notes.outputs))
        new = self.function(BackwardCall(notes.site, module, old, grad_outputs, *notes.values, notes.positional))
        return {} if new is None or not self.changes else changed_of(notes.inputs, old, new, can_take)


class _BackwardPreHook:
    """One backward pre-hook: the functions that hookline calls for it."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def take_outputs(self, output: Any, call: Any) -> Any:
        """Record the outputs of a call. If several may get gradients, pass them through a gate."""
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
        """Call the function with the call's only gradient. With several, the gate calls it instead."""
        if call.notes[self] is None:
            return None
        place = GradientPlace("grad_output", call.site.subscripts)
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

    def _call(
        self, site: hl.Site, module: nn.Module, templates: list[Any], came: dict[GradientPlace, Any]
    ) -> dict[GradientPlace, Any]:
        old = tuple(fill(template, came) for template in templates)
        new = self.function(BackwardCall(site, module, (), old))
        return {} if new is None else changed_of(templates, old, new, {*came})


def _home(site: hl.Site) -> hl.Site:
    """Return the site of the module or method that a site belongs to."""
    return hl.Site(site.path, member=site.member)


def _put(changed: dict[GradientPlace, Any], place: GradientPlace, gradient: Tensor) -> Tensor | None:
    """Return the result that an edit of this gradient needs. A cut gradient becomes zeros; torch would use None."""
    new = changed.get(place, gradient)
    return torch.zeros_like(gradient) if new is None else None if new is gradient else new


@lru_cache(maxsize=1024)
def _rest_of(forward: Callable[..., Any]) -> str:
    """Return the name under which hookline passes the `*args` of a forward, or "" if it has none."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return "args"
    return next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")
