"""The backward pass through one call of a module as one event, as module backward hooks have it.

hookline gives each gradient when it comes. A module backward hook wants those of all inputs and outputs at once: what
has come of one call is kept in its notes, and the function is called with the last. tacklebox and nice_hooks use this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hookline as hl

Path = tuple[Any, ...]


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


def add_backward(
    hooks: hl.Hooks, site: hl.Site | str, function: Function, name: str, keep_values: bool = False
) -> hl.Hooks:
    """Call `function` with each backward pass through a module or method; what it returns replaces `grad_inputs`.

    Return the hooks that do it, which all have that name and are to be switched together. Only with `keep_values` has
    a pass the inputs and outputs themselves, detached, as they were in the forward.
    """
    joined = _Joined(function, keep_values)
    site = hl.Site(site) if isinstance(site, str) else site
    clone = None if keep_values else False
    options: dict[str, Any] = {"name": name, "with_call": True}
    hooks.edit(site._replace(port="inputs"), joined.take_inputs, clone=clone, **options)
    hooks.edit(site, joined.take_outputs, clone=clone, **options)
    hooks.edit(site._replace(port="grad_inputs"), joined.take_gradient, **options)
    hooks.edit(site._replace(port="grad_output"), joined.take_gradient, **options)
    return hooks[name].when_missing("ignore")


class _Place(NamedTuple):
    """Where the gradient of a tensor will be, in the notes of a call."""

    port: str
    path: Path


@dataclass
class _Notes:
    """What is known of one call: its values with a place for each tensor, and the gradients that have come so far."""

    positional: int
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    waited_for: set[_Place] = field(default_factory=set)  # Of inputs; where none is, of outputs.
    came: dict[_Place, Tensor] = field(default_factory=dict)


class _Joined:
    """The functions that hookline calls, for one backward hook."""

    def __init__(self, function: Function, keep_values: bool) -> None:
        self.function = function
        self.keep_values = keep_values

    def take_inputs(self, bound: Mapping[str, Any], call: Any) -> None:
        """Note what a call is given."""
        values: list[tuple[Path, Any]] = []
        rest = _rest_of(getattr(call.module, call.site.method or "forward"))
        for name, value in bound.items():
            is_rest = name == rest and name not in call.kwargs
            values += [((name, i), part) for i, part in enumerate(value)] if is_rest else [((name,), value)]
        notes = _Notes(len(call.args), [_template("grad_inputs", path, value) for path, value in values])
        notes.waited_for = {
            place
            for path, value in values
            for place, tensor in _tensors("grad_inputs", path, value)
            if _differs(tensor)
        }
        if self.keep_values:
            notes.values = tuple(_detached(value) for _, value in values), ()
        call.notes[self] = notes

    def take_outputs(self, output: Any, call: Any) -> None:
        """Note what a call gives."""
        notes: _Notes = call.notes[self]
        values: list[tuple[Path, Any]] = [((), output)]
        if isinstance(output, tuple):
            values = [((i,), part) for i, part in enumerate(output)]
        notes.outputs = [_template("grad_output", path, value) for path, value in values]
        if not notes.waited_for:
            places = [pair for path, value in values for pair in _tensors("grad_output", path, value)]
            notes.waited_for = {place for place, tensor in places if _differs(tensor)}
        if self.keep_values:
            notes.values = notes.values[0], tuple(_detached(value) for _, value in values)

    def take_gradient(self, gradient: Tensor, call: Any) -> Tensor | None:
        """Take one gradient in; with the last, call the function. What it puts in this one's place is returned."""
        notes: _Notes = call.notes[self]
        place = _Place(call.site.port, call.site.subscripts)
        if place in notes.came:  # Of an earlier backward, which did not get through.
            notes.came = {}
        if not notes.came:
            module = call.module
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end(notes, module))  # Some may have no gradient to wait for.
        notes.came[place] = gradient
        if not notes.waited_for <= set(notes.came):
            return None
        return self._call(notes, call.module).get(place)

    def _end(self, notes: _Notes, module: nn.Module) -> None:
        if notes.came:
            self._call(notes, module)

    def _call(self, notes: _Notes, module: nn.Module) -> dict[_Place, Any]:
        """Call the function, and return the gradient that it changed: it can be none but the last that came."""
        came, notes.came = notes.came, {}
        grad_inputs, grad_outputs = (
            tuple(_fill(part, came) for part in side) for side in (notes.inputs, notes.outputs)
        )
        new = self.function(Pass(module, grad_inputs, grad_outputs, *notes.values, notes.positional))
        if new is None:
            return {}
        if len(new) != len(grad_inputs):
            raise hl.EditError(f"{len(new)} gradients returned for {len(grad_inputs)} inputs")
        changed = {}
        for place, old, value in zip(notes.inputs, grad_inputs, new, strict=True):
            if isinstance(place, _Place) and old is not None and value is not None and value is not old:
                changed[place] = value
        if set(changed) - {next(reversed(came))}:
            raise hl.EditError(
                "the gradients of several inputs come one after the other, and only the last can be changed here; "
                "edit each by itself, as in hl.edit(model, 'layer:grad_inputs[\"x\"]', function)"
            )
        return changed


def _tensors(port: str, path: Path, value: Any) -> Iterator[tuple[_Place, Tensor]]:
    if isinstance(value, Tensor):
        yield _Place(port, path), value
    for key, part in _parts(value):
        yield from _tensors(port, (*path, key), part)


def _template(port: str, path: Path, value: Any) -> Any:
    """Return a value with the place of its gradient for each tensor, and None for what has none."""
    if isinstance(value, Tensor):
        return _Place(port, path)
    if isinstance(value, Mapping):
        return {key: _template(port, (*path, key), part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_template(port, (*path, i), part) for i, part in enumerate(value)]
    return None


def _fill(template: Any, came: Mapping[_Place, Tensor]) -> Any:
    if isinstance(template, _Place):
        return came.get(template)
    if isinstance(template, dict):
        return {key: _fill(part, came) for key, part in template.items()}
    return tuple(_fill(part, came) for part in template) if isinstance(template, list) else None


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (tuple, list)) else []


def _differs(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _detached(value: Any) -> Any:
    """Return a value without its graph, which would hold itself through the notes of the call."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(part) for key, part in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value


def _rest_of(forward: Callable[..., Any]) -> str:
    """Return the name under which hookline gives what a forward takes as `*args`, if it does."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return "args"
    return next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")
