"""What the options of hooks may be; what means nothing is refused before the model runs."""

from __future__ import annotations

from typing import Any

import torch

from hookline.errors import HooklineError, SiteError
from hookline.sites import Site


def limit_of(keep: str | int) -> int | None:
    """Return how many calls are kept, None for all."""
    if keep == "last":
        return 1
    if keep == "all":
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise HooklineError(f'keep={keep!r} is not "last", "all" or a number of calls')
    return keep


def refuse_options(clone: Any, device: Any, dtype: Any, transform: Any, with_call: bool) -> None:
    """Raise for an option of capture that means nothing, before the model runs."""
    refuse_clone(clone)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise HooklineError(f"dtype={dtype!r} is not a torch.dtype, such as torch.float16")
    if transform is not None and not callable(transform):
        raise HooklineError(f"transform={transform!r} is not a function of the value")
    if with_call and transform is None:
        raise HooklineError("with_call=True gives the call to a transform; give one")
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise HooklineError(f"device={device!r} is not a device: {str(error).splitlines()[0]}") from None


def refuse_clone(clone: Any) -> None:
    """Raise for what `clone` can't be."""
    if clone not in (None, True, False):
        raise HooklineError(f"clone={clone!r} is not None, True or False")


def refuse_skip(site: Site) -> None:
    """Raise where there is nothing to skip."""
    if site.port == "param":
        raise SiteError(f"'{site}': a parameter is read, and there is nothing to skip; patch puts a value in its place")
    if site.port != "output" or site.index:
        what = "method" if site.method else "function" if site.function else "module"
        raise SiteError(f"'{site}': a {what} is skipped as a whole; name it without a port or subscripts")
