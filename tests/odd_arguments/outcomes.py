"""The outcome of a call with an odd argument: success, an error or warning of hookline's, or some other error."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import hookline as hl
from tests.odd_arguments.calls import CALLS, Given, World
from tests.odd_arguments.values import ODD

DONE, SPOKE, FAILED = "done", "spoke", "failed"


def outcome(name: str, folder: Path, /, **odd: str) -> tuple[str, str]:
    """Call a public function with one argument replaced; return the outcome and the text of the error or warning."""
    given = {parameter: ODD[label]() for parameter, label in odd.items()}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            CALLS[name](World(folder), Given(**given))
    except (hl.HooklineError, TypeError) as error:  # Python raises TypeError for a wrong signature or type.
        return (SPOKE if str(error) else FAILED), str(error)
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    words = [str(one.message) for one in said if issubclass(one.category, hl.HooklineWarning)]
    return (SPOKE, words[0]) if words else (DONE, "")
