"""hookline: look inside and reach into any PyTorch model."""

import importlib as _importlib
import typing as _typing

from hookline.attached import attached, clear
from hookline.cache import Cache
from hookline.errors import (
    BadSample,
    BadValue,
    CacheFull,
    EditError,
    HooklineError,
    HooklineWarning,
    NeverFired,
    NotCaptured,
    SiteError,
    StaleValue,
    StopForward,
    StoreError,
)
from hookline.hooks import Hook, Hooks
from hookline.listing import sites
from hookline.points import HookedModel, HookPoint, auto_hook, check
from hookline.scan import scan
from hookline.sites import Site
from hookline.verbs import capture, edit, patch, run, skip

if _typing.TYPE_CHECKING:
    from hookline.exploring.page import explore
    from hookline.harvesting import Generation, Harvest, Images, Texts, harvest
    from hookline.store.store import Store
    from hookline.sweeps import sweep
    from hookline.watching import watch

__version__ = "0.1.0"

__all__ = [
    "BadSample",
    "BadValue",
    "Cache",
    "CacheFull",
    "EditError",
    "Generation",
    "Harvest",
    "Hook",
    "HookPoint",
    "HookedModel",
    "HooklineError",
    "HooklineWarning",
    "Hooks",
    "Images",
    "NeverFired",
    "NotCaptured",
    "Site",
    "SiteError",
    "StaleValue",
    "StopForward",
    "Store",
    "StoreError",
    "Texts",
    "attached",
    "auto_hook",
    "capture",
    "check",
    "clear",
    "edit",
    "explore",
    "harvest",
    "patch",
    "run",
    "scan",
    "sites",
    "skip",
    "sweep",
    "watch",
]

# Imported when they are first asked for: to look inside a model takes none of it.
_LATER = dict.fromkeys(("Generation", "Harvest", "Images", "Texts", "harvest"), "hookline.harvesting")
_LATER["Store"] = "hookline.store.store"
_LATER["explore"] = "hookline.exploring.page"
_LATER["sweep"] = "hookline.sweeps"
_LATER["watch"] = "hookline.watching"


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    globals()[name] = found = getattr(_importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
