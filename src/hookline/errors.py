"""The exceptions, as a tree: one base class, and each also the built-in it resembles."""

from __future__ import annotations

import difflib
import dis
import os
import warnings
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

from hookline._torch import frame_at, outside

_NOT_THE_USERS = ("hookline", "torch", "contextlib", "functools", "_collections_abc", "copy")
Line = tuple[CodeType, int]  # A line of a program, by its code and number.


class HooklineError(Exception):
    """The base of every error hookline raises."""


class SiteError(HooklineError, LookupError):
    """A place that can't be read as one, or that the model does not have."""


class NotCaptured(HooklineError, KeyError):
    """A value that is not in the cache, and why."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the message in quotes.


class NeverFired(HooklineError, RuntimeError):
    """A site at which nothing passed, or a gradient that cannot exist."""


class StaleValue(HooklineError, RuntimeError):
    """A value that the model has overwritten since it was captured."""


class EditError(HooklineError, ValueError):
    """A new value that does not fit in the place of the old one."""

    is_longer = False  # Whether it is because the old one has a single position where the new one has several.


class StoreError(HooklineError, OSError):
    """A file that can't be written, or is not what it claims to be."""


class CacheFull(HooklineError, MemoryError):
    """More than a capture may keep in memory."""


class BadSample(HooklineError, RuntimeError):
    """A sample that could not be loaded, or on which the model failed; `sample` is its number."""

    sample: int | None = None


class BadValue(HooklineError, ArithmeticError):
    """A NaN, an Inf or a value over a limit that a watch has found, and what is known of it.

    `site` is where it was seen, `step`, `forward` and `call` when, `backward` whether it is a gradient. `value` is what
    passed there, `inputs` a Cache of what went in, `stats` the statistics of both and of the parameters; `function` is
    the place inside a forward that made it, where a second run has shown one.
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


class HooklineWarning(UserWarning):
    """The run is valid, but probably not what was meant."""


class StopForward(BaseException):
    """Ends a forward early. Not an Exception, so that a model's `except Exception` can't eat it."""

    @property
    def owner(self) -> object:
        """What is to catch it."""
        return self.args[0]


def warn(message: str, category: type[Warning] = HooklineWarning) -> None:
    """Warn at the line of the user: the nearest that is neither hookline's nor torch's."""
    warnings.warn(message, category, stacklevel=_user_frame()[1])


def user_line() -> Line | None:
    """Return the line of the user that runs."""
    frame = _user_frame()[0]
    return None if frame is None else (frame.f_code, frame.f_lineno)


def calling_line() -> Line:
    """Return the line that called the function that asks."""
    frame = frame_at(2)
    return frame.f_code, frame.f_lineno


def is_thrown_away(line: Line | None) -> bool:
    """Whether a statement on this line runs and drops what it has made itself, and not what a variable held."""
    frame = _user_frame()[0]
    if frame is None or line is None or frame.f_code is not line[0] or frame.f_lineno != line[1]:
        return False  # By identity: a cell of a notebook that runs again has other code that is equal.
    return not _gives_up_variable(frame)


def is_given_up() -> bool:
    """Whether the user's statement that runs drops what a variable held on purpose: by `del`, or for something else."""
    frame = _user_frame()[0]
    return frame is not None and _gives_up_variable(frame)


def _gives_up_variable(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("STORE", "DELETE"))


def line_text(line: Line) -> str:
    """Return a line as its file's name and its number."""
    return f"{os.path.basename(line[0].co_filename)}:{line[1]}"


def _user_frame() -> tuple[FrameType | None, int]:
    """Return the nearest frame of the user's own code, and its stacklevel as seen by the caller."""
    frame, steps = outside(_NOT_THE_USERS, frame_at(2))
    return frame, 2 + steps


def first_line(said: object) -> str:
    """Return the first line of an error or of what a file says, cut where it is long."""
    text = str(said).partition("\n")[0] or type(said).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def note_stop(error: BaseException, model: str) -> None:
    """Add to an error of a caller that can't go on with None why a model that was stopped has returned that."""
    if isinstance(error, (TypeError, AttributeError)) and "None" in str(error) and hasattr(error, "add_note"):
        error.add_note(  # Python 3.11.
            f"hookline: the call of {model} returned None, since its forward was stopped. To stop what calls it too, "
            "give that to hl.run: hl.run(model.generate, ..., capture=..., stop=True)"
        )


def did_you_mean(text: str, names: Iterable[str], written: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'a' or 'b'?" for the nearest names, or nothing.

    Args:
        written: What to write for a name, where that is not the name itself.
    """
    names = list(names)
    near = sorted(difflib.get_close_matches(text, names, n=3, cutoff=0.6), key=names.index)
    return f"; did you mean {' or '.join([repr((written or {}).get(one, one)) for one in near])}?" if near else ""


for _public in (
    HooklineError, SiteError, NotCaptured, NeverFired, StaleValue, EditError, StoreError, CacheFull, BadSample,
    BadValue, HooklineWarning, StopForward,
):  # fmt: skip
    _public.__module__ = "hookline"  # So that a traceback names them as users do.
