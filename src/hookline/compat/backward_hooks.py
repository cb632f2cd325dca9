"""The backward pass through one call of a module as one event, as module backward hooks have it.

hookline gives each gradient when it comes. A module backward hook wants those of all inputs and outputs at once: what
has come of one call is kept in its notes, and the function is called with the last. tacklebox and nice_hooks use this.
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
Parts = list[tuple[Path, Any]]  # The values at each position, with their subscripts.


class Place(NamedTuple):
    """Where the gradient of a tensor will be, in the notes of a call."""

    port: str
    path: Path


def outputs_of(output: Any) -> Parts:
    """Return what a call gives by position: the items of a tuple, or the one value."""
    return [((i,), part) for i, part in enumerate(output)] if isinstance(output, tuple) else [((), output)]


def awaited(port: str, parts: Parts) -> set[Place]:
    """Return the places of those tensors to which a gradient may come."""
    found = [pair for path, value in parts for pair in _tensors(port, path, value)]
    first = {id(tensor): place for place, tensor in reversed(found)}  # Of one that is there twice, hookline names this.
    return {first[id(tensor)] for _, tensor in found if is_followed(tensor)}


def _tensors(port: str, path: Path, value: Any) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield Place(port, path), value
    inside = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    )
    for key, part in inside:
        yield from _tensors(port, (*path, key), part)


def templates_of(port: str, parts: Parts) -> list[Any]:
    """Return values with the place of its gradient for each tensor, and None for what has none."""
    first: dict[int, Place] = {}  # An output that is there twice has its gradient at both places.
    return [_template(port, path, value, first if port == "grad_output" else {}) for path, value in parts]


def _template(port: str, path: Path, value: Any, first: dict[int, Place]) -> Any:
    if isinstance(value, Tensor):
        return first.setdefault(id(value), Place(port, path))
    if isinstance(value, Mapping):
        return {key: _template(port, (*path, key), part, first) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_template(port, (*path, i), part, first) for i, part in enumerate(value)]
    return None


def fill(template: Any, came: Mapping[Place, Tensor]) -> Any:
    """Return the gradients that have come in the structure of a value, None where there is none."""
    if isinstance(template, Place):
        return came.get(template)
    if isinstance(template, dict):
        filled = {key: fill(part, came) for key, part in template.items()}
        return filled if any(part is not None for part in filled.values()) else None
    parts = tuple(fill(part, came) for part in template) if isinstance(template, list) else ()
    return parts if any(part is not None for part in parts) else None


def is_followed(tensor: Tensor) -> bool:
    """Whether a gradient may come to a tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def detached(value: Any) -> Any:
    """Return a value without its graph, which would hold itself through the notes of the call."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(part) for key, part in value.items()}
    return type(value)(map(detached, value)) if type(value) in (tuple, list) else value


def changed_of(
    templates: list[Any], old: tuple[Any, ...], new: Sequence[Any], can_take: set[Place]
) -> dict[Place, Any]:
    """Return the gradients that are other ones now, each by its place; None stands for one that is cut."""
    if len(new) != len(old):
        raise hl.EditError(f"{len(new)} gradients returned in the place of {len(old)}")
    changed = {}
    for number, (template, before, one) in enumerate(zip(templates, old, new, strict=True)):
        if one is before:
            continue
        if isinstance(template, (list, dict)):
            raise hl.EditError("a gradient inside a nested value can't be changed here; hl.edit does it, by its place")
        if template not in can_take:
            raise hl.EditError(f"a gradient was returned in place {number}, where none comes; return None there")
        changed[template] = one
    return changed


def by_place(port: str, paths: list[Path], gradients: tuple[Tensor | None, ...]) -> dict[Place, Tensor | None]:
    """Return gradients, and None for those that did not come, each by its place."""
    return {Place(port, path): one for path, one in zip(paths, gradients, strict=True)}


def passed_together(receive: Callable[..., Any], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Pass tensors on so that their gradients go through `receive` all at once, which returns those that go on."""
    return _Gate.apply(receive, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Gate(torch.autograd.Function):
    """An identity for several tensors, whose gradients pass it together. They must not be written in place then."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten.alias(tensor) for tensor in tensors)  # `view_as` may change strides.

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.receive(gradients)


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
