"""Noticing that a block generates a second sequence: from there on the number of a call is not its place in one.

A model that generates with a cache of keys and values runs once over the prompt, then over one token at a time. When it
gets several tokens after that, another sequence has begun.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from hookline import origins
from hookline.errors import HooklineError


class Sequences:
    """What the calls that one hook has seen say about sequences."""

    length = 0  # Tokens in the latest forward of the model.
    generates = False  # Whether one token came after several.
    is_second = False  # Whether several came after that.

    def number(self, number: int) -> int:
        """Return the number of the call that runs, as one that can't be compared by a range if that would mislead."""
        length = _tokens()
        self.is_second = self.is_second or (self.generates and length > 1)
        self.generates = self.generates or length == 1 < self.length
        self.length = length
        return _Number(number) if self.is_second else number


class _Number(int):
    """The number of a call in a second sequence."""

    def _refuse(self, other: object = 0) -> NoReturn:  # `if call.number:` compares it with 0.
        raise HooklineError(
            f"call.number {int(self)} can't be compared with {other!r} by a range: it counts all calls in this block, "
            "and the model has begun a second sequence in it; open a block for each generate()"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse


def _tokens() -> int:
    """Return how many tokens the running forward of the model was given, 0 if that is unknown."""
    run = origins.running.get()
    if run is None:
        return 0
    args, kwargs = run.given
    # Floats are tokens only beside a cache: the second dimension of other data may be the batch, or channels.
    has_cache = any(["past" in name or "cache" in name for name in kwargs])
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and (has_cache or not value.is_floating_point()):
            return value.size(1)
    return 0
