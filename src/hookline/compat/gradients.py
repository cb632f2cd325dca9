"""Where gradients stand in what a call takes and gives: a place for each tensor, in values of any nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hookline as hl

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
