"""Undo the changes of a run on the modules of a model: attributes, their contents, and buffers."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookline._kernel import ATOMS, Names, is_of_hookline


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of a model's modules, and their contents, after a run."""
    seen = set[int]()
    restorers = [module_restorer(module, seen) for _, module in Names(model).once()]
    try:
        yield
    finally:
        for put_back in restorers:
            put_back()


@contextmanager
def buffers_as_found(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and plain tensors of a model that a run has written to, as the statistics of a BatchNorm."""
    plain = [held for _, module in Names(model).once() for held in vars(module).values() if type(held) is Tensor]
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *plain)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content in before:
                if not torch.equal(tensor, content):  # BatchNorm writes without raising the version.
                    tensor.copy_(content)


def module_restorer(module: nn.Module, seen: set[int]) -> Callable[[], bool]:
    """Return a function that restores a module's attributes, and their contents at any depth.

    It returns True if something had changed.

    The shadows that hooks put on a module stay as they are: hooks may be attached and detached during the run.
    """
    held = list(_containers(module.__dict__, seen))
    before = [_without_shadows(container) for container in held]

    def put_back() -> bool:
        has_changed = False
        for container, content in zip(held, before, strict=True):
            if holds_same(_without_shadows(container), content):
                continue
            has_changed = True
            names = container.items() if type(container) is dict else ()
            shadows = {key: one for key, one in names if is_of_hookline(one)}
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
            container.update(shadows) if shadows else None
        return has_changed

    return put_back


def _without_shadows(container: Any) -> Any:
    if type(container) is not dict:
        return copy.copy(container)
    return {key: one for key, one in container.items() if not is_of_hookline(one)}


def _containers(held: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the plain containers that a run could change, and the `__dict__` of objects, except of modules."""
    waiting = [held]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (Tensor, nn.Module, type, *ATOMS)):
            continue
        seen.add(id(one))
        if type(one) in (list, dict, set, deque):
            yield one
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            waiting += one
        elif type(getattr(one, "__dict__", None)) is dict and not callable(one):
            waiting.append(one.__dict__)


def holds_same(container: Any, content: Any) -> bool:
    """Return True if two containers of one kind hold the same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in content and one is content[key] for key, one in container.items())
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))
