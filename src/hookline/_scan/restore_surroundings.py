"""Undo the changes that a trial run of a model makes outside of the model's modules.

A trial run makes tensors that must not outlive it: fake ones, and copies of the parameters. The code of a model may
keep one in a global, a class, a closure, another object or a cache, such as a table that a function computes once.
`Surroundings` finds all of these before the run, and restores them if one kept a tensor of the run.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from opcode import opmap
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hookline._kernel import ATOMS
from hookline._scan.restore_modules import holds_same
from hookline.errors import HooklineError

CONTAINERS = (list, dict, set, deque)
_PLAIN = tuple(kind for kind in ATOMS if kind is not type)
_EMPTY = object()  # Stands for a slot without a value.
NOT_ENTERED = (*_PLAIN, BuiltinFunctionType, CodeType, FrameType, ModuleType)
_LARGEST, _MOST = 10_000, 300_000  # Larger containers are data and are skipped; the search ends after _MOST objects.
_NEVER_HOLD = frozenset((*NOT_ENTERED, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType))
_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)
_IMPORT = opmap["IMPORT_NAME"]
_IS_HEAP_TYPE = 1 << 9  # A bit of `type.__flags__`; the attributes of classes without it can't change.
# Code of these packages keeps nothing from a run of a model. Objects of the modules in `_HOLDING` can hold tensors.
# pytest is one of them because it rewrites each `assert` of a test file to call its own code: from there a search would
# reach the session, and so every test.
_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "hookline", "pytest", "_pytest"))
_NAMES_OF_TORCH = ("torch", "nn", "F", "Tensor")  # The names under which modules import torch or parts of it.
_HOLDING = frozenset(("builtins", "collections", "functools", "types", "weakref", "_thread"))


class TrialRun(Protocol):
    """A run whose tensors must not outlive it, on fake tensors or on copies."""

    def lives(self) -> bool:
        """Return True if something still holds a tensor of the run."""

    def kept(self) -> list[Tensor]:
        """Return the tensors of the run that something still holds."""


class Surroundings:
    """A snapshot, from before the run, of everything outside of a model's modules that its code can reach."""

    def __init__(self, model: nn.Module) -> None:
        self._caches: list[Any] = []  # The garbage collector does not show those that `gc.freeze()` hid from it.
        self._held = list(_reached(model, self._caches))
        self._modules = sys.modules.copy()

    def free(self, run: TrialRun) -> list[str]:
        """Put everything back if a run left tensors here; return the names of the places that kept them."""
        if not _lives(run):
            return []
        places = self.put_back(run)
        torch.clear_autocast_cache()
        if _lives(run) and (owner := _owner(run.kept())):
            raise HooklineError(
                f"a tensor of the trial run is still held by {owner}, and hookline can't put back what was there "
                f"before: the model's outputs may be wrong now. Build the model again, or restart Python if the "
                f"holder is not part of the model, and run the model once for real before hl.scan or hl.sites(run=)"
            )
        return places

    def put_back(self, run: TrialRun) -> list[str]:
        """If anything keeps a tensor of the run, undo all changes and empty caches; return the names of what kept one.

        All changes are undone, not only those that keep a tensor: a flag may say that a table exists.
        """
        wanted = {id(tensor) for tensor in run.kept()}
        changed = [held for held in self._held if not holds_same(content(held.holder), held.before)]
        keeping = [held for held in changed if keeps(held, wanted)]
        living = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
        caches = [*{id(cache): cache for cache in (*self._caches, *living)}.values()]
        caches = [cache for cache in caches if leads_to(wanted, gc.get_referents(cache))]
        imported = [name for name in self._imported() if leads_to(wanted, _defined(name))]
        for held in changed if keeping or caches or imported else ():
            restore(held, wanted)
        for cache in caches:
            cache.cache_clear()
        for name in imported:
            self._forget(name)
        return [
            *(held.name for held in keeping),
            *(f"the cache of {_name(cache)}" for cache in caches),
            *(f"the module {name}, which will be imported again" for name in imported),
        ]

    def _imported(self) -> list[str]:
        """Return the names of the Python modules that the run imported or put into `sys.modules`."""
        return [
            name
            for name, module in sys.modules.copy().items()
            if module is not self._modules.get(name) and name.partition(".")[0] not in _FOREIGN
        ]

    def _forget(self, name: str) -> None:
        """Remove a Python module from `sys.modules`: the run imported it, so its earlier state is unknown."""
        spaces: list[tuple[Any, str]] = [(sys.modules, name)]
        parent, _, child = name.rpartition(".")
        module = sys.modules[name]
        if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
            spaces.append((vars(sys.modules[parent]), child))
        for space, key in spaces:
            if name in self._modules:
                space[key] = self._modules[name]
            else:
                del space[key]


class Snapshot(NamedTuple):
    """An object that a run can change (a holder), the name it is reached by, and what it held before."""

    name: str
    holder: Any
    before: Any
    is_foreign: bool = False  # It belongs to a package in `_FOREIGN`: only entries that keep a tensor are restored.


def base_of(kind: type) -> Any:
    """Return the built-in container that a class derives from. The methods of the class itself are never called."""
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def content(holder: Any) -> Any:
    """Return a copy of what a holder holds now, as a plain container."""
    kind = type(holder)
    if issubclass(kind, Tensor):
        return [holder.grad_fn] if holder.requires_grad else []
    if issubclass(kind, type):
        return dict(vars(holder))
    if kind is CellType:
        return gc.get_referents(holder)
    if issubclass(kind, dict):
        return dict(dict.items(holder))
    if base := base_of(kind):
        return (set if base is set else list)(base.__iter__(holder))
    return {name: _slot(holder, name) for name in slots(holder)}


def restore(held: Snapshot, wanted: set[int]) -> None:
    """Restore what a holder held. In a foreign holder, only restore entries that lead to a tensor in `wanted`."""
    holder, before = held.holder, held.before
    kind = type(holder)
    if issubclass(kind, Tensor):
        holder.detach_()
    elif kind is CellType:
        del holder.cell_contents
        if before:
            holder.cell_contents = before[0]
    elif issubclass(kind, (list, deque, set)):
        base = base_of(kind)
        base.clear(holder)
        base.update(holder, before) if base is set else base.extend(holder, before)
    else:
        put, remove = _writers(kind)
        now = content(holder)
        for name in now | before:
            old, new = before.get(name, _EMPTY), now.get(name, _EMPTY)
            if new is not old and (not held.is_foreign or leads_to(wanted, [new])):
                remove(holder, name) if old is _EMPTY else put(holder, name, old)


def _writers(kind: type) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the functions that set and delete an entry or attribute without calling methods of the class."""
    if issubclass(kind, dict):
        table = OrderedDict if issubclass(kind, OrderedDict) else dict
        return table.__setitem__, table.__delitem__
    owner = type if issubclass(kind, type) else object
    return owner.__setattr__, owner.__delattr__


def slots(one: Any) -> list[str]:
    """Return the names of the attributes of an object that are in `__slots__`, and that no property hides."""
    names = [
        _mangled(base, name)
        for base in type(one).__mro__
        if (declared := vars(base).get("__slots__"))
        for name in ([declared] if isinstance(declared, str) else declared)
    ]
    return [name for name in names if type(inspect.getattr_static(type(one), name, None)) is MemberDescriptorType]


def _mangled(owner: type, name: str) -> str:
    """Return the name under which Python stores an attribute: `__x` of class A is `_A__x`."""
    is_private = name.startswith("__") and not name.endswith("__") and owner.__name__.strip("_")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _slot(one: Any, name: str) -> Any:
    try:
        return object.__getattribute__(one, name)
    except AttributeError:
        return _EMPTY


def keeps(held: Snapshot, wanted: set[int]) -> bool:
    """Return True if something new in a holder leads to a tensor whose id is in `wanted`."""
    if isinstance(held.holder, Tensor):
        return True
    before = {id(part) for part in values(held.before)}
    return leads_to(wanted, [part for part in values(content(held.holder)) if id(part) not in before])


def leads_to(wanted: set[int], waiting: list[Any]) -> bool:
    """Return True if one of the objects is, or holds at any depth, a tensor whose id is in `wanted`."""
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in wanted:
            return True
        if id(one) in seen or issubclass(type(one), (*NOT_ENTERED, type, Tensor)):
            continue
        seen.add(id(one))
        waiting += _of_function(one) if type(one) is FunctionType else gc.get_referents(one)
    return False


def _of_function(function: FunctionType) -> list[Any]:
    """Return what a function holds, except its globals."""
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def values(container: Any) -> list[Any]:
    """Return the items of a container, without the keys of a dict."""
    return list(container.values() if isinstance(container, dict) else container)


def _reached(model: nn.Module, caches: list[Any]) -> Iterator[Snapshot]:
    """Walk from a model's modules to everything that their code names and their attributes hold.

    Args:
        caches: The caches of functions on the way are added here.
    """
    waiting: deque[tuple[str, Any]] = deque((type(module).__qualname__, module) for module in model.modules())
    seen = {id(module.__dict__) for module in model.modules()}  # `left_as_found` restores the modules themselves.
    seen.add(id(sys.modules))
    kinds = dict[type, tuple[bool, Any]]()
    spaces = dict[int, _Namespace]()
    without_torch = _without_torch(model)
    while waiting and len(seen) < _MOST:
        name, one = waiting.popleft()
        if id(one) in seen:
            continue
        kind = type(one)  # Not `isinstance`: it reads `__class__`, which may make a proxy load its object.
        if kind not in kinds:
            kinds[kind] = (issubclass(kind, NOT_ENTERED), base_of(kind))
        is_skipped, base = kinds[kind]
        if is_skipped or (base and base.__len__(one) > _LARGEST):
            continue
        seen.add(id(one))
        if kind is functools._lru_cache_wrapper:
            caches.append(one)
        if kind is FunctionType:
            yield from _with_attributes([(name, one)], seen)
            is_closed = _is_foreign(one) or _package(one) in without_torch
            for space, names in () if is_closed else _namespaces(one, spaces):
                if id(space.names) not in seen:
                    seen.add(id(space.names))
                    yield Snapshot(f"the globals of {space.home}", space.names, space.names.copy(), space.is_foreign)
                parts = [(f"{space.home}.{key}", space.names[key]) for key in names]
                if space.is_foreign:  # Its other objects belong to that package alone.
                    yield from _with_attributes(parts, seen)
                else:
                    waiting += parts
        elif base or _can_change(one):
            yield Snapshot(name, one, content(one), issubclass(kind, type) and _is_foreign(one))
        if not (issubclass(kind, type) and _package(one) in without_torch):
            waiting += [part for part in _inside(name, one) if type(part[1]) not in _NEVER_HOLD]


def _with_attributes(parts: list[tuple[str, Any]], seen: set[int]) -> Iterator[Snapshot]:
    """Yield snapshots of functions and foreign classes, whose attributes a model's code may set."""
    for name, one in parts:
        is_class = issubclass(type(one), type)
        if type(one) is FunctionType and id(one.__dict__) not in seen:
            seen.add(id(one.__dict__))
            yield Snapshot(f"the attributes of {name}", one.__dict__, one.__dict__.copy(), _is_foreign(one))
        elif is_class and id(one) not in seen and _can_change(one):
            seen.add(id(one))
            yield Snapshot(name, one, content(one), is_foreign=True)


def _can_change(one: Any) -> bool:
    kind = type(one)
    if issubclass(kind, Tensor):  # A write to a tensor gives it a `grad_fn`, which holds tensors of the run.
        return not one.requires_grad
    if issubclass(kind, type):
        return bool(one.__flags__ & _IS_HEAP_TYPE)
    return kind is CellType or (not _is_foreign(one) and bool(slots(one)))


def _inside(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, each with its name."""
    kind = type(one)
    if issubclass(kind, nn.Module):
        yield from ((f"{name}.{key}", part) for key, part in dict(one.__dict__).items())
        yield kind.__qualname__, kind
    elif kind is FunctionType:
        # Decorators of torch and of the standard library hold the function they decorate.
        parts = (one.__closure__,) if _is_foreign(one) else (one.__closure__, one.__defaults__, one.__kwdefaults__)
        yield from ((f"the closure of {_name(one)}", part) for container in parts for part in values(container or ()))
        yield from ((f"{_name(one)}.{key}", part) for key, part in one.__dict__.items())
    elif kind is ContextVar:
        yield name, one.get(None)
    elif issubclass(kind, Tensor) or _is_foreign(one):
        return
    elif issubclass(kind, type):
        yield from ((f"{one.__qualname__}.{key}", part) for key, part in dict(vars(one)).items())
        yield from ((base.__qualname__, base) for base in one.__mro__)
    elif kind in CONTAINERS:
        yield from ((name, part) for part in values(one))
    else:  # Other objects, and containers with attributes.
        yield name, _attributes(one)
        yield from ((name, part) for part in gc.get_referents(one))


def _attributes(one: Any) -> Any:
    """Return the `__dict__` of an object, if Python itself provides it."""
    slot = next((vars(base)["__dict__"] for base in type(one).__mro__ if "__dict__" in vars(base)), None)
    return slot.__get__(one) if type(slot) is GetSetDescriptorType else None


def _is_foreign(one: Any) -> bool:
    """Return True if an object belongs to Python, torch, hookline or pytest."""
    if type(one) is FunctionType or issubclass(type(one), type):
        return _package(one) in _FOREIGN
    package = _package(type(one))
    return package in _FOREIGN and package not in _HOLDING


def _package(code: Any) -> str:
    """Return the package that a function or a class belongs to."""
    home = code.__globals__.get("__name__") if type(code) is FunctionType else code.__module__
    return str(home).partition(".")[0]


def _without_torch(model: nn.Module) -> set[str]:
    """Return the installed packages that use neither torch nor the user's code.

    Large libraries use many of these, for downloads or progress bars. Their code is not searched; their objects are.
    """
    installed, others = set[str](), {_package(base) for module in model.modules() for base in type(module).__mro__}
    for name, module in sys.modules.copy().items():
        if not issubclass(type(module), ModuleType):
            continue
        names, package = vars(module), name.partition(".")[0]
        file = str(names.get("__file__"))
        if "site-packages" in file or "dist-packages" in file:
            installed.add(package)
            if not names.keys().isdisjoint(_NAMES_OF_TORCH):
                others.add(package)
        elif package not in _FOREIGN:
            parts = [part for part in names.values() if type(part) is FunctionType or issubclass(type(part), type)]
            modules = [part for part in names.values() if issubclass(type(part), ModuleType)]
            others |= {package, *map(_package, parts), *(str(vars(one).get("__package__")) for one in modules)}
    return installed - {name.partition(".")[0] for name in others}


class _Namespace:
    """The globals of a Python module, and the names that were already returned."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.home = str(names.get("__name__", "?"))
        self.is_foreign = self.home.partition(".")[0] in _FOREIGN
        self.modules = {key: one for key, one in names.items() if issubclass(type(one), ModuleType)}
        self._returned = {key for key, one in names.items() if type(one) in _NEVER_HOLD}

    def unseen_names(self, names: set[str]) -> set[str]:
        """Return the names in `names` that exist in this namespace and were not returned before."""
        new = (names & self.names.keys()) - self._returned
        self._returned |= new
        return new


def _namespaces(function: FunctionType, spaces: dict[int, _Namespace]) -> Iterator[tuple[_Namespace, set[str]]]:
    """Yield the globals of a function, and of the modules it names or imports, each with the names its code uses."""
    used, imported = set[str](), set[str]()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        used.update(code.co_names)
        if _IMPORT in code.co_code[::2]:
            imported.update(code.co_names)
        codes += [part for part in code.co_consts if type(part) is CodeType]
    waiting = [function.__globals__, *_modules_named(imported, function.__globals__)]
    passed = set[int]()
    while waiting:
        names = waiting.pop()
        if id(names) in passed:
            continue
        passed.add(id(names))
        if id(names) not in spaces:
            spaces[id(names)] = _Namespace(names)
        space = spaces[id(names)]
        yield space, space.unseen_names(used)
        waiting += [vars(space.modules[name]) for name in used & space.modules.keys()]


def _modules_named(names: set[str], space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the globals of the modules with these names, which may be relative to the package of the code."""
    if not names:
        return
    package = str(space.get("__package__") or "").split(".")
    parents = [".".join(package[:depth]) for depth in range(1, len(package) + 1)]
    full = {*names, *parents, *(f"{parent}.{name}" for parent in parents for name in names)}
    modules = [sys.modules[name] for name in full if name in sys.modules]
    yield from (vars(module) for module in modules if issubclass(type(module), ModuleType))


def _defined(name: str) -> list[Any]:
    """Return the globals of a Python module and the attributes of the classes it defines."""
    module: Any = sys.modules[name]
    if not issubclass(type(module), ModuleType):
        return [module]
    classes = [one for one in vars(module).values() if issubclass(type(one), type) and one.__module__ == name]
    return [vars(module), *(dict(vars(one)) for one in classes)]


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _owner(kept: list[Tensor]) -> str:
    """Describe the object that holds these tensors; return an empty text if a stored traceback holds them."""
    holders = [_suspended(one) or one for one in gc.get_referrers(*kept) if one is not kept]
    if not kept or any(type(one) is FrameType for one in holders):
        return ""
    if not holders:
        return "something outside of Python, such as the history of another tensor"
    one, words = holders[0], [_description(holders[0])]
    passed = [holders]
    while len(words) < 4 and words[-1].startswith("a "):
        passed.append(owners := gc.get_referrers(one))
        ignored = {id(each) for each in passed}
        owners[:] = [each for each in owners if type(each) is not FrameType and id(each) not in ignored]
        if not owners:
            break
        one = owners[0]
        words.append(_description(one))
    return " of ".join(words)


def _description(one: Any) -> str:
    kind = type(one)
    if issubclass(kind, dict) and "__spec__" in one:
        return f"the globals of {one.get('__name__')}"
    if issubclass(kind, (type, FunctionType, ModuleType, *_SUSPENDED)):
        return f"the {'class' if issubclass(kind, type) else kind.__name__} {getattr(one, '__qualname__', one)}"
    return f"a {kind.__qualname__}"


def _suspended(frame: Any) -> Any:
    """Return the suspended generator or coroutine that a frame belongs to, if any."""
    if type(frame) is not FrameType:
        return None
    return next((one for one in gc.get_referrers(frame) if issubclass(type(one), _SUSPENDED)), None)


def _lives(run: TrialRun) -> bool:
    """Return True if something still holds a tensor of a run after garbage collection."""
    return all(run.lives() and gc.collect(generation) >= 0 for generation in range(3)) and run.lives()
