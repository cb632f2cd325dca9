"""hookline: look inside and reach into any PyTorch model."""

from hookline.attached import attached, clear
from hookline.cache import Cache
from hookline.errors import (
    BadSample,
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
from hookline.harvest import Generation, Harvest, Images, Texts, harvest
from hookline.hooks import Hook, Hooks
from hookline.listing import sites
from hookline.points import HookedModel, HookPoint, auto_hook, check
from hookline.scan import scan
from hookline.sites import Site
from hookline.store.store import Store
from hookline.verbs import capture, edit, patch, run, skip

__version__ = "0.1.0"

__all__ = [
    "BadSample",
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
    "harvest",
    "patch",
    "run",
    "scan",
    "sites",
    "skip",
]
