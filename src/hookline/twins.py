"""Hooks that are there twice, as after a notebook cell that was run twice."""

from __future__ import annotations

from types import CellType

from hookline.errors import warn
from hookline.wiring.modules import attached_to
from hookline.wiring.taps import Tap


def warn_of_twins(taps: list[Tap]) -> None:
    """Warn when a hook does the same at the same place already, as after a notebook cell that was run twice."""
    for tap in taps:
        is_watched = tap.holders or tap.method in tap.module.__dict__
        for other in attached_to(tap.module) if is_watched else ():
            same = other.active and other.site == tap.site and other.action.kind == tap.action.kind
            added_before = other.session is not tap.session or (other not in taps and other.name == tap.name)
            if same and added_before and _label(other) == _label(tap):
                whose = " from another Hooks" if other.session is not tap.session else ""
                warn(
                    f"'{tap.site}' has the same {tap.action.kind} hook{whose} already; "
                    "hl.attached(model) lists all hooks, hl.clear(model) removes hookline's"
                )
                return


def _label(tap: Tap) -> object:
    """Return what a tap does, the same for a function that was defined twice by the same lines."""
    function = getattr(tap.action, "function", None)
    code = getattr(function, "__code__", None)
    if function is not None and code is None:
        return id(function)  # An object that is called: what it does can't be told.
    if code is None:
        return repr(tap.action)
    cells = getattr(function, "__closure__", None) or ()
    owner = getattr(function, "__self__", None)
    defaults = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    held = [*map(_held_by, cells), *map(id, defaults)]
    return code.co_code, code.co_consts, code.co_names, held, id(owner)


def _held_by(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # Nothing yet.
        return 0
