"""The exceptions: one base class, and each also derives from the built-in it resembles. Also how hookline warns."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any


class HooklineError(Exception):
    """The base of every error hookline raises."""


class SiteError(HooklineError, LookupError):
    """A site that can't be parsed, or that the model does not have."""


class NotCaptured(HooklineError, KeyError):
    """A value that is not in the cache; the message says why."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the message in quotes.


class NeverFired(HooklineError, RuntimeError):
    """A site at which nothing passed, or a gradient that cannot exist."""


class StaleValue(HooklineError, RuntimeError):
    """A value that the model has overwritten since it was captured."""


class EditError(HooklineError, ValueError):
    """A new value that does not fit in the place of the old one."""

    is_longer = False  # Whether the new value is longer in a dimension in which the old one has size 1.


class StoreError(HooklineError, OSError):
    """A file that can't be written, or is not what it claims to be."""


class CacheFull(HooklineError, MemoryError):
    """A capture that would keep more in memory than it may."""


class BadSample(HooklineError, RuntimeError):
    """A sample that could not be loaded, or on which the model failed; `sample` is its number."""

    sample: int | None = None


class BadValue(HooklineError, ArithmeticError):
    """A NaN, an Inf or a value over a limit that a watch has found, with what is known about it.

    `site` says where it was seen, `step`, `forward` and `call` say when, and `backward` is True for a gradient. `value`
    is the value at the site, `inputs` a Cache of the inputs, and `stats` the statistics of both and of the parameters.
    `function` is the place inside the forward that produced it, if a second run has found one.
    """

    site: Any = None
    function: Any = None
    step = 0
    forward = 0
    call = 0
    backward = False
    value: Any = None
    inputs: Any = None
    stats: Any = None


class Diverged(HooklineError, AssertionError):
    """Two models that part, where they were to do the same."""


class HooklineWarning(UserWarning):
    """The run is valid, but probably not what the user meant."""


class StopForward(BaseException):
    """Ends a forward early. Not an Exception, so that a model's `except Exception` can't catch it."""

    @property
    def owner(self) -> object:
        """The set of stops that it was raised for. Only the `run_until` that made this set catches it."""
        return self.args[0]


def warn(message: str, category: type[Warning] = HooklineWarning) -> None:
    """Warn at the user's line: the nearest one that is neither in hookline nor in torch."""
    from hookline._torch import user_frame  # Imported here, so that `import hookline` does not import torch.

    warnings.warn(message, category, stacklevel=user_frame()[1])


def first_line(said: object) -> str:
    """Return the first line of an error or a text, shortened if it is long."""
    text = str(said).partition("\n")[0] or type(said).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, unless it has one from hookline already. Python 3.10 has no notes."""
    is_noted = any(note.startswith("hookline: ") for note in getattr(error, "__notes__", ()))
    if hasattr(error, "add_note") and not is_noted:
        error.add_note(f"hookline: {text}")


def did_you_mean(text: str, names: Iterable[str], written: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'a' or 'b'?" for the nearest names, or "" if none is near.

    Args:
        written: The text to suggest for a name, where it differs from the name.
    """
    names = list(names)
    near = sorted(difflib.get_close_matches(text, names, n=3, cutoff=0.6), key=names.index)
    return f"; did you mean {' or '.join([repr((written or {}).get(one, one)) for one in near])}?" if near else ""


for _public in (
    HooklineError, SiteError, NotCaptured, NeverFired, StaleValue, EditError, StoreError, CacheFull, BadSample,
    BadValue, Diverged, HooklineWarning, StopForward,
):  # fmt: skip
    _public.__module__ = "hookline"  # So that a traceback names them as users do.
