"""Containers that a caller passes to modules, which read them and write into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class State:
    """A dataclass among the arguments."""

    seen: list[Tensor]
    latest: Tensor | None = None


class KeyValues:
    """A plain object among the arguments, as key-value caches are."""

    def __init__(self, layers: list[Tensor], latest: Tensor | None = None) -> None:
        self.layers, self.latest = layers, latest

    def __repr__(self) -> str:
        return f"KeyValues({self.layers}, {self.latest})"


Container = list[Tensor] | dict[str, Tensor] | State | KeyValues
KINDS = ("list", "dict", "state", "object")


def container(kind: str, *held: Tensor) -> Container:
    """Return a container of a kind that holds these tensors."""
    if kind == "list":
        return list(held)
    if kind == "dict":
        return {f"step {index}": tensor for index, tensor in enumerate(held)}
    return (State if kind == "state" else KeyValues)(list(held), held[-1] if held else None)


def recall(memory: Any) -> list[Tensor]:
    """Return the tensors in a container, in order."""
    if isinstance(memory, dict):
        return list(memory.values())
    if isinstance(memory, list):
        return list(memory)
    return [*_layers(memory), *([] if memory.latest is None else [memory.latest])]


def append(memory: Any, new: Tensor) -> None:
    """Append a tensor to a container."""
    if isinstance(memory, dict):
        memory[f"step {len(memory)}"] = new
    elif isinstance(memory, list):
        memory.append(new)
    else:
        _layers(memory).append(new)
        memory.latest = new


def insert(memory: Any, new: Tensor) -> None:
    """Write a tensor to the front of a container, and move the old first tensor."""
    if isinstance(memory, dict):
        first = memory.pop("step 0", new)
        memory["step 0"], memory[f"step {len(memory) + 1}"] = new, first
    elif isinstance(memory, list):
        memory.insert(0, new)
    else:
        _layers(memory).insert(0, new)


def rewrite(memory: Any, new: Tensor) -> None:
    """Replace an element of a container, or an attribute."""
    if isinstance(memory, dict):
        memory["step 0"] = new
    elif isinstance(memory, list):
        memory[:1] = [new]
    elif isinstance(memory, State):
        memory.seen = [one * 0.5 for one in memory.seen]
        memory.latest = new
    else:
        memory.layers[:1] = [new]


def _layers(memory: Any) -> list[Tensor]:
    return memory.seen if isinstance(memory, State) else memory.layers


WRITES: dict[str, Callable[[Any, Tensor], None]] = {"append": append, "insert": insert, "rewrite": rewrite}
