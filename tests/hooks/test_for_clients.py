"""The functions on hooks that only the clients of the kernel use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._kernel import Observer, OutputObserver, add_observers, find_places


class Seeing(Observer):
    """An observer that keeps the values it is called with."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, value: Any, _call: Any, _is_whole: bool, /) -> Any:
        self.seen.append(value)
        return value


class Keeping(OutputObserver):
    """An observer that keeps the outputs it gets on the hot path."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def keep(self, value: Any, call: Any = None, is_new: bool = False) -> None:
        self.seen.append(value)


@pytest.mark.parametrize("kind", [Seeing, Keeping])
def test_an_observer_of_either_kind_sees_a_whole_output(kind: type[Seeing | Keeping]) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    hooks, observer = hl.Hooks(model), kind()
    add_observers(hooks, [(place, observer) for place in find_places(model, ["1"])])
    output = model(x)
    assert [value is output for value in observer.seen] == [True]
    assert all(hook.fired for hook in hooks)
