"""Names on a command line become things: `module:name`, dtypes, and what transformers has by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hookline.errors import HooklineError, did_you_mean
from hookline.nodes import DTYPES

_FUNCTION = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")  # And no "C:\data" or "s3://bucket".
_IN_A_FILE = re.compile(r"(.+\.py):([^\W\d]\w*(\.\w+)*)")


def is_function(name: str) -> bool:
    """Whether a name is `package.module:name` or `folder/file.py:name`."""
    return _FUNCTION.fullmatch(name) is not None or _IN_A_FILE.fullmatch(name) is not None


def named(name: str) -> Any:
    """Return what `module:function` means; modules of the current folder are found too."""
    in_a_file = _IN_A_FILE.fullmatch(name)
    module, path = in_a_file.group(1, 2) if in_a_file else name.split(":")
    _find_modules_of(os.getcwd())
    try:
        found: Any = _loaded_file(Path(module)) if in_a_file else importlib.import_module(module)
    except (ImportError, FileNotFoundError) as error:
        told = "name a function in a module that can be imported from here, or in a file, as in folder/mine.py:net"
        raise HooklineError(f"{name!r}: {error}; {told}") from error
    where = "" if in_a_file else _elsewhere(found)
    for part in path.split("."):
        if not hasattr(found, part):
            here = f"{module.replace('.', os.sep)}.py"
            own = f"; for the file here, write {here}:{path}" if where and os.path.isfile(here) else ""
            raise HooklineError(f"{name!r}: {module!r}{where} has no {path!r}{own or did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise HooklineError(f"{name!r} is {type(found).__name__}, and no function to call")
    return found


def _elsewhere(module: ModuleType) -> str:
    """Say where a module lies, if that is not in the current folder."""
    file = getattr(module, "__file__", None)
    is_here = file is not None and Path(file).is_relative_to(Path.cwd())
    return "" if is_here else f" ({file or 'built into Python'})"


def _loaded_file(path: Path) -> ModuleType:
    """Return a file as a module: the one that `import` would give, or one of a name that nothing else has."""
    file = path.absolute()
    _find_modules_of(str(file.parent))
    if _imports(file.stem, file):  # Other processes find it by this name, too.
        return importlib.import_module(file.stem)
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise ImportError(f"{str(path)!r} can't be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imports(name: str, file: Path) -> bool:
    """Whether importing a name gives this file, and not a module of Python or of a package."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # A name with dots, or a module that was not found by a search.
        return False
    return found is not None and found.origin is not None and Path(found.origin) == file


def _find_modules_of(folder: str) -> None:
    """Let the modules of a folder be found: before those of packages, and after Python's own."""
    own = {os.path.normpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    places = [place for place, path in enumerate(sys.path) if os.path.normpath(path) in own]
    if folder not in sys.path:
        sys.path.insert(max(places, default=-1) + 1, folder)


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name, with or without "torch." before it."""
    known = {text.removeprefix("torch."): dtype for text, dtype in DTYPES.items()}
    wanted = name.removeprefix("torch.")
    if wanted not in known:
        raise HooklineError(f"{name!r} is not a dtype{did_you_mean(wanted, known)}")
    return known[wanted]


def transformers() -> Any:
    """Return the package, with no bar of its own where nobody looks."""
    try:
        import transformers
    except ImportError:
        raise HooklineError("models by name need transformers: pip install 'hookline[transformers]'") from None
    package: Any = transformers
    if not sys.stderr.isatty():
        package.utils.logging.disable_progress_bar()
    return package


def loaded(kind: Any, name: str, *, trusted: bool, **options: Any) -> Any:
    """Load something of transformers; what it has to say of a failure is many lines.

    The code that a checkpoint brings along is run only if it is trusted. Unless it is told, transformers would ask.
    """
    try:
        return kind.from_pretrained(name, trust_remote_code=trusted, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            told = "brings Python code of its own; look at it, and give --trust-remote-code to run it"
            raise HooklineError(f"{name!r} {told}") from error
        first = str(error).strip().partition("\n")[0]
        where = "" if os.path.exists(name) else "there is no such folder here, and elsewhere: "
        raise HooklineError(f"{kind.__name__} can't load {name!r}: {where}{first}") from error
