"""Which of the hooks that are there a place means."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.sites import Site, matches_name
from hookline.where import Found
from hookline.wiring.taps import Tap


def names_output(where: Any) -> bool:
    """Whether a place says ":output" itself, where one without a port means any."""
    return ":output" in str(where[-1] if type(where) is tuple else where)


def is_at(tap: Tap, place: Found, only_output: bool) -> bool:
    """Whether a hook is at a place; one without port and subscripts means any at that module."""
    if tap.module is not place.module or not {*map(_key, tap.holders)} >= {*map(_key, place.holders)}:
        return False
    site = place.site
    if site == Site(site.path) and not only_output:
        return True
    same = tap.site._replace(path="", member="") == site._replace(path="", member="")
    return same and matches_name(tap.site.member, site.member)


def _key(holder: tuple[nn.Module, str]) -> tuple[int, str]:
    return id(holder[0]), holder[1]
