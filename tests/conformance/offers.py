"""Find out what a result offers of `FEATURES`: each function uses a feature once."""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import hookline as hl
from tests.conformance.subjects import (
    BY_NAME,
    COPIES,
    EQUALITY,
    FRAME,
    NAMES_EXTRA,
    NO_MAPPING,
    ODD_KEYS,
    PLOT,
    REFUSES_LOAD,
    SAVE,
    SPELLINGS,
    STRANGE,
    STRANGERS,
    Subject,
)


def offers(feature: str, subject: Subject, result: Any, folder: Path) -> bool:
    """Return True if a result offers a feature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)
        try:
            return _PROBES[feature](subject, result, folder)
        except (AttributeError, TypeError, LookupError, RuntimeError):
            return False


@contextlib.contextmanager
def without(package: str) -> Iterator[None]:
    """Make it impossible to import a package."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, package, None)
        yield


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two objects are equal; `!=` has to say the opposite of `==`, and from both sides."""
    found = bool(one == other)
    assert [bool(other == one), not operator.ne(one, other), not operator.ne(other, one)] == [found] * 3
    return found


def copies(result: Any) -> list[Any]:
    """Return copies of a result, made in every way that Python has."""
    pickles = [pickle.loads(pickle.dumps(result, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [copy.copy(result), copy.deepcopy(result), *pickles]


def _frame(_subject: Subject, result: Any, _folder: Path) -> bool:
    return hasattr(result, "to_frame")


def _names_extra(_subject: Subject, result: Any, _folder: Path) -> bool:
    with without("pandas"):
        try:
            result.to_frame()
        except hl.HooklineError as error:
            return str(error) == "to_frame() needs pandas: pip install 'hookline[pandas]'"
    return False


def _plot(_subject: Subject, result: Any, _folder: Path) -> bool:
    return hasattr(result, "plot")


def _save(_subject: Subject, result: Any, _folder: Path) -> bool:
    return hasattr(result, "save") and hasattr(result, "load")


def _refuses_load(_subject: Subject, result: Any, folder: Path) -> bool:
    result.save(folder / "to_load", overwrite=True)
    with contextlib.suppress(hl.HooklineError):
        result.load(folder / "to_load")
        return False
    return True


def _copies(_subject: Subject, result: Any, _folder: Path) -> bool:
    return all(type(one) is type(result) and str(one) == str(result) for one in copies(result))


def _equality(subject: Subject, result: Any, folder: Path) -> bool:
    same, other = subject.again(folder), subject.again(folder, 1)
    try:
        return are_equal(result, same) and not are_equal(result, other)
    finally:
        for one in (same, other) if subject.close is not None else ():
            subject.close(one)


def _no_mapping(_subject: Subject, result: Any, _folder: Path) -> bool:
    plain = dict(result) if isinstance(result, Mapping) else list(result)
    return not are_equal(result, plain)


def _strangers(_subject: Subject, result: Any, _folder: Path) -> bool:
    return not any(other in result for other in STRANGE)


def _by_name(subject: Subject, result: Any, _folder: Path) -> bool:
    return all(result[name] is not None for name in subject.names)


def _spellings(subject: Subject, result: Any, _folder: Path) -> bool:
    sites = [hl.Site.parse(name) for name in subject.names]
    keys = [*sites, *(f"{name}:output" for name in subject.names if name)]
    return all(key in result and result[key] is not None for key in keys)


def _odd_keys(subject: Subject, result: Any, _folder: Path) -> bool:
    for key in STRANGE:
        try:
            result[key]
        except subject.error:
            continue
        return False
    return True


_PROBES: dict[str, Callable[[Subject, Any, Path], bool]] = {
    FRAME: _frame,
    NAMES_EXTRA: _names_extra,
    PLOT: _plot,
    SAVE: _save,
    REFUSES_LOAD: _refuses_load,
    COPIES: _copies,
    EQUALITY: _equality,
    NO_MAPPING: _no_mapping,
    STRANGERS: _strangers,
    BY_NAME: _by_name,
    SPELLINGS: _spellings,
    ODD_KEYS: _odd_keys,
}
