"""Where gradients stand in what a call takes and gives: a place for each tensor, in values of any nesting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    return {place for place, tensor in found if is_followed(tensor)}


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
    return [_template(port, path, value) for path, value in parts]


def _template(port: str, path: Path, value: Any) -> Any:
    if isinstance(value, Tensor):
        return Place(port, path)
    if isinstance(value, Mapping):
        return {key: _template(port, (*path, key), part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_template(port, (*path, i), part) for i, part in enumerate(value)]
    return None


def fill(template: Any, came: Mapping[Place, Tensor]) -> Any:
    """Return the gradients that have come in the structure of a value, None where there is none."""
    if isinstance(template, Place):
        return came.get(template)
    if isinstance(template, dict):
        return {key: fill(part, came) for key, part in template.items()}
    return tuple(fill(part, came) for part in template) if isinstance(template, list) else None


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


def changed_of(templates: list[Any], old: tuple[Any, ...], new: Sequence[Any]) -> dict[Place, Any]:
    """Return the gradients that are other ones now, each by its place."""
    if len(new) != len(old):
        raise hl.EditError(f"{len(new)} gradients returned in the place of {len(old)}")
    pairs = [(template, one) for template, before, one in zip(templates, old, new, strict=True) if one is not before]
    if any(not isinstance(template, Place) for template, _ in pairs if template is not None):
        raise hl.EditError("a gradient inside a nested value can't be changed here; hl.edit does it, by its place")
    return {template: one for template, one in pairs if template is not None and one is not None}
