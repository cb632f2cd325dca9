"""By what functions, classes and objects are known again, in another process and after a change of their code.

Code is known by its instructions and constants and by what it names outside: other functions and classes by their own
code, variables by their values. What it names is followed up to installed packages: of those, a function or a class is
known by its own code and the version; of the standard library, torch, numpy and hookline by its name and the version.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import logging
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.harvesting.checksums import checksum

_DEEPEST = 60  # Levels of objects inside objects.
_ATOMS = (str, bytes, int, float, complex, torch.dtype, torch.Size, torch.layout, torch.memory_format)
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|meta)(:\d+)?")
_SLOT = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_MAIN = ("__main__", "__mp_main__")  # A notebook or a script; in a worker's process its file is another's.
_BY_NAME = ("torch", "numpy", "hookline", "accelerate")
_ABOUT = ("__annotate__", "__annotate_func__")  # Functions of a class that only say what types there are.
_WALKED = ("types", "argparse", "functools", "collections")  # Objects of the standard library that hold values.
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class Known:
    """Makes texts of values.

    Args:
        model: Returns the texts of which a model is made.
        opaque: The names of classes that nobody can look into are added to it.
    """

    def __init__(self, model: Callable[[nn.Module, Known], Iterable[str]], opaque: set[str] | None = None) -> None:
        self.model = model
        self.variables: dict[str, set[str]] = {}  # Those that code names outside of it.
        self.opaque = set() if opaque is None else opaque
        self._seen: dict[int, tuple[Any, str]] = {}  # By identity, with the value, so that no other takes its place.
        self._depth = 0

    def name(self, value: Any, text: str) -> None:
        """Say by what a value is known, wherever it's met."""
        self._seen[id(value)] = value, text

    def text(self, value: Any) -> str:
        """Return a text that another value would not have."""
        if value is None or isinstance(value, _ATOMS):
            return "a device" if isinstance(value, str) and _DEVICE.fullmatch(value) else repr(value)
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if self._depth > _DEEPEST:
            return "deeper"
        self._depth += 1
        self.name(value, "itself")
        try:
            text = hashed(self._parts(value))
        except Exception:  # Whatever an object does when it is looked at.
            text = type(value).__qualname__ + self._unknown(value)
        finally:
            self._depth -= 1
        self.name(value, text)
        return text

    def _parts(self, value: Any) -> Iterator[str]:
        """Return the texts of which a value is made."""
        yield type(value).__qualname__
        if isinstance(value, Tensor):
            yield checksum(value).hex()
        elif isinstance(value, torch.device):
            return  # Where something runs is not what it is.
        elif inspect.isfunction(value):
            yield from self._function(value)
        elif inspect.iscode(value):
            yield from self._code(value)
        elif inspect.ismethod(value):
            yield from map(self.text, (value.__func__, value.__self__))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, (staticmethod, classmethod)):
            yield self.text(value.__func__)
        elif isinstance(value, property):
            yield from map(self.text, (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            yield from map(self.text, (value.func, value.args, value.keywords))
        elif isinstance(value, (set, frozenset)):
            yield from sorted(map(self.text, value))
        elif isinstance(value, Mapping):
            yield from (self.text(one) for pair in value.items() for one in pair)
        elif isinstance(value, (list, tuple, deque)):
            is_flat = {*map(type, value)} <= {int, float, bool}  # There may be millions.
            yield from [repr(list(value))] if is_flat else map(self.text, value)
        else:
            yield from self._object(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        """Return the code of a function, what it closes over, its defaults, and what it finds outside."""
        home = function.__globals__.get("__name__", "")
        yield function.__qualname__
        yield self.text([cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)])
        yield self.text(vars(function))
        if kind(home) == "named":
            yield f"{home} {version(home)}"
            return
        yield from self._code(function.__code__, function.__doc__)
        if kind(home) == "ours":
            yield self.text([function.__defaults__, function.__kwdefaults__])
            yield from self._outside(function)

    def _code(self, code: types.CodeType, docstring: str | None = None) -> Iterator[str]:
        """Return instructions, names and constants; what a docstring says changes nothing."""
        constants = code.co_consts[1:] if docstring and code.co_consts[:1] == (docstring,) else code.co_consts
        yield from (code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex(), repr(code.co_names))
        yield from map(self.text, constants)

    def _outside(self, function: types.FunctionType) -> Iterator[str]:
        """Return the functions and classes that code names; note the variables."""
        found = function.__globals__
        used = {name: found[name] for name in _names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME") if name in found}
        for key, module in list(used.items()):
            if isinstance(module, types.ModuleType) and kind(module.__name__) == "ours":
                names = _names(function.__code__, "LOAD_ATTR", "LOAD_METHOD")
                used |= {f"{key}.{name}": vars(module)[name] for name in names if name in vars(module)}
        for name, value in sorted(used.items()):
            if isinstance(value, types.ModuleType) or type(value).__module__ == "typing":
                continue
            if isinstance(value, type) or inspect.isroutine(value):
                yield name + self.text(value)
            else:
                self.variables.setdefault(name, set()).add(self.text(value))

    def _class(self, found: type) -> Iterator[str]:
        """Return the code of a class and of those that it's made of."""
        yield found.__qualname__.removeprefix("FSDP")  # So does fully_shard rename them.
        for base in found.__mro__:
            if kind(base.__module__) == "named":
                continue
            for name, value in sorted((name, value) for name, value in vars(base).items() if name not in _ABOUT):
                is_code = isinstance(value, (staticmethod, classmethod, property, functools.partial, type))
                if is_code or inspect.isfunction(value) or hasattr(type(value), "__get__"):
                    yield "" if isinstance(value, _SLOT) else name + self.text(value)
                elif not name.startswith(("__", "_abc_")) and kind(base.__module__) == "ours":
                    self.variables.setdefault(f"{base.__qualname__}.{name}", set()).add(self.text(value))

    def _object(self, value: Any) -> Iterator[str]:
        """Return an object's class and its values."""
        home = type(value).__module__
        if callable(getattr(value, "fingerprint", None)) and not isinstance(value, nn.Module):
            yield str(value.fingerprint())
            return
        if isinstance(value, nn.Module):
            yield from self.model(value, self)
            return
        yield self.text(type(value))
        state = dict(held(value))
        if hasattr(value, "tobytes"):  # numpy's, and images.
            is_of_objects = getattr(getattr(value, "dtype", None), "hasobject", False)
            yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}"
            yield self.text(value.tolist()) if is_of_objects else hashlib.blake2b(value.tobytes()).hexdigest()
        elif inspect.isroutine(value):
            yield f"{getattr(value, '__module__', '')} {value.__qualname__}"
            owner = getattr(value, "__self__", None)
            yield "" if isinstance(owner, types.ModuleType) else self.text(owner)
        elif isinstance(value, torch.ScriptObject):
            yield self._scripted(value)
        elif _is_standard(home) and home.partition(".")[0] not in _WALKED:
            text = repr(value)
            is_plain = " at 0x" not in text and not isinstance(value, logging.Logger)
            yield text if is_plain else self._unknown(value)
        elif state and not home.startswith(("torch.distributed", "torch._dynamo")):
            yield from (name + self.text(one) for name, one in sorted(state.items()) if name not in ORIGIN_NAMES)
        elif not hasattr(value, "__dict__") and " at 0x" in repr(value):
            yield self._unknown(value)
        elif not state:
            yield re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    def _scripted(self, value: Any) -> str:
        try:
            return self.text(value.__getstate__())
        except Exception:  # A class that can't be pickled has none.
            return self._unknown(value)

    def _unknown(self, value: Any) -> str:
        if not _is_standard(type(value).__module__):
            self.opaque.add(f"{type(value).__module__}.{type(value).__qualname__}")
        return ""


# Attributes that say where a model came from or is, not what it is.
ORIGIN_NAMES = frozenset(
    {"name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "hf_device_map", "_is_hf_initialized"}
)


def hashed(texts: Iterable[str]) -> str:
    """Return a short text that other texts would not have."""
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        found.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return found.hexdigest()


def held(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the values of an object by name, those in slots too."""
    yield from (getattr(value, "__dict__", None) or {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@functools.cache
def kind(module: str) -> str:
    """Return whether the code of a Python module is "ours", "installed", or known by its name alone: "named"."""
    top = module.partition(".")[0]
    if top in _MAIN:
        return "ours"
    if top in _BY_NAME or _is_standard(module):
        return "named"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "installed" if re.search(r"[/\\](site|dist)-packages[/\\]", file) else "ours"


@functools.cache
def _is_standard(module: str) -> bool:
    """Return whether a Python module comes with Python."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return module.partition(".")[0] in sys.stdlib_module_names
    return file.startswith(_STANDARD) and not re.search(r"[/\\](site|dist)-packages[/\\]", file)


def version(module: str) -> str:
    """Return the version of the package of a Python module, without what says how it was built."""
    found = sys.modules.get(module.partition(".")[0])
    return str(getattr(found, "__version__", "")).partition("+")[0]


def _names(code: types.CodeType, *instructions: str) -> set[str]:
    """Return what instructions of code name, and of the code inside it: comprehensions, lambdas, inner functions."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in instructions}
    return found.union(*(_names(one, *instructions) for one in code.co_consts if inspect.iscode(one)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
