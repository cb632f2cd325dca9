"""How many references Python counts to what one variable holds: by more of them it shows that others hold it too."""

from __future__ import annotations

from sys import getrefcount
from typing import Any


def references_in_call() -> int:
    """Count the references in a call to what one variable of its caller holds, as they are counted at this moment.

    After dynamo has compiled something, Python may run every function in a way that holds arguments once more.
    """
    held: list[Any] = []
    return _count(held)


def _count(value: Any) -> int:
    return getrefcount(value)
