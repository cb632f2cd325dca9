"""What the options of hooks may be; what means nothing is refused before the model runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from torch import nn

from hookline._cache.budget import Budget, Folder
from hookline._options import device_here, refuse_flags_or_none, short_text
from hookline._sites.language import Site
from hookline._sites.tree import unwrap
from hookline.errors import HooklineError, SiteError
from hookline.parallel.ranks import is_sharded


def calls_of(keep: str | int) -> int | None:
    """Return how many calls are kept, None for all."""
    if keep == "last":
        return 1
    if keep == "all":
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise HooklineError(f'keep={keep!r} is not "last", "all" or a number of calls')
    return keep


def bytes_of(limit: Any, name: str = "limit") -> int:
    """Return a number of bytes that was given as one, or as text: "500 MB", "2 GiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", limit) if isinstance(limit, str) else None
    if found is not None:
        size = Decimal(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool) and math.isfinite(limit):
        size = Decimal(limit)
    else:
        size = Decimal(-1)
    if size < 0 or size != int(size):
        raise HooklineError(
            f'{name}={short_text(limit)} is not a number of bytes, nor text such as "500 MB" or "2 GiB"'
        )
    return int(size)


def budget_of(limit: Any, spill: Any, detach: bool) -> Budget | None:
    """Return what may be kept in memory, None for any number of bytes."""
    if not (isinstance(spill, (bool, str, os.PathLike)) and spill != ""):
        raise HooklineError(f"spill={spill!r} is not a folder; True is a temporary one")
    if limit is None:
        if spill:
            raise HooklineError("spill= says where to keep what is over a limit; give limit= too, in bytes")
        return None
    size = bytes_of(limit)
    if not spill:
        return Budget(size)
    if not detach:
        raise HooklineError("a value of the graph can't be on disk, as spill= asks; leave detach=False out")
    if spill is not True and not os.path.isdir(spill):
        raise HooklineError(f"spill={os.fspath(spill)!r} is not a folder; make it first, or use spill=True")
    return Budget(size, Folder(None if spill is True else os.path.abspath(spill)))


def refuse_options(clone: Any, device: Any, transform: Any, with_call: bool) -> None:
    """Raise for an option of capture that means nothing, before the model runs."""
    if clone is not None:
        refuse_flags_or_none(clone=clone)
    if transform is not None and not callable(transform):
        raise HooklineError(f"transform={transform!r} is not a function of the value")
    if with_call and transform is None:
        raise HooklineError("with_call=True gives the call to a transform; give one")
    if device is not None:
        device_here(device)


def refuse_model(model: nn.Module, given: Any, verb: str, is_place: bool = False) -> None:
    """Raise where hooks are given the model that they are on, as the short forms are, unless it is meant as a place."""
    if given is model and not is_place:
        raise SiteError(
            f"these hooks know their model; leave it out, as in hooks.{verb}(...). The place of its own output is ''"
        )


def refuse_call(model: nn.Module, given: Any) -> None:
    """Raise where hooks that call their model are given it, or a method of it to call instead, as hl.run is."""
    own = [id(model), id(unwrap(model))]
    if id(given) in own:
        raise HooklineError("hooks.run calls the model that the hooks are on; leave it out, as in hooks.run(x)")
    if callable(given) and id(getattr(given, "__self__", None)) in own:
        call = f"model.{getattr(given, '__name__', 'method')}(...)"
        raise HooklineError(f"hooks.run calls the model itself, not a method of it; write `with hooks: {call}`")


def refuse_stop(model: nn.Module, sites: Iterable[Site], detach: bool) -> None:
    """Raise where a forward that captures can't end early."""
    if any(site.is_gradient for site in sites):
        raise SiteError("stop=True ends the forward before any gradient can come; capture gradients without it")
    if not detach and is_sharded(model):
        raise HooklineError(
            "stop=True shards the weights of FSDP again at the stop, and a backward from there would need them; leave "
            "stop=True or detach=False out"
        )


def refuse_skip(site: Site) -> None:
    """Raise where there is nothing to skip."""
    if site.port == "param":
        raise SiteError(f"'{site}': a parameter is read, and there is nothing to skip; patch puts a value in its place")
    if site.port != "output" or site.index:
        what = "method" if site.method else "function" if site.function else "module"
        raise SiteError(f"'{site}': a {what} is skipped as a whole; name it without a port or subscripts")
