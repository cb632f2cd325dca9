"""hookline: look inside and reach into any PyTorch model.

Only the errors are imported with hookline. Every other name is imported when it is first used, and torch with it, so
that the command line can show its help and complete words without waiting for torch.
"""

import importlib as _importlib
import typing as _typing

from hookline.errors import (
    BadSample,
    BadValue,
    CacheFull,
    Diverged,
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

if _typing.TYPE_CHECKING:
    from hookline._cache.cache import Cache
    from hookline._compare.compare import compare
    from hookline._compare.report import Comparison
    from hookline._engine.offload import pinned
    from hookline._engine.sequences import tell_tokens
    from hookline._explore.explore import explore
    from hookline._harvest.generation import Generation
    from hookline._harvest.harvest import Harvest, harvest
    from hookline._harvest.texts_and_images import Images, Texts
    from hookline._hooks.hooks import Hook, Hooks
    from hookline._hooks.list_and_clear import attached, clear
    from hookline._hooks.short_forms import capture, edit, patch, run, skip
    from hookline._scan.list_sites import sites
    from hookline._scan.scan import scan
    from hookline._sites.language import Site
    from hookline._store.store import Store
    from hookline._sweep.result import Sweep
    from hookline._sweep.sweep import sweep
    from hookline._values.tokens import tokens
    from hookline._watch.watch import watch
    from hookline.points.check import check
    from hookline.points.hook_points import HookPoint
    from hookline.points.hooked_model import HookedModel, auto_hook

__version__ = "0.1.0"

__all__ = [
    "BadSample",
    "BadValue",
    "Cache",
    "CacheFull",
    "Comparison",
    "Diverged",
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
    "Sweep",
    "Texts",
    "attached",
    "auto_hook",
    "capture",
    "check",
    "clear",
    "compare",
    "edit",
    "explore",
    "harvest",
    "patch",
    "pinned",
    "run",
    "scan",
    "sites",
    "skip",
    "sweep",
    "tell_tokens",
    "tokens",
    "watch",
]

# Where each name that is imported on first use is defined.
_LATER = {
    "hookline._cache.cache": ("Cache",),
    "hookline._compare.compare": ("compare",),
    "hookline._compare.report": ("Comparison",),
    "hookline._engine.offload": ("pinned",),
    "hookline._engine.sequences": ("tell_tokens",),
    "hookline._explore.explore": ("explore",),
    "hookline._harvest.generation": ("Generation",),
    "hookline._harvest.harvest": ("Harvest", "harvest"),
    "hookline._harvest.texts_and_images": ("Images", "Texts"),
    "hookline._hooks.hooks": ("Hook", "Hooks"),
    "hookline._hooks.list_and_clear": ("attached", "clear"),
    "hookline._hooks.short_forms": ("capture", "edit", "patch", "run", "skip"),
    "hookline._scan.list_sites": ("sites",),
    "hookline._scan.scan": ("scan",),
    "hookline._sites.language": ("Site",),
    "hookline._store.store": ("Store",),
    "hookline._sweep.result": ("Sweep",),
    "hookline._sweep.sweep": ("sweep",),
    "hookline._values.tokens": ("tokens",),
    "hookline._watch.watch": ("watch",),
    "hookline.points": ("HookPoint", "HookedModel", "auto_hook", "check"),
}
_HOMES = {name: module for module, names in _LATER.items() for name in names}
_MODULES = ("callbacks", "compat", "parallel", "points")


def __getattr__(name: str) -> _typing.Any:
    home = f"hookline.{name}" if name in _MODULES else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    try:
        module = _importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("hookline."):
            raise
        raise AttributeError(f"module 'hookline' has no attribute {name!r}: {error.name!r} was removed") from error
    if name in _MODULES:
        return module
    globals()[name] = found = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
