"""Several calls of a module, method or function, as a site names them: `#1:`, `#:3`, `#{0,2}`, `#*`, `#-1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

MOST_CALLS = 10**10  # The number of a call is below this.
_RANGE = re.compile(r"(\d{0,10}):(?![A-Za-z_])(\d{0,10})(?::(?![A-Za-z_])(\d{1,10}))?")
_LATEST = re.compile(r"-1(?!\d|:(?![A-Za-z_]))")  # A colon may begin a port.
_SET = re.compile(r"\{\s*(\d{1,10}(?:\s*,\s*\d{1,10})*)\s*\}")


@dataclass(frozen=True)
class Calls:
    """Several calls. `text` is how they are written, without the `#`."""

    text: str

    @property
    def is_each(self) -> bool:
        """Whether each call is a site of its own."""
        return self.text == "*"

    @property
    def is_latest(self) -> bool:
        """Whether only the latest call counts."""
        return self.text == "-1"

    @property
    def last(self) -> int | None:
        """The number of the last call; None if there is no end to them."""
        is_open = isinstance(self.numbers, range) and self.numbers.stop >= MOST_CALLS
        return None if is_open else self.numbers[-1]

    @cached_property
    def numbers(self) -> range | tuple[int, ...]:
        """The numbers of the calls, in order."""
        if self.is_each or self.is_latest:
            return range(MOST_CALLS)
        if self.text[0] == "{":
            return tuple(map(int, self.text[1:-1].split(",")))
        start, stop, step = [int(bound) if bound else None for bound in (self.text + "::").split(":")[:3]]
        return range(start or 0, MOST_CALLS if stop is None else stop, step or 1)

    def __str__(self) -> str:
        return self.text


Wanted = int | Calls | None  # Which calls a site means: one, several, or all of them as one.


def is_wanted(wanted: Wanted, number: int) -> bool:
    """Return True if a site means the call of this number."""
    if wanted is None or isinstance(wanted, int):
        return wanted is None or wanted == number
    return number in wanted.numbers


@lru_cache(maxsize=1024)
def read_calls(text: str) -> tuple[Calls | int | None, int]:
    """Read the calls at the start of a text, right after the `#`. Return them, or None, and where they end."""
    if text.startswith("*"):
        return Calls("*"), 1
    if _LATEST.match(text):
        return Calls("-1"), 2
    several = _SET.match(text)
    if several is not None:
        numbers = sorted({int(one.strip()) for one in several.group(1).split(",")})  # int() takes less space than \s.
        return numbers[0] if len(numbers) == 1 else Calls(f"{{{','.join(map(str, numbers))}}}"), several.end()
    bounds = _RANGE.match(text)
    if bounds is not None:
        start, stop, step = [int(bound) if bound else None for bound in bounds.groups()]
        if step == 0 or (stop is not None and stop <= (start or 0)):
            return None, bounds.end()
        stride = f":{step}" if step not in (None, 1) else ""
        return Calls(f"{start or ''}:{'' if stop is None else stop}{stride}"), bounds.end()
    one = re.compile(r"\d{1,10}").match(text)
    return (int(one.group()), one.end()) if one is not None else (None, 0)
