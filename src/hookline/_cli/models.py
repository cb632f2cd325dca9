"""MODEL on a command line: `module:name`, or a transformers checkpoint or config.json.

Each becomes a small object that can be pickled and that returns the model when it is called. `import_name` imports
the object named by `module:name`, which --data, --input and --loss take too.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hookline._cli.output import note
from hookline._kernel import dtype_of
from hookline.errors import HooklineError, did_you_mean

_FUNCTION = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")  # Does not match "C:\data" or "s3://bucket".
_IN_A_FILE = re.compile(r"(.+\.py):([^\W\d]\w*(\.\w+)*)")


def is_function(name: str) -> bool:
    """Return True if a name is `package.module:name` or `folder/file.py:name`."""
    return _FUNCTION.fullmatch(name) is not None or _IN_A_FILE.fullmatch(name) is not None


def import_name(name: str) -> Any:
    """Import the object named by `module:name`; the module may be in the current folder."""
    in_a_file = _IN_A_FILE.fullmatch(name)
    module, path = in_a_file.group(1, 2) if in_a_file else name.split(":")
    _find_modules_of(os.getcwd())
    try:
        found: Any = _loaded_file(Path(module)) if in_a_file else importlib.import_module(module)
    except (ImportError, FileNotFoundError) as error:
        remedy = "name a function in a module that can be imported from here, or in a file, as in folder/mine.py:net"
        raise HooklineError(f"{name!r}: {error}; {remedy}") from error
    where = "" if in_a_file else _elsewhere(found)
    for part in path.split("."):
        if not hasattr(found, part):
            here = f"{module.replace('.', os.sep)}.py"
            own = f"; for the file here, write {here}:{path}" if where and os.path.isfile(here) else ""
            raise HooklineError(f"{name!r}: {module!r}{where} has no {path!r}{own or did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise HooklineError(f"{name!r} is {type(found).__name__}, not a function to call")
    return found


def _elsewhere(module: ModuleType) -> str:
    """Say where a module is, if it is not in the current folder."""
    file = getattr(module, "__file__", None)
    is_here = file is not None and Path(file).is_relative_to(Path.cwd())
    return "" if is_here else f" ({file or 'built into Python'})"


def _loaded_file(path: Path) -> ModuleType:
    """Import a file: under its own name if `import` would find this file, otherwise under a unique name."""
    file = path.absolute()
    _find_modules_of(str(file.parent))
    if _imports(file.stem, file):  # Other processes can import it by this name too.
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
    """Return True if importing a name loads this file, and not a standard or installed module of the same name."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # The name has dots, or is a loaded module without a spec.
        return False
    return found is not None and found.origin is not None and Path(found.origin) == file


def _find_modules_of(folder: str) -> None:
    """Put a folder on sys.path: after Python's own modules, before installed packages."""
    own = {os.path.normpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    places = [place for place, path in enumerate(sys.path) if os.path.normpath(path) in own]
    if folder not in sys.path:
        sys.path.insert(max(places, default=-1) + 1, folder)


def transformers() -> Any:
    """Import transformers; without a terminal, its progress bars are off."""
    try:
        import transformers
    except ImportError:
        raise HooklineError("models by name need transformers: pip install 'hookline[transformers]'") from None
    package: Any = transformers
    if not sys.stderr.isatty():
        package.utils.logging.disable_progress_bar()
    return package


def load_pretrained(kind: Any, name: str, *, trusted: bool, **options: Any) -> Any:
    """Load something with transformers, and shorten its error messages to one line.

    Code that comes with a checkpoint runs only if `trusted` is True; with None, transformers would ask the user.
    """
    try:
        return kind.from_pretrained(name, trust_remote_code=trusted, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            remedy = "comes with Python code; read it, and give --trust-remote-code to run it"
            raise HooklineError(f"{name!r} {remedy}") from error
        first = str(error).strip().partition("\n")[0]
        where = "" if os.path.exists(name) else "there is no such folder here, and the Hub says: "
        raise HooklineError(f"{kind.__name__} can't load {name!r}: {where}{first}") from error


_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_SEED = 0


@dataclass(frozen=True)
class ModelOptions:
    """The options for running a model: device, dtype, attention implementation."""

    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    trusted: bool = False  # True if the code that comes with a checkpoint may run.

    @property
    def for_transformers(self) -> dict[str, Any]:
        """The options for `from_pretrained`."""
        attention = {} if self.attention is None else {"attn_implementation": self.attention}
        return {"trusted": self.trusted, **attention}

    def placed(self, model: nn.Module) -> nn.Module:
        """Return a model ready to run, on a GPU if there is one; each process of a launcher takes a different GPU."""
        device = self.device
        if device is None and torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
            device = f"cuda:{local % torch.cuda.device_count()}"
        try:
            model = model.eval().to(device or "cpu")
        except (RuntimeError, AssertionError) as error:
            first = str(error).partition("\n")[0]
            raise HooklineError(f"the model can't be put on {device!r}: {first}") from error
        return self.cast(model)

    def cast(self, model: nn.Module) -> nn.Module:
        """Return a model in the dtype of --dtype."""
        return model if self.dtype is None else model.to(dtype_of(self.dtype))


@dataclass(frozen=True)
class PretrainedModel:
    """A pretrained transformers model, loaded as the class it was saved as, so that its module names are the same."""

    name: str
    options: ModelOptions

    def __call__(self) -> nn.Module:
        kind = _kind(_config(self.name, self.options))
        return self.options.placed(load_pretrained(kind, self.name, **self.options.for_transformers))

    def empty(self) -> nn.Module:
        """Return the model without weights: enough to see what it would do."""
        with torch.device("meta"):
            return self.options.cast(_built(_config(self.name, self.options), self.options.trusted).eval())


@dataclass(frozen=True)
class ConfigModel:
    """A model from a transformers config, with random weights, which are the same each time."""

    name: str
    options: ModelOptions

    def __call__(self) -> nn.Module:
        note(f"{Path(self.name).name!r} is a config without weights: they are random, with seed {_SEED}")
        with _seeded():
            return self.options.placed(_built(_config(self.name, self.options), self.options.trusted))

    def empty(self) -> nn.Module:
        """Return the model without weights: enough to see what it would do."""
        return PretrainedModel(self.name, self.options).empty()


@dataclass(frozen=True)
class UserModel:
    """A user's model: an instance, or a function or class that returns one."""

    name: str
    options: ModelOptions

    def __call__(self) -> nn.Module:
        with _seeded():  # Importing a module may create a model.
            found = import_name(self.name)
        if not isinstance(found, nn.Module):
            _refuse_arguments(self.name, found)
            with _seeded():
                found = found()
        if not isinstance(found, nn.Module):
            raise HooklineError(f"{self.name!r} gives {type(found).__name__}, not a model")
        if self.options.attention is not None:
            _choose_attention(self.name, found, self.options.attention)
        return self.options.placed(found)


Model = PretrainedModel | ConfigModel | UserModel


def model_of(name: str, options: ModelOptions) -> Model:
    """Return an object that returns the model when it is called."""
    if is_function(name):
        return UserModel(name, options)
    path = Path(name)
    known = str(path.absolute()) if path.exists() else name  # Another process may have another working folder.
    return ConfigModel(known, options) if _has_no_weights(path) else PretrainedModel(known, options)


def _has_no_weights(path: Path) -> bool:
    """Return True if a path is a config.json, or a folder with one and without weights."""
    if path.is_file():
        return path.suffix == ".json"
    is_config = path.is_dir() and (path / "config.json").is_file()
    return is_config and not any(any(path.glob(weights)) for weights in _WEIGHTS)


def _config(name: str, options: ModelOptions) -> Any:
    return load_pretrained(transformers().AutoConfig, name, **options.for_transformers)


def _kind(config: Any) -> Any:
    """Return the class that a model was saved as."""
    package = transformers()
    saved = next(iter(getattr(config, "architectures", None) or []), None)
    own = getattr(config, "auto_map", None) or {}  # The checkpoint's own classes, by Auto class.
    maker = next((auto for auto, path in own.items() if str(path).rpartition(".")[2] == saved), "AutoModel")
    return getattr(package, saved or maker, getattr(package, maker, package.AutoModel))


def _built(config: Any, trusted: bool) -> nn.Module:
    """Create a model from a config, as the class it was saved as."""
    kind = _kind(config)
    try:
        is_auto = hasattr(kind, "from_config")
        model: nn.Module = kind.from_config(config, trust_remote_code=trusted) if is_auto else kind(config)
    except (ValueError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        raise HooklineError(f"{type(config).__name__} can't be made into a model: {first}") from error
    return model


def _refuse_arguments(name: str, maker: Callable[..., Any]) -> None:
    """Raise for a function that needs arguments."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # A builtin has no signature.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise HooklineError(f"{name!r}: {error}; name a function that needs none and returns the model") from None


def _choose_attention(name: str, model: nn.Module, attention: str) -> None:
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise HooklineError(f"--attention is for transformers models, and {name!r} gives {type(model).__name__}")
    choose(attention)


@contextmanager
def _seeded() -> Iterator[None]:
    """Make random weights the same each time; the global random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        yield
