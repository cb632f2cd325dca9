"""The classes of transformer_lens, where it is installed: hook points and hooked models are then subclasses of them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torch import nn

from hookline.errors import warn

Kind = TypeVar("Kind", bound=type)


class Lens(NamedTuple):
    """The two classes that the interface consists of."""

    point: Any
    root: Any


@cache
def lens() -> Lens | None:
    """Return transformer_lens's HookPoint and HookedRootModule, or None where it is not installed."""
    if importlib.util.find_spec("transformer_lens") is None:
        return None
    try:
        package = importlib.import_module("transformer_lens")
        points = importlib.import_module("transformer_lens.hook_points")
    except Exception as error:  # It comes with a tree of packages, of which any may be broken.
        warn(f"transformer_lens is installed but can't be imported ({error}); hookline's own hook points are used")
        return None
    root = getattr(package, "HookedRootModule", None) or points.HookedRootModule  # It was moved in version 3.
    return Lens(points.HookPoint, getattr(root, "HookedRootModule", root))


@cache
def as_point(kind: Kind) -> Kind:
    """Return a class of hook points, as a subclass of transformer_lens's HookPoint where there is one."""
    found = lens()
    return kind if found is None else _both(kind, found.point)


@cache
def as_root(kind: Kind) -> Kind:
    """Return a class of hooked models, as a subclass of transformer_lens's HookedRootModule where there is one."""
    found = lens()
    return kind if found is None else _both(kind, found.root)


def is_lens_point(module: nn.Module) -> bool:
    """Whether a module is a hook point that its author put there, with transformer_lens."""
    points = sys.modules.get("transformer_lens.hook_points")
    return points is not None and isinstance(module, points.HookPoint)


def _both(kind: Any, other: type) -> Any:
    return type(kind.__name__, (kind, other), {"__module__": kind.__module__, "__doc__": kind.__doc__})
