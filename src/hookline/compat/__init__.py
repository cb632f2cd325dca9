"""Five older libraries, rebuilt on hookline's public API: their names and documented behaviour.

| old import | new import |
|---|---|
| `torch_hook_utils` | `hookline.compat.torch_hook_utils` |
| `tacklebox` | `hookline.compat.tacklebox` |
| `nice_hooks` | `hookline.compat.nice_hooks` |
| `torchhook` | `hookline.compat.torchhook` |
| `Auto_HookPoint` | `hookline.compat.auto_hookpoint` |

To switch, change the import lines. For a script that can't be edited, call `install`; importing hookline alone installs
nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

import hookline as hl

__all__ = ["install"]

NAMES = {
    "torch_hook_utils": "torch_hook_utils",
    "tacklebox": "tacklebox",
    "nice_hooks": "nice_hooks",
    "torchhook": "torchhook",
    "Auto_HookPoint": "auto_hookpoint",
}


def __getattr__(name: str) -> ModuleType:
    if name not in NAMES.values():
        raise AttributeError(f"module 'hookline.compat' has no attribute {name!r}")
    return importlib.import_module(f"hookline.compat.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *NAMES.values()})


def install(*names: str, over: bool = False) -> None:
    """Make `import nice_hooks` (and its submodules) import hookline's version, from now on and only in this process.

    To run a script that can't be edited::

        import runpy
        from hookline.compat import install

        install("nice_hooks", "torchhook")
        runpy.run_path("their_script.py", run_name="__main__")

    Args:
        names: The libraries that the script imports, of torch_hook_utils, tacklebox, nice_hooks, torchhook and
            Auto_HookPoint.
        over: Do this even if the original is installed or imported. Code that already imported the original keeps it.
    """
    if not names:
        raise hl.HooklineError(f"install() needs the names of one or more libraries: {', '.join(NAMES)}")
    for name in names:
        _refuse_unknown(name)
    wanted = [name for name in names if name not in _finder.names]
    for name in wanted if not over else ():
        _refuse_original(name)
    for name in wanted:
        for module in [found for found in sys.modules if found.partition(".")[0] == name]:
            del sys.modules[module]
    _finder.names.update(wanted)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class Finder(MetaPathFinder):
    """Finds the modules of the installed libraries, before any other finder does."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of hookline's module for this name, or None if hookline has none."""
        top, _, rest = fullname.partition(".")
        if top not in self.names:
            return None
        ours = ".".join(filter(None, (__name__, NAMES[top], rest)))
        if rest and importlib.util.find_spec(ours) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, Alias(ours))


class Alias(Loader):
    """Makes one of hookline's modules importable under a second name. Both names give the same module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that Python created with hookline's module."""
        sys.modules[module.__name__] = importlib.import_module(self.name)


_finder = Finder()


def _refuse_unknown(name: str) -> None:
    if name in NAMES:
        return
    folded = {known.lower(): known for known in NAMES}
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), folded, n=1)
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"there are {', '.join(NAMES)}"
    raise hl.HooklineError(f"{name!r} is not one of the libraries in hookline.compat; {hint}")


def _refuse_original(name: str) -> None:
    """Raise if the original library is imported or installed."""
    if name in sys.modules:
        raise hl.HooklineError(
            f"{name!r} is already imported; call install before that import, or pass over=True to get hookline's "
            "version from now on"
        )
    spec = importlib.util.find_spec(name)
    if spec is not None:
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        raise hl.HooklineError(
            f"{name!r} is installed ({where}); uninstall it, or pass over=True to get hookline's version in this "
            "process"
        )
