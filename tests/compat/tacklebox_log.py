"""Hooks for the tests of tacklebox that note what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Log:
    """Hooks that note what they see, as functions of their own."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def hook(self, name: str = "", count: int = 3) -> Callable[..., None]:
        if count == 2:
            return lambda module, inputs: self.seen.append((name, inputs))
        return lambda module, first, second: self.seen.append((name, first, second))

    @property
    def names(self) -> list[str]:
        names = [one[0] for one in self.seen]
        self.seen.clear()
        return names
